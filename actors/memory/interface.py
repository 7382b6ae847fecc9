"""What every platform's shared memory can do, and what is the same on all of them.

An image is created writable, filled through its writable descriptor (by a client) or by `write_at`
and `load_from_file` (by the daemon), sealed, read and lent, and freed. Its owner is whoever created
it; nobody else frees it, and no call may run while `seal` or `free` does: a closed descriptor's
number is reused at once. Reads may run in several threads at the same time.
"""

import abc
import contextlib
import os
from collections.abc import Generator, Sequence
from typing import Final, Protocol

from prefixcached.protocol import image

CHUNK_BYTES: Final = 1 << 20
"""Step of copies and checksums. Measured on Linux, 256 MiB: `pread` into a reused buffer of 1 MiB
hashes in 50 ms (a mapping 58 ms, 4 MiB buffers 54 ms) and copies to a file as fast as `sendfile`;
`copy_file_range` does not cross file systems."""

CLOSED: Final = -1
"""Stands for a descriptor that is not open."""


class Hasher(Protocol):
    """A running checksum, `xxhash.xxh3_128` for one."""

    def update(self, data: memoryview, /) -> object:
        """Take in more bytes."""


class SharedImage(abc.ABC):
    """Shared memory of one image.

    Every method that touches bytes blocks and belongs in a thread. All of them raise RuntimeError
    when they are called in the wrong state (sealed, not yet sealed, freed): a bug in the caller.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"an image cannot have {nbytes} bytes")
        self._nbytes = nbytes
        self._writable = CLOSED
        self._readable = CLOSED
        self._sealed = False

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return self._nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes charged to the budget: whole pages (rule E1)."""
        return image.allocated_bytes(self._nbytes)

    @property
    def is_sealed(self) -> bool:
        """Whether the bytes are final."""
        return self._sealed

    @property
    def is_freed(self) -> bool:
        """Whether the descriptors are closed."""
        return self._writable == CLOSED and self._readable == CLOSED

    @property
    def writable_descriptor(self) -> int:
        """What a client is lent to fill the image; only before `seal`."""
        if self._writable == CLOSED or self._sealed:
            raise RuntimeError(f"{self!r} can no longer be written")
        return self._writable

    @property
    def descriptor(self) -> int:
        """The read-only descriptor that takers are lent; only after `seal`."""
        if not self._sealed:
            raise RuntimeError(f"{self!r} must be sealed before it is lent")
        return self._open_readable()

    @abc.abstractmethod
    def seal(self) -> None:
        """Make the bytes final; only the read-only descriptor remains. Sealing twice is harmless.

        Raises:
            OSError: EBUSY on Linux, while some process maps the image writable: the image stays
                writable and must not be published. EPERM, where a client has sealed it against
                seals. On macOS nobody can tell, see docs/security.md.
        """

    @abc.abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (writable, contiguous) with the bytes from ``offset`` on.

        Raises:
            ValueError: The range does not lie in the image.
        """

    @abc.abstractmethod
    def write_at(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write ``buffers`` one after the other from ``offset`` on; only before `seal`.

        Raises:
            ValueError: The range does not lie in the image.
            OSError: ENOSPC or ENOMEM: the machine has no memory left.
        """

    @abc.abstractmethod
    def views(self) -> Generator[memoryview]:
        """Yield all bytes in order, in chunks; each view is valid until the next one."""

    def hash_update(self, hasher: Hasher) -> None:
        """Feed all bytes to ``hasher``."""
        with contextlib.closing(self.views()) as views:
            for view in views:
                hasher.update(view)

    def copy_to_file(self, fd: int, file_offset: int, hasher: Hasher | None = None) -> None:
        """Write all bytes to the file ``fd`` at ``file_offset``; the file's position stays.

        Args:
            fd: A regular file, open for writing and not for appending.
            file_offset: Where the first byte goes.
            hasher: Fed with the same bytes on the way, which saves reading them a second time.

        Raises:
            OSError: As `os.pwrite`; what was written before stays in the file.
        """
        with contextlib.closing(self.views()) as views:
            for view in views:
                if hasher is not None:
                    hasher.update(view)
                file_offset += write_fully(fd, view, file_offset)

    def load_from_file(self, fd: int, file_offset: int, hasher: Hasher | None = None) -> None:
        """Fill the whole image from the file ``fd``, starting at ``file_offset`` there.

        Args:
            fd: A regular file, open for reading; its position stays.
            file_offset: Where the first byte lies.
            hasher: Fed with the same bytes on the way.

        Raises:
            EOFError: The file ends before the image is full.
            OSError: As `os.preadv` and `write_at`.
        """
        chunk = memoryview(bytearray(min(CHUNK_BYTES, self._nbytes)))
        offset = 0
        while offset < self._nbytes:
            piece = chunk[: self._nbytes - offset]
            read_fully(fd, piece, file_offset + offset)
            if hasher is not None:
                hasher.update(piece)
            self.write_at(offset, [piece])
            offset += piece.nbytes

    def free(self) -> None:
        """Close the descriptors; the memory returns once no client holds one. Idempotent.

        Takes real time for a large image (220 ms per GiB on Linux), so call it in a thread.
        """
        writable, self._writable = self._writable, CLOSED
        readable, self._readable = self._readable, CLOSED
        try:
            if writable != CLOSED:
                os.close(writable)
        finally:
            if readable != CLOSED:
                os.close(readable)

    def __repr__(self) -> str:
        state = "freed" if self.is_freed else "sealed" if self._sealed else "writable"
        return f"<{type(self).__name__} {self._nbytes} bytes, {state}>"

    def _open_readable(self) -> int:
        """A descriptor that the daemon itself can read from, in any state but freed."""
        if self.is_freed:
            raise RuntimeError(f"{self!r} has no bytes any more")
        return self._readable if self._readable != CLOSED else self._writable

    def _check_range(self, offset: int, count: int) -> None:
        if offset < 0 or offset + count > self._nbytes:
            raise ValueError(f"bytes {offset}..{offset + count} do not lie in {self!r}")


def read_fully(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``fd`` at ``offset``; EOFError where the file is too short."""
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends at {offset + done}, {buffer.nbytes - done} bytes short")
        done += count


def write_fully(fd: int, buffer: memoryview, offset: int) -> int:
    """Write all of ``buffer`` to ``fd`` at ``offset`` and return its size."""
    done = 0
    while done < buffer.nbytes:
        done += os.pwrite(fd, buffer[done:], offset + done)
    return done


def flat_view(buffer: memoryview | bytes) -> memoryview:
    """Return ``buffer``, which must be C-contiguous, as a one-dimensional view of bytes."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def byte_views(buffers: Sequence[memoryview | bytes]) -> list[memoryview]:
    """Return each of ``buffers`` that is not empty as `flat_view`."""
    return [view for view in map(flat_view, buffers) if view.nbytes]
