"""What the tests of commands share: the command line in this process, and a cache to fill."""

from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from prefixcached.client import Cache
from prefixcached.daemon.cli import main
from prefixcached.protocol.paths import SOCKET_VARIABLE
from tests.support.numpy_kv import NumpyAdapter, make_caches
from tests.support.until import wait_until_loaded

BOTH_TIERS = ("--ram-bytes", "64MiB", "--ssd-bytes", "256MiB")


def invoke(
    *arguments: str,
    socket: Path | None = None,
    environment: dict[str, str | None] | None = None,
    text: str | None = None,
) -> Result:
    """Run the command line; ``text`` is its standard input."""
    variables: dict[str, str | None] = dict(environment or {})
    if socket is not None:
        variables[SOCKET_VARIABLE] = str(socket)
    return CliRunner().invoke(main, arguments, env=variables, input=text)


def numpy_cache(socket: Path) -> Cache:
    """A client that raises, whose caches are arrays of numpy."""
    return Cache(socket, timeout=10, fail_open=False, adapter=NumpyAdapter())


def put(cache: Cache, tokens: Sequence[int], namespace: str = "n", *, state: bool = False) -> None:
    """Store made-up KV of ``tokens``, once a daemon that has just started takes puts."""
    wait_until_loaded(cache)
    assert cache.put(list(tokens), make_caches(tokens, state=state), namespace=namespace)
