"""How a client fills and reads lent descriptors, on both kinds of shared memory and on files."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.actors import memory
from prefixcached.actors.memory import darwin
from prefixcached.client import transfer

pytestmark = pytest.mark.usefixtures("no_descriptor_stays")


def test_more_views_than_one_call_takes_arrive_in_order() -> None:
    """DESIGN 3: strided slices are written and read with few calls, whatever their number."""
    sizes = [index % 5 for index in range(3 * transfer.IOV_MAX + 7)]
    data = os.urandom(sum(sizes))
    image = memory.create(len(data) + 10)
    transfer.write_rows(image.writable_descriptor, 10, split(data, sizes))
    image.seal()
    back = bytearray(len(data))
    transfer.read_rows(image.descriptor, 10, split(back, list(reversed(sizes))))
    assert back == data
    image.free()


def split(data: bytes | bytearray, sizes: list[int]) -> list[memoryview]:
    """Cut ``data`` into views of these sizes."""
    view, views = memoryview(data), []
    for size in sizes:
        views.append(view[:size])
        view = view[size:]
    return views


def test_partial_calls_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call moves at most CALL_BYTES, cutting views in the middle; the rest follows."""
    monkeypatch.setattr(transfer, "CALL_BYTES", 7)
    sizes = [1, 20, 0, 3, 7, 8, 6]
    data = os.urandom(sum(sizes))
    image = memory.create(len(data))
    transfer.write_rows(image.writable_descriptor, 0, split(data, sizes))
    back = bytearray(len(data))
    transfer.read_rows(image.writable_descriptor, 0, split(back, [len(data)]))
    assert back == data
    image.free()


def test_arrays_of_any_dtype_and_shape_are_bytes() -> None:
    """T12: what is written from arrays of several dimensions comes back bit for bit."""
    source = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    image = memory.create(source.nbytes)
    transfer.write_rows(image.writable_descriptor, 0, [source.data])
    target = np.zeros_like(source)
    transfer.read_rows(image.writable_descriptor, 0, [target[0].data, target[1].data])
    assert np.array_equal(source, target)
    image.free()


def test_a_short_image_is_an_error_not_zeros(tmp_path: Path) -> None:
    """T8: where less was lent than promised, the read fails and says by how much."""
    (tmp_path / "file").write_bytes(b"0123456789")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(EOFError, match="3 bytes before"):
        transfer.read_rows(fd, 5, [memoryview(bytearray(4)), memoryview(bytearray(4))])
    os.close(fd)


def test_filling_past_the_end_or_after_the_seal_fails() -> None:
    """P4: a client can change neither an image's size nor what is published."""
    image = memory.create(10)
    kept = os.dup(image.writable_descriptor)
    with pytest.raises((PermissionError, EOFError)):
        transfer.write_rows(kept, 5, [memoryview(b"123456")])
    image.seal()
    if not transfer.is_mapped_only(kept):
        with pytest.raises(PermissionError):
            transfer.write_rows(kept, 0, [memoryview(b"x")])
    os.close(kept)
    image.free()


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 70000])
def test_mapped_memory_is_filled_and_read(offset: int) -> None:
    """DESIGN 3: what macOS can only map moves through a mapping that does not stay."""
    sizes = [3, 1, 5000, 20000]
    data = os.urandom(sum(sizes))
    image = darwin.ShmImage(offset + len(data))
    transfer.write_mapped(image.writable_descriptor, offset, split(data, sizes))
    image.seal()
    back = bytearray(len(data))
    transfer.read_mapped(image.descriptor, offset, split(back, sizes[::-1]))
    assert back == data
    transfer.read_mapped(image.descriptor, offset, [])
    image.free()


def test_mapped_memory_that_is_too_short_is_refused_before_it_is_touched() -> None:
    """T8: a mapping past the end would kill the process instead of failing the call."""
    image = darwin.ShmImage(100)
    far = 1 << 20
    with pytest.raises(EOFError, match=f"before byte {far + 1}"):
        transfer.read_mapped(image.writable_descriptor, far, [memoryview(bytearray(1))])
    with pytest.raises(EOFError, match=f"before byte {far + 1}"):
        transfer.write_mapped(image.writable_descriptor, far, [memoryview(b"x")])
    image.free()


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 5), max_size=4)), max_size=12))
def test_merged_runs_move_the_same_bytes(gaps: list[tuple[int, list[int]]]) -> None:
    """Joining runs changes neither where bytes go nor their order, and leaves no gapless pair."""
    runs: list[transfer.Run] = []
    offset = 0
    for gap, sizes in gaps:
        offset += gap
        views = [memoryview(os.urandom(size)) for size in sizes]
        runs.append((offset, views))
        offset += sum(sizes)
    merged = list(transfer.merge_runs(runs))
    assert placed(merged) == placed(runs)
    bounds = [(start, start + sum(view.nbytes for view in views)) for start, views in merged]
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(bounds))


def placed(runs: list[transfer.Run]) -> dict[int, int]:
    """Which byte stands where."""
    result: dict[int, int] = {}
    for offset, views in runs:
        result.update(enumerate(b"".join(bytes(view) for view in views), start=offset))
    return result


def test_transfers_over_mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """PLATFORM 3.1: where shared memory can only be mapped, all of several images moves as well."""
    monkeypatch.setattr(transfer, "is_mapped_only", lambda _: True)
    rows = [
        [np.random.default_rng(n).integers(255, size=transfer.PIECE_BYTES, dtype=np.uint8)] * 3
        for n in range(2)
    ]
    images = [darwin.ShmImage(sum(row.nbytes for row in some)) for some in rows]
    moves = [
        transfer.Move(image.writable_descriptor, 0, [row.data for row in some])
        for image, some in zip(images, rows, strict=True)
    ]
    transfer.write_all(moves, lambda: None)
    for image, some in zip(images, rows, strict=True):
        image.seal()
        found = [np.zeros_like(row) for row in some]
        move = transfer.Move(image.descriptor, 0, [row.data for row in found])
        transfer.read_all([move], lambda: None)
        assert all(np.array_equal(*pair) for pair in zip(found, some, strict=True))
        image.free()


def test_an_interrupted_transfer_leaves_no_thread_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: Ctrl-C while helpers copy: they have stopped when it arrives, for the caller now closes.

    Their descriptors' numbers may soon be those of the program's own files.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    main, at_work = threading.get_ident(), threading.Event()

    def before_each() -> None:
        if threading.get_ident() != main:
            at_work.set()
            time.sleep(0.5)  # long after the interrupt: only waiting keeps the descriptor open
            at_work.clear()
        else:
            assert at_work.wait(20)

    images = [memory.create(transfer.PARALLEL_BYTES) for _ in range(2)]
    views = [memoryview(bytes(transfer.PARALLEL_BYTES))]
    moves = [transfer.Move(image.writable_descriptor, 0, views) for image in images]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)

    def interrupt() -> None:
        at_work.wait(20)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGALRM)

    timer = threading.Thread(target=interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            transfer.write_all(moves, before_each)
        assert not at_work.is_set()
    finally:
        timer.join()
        signal.signal(signal.SIGALRM, before)
        for image in images:
            image.free()
