"""How KV moves between MLX buffers and a lent descriptor: one copy, no mapping left behind.

Files and Linux's memfds are read and written with `preadv` and `pwritev`. Shared memory of macOS
can only be mapped (PLATFORM 3.1); there a mapping lives for the time of one call. Nothing here
closes the descriptor. Much of it is moved by several threads, which touch memory and descriptors
alone, never mlx: one core does not fill the memory bus, and most of the time goes into new pages.
"""

import contextlib
import errno
import itertools
import mmap
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

IOV_MAX: Final = 1024
"""Buffers of one `preadv` or `pwritev`: the limit of Linux and macOS alike."""

CALL_BYTES: Final = 1 << 30
"""Bytes of one such call: Linux moves at most 2 GiB - 4 KiB, macOS refuses more than 2 GiB - 1."""

THREADS: Final = 4
"""Most threads of one transfer: as many as `mx.load` uses; more gain little on any machine seen."""

PARALLEL_BYTES: Final = 8 << 20
"""Less than this is moved by the caller alone: starting threads takes as long."""

PIECE_BYTES: Final = 4 << 20
"""What a thread takes at a time: small enough that all end together."""

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


class Move(NamedTuple):
    """``views`` are to be read from, or written to, ``fd`` from byte ``offset`` on."""

    fd: int
    offset: int
    views: Sequence[memoryview]


def read_all(moves: Sequence[Move], before_each: Callable[[], None]) -> None:
    """Make all ``moves`` as `read_rows` does, spread over threads.

    Args:
        moves: In any order.
        before_each: Called before each piece, by any thread; what it raises ends the transfer.

    Raises:
        EOFError, OSError: As `read_rows`.
    """

    def read(piece: Move) -> None:
        before_each()
        read_rows(*piece)

    _spread(read, [[piece] for move in moves for piece in _pieces(move)], _total_bytes(moves))


def write_all(moves: Sequence[Move], before_each: Callable[[], None]) -> None:
    """Make all ``moves`` as `write_rows` does, spread over threads. Arguments as `read_all`.

    Raises:
        EOFError, OSError: As `write_rows`.
    """
    # Linux locks a file while it is written, so there one thread at a time fills an image.
    jobs: dict[object, list[Move]] = {}
    for move in moves:
        for piece in _pieces(move):
            key = (piece.fd, piece.offset) if is_mapped_only(piece.fd) else piece.fd
            jobs.setdefault(key, []).append(piece)

    def write(piece: Move) -> None:
        before_each()
        write_rows(*piece)

    _spread(write, list(jobs.values()), _total_bytes(moves))


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
            _copy(view, memory[position : position + view.nbytes])
            position += view.nbytes


def read_mapped(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """As `read_rows`, through a mapping; ``views`` are flat."""
    with _mapped(fd, offset, views, mmap.PROT_READ) as (memory, start):
        position = start
        for view in views:
            _copy(memory[position : position + view.nbytes], view)
            position += view.nbytes


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes without the interpreter's lock, which a slice assignment would hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


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


def _spread(do: Callable[[Move], None], jobs: Sequence[Sequence[Move]], total_bytes: int) -> None:
    """Make the moves of every job, in threads where that pays.

    No thread touches a descriptor or a buffer any more when this returns or raises, interrupted or
    not: the caller closes them next, and their numbers may soon be those of other files.
    """
    pending = deque(jobs)
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            try:
                job = pending.popleft()
            except IndexError:
                return
            for piece in job:
                if failures:
                    return
                try:
                    do(piece)
                except BaseException as error:  # noqa: BLE001, raised below, by the caller's thread
                    failures.append(error)

    def help_out(finished: threading.Event) -> None:
        try:
            work()
        finally:
            finished.set()

    helpers: list[tuple[threading.Thread, threading.Event]] = []
    try:
        if total_bytes >= PARALLEL_BYTES:
            count = min(THREADS, len(jobs), os.cpu_count() or 1) - 1
            with contextlib.suppress(RuntimeError):  # no more threads: this one does it all
                for _ in range(count):
                    finished = threading.Event()
                    helper = threading.Thread(
                        target=help_out, args=(finished,), name="prefixcached-copy"
                    )
                    helpers.append((helper, finished))
                    helper.start()
        work()
    except BaseException as error:  # noqa: BLE001, Ctrl-C between two pieces
        failures.append(error)
    while helpers:
        try:
            helper, finished = helpers[-1]
            # Not `join`: one that was interrupted calls the thread ended. One without an identity
            # has not begun, and will do nothing where something failed.
            if helper.ident is not None:
                finished.wait()
            helpers.pop()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
    if failures:
        try:
            raise failures[0]
        finally:
            # This frame is in the error's traceback: the two would keep each other and the views.
            failures.clear()


def _pieces(move: Move) -> Iterator[Move]:
    """Cut a move between its views into pieces of about `PIECE_BYTES`."""
    offset, views, nbytes = move.offset, [], 0
    for view in move.views:
        views.append(view)
        nbytes += view.nbytes
        if nbytes >= PIECE_BYTES:
            yield Move(move.fd, offset, views)
            offset, views, nbytes = offset + nbytes, [], 0
    if views:
        yield Move(move.fd, offset, views)


def _total_bytes(moves: Iterable[Move]) -> int:
    return sum(view.nbytes for move in moves for view in move.views)


def _flatten(views: Iterable[memoryview]) -> list[memoryview]:
    # A cast of what is bytes already costs microseconds a view.
    return [
        view if view.format == "B" and view.ndim == 1 else view.cast("B")
        for view in views
        if view.nbytes
    ]


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
