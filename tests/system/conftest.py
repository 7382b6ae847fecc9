"""What the system tests share: a real daemon with both tiers, and clients without mlx."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.client import Cache
from tests.support.daemon_process import DaemonProcess
from tests.support.numpy_kv import NumpyAdapter


def numpy_cache(socket: Path, **options: float) -> Cache:
    """A client whose caches are numpy arrays, and which raises what goes wrong."""
    settings = {"timeout": 30.0, **options}
    return Cache(socket, adapter=NumpyAdapter(), fail_open=False, **settings)  # type: ignore[arg-type]


@pytest.fixture
def both_tiers() -> Iterator[DaemonProcess]:
    """A daemon with RAM and SSD."""
    with DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "256MiB") as process:
        yield process
        print(process.log())


@pytest.fixture
def shared(both_tiers: DaemonProcess) -> Iterator[Cache]:
    """A client of `both_tiers`."""
    with numpy_cache(both_tiers.socket) as cache:
        yield cache
