"""The store on a real directory: writing, reading back, scanning, deleting, clearing."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import safetensors

from prefixcached.actors import memory
from prefixcached.actors.filesystem import FileSystem, allocated_bytes
from prefixcached.actors.reading import Identity
from prefixcached.actors.scanning import BATCH_FILES, Scan
from prefixcached.actors.storage_format import (
    DamagedFile,
    encode_header,
    file_bytes_bound,
    namespace_directory,
    schema_name,
)
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import (
    QUARANTINE,
    SEGMENTS,
    TRASH,
    StoreInUseError,
    StoreUnusableError,
    split_path,
)
from prefixcached.actors.waste import QuarantineLimits
from prefixcached.protocol.actor_messages import FileEntry
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import layout
from tests.support.filesystems import CountingFs, FullFs, QuickFs
from tests.support.store_samples import (
    Sample,
    checkpoint,
    every_kind,
    path_of,
    sample,
    schema_of,
    segment,
    stored_object,
    write,
)

SAMPLES = pytest.mark.parametrize("one", every_kind(), ids=lambda s: f"{s.header.kind}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A prepared store in a directory of its own."""
    store = Store(tmp_path / "state", min_free_bytes=0)
    store.prepare()
    yield store
    store.close()


def data_of(store: Store, entry: FileEntry) -> bytes:
    """Verify an entry and return the image's bytes through the lent descriptor."""
    file = store.reader.verify(entry)
    try:
        return os.pread(file.descriptor, entry.data_bytes, file.data_offset)
    finally:
        file.close()


def found(scan: Scan) -> dict[str, FileEntry]:
    return {entry.header.id: entry for batch in scan for entry in batch.entries}


def files_below(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.name[0] != "."}


# -- writing and reading ---------------------------------------------------------------------------


@SAMPLES
def test_written_images_are_read_back(store: Store, one: Sample) -> None:
    """D3: what is lent is what was written, bit for bit, of every kind."""
    entry = write(store, one)
    assert data_of(store, entry) == one.data
    assert entry.tokens == one.tokens
    header = msgspec.structs.replace(entry.header, checksum="", tokens_checksum="")
    assert header == one.header


@SAMPLES
def test_scan_finds_what_was_written(store: Store, one: Sample) -> None:
    """D1: the files are the database; a scan finds the very entries that the writes reported."""
    entry = write(store, one)
    batches = list(store.scan())
    assert [e for batch in batches for e in batch.entries] == [entry]
    expected = {one.header.schema_digest: one.schema} if one.schema else {}
    assert batches[0].schemas == expected


@SAMPLES
def test_files_are_loaded_into_memory(store: Store, one: Sample) -> None:
    """T7: a promotion brings the same bytes, checked on the way."""
    entry = write(store, one)
    image = memory.create(entry.data_bytes)
    identity = store.reader.load(entry, image)
    back = bytearray(entry.data_bytes)
    image.read_into(0, memoryview(back))
    image.free()
    assert bytes(back) == one.data
    assert identity == Identity.of(path_of(store, entry).stat())


def test_files_are_named_for_any_tool(store: Store) -> None:
    """D1: a file lies at <namespace hash>/<id>.<kind>.safetensors and opens as it lies there."""
    one = checkpoint()
    entry = write(store, one)
    assert entry.path == (f"{namespace_directory('demo')}/{one.header.id}.checkpoint.safetensors")
    with safetensors.safe_open(path_of(store, entry), framework="numpy") as file:
        assert "s.0" in file.keys()  # noqa: SIM118


def test_nothing_but_the_file_and_its_schema_remains(store: Store) -> None:
    """D2: no temporary file is left, and the schema is written once per namespace."""
    entries = [write(store, segment(seed=seed)) for seed in range(3)]
    schema = f"{namespace_directory('demo')}/{schema_name(segment().header.schema_digest)}"
    segments = Path(store.directory.path, SEGMENTS)
    assert files_below(segments) == {schema, *(entry.path for entry in entries)}


