"""What a test adds to the environment of the model processes that it starts.

The detection ships with the product, since `prefixcached demo` needs it as well.
"""

from prefixcached.client.openblas import openblas_environment, openblas_path

__all__ = ["openblas_environment", "openblas_path"]
