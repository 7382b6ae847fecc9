"""One daemon per user that shares MLX KV prompt caches between processes.

The import package: its parts `protocol`, `actors`, `daemon`, `client` and `deploy` stand at
the root of the repository and are reached through symbolic links beside this file.
"""

from importlib.metadata import version

__version__ = version("prefixcached")

__all__ = ["__version__"]