def test_modes_are_private(store: Store) -> None:
    """D9: files are 0600 and directories 0700, whatever the umask."""
    write(store, segment())
    for path in Path(store.directory.path).rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_allocated_bytes_are_real_and_bounded(store: Store) -> None:
    """D5: an entry is charged what its file occupies, at most what was reserved for it."""
    one = segment(0, 500)
    entry = write(store, one)
    assert entry.allocated_bytes == allocated_bytes(path_of(store, entry).stat())
    assert 0 < entry.allocated_bytes <= file_bytes_bound(one.header, schema_of(one))


def test_descriptors_are_read_only(store: Store) -> None:
    """L2: a lent descriptor of a file cannot be written through."""
    file = store.reader.verify(write(store, segment()))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file.descriptor, b"x", 0)
    file.close()


@pytest.mark.parametrize("wrong", ["memory", "few tokens", "many tokens"])
def test_sizes_that_do_not_fit_are_refused(store: Store, wrong: str) -> None:
    """D2: an image that is not what its header says is not written."""
    one = segment()
    image = memory.create(len(one.data) + (wrong == "memory"))
    tokens = {"few tokens": one.tokens[4:], "many tokens": one.tokens + bytes(4)}.get(
        wrong, one.tokens
    )
    with pytest.raises(ValueError, match="do not fit"):
        store.write(one.header, tokens, one.schema, image)
    image.free()
    assert found(store.scan()) == {}


def test_a_schema_that_contradicts_the_image_is_refused(store: Store) -> None:
    """D2: an image that its schema cannot describe is not written."""
    one = segment()
    image = one.image()
    with pytest.raises(SchemaError):
        store.write(one.header, one.tokens, b"\xc0", image)
    image.free()


