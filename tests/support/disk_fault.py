"""A disk that fails under a running daemon, without anybody's rights mattering."""

import contextlib
from collections.abc import Iterator

from tests.support.daemon_process import DaemonProcess


@contextlib.contextmanager
def failing_disk(daemon: DaemonProcess, *, is_frozen: bool = False) -> Iterator[None]:
    """For the block, a file stands where the directory of all images was: each call fails.

    A daemon that ``is_frozen`` already goes on within the block.
    """
    segments = daemon.state_dir / "segments.noindex"
    aside = daemon.directory / "aside"
    with _frozen(daemon, is_frozen=is_frozen):  # or it makes the directory again in between
        segments.rename(aside)
        segments.write_bytes(b"")
    try:
        yield
    finally:
        with _frozen(daemon):
            segments.unlink()
            aside.rename(segments)


@contextlib.contextmanager
def _frozen(daemon: DaemonProcess, *, is_frozen: bool = False) -> Iterator[None]:
    if not daemon.is_running:
        yield
        return
    if not is_frozen:
        daemon.stop()
    try:
        yield
    finally:
        daemon.cont()
