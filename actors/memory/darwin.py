"""Shared memory on macOS: POSIX shared memory, unlinked at once (PLATFORM 3.1).

These objects can be mapped only, neither read nor written, and accept one `ftruncate` in their
life. There are no seals: immutability rests on the read-only descriptor, whose mapping can never
become writable. A process that kept its writable descriptor past the commit could still write; that
takes intent, not a bug (docs/security.md). Nothing here is particular to macOS, so Linux tests it.
"""

import contextlib
import importlib
import mmap
import os
import secrets
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from prefixcached.actors.memory.interface import (
    CHUNK_BYTES,
    CLOSED,
    SharedImage,
    byte_views,
    flat_view,
)

# What multiprocessing is built on; the type checkers know no stub for it. Loaded before it is
# needed: loading takes a descriptor, of which there may be none left then.
_POSIXSHMEM: Final = importlib.import_module("_posixshmem")

_NAME_PREFIX: Final = "/pfxc-"
_NAME_RANDOM_BYTES: Final = 12
"""24 hex digits: 30 bytes in all, macOS allows 31; nobody guesses the name before the unlink."""


class ShmImage(SharedImage):
    """One image in a POSIX shared memory object."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._writable, self._readable = _create_pair(self.allocated_bytes)

    def seal(self) -> None:
        """See `SharedImage.seal`."""
        if self._sealed:
            return
        fd, self._writable = self.writable_descriptor, CLOSED
        self._sealed = True
        os.close(fd)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `SharedImage.read_into`."""
        flat = flat_view(buffer)
        self._check_range(offset, flat.nbytes)
        with _mapped(self._open_readable(), self._nbytes, mmap.PROT_READ) as memory:
            flat[:] = memory[offset : offset + flat.nbytes]

    def write_at(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """See `SharedImage.write_at`."""
        fd = self.writable_descriptor
        views = byte_views(buffers)
        self._check_range(offset, sum(view.nbytes for view in views))
        with _mapped(fd, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE) as memory:
            for view in views:
                memory[offset : offset + view.nbytes] = view
                offset += view.nbytes

    def views(self) -> Generator[memoryview]:
        """See `SharedImage.views`."""
        with _mapped(self._open_readable(), self._nbytes, mmap.PROT_READ) as memory:
            for offset in range(0, self._nbytes, CHUNK_BYTES):
                with memory[offset : offset + CHUNK_BYTES] as piece:
                    yield piece


def _create_pair(size_bytes: int) -> tuple[int, int]:
    """Return a writable and a read-only descriptor of one new object without a name."""
    name = _NAME_PREFIX + secrets.token_hex(_NAME_RANDOM_BYTES)
    with contextlib.ExitStack() as undo:
        writable: int = _POSIXSHMEM.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        undo.callback(os.close, writable)
        try:
            readable: int = _POSIXSHMEM.shm_open(name, os.O_RDONLY, mode=0)
        finally:
            _POSIXSHMEM.shm_unlink(name)
        undo.callback(os.close, readable)
        if size_bytes:
            os.ftruncate(writable, size_bytes)
        undo.pop_all()
    return writable, readable


@contextlib.contextmanager
def _mapped(fd: int, nbytes: int, protection: int) -> Iterator[memoryview]:
    """Map ``fd`` for the time of the block. The length is explicit: these objects report none."""
    if nbytes == 0:
        yield memoryview(b"")
        return
    with (
        mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection) as mapping,
        memoryview(mapping) as memory,
    ):
        yield memory