def test_an_image_follows_a_header_that_fills_its_page(store: Store) -> None:
    """D2: the room that is left for the header is what it takes, to the last byte."""
    plain = segment(0, 99)
    image_layout = layout(schema_of(plain), plain.header.spec)
    start = encode_header(plain.header, image_layout, 99)
    missing = len(start) - len(start.rstrip(b" "))
    spec = msgspec.structs.replace(plain.header.spec, metadata=bytes(missing // 4 * 3))
    one = sample(spec, namespace="demo" + "n" * (missing % 4))
    entry = write(store, one)
    with path_of(store, entry).open("rb") as file:
        assert file.read(entry.data_offset)[-1:] == b"}"
    assert data_of(store, entry) == one.data


def test_writing_again_replaces(store: Store) -> None:
    """A retried write of the same image puts the same file in its place."""
    one = segment()
    first = write(store, one)
    second = write(store, one)
    assert first.path == second.path
    assert list(found(store.scan()).values()) == [second]


# -- verification ----------------------------------------------------------------------------------


def test_a_file_that_is_still_the_same_is_not_read_again(tmp_path: Path) -> None:
    """D3, T7: a second verification of an unchanged file reads nothing."""
    system = CountingFs()
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    entry = write(store, segment(0, 1000))
    first = store.reader.verify(entry)
    assert first.read_bytes == path_of(store, entry).stat().st_size
    reads = system.calls["read"]
    second = store.reader.verify(entry, first.identity)
    assert second.read_bytes == 0
    assert system.calls["read"] == reads
    first.close()
    second.close()
    store.close()


def test_a_schema_that_was_just_written_is_not_read(tmp_path: Path) -> None:
    """D3: the first verification of a new file opens that file alone."""
    system = CountingFs()
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    entry = write(store, segment())
    opened = system.calls.get("open_file", 0)
    store.reader.verify(entry).close()
    assert system.calls["open_file"] == opened + 1
    store.close()


def test_a_file_that_changed_is_read_again(store: Store) -> None:
    """D3: another change time, or another inode, costs a new verification."""
    one = segment()
    entry = write(store, one)
    first = store.reader.verify(entry)
    first.close()
    os.utime(path_of(store, entry))
    touched = store.reader.verify(entry, first.identity)
    touched.close()
    assert touched.read_bytes > 0
    copy = path_of(store, entry).with_suffix(".copy")
    copy.write_bytes(path_of(store, entry).read_bytes())
    copy.rename(path_of(store, entry))
    replaced = store.reader.verify(entry, touched.identity)
    replaced.close()
    assert replaced.read_bytes > 0


def test_touch_records_recency_and_its_own_change(store: Store) -> None:
    """D3, D5: our own recency update survives a restart and costs no verification."""
    entry = write(store, segment())
    file = store.reader.verify(entry)
    file.close()
    identity = store.reader.touch(entry, 1_000_000_000 * 10**9, file.identity)
    assert identity is not None
    assert identity != file.identity
    again = store.reader.verify(entry, identity)
    again.close()
    assert again.read_bytes == 0
    assert found(store.scan())[entry.header.id].used_seconds == 1_000_000_000


def test_touch_does_not_hide_a_change_by_others(store: Store) -> None:
    """D3: touching a file that somebody changed does not make it verified."""
    entry = write(store, segment())
    file = store.reader.verify(entry)
    file.close()
    os.utime(path_of(store, entry))
    assert store.reader.touch(entry, time.time_ns(), file.identity) is None
    assert store.reader.touch(entry, time.time_ns(), None) is None


def test_a_verification_ends_at_its_next_step(store: Store) -> None:
    """F2: what the step raises ends the reading, and the descriptor is closed."""

    class StopReading(Exception):  # noqa: N818
        pass

    def stop() -> None:
        raise StopReading

    entry = write(store, segment(0, 100))
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(StopReading):
        store.reader.verify(entry, step=stop)
    assert len(os.listdir("/dev/fd")) == before


def test_a_file_that_changes_while_it_is_read_is_not_lent(store: Store) -> None:
    """D3: bytes that may have changed behind the reader are not lent, and it is no damage."""
    entry = write(store, segment(0, 100))
    times = iter(range(10**9, 10**9 + 100))

    def change() -> None:
        os.utime(path_of(store, entry), (0, next(times)))

    with pytest.raises(OSError, match="changes while it is read"):
        store.reader.verify(entry, step=change)
    assert path_of(store, entry).exists()


def test_another_entry_in_its_place_is_damage(store: Store) -> None:
    """D3: ids, tokens and namespace are checked, not only the file's own checksum."""
    mine, other = write(store, segment(seed=1)), write(store, segment(seed=2))
    path_of(store, other).replace(path_of(store, mine))
    with pytest.raises(DamagedFile, match="not the one that the index knows"):
        store.reader.verify(mine)


@pytest.mark.parametrize("what", ["symlink", "fifo", "directory"])
def test_nothing_but_a_plain_file_is_followed(store: Store, tmp_path: Path, what: str) -> None:
    """D9: a link out of the directory, a pipe or a directory is damage, at once."""
    entry = write(store, segment())
    path = path_of(store, entry)
    outside = tmp_path / "outside"
    path.rename(outside)
    if what == "symlink":
        path.symlink_to(outside)
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(DamagedFile):
        store.reader.verify(entry)
    store.quarantine(entry, "test")
    assert outside.exists()


def test_paths_cannot_lead_out(store: Store) -> None:
    """D9: an entry's path that the store did not make is refused."""
    for path in ("../lock", "x", "/etc/passwd", f"{'0' * 32}/../lock", f"{'0' * 32}/x"):
        with pytest.raises(ValueError, match="not the path"):
            split_path(path)


def test_a_linked_namespace_directory_is_not_followed(store: Store, tmp_path: Path) -> None:
    """D9: a namespace's directory that is a link is foreign and nothing behind it is read."""
    entry = write(store, segment())
    directory = path_of(store, entry).parent
    directory.rename(tmp_path / "outside")
    directory.symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
        store.reader.verify(entry)
    assert found(store.scan()) == {}
    assert store.waste.foreign_files == 1


# -- the scan --------------------------------------------------------------------------------------


def test_scan_reports_in_batches(store: Store) -> None:
    """D10: entries come in bounded batches, none lost, none twice."""
    count = BATCH_FILES + 10
    written = {write(store, segment(0, 2, seed=seed)).header.id for seed in range(count)}
    batches = [[e.header.id for e in batch.entries] for batch in store.scan()]
    assert all(len(batch) <= BATCH_FILES for batch in batches)
    ids = [id_ for batch in batches for id_ in batch]
    assert len(ids) == count
    assert set(ids) == written


def test_scan_reaps_temporary_files(store: Store) -> None:
    """D2: what an unfinished write left is removed at start, wherever it stands."""
    entry = write(store, segment())
    state = Path(store.directory.path)
    for directory in (state, state / SEGMENTS, path_of(store, entry).parent):
        (directory / "tmp-left").write_bytes(b"x" * 5000)
    scan = store.scan()
    assert list(found(scan).values()) == [entry]
    assert scan.temporary == 3
    assert not list(state.rglob("tmp-*"))


def test_scan_counts_foreign_files_and_leaves_them(store: Store) -> None:
    """D10: files that are not ours are counted, kept apart and not opened as entries."""
    entry = write(store, segment())
    directory = path_of(store, entry).parent
    (directory / "notes.txt").write_bytes(b"x" * 10_000)
    (directory.parent / "elsewhere").mkdir()
    (directory.parent / "elsewhere" / "big").write_bytes(b"y" * 50_000)
    assert list(found(store.scan()).values()) == [entry]
    assert store.waste.foreign_files == 2
    on_disk = sum(
        allocated_bytes(p.stat())
        for p in (directory / "notes.txt", directory.parent / "elsewhere" / "big")
    )
    assert store.waste.foreign_bytes == on_disk
    assert (directory / "notes.txt").exists()


def test_files_without_their_schema_are_unattached(store: Store) -> None:
    """D1, D10: losing a schema file makes its files unattached: kept apart, not damaged."""
    one = segment()
    entry = write(store, one)
    (path_of(store, entry).parent / schema_name(one.header.schema_digest)).unlink()
    scan = store.scan()
    assert found(scan) == {}
    assert scan.damaged == 0
    assert store.waste.foreign_bytes == entry.allocated_bytes
    write(store, segment(seed=9))
    assert entry.header.id in found(store.scan())


def test_a_damaged_schema_is_quarantined(store: Store) -> None:
    """D3: a schema whose content does not match its name is moved aside."""
    one = segment()
    entry = write(store, one)
    path = path_of(store, entry).parent / schema_name(one.header.schema_digest)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    scan = store.scan()
    assert found(scan) == {}
    assert scan.damaged == 1
    assert len(files_below(Path(store.directory.path, QUARANTINE))) == 1
    assert path_of(store, entry).exists()


def test_misplaced_files_are_quarantined(store: Store) -> None:
    """N1: a file in another namespace's directory, or under another id, is never served."""
    mine, other = write(store, segment(seed=1)), write(store, segment(seed=2, namespace="b"))
    path_of(store, mine).rename(path_of(store, other).parent / path_of(store, mine).name)
    renamed = path_of(store, other).parent / f"{'0' * 32}.segment.safetensors"
    path_of(store, other).rename(renamed)
    scan = store.scan()
    assert found(scan) == {}
    assert scan.damaged == 2


def test_empty_namespaces_are_removed(store: Store) -> None:
    """A namespace without images leaves no directory behind."""
    entry = write(store, segment())
    store.delete(entry.path)
    assert found(store.scan()) == {}
    assert not path_of(store, entry).parent.exists()
    assert store.other_bytes == 0


def test_quarantine_is_bounded(tmp_path: Path) -> None:
    """D3: the oldest quarantined files are dropped, by number and by bytes."""
    bounds = QuarantineLimits(files=3, bytes=1 << 20)
    store = Store(tmp_path / "state", min_free_bytes=0, quarantine=bounds)
    store.prepare()
    entries = [write(store, segment(seed=seed)) for seed in range(5)]
    for entry in entries:
        store.quarantine(entry, "test")
    kept = sorted(files_below(Path(store.directory.path, QUARANTINE)))
    assert [name.split(".")[2] for name in kept] == [e.header.id for e in entries[2:]]
    assert store.waste.quarantine_bytes == sum(e.allocated_bytes for e in entries[2:])
    store.drop_others(1)
    assert store.waste.quarantine_bytes == sum(e.allocated_bytes for e in entries[3:])
    store.close()


def test_foreign_files_are_the_first_victims(store: Store) -> None:
    """D10: what is no entry goes when space is wanted, foreign files before quarantined ones."""
    entries = [write(store, segment(seed=seed)) for seed in range(2)]
    directory = path_of(store, entries[0]).parent
    (directory / "a").write_bytes(b"x" * 10_000)
    store.quarantine(entries[1], "test")
    list(store.scan())
    assert store.drop_others(1) == 12288
    assert not (directory / "a").exists()
    assert store.waste.quarantine_bytes > 0
    assert store.drop_others(1 << 30) == entries[1].allocated_bytes
    assert store.waste.quarantine_bytes == store.waste.foreign_bytes == 0
    assert path_of(store, entries[0]).exists()


# -- deleting and clearing -------------------------------------------------------------------------


def test_deleting_twice_is_harmless(store: Store) -> None:
    """D1: a file may be gone at any time."""
    entry = write(store, segment())
    store.delete(entry.path)
    store.delete(entry.path)
    with pytest.raises(FileNotFoundError):
        store.reader.verify(entry)


def test_clear_hides_one_namespace_by_one_rename(tmp_path: Path) -> None:
    """D11: one rename puts a namespace out of reach; its bytes are free once trash is emptied."""
    system = CountingFs()
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    gone = [write(store, segment(seed=seed, namespace="a")) for seed in range(3)]
    kept = write(store, segment(namespace="b"))
    before = system.calls.get("rename", 0)
    store.clear("a")
    assert system.calls["rename"] == before + 1
    assert not path_of(store, gone[0]).exists()
    first, done = store.empty_trash(2)
    assert not done
    second, done = store.empty_trash(100)
    assert done
    assert not list(Path(store.directory.path, TRASH).glob("[!.]*"))
    assert first + second == sum(e.allocated_bytes for e in gone)
    assert list(found(store.scan()).values()) == [kept]
    store.close()


def test_trash_counts_former_entries_alone(store: Store) -> None:
    """D5: of the trash, entries' bytes are reported as freed and the rest as other bytes."""
    gone = [write(store, segment(seed=seed, namespace="a")) for seed in range(3)]
    schema_bytes = store.other_bytes
    assert schema_bytes > 0
    (path_of(store, gone[0]).parent / "notes").write_bytes(b"x")
    list(store.scan())
    store.clear("a")
    assert store.other_bytes == schema_bytes + 4096
    freed, done = store.empty_trash(100)
    assert done
    assert freed == sum(e.allocated_bytes for e in gone)
    assert store.other_bytes == 0


def test_trash_of_an_earlier_run_is_other_bytes(store: Store) -> None:
    """D5: what an earlier run left in the trash counts until it is deleted."""
    entry = write(store, segment(namespace="a"))
    store.clear("a")
    list(store.scan())
    assert store.other_bytes >= entry.allocated_bytes
    assert store.empty_trash(100) == (0, True)
    assert store.other_bytes == 0


def test_clear_of_everything(store: Store) -> None:
    """D11: clearing all is one rename too, and writing goes on."""
    for one in every_kind():
        write(store, one)
    store.clear(None)
    assert found(store.scan()) == {}
    entry = write(store, segment())
    assert list(found(store.scan()).values()) == [entry]


def test_clear_of_nothing(store: Store) -> None:
    """D11: clearing a namespace that has no files succeeds."""
    store.clear("never seen")
    assert store.empty_trash(10) == (0, True)


# -- the directory ---------------------------------------------------------------------------------


def test_two_daemons_cannot_use_one_directory(store: Store) -> None:
    """D9: the second daemon is told so; after the first one ends it may."""
    second = Store(store.directory.path)
    with pytest.raises(StoreInUseError, match="another prefixcached daemon"):
        second.prepare()
    store.close()
    second.prepare()
    second.close()


CHANGES: dict[str, Callable[[Store, FileEntry], object]] = {
    "write": lambda store, _: write(store, segment(seed=1)),
    "delete": lambda store, entry: store.delete(entry.path),
    "clear": lambda store, _: store.clear("demo"),
    "clear all": lambda store, _: store.clear(None),
    "trash": lambda store, _: store.empty_trash(100),
    "quarantine": lambda store, entry: store.quarantine(entry, "test"),
    "meter": lambda store, _: store.save_meter(b"{}"),
    "probe": lambda store, _: store.probe(1),
    "scan": lambda store, _: list(store.scan()),
}
"""Whatever changes files, the scan included: it removes what it takes for leftovers."""


@pytest.mark.parametrize("had_it", [False, True], ids=["refused", "moved away"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_is_changed_without_the_lock(
    tmp_path: Path, change: Callable[[Store, FileEntry], object], *, had_it: bool
) -> None:
    """D9, D11: a directory that another daemon holds stays as it is, and the caller is told."""
    path = tmp_path / "state"
    other = Store(path, QuickFs(), min_free_bytes=0)
    if had_it:
        other.prepare()
        path.rename(tmp_path / "moved")
    owner = Store(path, QuickFs(), min_free_bytes=0)
    owner.prepare()
    gone = write(owner, segment(namespace="gone"))
    owner.clear("gone")
    entry = write(owner, segment())
    path_of(owner, entry).with_name("tmp-unfinished").touch()
    before = files_below(path)
    with pytest.raises(StoreUnusableError):
        change(other, entry)
    assert other.drop_others(1 << 40) == 0
    assert files_below(path) == before
    assert gone.header.id in str(before)
    other.close()
    owner.close()


def test_trash_that_somebody_deleted_is_empty(store: Store) -> None:
    """D1, D5: its bytes no longer count, and the directory is there for the next clear."""
    write(store, segment())
    store.clear(None)
    shutil.rmtree(Path(store.directory.path, TRASH))
    assert store.empty_trash(100) == (0, True)
    assert store.other_bytes == 0
    write(store, segment())
    store.clear(None)


def test_what_no_entry_owns_stays_where_another_daemon_has_the_directory(tmp_path: Path) -> None:
    """D9, D10: what this one knew of its own directory is no order to delete in another's."""
    path, moved = tmp_path / "state", tmp_path / "moved"
    store = Store(path, QuickFs(), min_free_bytes=0)
    store.prepare()
    (path / SEGMENTS / "foreign").write_bytes(b"x" * 10_000)
    list(store.scan())
    assert store.waste.foreign_bytes > 0
    path.rename(moved)
    owner = Store(path, QuickFs(), min_free_bytes=0)
    owner.prepare()
    (path / SEGMENTS / "foreign").write_bytes(b"y" * 10_000)
    assert store.drop_others(1 << 40) == 0
    assert (path / SEGMENTS / "foreign").exists()
    assert (moved / SEGMENTS / "foreign").exists()
    store.close()
    owner.close()


def test_a_lock_that_was_deleted_is_taken_anew_before_a_change(store: Store) -> None:
    """D7, D9: no daemon can have come in between when the change happens."""
    entry = write(store, segment())
    Path(store.directory.path, "lock").unlink()
    store.delete(entry.path)
    assert not path_of(store, entry).exists()
    with pytest.raises(StoreInUseError):
        Store(store.directory.path).prepare()


def test_directories_that_others_can_write_to_are_refused(tmp_path: Path) -> None:
    """D9: the error names the directory, the mode and what to do."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o770)
    with pytest.raises(PermissionError, match=r"770.*change it or choose another"):
        Store(state).prepare()


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """D9: the owner is checked at start."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to 12345"):
        Store(state).prepare()


def test_a_linked_part_is_refused(tmp_path: Path) -> None:
    """D9: a part of the state directory that is a link is not followed."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (tmp_path / "outside").mkdir(mode=0o700)
    (state / SEGMENTS).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
        Store(state).prepare()


@pytest.mark.parametrize("what", ["state", "segments", "namespace"])
def test_a_directory_deleted_while_running_is_made_again(store: Store, what: str) -> None:
    """D7: the next write finds its directory missing and makes it, lock included."""
    first = write(store, segment(seed=1))
    parts: dict[str, tuple[str, ...]] = {
        "state": (),
        "segments": (SEGMENTS,),
        "namespace": (SEGMENTS, first.path[:32]),
    }
    shutil.rmtree(Path(store.directory.path, *parts[what]))
    entry = write(store, segment(seed=2))
    assert data_of(store, entry) == segment(seed=2).data
    assert list(found(store.scan()).values()) == [entry]
    with pytest.raises(StoreInUseError):
        Store(store.directory.path).prepare()


def test_space_is_left_on_the_volume(tmp_path: Path) -> None:
    """D7: a write that would leave too little free space is refused as if the disk were full."""
    store = Store(tmp_path / "state", min_free_bytes=1 << 60)
    store.prepare()
    with pytest.raises(OSError, match="would leave less") as caught:
        write(store, segment())
    assert caught.value.errno == errno.ENOSPC
    assert found(store.scan()) == {}
    store.close()


def test_probe_says_whether_the_disk_works(tmp_path: Path) -> None:
    """D7: a probe fails while the disk does, and leaves nothing behind."""
    system = FullFs()
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    with pytest.raises(OSError, match="No space"):
        store.probe(1)
    system.full = False
    store.probe(1)
    with pytest.raises(OSError, match="would leave less"):
        store.probe(1 << 60)
    assert files_below(Path(store.directory.path)) == {"lock"}
    store.close()


def test_a_probe_makes_a_deleted_directory_again(store: Store) -> None:
    """D7: what was deleted while the disk failed does not keep it from being used again."""
    shutil.rmtree(store.directory.path)
    store.probe(1)
    with pytest.raises(StoreInUseError):
        Store(store.directory.path).prepare()
    entry = write(store, segment())
    assert list(found(store.scan()).values()) == [entry]


def test_meter_is_stored(store: Store) -> None:
    """D6: the write meter survives a restart."""
    assert store.load_meter() == b""
    store.save_meter(b"first")
    store.save_meter(b"second")
    assert store.load_meter() == b"second"


def test_no_descriptor_is_left(store: Store) -> None:
    """C3: the store closes all that it opens."""
    before = len(os.listdir("/dev/fd"))
    for one in every_kind():
        data_of(store, write(store, one))
    list(store.scan())
    store.clear(None)
    store.empty_trash(100)
    store.probe(0)
    store.save_meter(b"x")
    store.load_meter()
    assert len(os.listdir("/dev/fd")) == before


def test_reading_in_several_threads(store: Store) -> None:
    """F2: files are verified in several threads at once."""
    ones = [segment(0, 2000, seed=seed) for seed in range(4)]
    entries = [write(store, one) for one in ones]
    failures: list[str] = []

    def verify() -> None:
        for one, entry in zip(ones, entries, strict=True):
            if data_of(store, entry) != one.data:
                failures.append(entry.path)

    threads = [threading.Thread(target=verify) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS keeps it out of backups")
def test_time_machine_leaves_the_files_alone(store: Store) -> None:
    """DESIGN 3: the parts carry Time Machine's exclusion mark."""
    listed = subprocess.run(
        ["xattr", str(Path(store.directory.path, SEGMENTS))], capture_output=True, check=True
    )
    assert b"com_apple_backup_excludeItem" in listed.stdout


def test_the_real_file_system_writes_short_writes_whole(tmp_path: Path) -> None:
    """D2: a write of many bytes is complete when it returns."""
    system = FileSystem()
    within = os.open(tmp_path, os.O_RDONLY)
    descriptor = system.create_file("file", within)
    data = os.urandom(3 << 20)
    system.write(descriptor, data, 100)
    system.close(descriptor)
    os.close(within)
    assert (tmp_path / "file").read_bytes() == bytes(100) + data


def test_objects_need_no_schema(store: Store) -> None:
    """O1: an object's directory holds the object alone."""
    entry = write(store, stored_object())
    assert files_below(path_of(store, entry).parent) == {path_of(store, entry).name}


def test_a_schema_that_has_grown_is_written_anew(store: Store) -> None:
    """D3: it would be damage, and all files that need it with it."""
    entry = write(store, segment())
    file = path_of(store, entry).with_name(schema_name(entry.header.schema_digest))
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    write(store, segment(seed=2))
    assert file.read_bytes() == whole
