"""Shared memory on Linux: memfds, sealed by the kernel.

Bytes move by `pread` and `pwrite`: a first-touch mapping costs twice as much, and a writable one
left behind, also in a forked child, blocks the seal. Growing and shrinking are sealed before
anybody else sees the descriptor, writing at commit, so that no holder of either descriptor can
change a published byte.
"""

import errno
import fcntl
import os
import sys
from collections.abc import Generator, Sequence
from typing import Final

from prefixcached.actors.memory.interface import (
    CHUNK_BYTES,
    CLOSED,
    SharedImage,
    byte_views,
    flat_view,
    read_fully,
    write_fully,
)

assert sys.platform == "linux"

_MFD_NOEXEC_SEAL: Final = 0x0008
"""Linux 6.3: never executable. Unknown to `os` in Python 3.11; older kernels answer EINVAL."""

_NAME: Final = "prefixcached"
"""Shown in /proc/PID/fd; names of memfds need not be unique."""


class MemfdImage(SharedImage):
    """One image in a memfd."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        fd = _create_memfd()
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        self._writable = fd

    def seal(self) -> None:
        """See `SharedImage.seal`."""
        if self._sealed:
            return
        fd = self.writable_descriptor
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        self._sealed = True
        self._readable, self._writable = _reopen_read_only(fd), CLOSED

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `SharedImage.read_into`."""
        flat = flat_view(buffer)
        self._check_range(offset, flat.nbytes)
        read_fully(self._open_readable(), flat, offset)

    def write_at(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """See `SharedImage.write_at`."""
        fd = self.writable_descriptor
        views = byte_views(buffers)
        self._check_range(offset, sum(view.nbytes for view in views))
        for view in views:
            offset += write_fully(fd, view, offset)

    def views(self) -> Generator[memoryview]:
        """See `SharedImage.views`."""
        fd = self._open_readable()
        chunk = memoryview(bytearray(min(CHUNK_BYTES, self._nbytes)))
        for offset in range(0, self._nbytes, CHUNK_BYTES):
            piece = chunk[: self._nbytes - offset]
            read_fully(fd, piece, offset)
            yield piece


def _create_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(_NAME, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(_NAME, flags)


def _reopen_read_only(fd: int) -> int:
    """Replace a sealed ``fd`` by a read-only descriptor of the same memory, and return that.

    Without /proc, or out of descriptors, the sealed one serves: the seal alone forbids writing.
    """
    try:
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return fd
    os.close(fd)
    return read_only
