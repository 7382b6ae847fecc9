"""Torn and altered files: each is found, moved aside, and never served (rule D3)."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixcached.actors import memory
from prefixcached.actors.storage_format import DATA_ALIGNMENT, DamagedFile
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import QUARANTINE
from prefixcached.protocol.actor_messages import FileEntry
from tests.support.filesystems import QuickFs
from tests.support.store_samples import Sample, checkpoint, every_kind, path_of, segment, write

FLIPS = 1000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A prepared store in a directory of its own."""
    store = Store(tmp_path / "state", QuickFs(), min_free_bytes=0)
    store.prepare()
    yield store
    store.close()


def is_refused(store: Store, entry: FileEntry) -> bool:
    """Whether both ways of reading the file find it damaged."""
    refused = 0
    image = memory.create(entry.data_bytes)
    try:
        store.reader.verify(entry).close()
    except DamagedFile:
        refused += 1
    try:
        store.reader.load(entry, image)
    except DamagedFile:
        refused += 1
    finally:
        image.free()
    assert refused in (0, 2)
    return refused == 2


def test_truncation_at_every_length(store: Store) -> None:
    """D3: a file cut at any length is damage, to a reader and to the scan."""
    entry = write(store, segment())
    path = path_of(store, entry)
    whole = path.read_bytes()
    header = len(whole[: entry.data_offset].rstrip(b" "))
    lengths = [*range(header), *range(header, DATA_ALIGNMENT, 97)]
    lengths += range(DATA_ALIGNMENT, len(whole))
    for length in lengths:
        path.write_bytes(whole[:length])
        assert is_refused(store, entry), length
    for length in (0, 7, 8, header, DATA_ALIGNMENT, len(whole) - 1):
        path.write_bytes(whole[:length])
        scan = store.scan()
        assert list(scan) == [], length
        assert scan.damaged == 1, length
        assert not path.exists()
    path.write_bytes(whole)
    assert not is_refused(store, entry)


def test_appended_bytes(store: Store) -> None:
    """D3: a file that is longer than it says is damage."""
    entry = write(store, segment())
    with path_of(store, entry).open("ab") as file:
        file.write(b"\0")
    assert is_refused(store, entry)


@pytest.mark.slow
def test_flipped_bits_anywhere(store: Store) -> None:
    """D3: 1,000 random flipped bits of a small store, each found by reading."""
    entries = [write(store, one) for one in every_kind()]
    source = random.Random(7)
    for _ in range(FLIPS):
        entry = source.choice(entries)
        path = path_of(store, entry)
        whole = path.read_bytes()
        # Where it matters: most of a small file is padding, and the format's tests flip that.
        data_begins = len(whole[: entry.data_offset].rstrip(b" "))
        place = source.choice(
            (source.randrange(data_begins), source.randrange(entry.data_offset, len(whole)))
        )
        flipped = bytearray(whole)
        flipped[place] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        unused = whole.index(b'"format":"mlx"')
        assert is_refused(store, entry) or unused <= place < unused + 14, place
        path.write_bytes(whole)
    for entry in entries:
        assert not is_refused(store, entry)


def test_flipped_bits_of_the_description_are_found_by_the_scan(store: Store) -> None:
    """D3, N1: the index is never built from an altered description."""
    entry = write(store, checkpoint())
    path = path_of(store, entry)
    whole = path.read_bytes()
    begin = whole.index(b'"prefixcached":"')
    end = whole.index(b'"prefixcached.xxh3"') + 54
    source = random.Random(3)
    for place in source.sample(range(begin, end), 200):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        scan = store.scan()
        assert list(scan) == []
        assert scan.damaged == 1
    path.write_bytes(whole)
    assert [e for batch in store.scan() for e in batch.entries] != []


@pytest.mark.parametrize("kind", [segment, checkpoint])
def test_a_flipped_bit_of_a_token_is_found_by_the_scan(
    store: Store, kind: Callable[[], Sample]
) -> None:
    """T12, D3: tokens say what a prompt finds, also those of a file that nobody will read whole."""
    entry = write(store, kind())
    path = path_of(store, entry)
    whole = path.read_bytes()
    for bit in range(8):
        flipped = bytearray(whole)
        flipped[-len(entry.tokens)] ^= 1 << bit
        path.write_bytes(flipped)
        scan = store.scan()
        assert list(scan) == []
        assert scan.damaged == 1


def test_swapped_data_of_one_size(store: Store) -> None:
    """D3: the checksum binds data to its own header."""
    first, second = (write(store, segment(seed=seed)) for seed in (1, 2))
    one, two = (path_of(store, entry).read_bytes() for entry in (first, second))
    path_of(store, first).write_bytes(one[: first.data_offset] + two[second.data_offset :])
    assert is_refused(store, first)


def test_damage_is_moved_aside(store: Store) -> None:
    """D3: a quarantined file keeps its bytes, is counted, and is found by no scan."""
    entry = write(store, segment())
    whole = path_of(store, entry).read_bytes()
    other_bytes = store.other_bytes
    store.quarantine(entry, "test")
    (kept,) = (p for p in Path(store.directory.path, QUARANTINE).iterdir() if p.name[0] != ".")
    assert kept.read_bytes() == whole
    assert store.waste.quarantined_files == 1
    assert store.other_bytes == other_bytes + entry.allocated_bytes
    assert list(store.scan()) == []
    with pytest.raises(FileNotFoundError):
        store.reader.verify(entry)
    assert os.listdir(path_of(store, entry).parent.parent) == [".metadata_never_index"]
