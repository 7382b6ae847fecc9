"""How KV moves between MLX buffers and a lent descriptor: one copy, no mapping left behind.

Files and Linux's memfds are read and written with `preadv` and `pwritev`. Shared memory of macOS
can only be mapped (PLATFORM 3.1); there a mapping lives for the time of one call. Nothing here
closes the descriptor.
"""

import contextlib
import errno
import itertools
import mmap
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

IOV_MAX: Final = 1024
"""Buffers of one `preadv` or `pwritev`: the limit of Linux and macOS alike."""

CALL_BYTES: Final = 1 << 30
"""Bytes of one such call: Linux moves at most 2 GiB - 4 KiB, macOS refuses more than 2 GiB - 1."""

Run = tuple[int, Sequence[memoryview]]
"""An offset in bytes, and the contiguous buffers that lie there one after the other."""

_Vectored = Callable[[int, Sequence[memoryview], int], int]


def write_rows(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """Write ``views`` one after the other into the image ``fd`` from ``offset`` on.

    Args:
        fd: A granted image's writable descriptor.
        offset: Bytes from its beginning.
        views: C-contiguous buffers of any format.

    Raises:
        EOFError: The image is too small for the views.
        OSError: ENOSPC or ENOMEM where the machine has no memory left; EPERM where the image is
            sealed, or too small.
    """
    flat = _flatten(views)
    if is_mapped_only(fd):
        write_mapped(fd, offset, flat)
    elif _move(os.pwritev, fd, offset, flat):
        raise OSError(errno.EIO, "the system accepted no more bytes")


def read_rows(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """Fill ``views`` one after the other from the image or file ``fd``, from ``offset`` on.

    Args:
        fd: A lent read-only descriptor.
        offset: Bytes from its beginning.
        views: Writable C-contiguous buffers of any format.

    Raises:
        EOFError: The image ends before the views are full.
        OSError: The read failed (EIO on a failing disk).
    """
    flat = _flatten(views)
    if is_mapped_only(fd):
        read_mapped(fd, offset, flat)
        return
    missing_bytes = _move(os.preadv, fd, offset, flat)
    if missing_bytes:
        raise EOFError(f"what was lent ends {missing_bytes} bytes before what should be in it")


def merge_runs(runs: Iterable[Run]) -> Iterator[Run]:
    """Join runs that follow each other without a gap, so that few calls move them."""
    start, end = 0, -1
    merged: list[memoryview] = []
    for offset, views in runs:
        if offset != end:
            if merged:
                yield start, merged
            start, end, merged = offset, offset, []
        merged.extend(views)
        end += sum(view.nbytes for view in views)
    if merged:
        yield start, merged


def is_mapped_only(fd: int) -> bool:
    """Whether ``fd`` is shared memory that `read` and `write` refuse, as on macOS."""
    return sys.platform == "darwin" and not stat.S_ISREG(os.fstat(fd).st_mode)


def write_mapped(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """As `write_rows`, through a mapping; ``views`` are flat."""
    with _mapped(fd, offset, views, mmap.PROT_READ | mmap.PROT_WRITE) as (memory, start):
        position = start
        for view in views:
            memory[position : position + view.nbytes] = view
            position += view.nbytes


def read_mapped(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """As `read_rows`, through a mapping; ``views`` are flat."""
    with _mapped(fd, offset, views, mmap.PROT_READ) as (memory, start):
        position = start
        for view in views:
            view[:] = memory[position : position + view.nbytes]
            position += view.nbytes


@contextlib.contextmanager
def _mapped(
    fd: int, offset: int, views: Sequence[memoryview], protection: int
) -> Iterator[tuple[memoryview, int]]:
    """Map the range of ``views``; give the mapping and where in it the range begins."""
    nbytes = sum(view.nbytes for view in views)
    if not nbytes:
        yield memoryview(b""), 0
        return
    # Touching a mapping past the end of its object would kill the process.
    if os.fstat(fd).st_size < offset + nbytes:
        raise EOFError(f"what was lent ends before byte {offset + nbytes}")
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with (
        mmap.mmap(
            fd, offset - start + nbytes, flags=mmap.MAP_SHARED, prot=protection, offset=start
        ) as mapping,
        memoryview(mapping) as memory,
    ):
        yield memory, offset - start


def _flatten(views: Iterable[memoryview]) -> list[memoryview]:
    return [view.cast("B") for view in views if view.nbytes]


def _move(call: _Vectored, fd: int, offset: int, views: Iterable[memoryview]) -> int:
    """Repeat ``call`` until it has moved all bytes; return how many it refused to move."""
    pending = deque(views)
    while pending:
        moved_bytes = call(fd, _batch(pending), offset)
        if moved_bytes == 0:
            return sum(view.nbytes for view in pending)
        offset += moved_bytes
        _drop(pending, moved_bytes)
    return 0


def _batch(pending: deque[memoryview]) -> list[memoryview]:
    """What the next call may carry of ``pending``."""
    batch: list[memoryview] = []
    room_bytes = CALL_BYTES
    for view in itertools.islice(pending, IOV_MAX):
        if not room_bytes:
            break
        batch.append(view[:room_bytes])
        room_bytes -= batch[-1].nbytes
    return batch


def _drop(pending: deque[memoryview], moved_bytes: int) -> None:
    """Remove the first ``moved_bytes`` bytes from ``pending``."""
    while moved_bytes:
        first = pending[0]
        if first.nbytes > moved_bytes:
            pending[0] = first[moved_bytes:]
            return
        moved_bytes -= first.nbytes
        pending.popleft()
