"""A disk that refuses single calls: good files stay, and every byte left behind is counted."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixcached.actors import memory
from prefixcached.actors.filesystem import allocated_bytes
from prefixcached.actors.storage_format import (
    encode_header,
    file_name,
    namespace_directory,
    schema_name,
)
from prefixcached.actors.store import MIN_FREE_BYTES, Store
from prefixcached.actors.store_directory import (
    NO_INDEX_NAME,
    QUARANTINE,
    SEGMENTS,
    TEMPORARY_PREFIX,
    TRASH,
    entry_path,
)
from prefixcached.protocol.actor_messages import FileEntry
from prefixcached.protocol.image import WindowRows, layout
from tests.support.filesystems import InterceptedFs, QuickFs
from tests.support.store_samples import checkpoint, path_of, schema_of, segment, write


class RefusingFs(InterceptedFs):
    """Refuses the calls that the test names, as a disk does that fails here and there."""

    def __init__(self) -> None:
        self.refuses: dict[str, Callable[..., bool]] = {}
        self.ghosts: list[str] = []
        """Names that are listed among images, and gone when they are opened."""

    def _intercept(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name in self.refuses and self.refuses[name](*args):
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (injected into {name})")
        answer = call(*args, **kwargs)
        if name == "names" and any(each.endswith(".safetensors") for each in answer):
            return [*answer, *self.ghosts]
        return answer


class AlmostFullFs(QuickFs):
    """A volume with as much room as the test says."""

    free = 0

    def free_bytes(self, descriptor: int) -> int:
        return self.free


def always(*_: object) -> bool:
    return True


def is_named(wanted: str, name: str, *_: object) -> bool:
    """Whether a call is for files whose names contain a word."""
    return wanted in name


@pytest.fixture
def system() -> RefusingFs:
    """A file system that the test can break."""
    return RefusingFs()


@pytest.fixture
def store(tmp_path: Path, system: RefusingFs) -> Iterator[Store]:
    """A prepared store in a directory of its own."""
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    yield store
    store.close()


def scanned(store: Store) -> list[FileEntry]:
    return [entry for batch in store.scan() for entry in batch.entries]


def schema_bytes(store: Store, entry: FileEntry) -> int:
    """What a namespace's schema occupies."""
    schema = path_of(store, entry).with_name(schema_name(entry.header.schema_digest))
    return allocated_bytes(schema.stat())


# -- the scan --------------------------------------------------------------------------------------


def test_files_whose_schema_cannot_be_read_now_stay(store: Store, system: RefusingFs) -> None:
    """D4: a schema that fails for a moment makes its files neither foreign nor damaged."""
    entry = write(store, segment())
    system.refuses["open_file"] = partial(is_named, ".schema")
    scan = store.scan()
    assert list(scan) == []
    assert (scan.unreadable, scan.damaged, store.waste.foreign_files) == (1, 0, 0)
    assert store.other_bytes >= entry.allocated_bytes
    system.refuses.clear()
    assert scanned(store) == [entry]


def test_a_file_that_is_deleted_during_the_scan_is_not_missed(
    store: Store, system: RefusingFs
) -> None:
    """D1: deleting any file at any time is safe, also between its listing and its opening."""
    entry = write(store, segment())
    system.ghosts = [f"{'0' * 32}.segment.safetensors"]
    scan = store.scan()
    assert [found for batch in scan for found in batch.entries] == [entry]
    assert (scan.unreadable, scan.damaged, store.waste.foreign_files) == (0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_foreign(store: Store) -> None:
    """D9, D10: it is counted and left alone; nothing of it is served."""
    entry = write(store, segment())
    os.chown(path_of(store, entry), 65534, -1)
    assert scanned(store) == []
    assert store.waste.foreign_files == 1
    assert path_of(store, entry).exists()


def test_a_link_with_an_images_name_is_foreign(store: Store, tmp_path: Path) -> None:
    """D9: no link is followed out of the directory, whatever it is called."""
    entry = write(store, segment())
    path_of(store, entry).rename(tmp_path / "elsewhere")
    path_of(store, entry).symlink_to(tmp_path / "elsewhere")
    scan = store.scan()
    assert list(scan) == []
    assert (scan.damaged, store.waste.foreign_files) == (0, 1)
    assert (tmp_path / "elsewhere").exists()


def test_a_file_that_contradicts_its_schema_is_damage(store: Store) -> None:
    """D3, C3: a description whose sizes the schema cannot give is not believed."""
    one = segment()
    entry = write(store, one)
    lying = msgspec.structs.replace(
        entry.header, spec=msgspec.structs.replace(one.header.spec, windows=(WindowRows(),))
    )
    header = encode_header(lying, layout(schema_of(one), one.header.spec), len(one.tokens) // 4)
    path_of(store, entry).write_bytes(header + one.data + one.tokens)
    scan = store.scan()
    assert list(scan) == []
    assert scan.damaged == 1
    assert not path_of(store, entry).exists()


def test_what_cannot_be_removed_or_moved_aside_is_counted(store: Store, system: RefusingFs) -> None:
    """D5: leftovers and damage that a failing disk keeps are charged, and go first later."""
    entry = write(store, segment())
    path_of(store, entry).write_bytes(b"torn")
    leftover = path_of(store, entry).with_name(f"{TEMPORARY_PREFIX}{'0' * 32}")
    leftover.write_bytes(bytes(5000))
    system.refuses["unlink"] = system.refuses["rename"] = always
    scan = store.scan()
    assert list(scan) == []
    assert (scan.damaged, scan.temporary, store.waste.foreign_files) == (1, 0, 2)
    kept = allocated_bytes(path_of(store, entry).stat()) + allocated_bytes(leftover.stat())
    assert store.waste.foreign_bytes == kept
    system.refuses.clear()
    assert store.waste.drop_foreign(kept) == kept
    assert not leftover.exists()
    assert store.waste.foreign_bytes == 0


# -- writing ---------------------------------------------------------------------------------------


def test_a_file_whose_name_may_not_be_durable_is_counted_until_it_is(
    store: Store, system: RefusingFs
) -> None:
    """D2: after its rename a file is there, whether or not the directory could be synced."""
    one = segment()
    entry = write(store, one)
    other = segment(seed=1)
    system.refuses["barrier_directory"] = always
    with pytest.raises(OSError, match="injected"):
        write(store, other)
    assert store.waste.foreign_files == 1
    assert store.other_bytes == entry.allocated_bytes + schema_bytes(store, entry)
    system.refuses.clear()
    name = file_name(other.header.id, other.header.kind)
    store.delete(entry_path(namespace_directory(other.header.namespace), name))
    assert store.other_bytes == schema_bytes(store, entry), "whoever deletes it ends that"
    system.refuses["barrier_directory"] = always
    with pytest.raises(OSError, match="injected"):
        write(store, other)
    system.refuses.clear()
    again = write(store, other)
    assert store.waste.foreign_files == 0
    assert store.other_bytes == schema_bytes(store, entry)
    assert {found.header.id for found in scanned(store)} == {entry.header.id, again.header.id}


def test_a_temporary_file_that_stays_is_counted(store: Store, system: RefusingFs) -> None:
    """D5: a write that fails on a disk that also refuses to delete leaves bytes that count."""
    entry = write(store, segment())
    system.refuses["write_image"] = system.refuses["unlink"] = always
    with pytest.raises(OSError, match="write_image"):
        write(store, segment(seed=1))
    names = os.listdir(path_of(store, entry).parent)
    (leftover,) = [name for name in names if name.startswith(TEMPORARY_PREFIX)]
    assert store.waste.foreign_files == 1
    system.refuses.clear()
    store.waste.drop_foreign(1)
    assert leftover not in os.listdir(path_of(store, entry).parent)
    assert store.waste.foreign_files == 0


def test_a_failed_write_leaves_nothing(store: Store, system: RefusingFs) -> None:
    """D2: without its rename a file was never there, and neither were its bytes."""
    entry = write(store, segment())
    before = store.other_bytes
    system.refuses["rename"] = always
    with pytest.raises(OSError, match="rename"):
        write(store, segment(seed=1))
    assert sorted(os.listdir(path_of(store, entry).parent)) == sorted(
        [path_of(store, entry).name, schema_name(entry.header.schema_digest)]
    )
    assert store.other_bytes == before
    assert store.waste.foreign_files == 0


def test_a_schema_that_was_cut_short_is_written_again(store: Store) -> None:
    """D2, D3: without its schema no file of the namespace is found by the next start."""
    entry = write(store, segment())
    schema = path_of(store, entry).with_name(schema_name(entry.header.schema_digest))
    whole = schema.read_bytes()
    schema.write_bytes(whole[:-1])
    again = write(store, segment(seed=1))
    assert schema.read_bytes() == whole
    assert {found.header.id for found in scanned(store)} == {entry.header.id, again.header.id}


def test_a_write_fits_into_the_last_byte_of_room(tmp_path: Path) -> None:
    """D7: the room that a file needs is all of it, header, image and tokens, and no byte more."""
    system = AlmostFullFs()
    left_to_others = 1000
    store = Store(tmp_path / "state", system, min_free_bytes=left_to_others)
    store.prepare()
    system.free = 1 << 30
    file_bytes = path_of(store, write(store, segment(0, 900))).stat().st_size
    system.free = left_to_others + file_bytes - 1
    with pytest.raises(OSError, match=f" {file_bytes} bytes would leave less"):
        write(store, segment(0, 900, seed=1))
    system.free += 1
    write(store, segment(0, 900, seed=1))
    store.close()


@pytest.mark.parametrize("call", ["write", "rename"])
def test_a_meter_that_is_not_stored_is_an_error(
    store: Store, system: RefusingFs, call: str
) -> None:
    """D6, D7: its owner learns that the disk fails; the stored one stays, and nothing is left."""
    store.save_meter(b"stored")
    before = sorted(os.listdir(store.directory.path))
    system.refuses[call] = always
    with pytest.raises(OSError, match="injected"):
        store.save_meter(b"lost")
    assert store.load_meter() == b"stored"
    assert sorted(os.listdir(store.directory.path)) == before


# -- clearing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["demo", None])
def test_a_clear_of_a_directory_that_was_deleted_is_done(
    store: Store, namespace: str | None
) -> None:
    """D7, D11: what is gone is unfindable, and the directory works again afterwards."""
    write(store, segment())
    shutil.rmtree(Path(store.directory.path, SEGMENTS))
    shutil.rmtree(Path(store.directory.path, TRASH))
    store.clear(namespace)
    assert scanned(store) == []
    entry = write(store, segment(seed=1))
    assert scanned(store) == [entry]


def test_a_clear_without_a_trash_clears(store: Store) -> None:
    """D7, D11: a trash that somebody deleted is made again, and the files are out of reach."""
    entry = write(store, segment())
    kept = write(store, segment(namespace="kept"))
    shutil.rmtree(Path(store.directory.path, TRASH))
    store.clear("demo")
    assert not path_of(store, entry).exists()
    assert scanned(store) == [kept]


def test_what_stays_in_the_trash_is_told_apart_from_what_became_free(
    store: Store, system: RefusingFs
) -> None:
    """D5: a file that cannot be deleted now is freed, and told, when it can."""
    entries = [write(store, segment()), write(store, checkpoint())]
    store.clear("demo")
    last = path_of(store, entries[1]).name
    system.refuses["unlink"] = lambda name, _: name == last
    assert store.empty_trash(100) == (entries[0].allocated_bytes, False)
    with pytest.raises(OSError, match="unlink"):
        store.empty_trash(100)
    system.refuses.clear()
    assert store.empty_trash(100) == (entries[1].allocated_bytes, True)
    assert not [*Path(store.directory.path, TRASH).rglob("*.safetensors")]


def test_the_trash_is_emptied_in_steps(store: Store) -> None:
    """C6, D11: a step deletes so many files, and says truly whether more are left."""
    entries = [write(store, segment(seed=seed)) for seed in range(4)]
    store.clear("demo")
    freed = []
    done = False
    while not done:
        nbytes, done = store.empty_trash(2)
        freed.append(nbytes)
    assert sum(freed) == sum(entry.allocated_bytes for entry in entries)
    assert max(freed) <= 2 * max(entry.allocated_bytes for entry in entries)
    assert len(freed) >= 3, "four images, a schema, and the step that finds nothing left"


def test_foreign_files_go_as_far_as_they_can(store: Store, system: RefusingFs) -> None:
    """D10: one that is gone already or cannot be deleted does not save the others."""
    entry = write(store, segment())
    folder = path_of(store, entry).parent
    for name in ("gone", "kept", "dropped"):
        (folder / name).write_bytes(bytes(5000))
    scanned(store)
    assert store.waste.foreign_files == 3
    (folder / "gone").unlink()
    system.refuses["unlink"] = partial(is_named, "kept")
    dropped = [allocated_bytes((folder / "dropped").stat())] * 2
    assert store.waste.drop_foreign(1 << 40) == sum(dropped)
    assert store.waste.dropped_files == len(dropped)
    assert sorted(os.listdir(folder)) == sorted(
        ["kept", path_of(store, entry).name, schema_name(entry.header.schema_digest)]
    )
    assert store.waste.foreign_files == 1
    assert store.waste.foreign_bytes == allocated_bytes((folder / "kept").stat())


def test_the_quarantine_makes_room_after_the_foreign_files(store: Store) -> None:
    """D10: damaged files are kept for those who look into them, as long as there is room."""
    entry = write(store, segment())
    store.quarantine(entry, "for the test")
    (path_of(store, entry).parent / "foreign").write_bytes(bytes(5000))
    scanned(store)
    foreign, aside = store.waste.foreign_bytes, store.waste.quarantine_bytes
    assert foreign
    assert aside == entry.allocated_bytes
    assert store.waste.drop_foreign(foreign) == foreign
    assert store.waste.quarantine_bytes == aside
    assert store.waste.drop_foreign(1) == aside
    assert store.waste.quarantine_bytes == 0
    assert not [*Path(store.directory.path, QUARANTINE).rglob("*.safetensors")]


def test_a_namespace_directory_that_cannot_be_listed_is_no_victim(
    store: Store, system: RefusingFs
) -> None:
    """D4: what cannot be read now may be good, so it counts and stays."""
    entry = write(store, segment())
    system.refuses["open_directory"] = partial(is_named, namespace_directory("demo"))
    scan = store.scan()
    assert list(scan) == []
    assert (scan.unreadable, store.waste.foreign_files) == (1, 0)
    system.refuses.clear()
    assert scanned(store) == [entry]


def test_a_promotion_reads_what_was_written_while_other_calls_fail(
    store: Store, system: RefusingFs
) -> None:
    """D7: a disk that takes no more writes still serves what is on it."""
    one = segment()
    entry = write(store, one)
    for call in ("write", "write_image", "create_file", "rename", "unlink"):
        system.refuses[call] = always
    image = memory.create(entry.data_bytes)
    try:
        store.reader.load(entry, image)
        back = bytearray(entry.data_bytes)
        image.read_into(0, memoryview(back))
        assert bytes(back) == one.data
    finally:
        image.free()


def test_a_foreign_folder_goes_as_one(store: Store) -> None:
    """D10: whatever somebody put into the directory is counted, and leaves without a trace."""
    entry = write(store, segment())
    folder = path_of(store, entry).parent.parent / "somebodys"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_bytes(bytes(5000))
    (folder / "other").write_bytes(bytes(9000))
    assert scanned(store) == [entry]
    held = sum(allocated_bytes(path.stat()) for path in folder.rglob("*") if path.is_file())
    assert (store.waste.foreign_files, store.waste.foreign_bytes) == (1, held)
    assert store.waste.drop_foreign(1) == held
    assert not folder.exists()
    assert (store.waste.foreign_files, store.waste.foreign_bytes) == (0, 0)
    assert store.waste.dropped_files == 1
    assert store.other_bytes == schema_bytes(store, entry)


def test_the_marks_that_keep_indexers_out_stay(store: Store) -> None:
    """D9: neither an emptied trash nor an emptied quarantine loses them."""
    entry = write(store, segment())
    store.quarantine(entry, "for the test")
    store.waste.trim_quarantine(0)
    write(store, segment(seed=1))
    store.clear("demo")
    while not store.empty_trash(10)[1]:
        pass
    for part in (SEGMENTS, TRASH, QUARANTINE):
        assert Path(store.directory.path, part, NO_INDEX_NAME).exists()
    assert os.listdir(Path(store.directory.path, TRASH)) == [NO_INDEX_NAME]


def test_what_lay_in_a_deleted_directory_counts_no_more(store: Store) -> None:
    """D5, D7: whoever deletes the directory of all files deletes the foreign ones with it."""
    entry = write(store, segment())
    (path_of(store, entry).parent / "foreign").write_bytes(bytes(5000))
    scanned(store)
    assert store.other_bytes
    shutil.rmtree(Path(store.directory.path, SEGMENTS))
    store.prepare()
    assert store.has_lost_files
    assert (store.other_bytes, store.waste.foreign_files) == (0, 0)


@pytest.mark.parametrize("call", ["restrict", "barrier_directory"])
def test_a_clear_of_all_that_fails_halfway_loses_no_files(
    store: Store, system: RefusingFs, call: str
) -> None:
    """D7, D11: what is made again after its rename was cleared, not lost."""
    write(store, segment())
    system.refuses[call] = always
    with pytest.raises(OSError, match=call):
        store.clear(None)
    system.refuses.clear()
    store.prepare()
    assert not store.has_lost_files
    write(store, segment(seed=1))
    shutil.rmtree(Path(store.directory.path, SEGMENTS))
    store.prepare()
    assert store.has_lost_files


def test_a_store_leaves_the_room_that_the_page_promises(tmp_path: Path) -> None:
    """D7: by default half a gibibyte of the volume is left to others."""
    page = Path(__file__).parents[2] / "docs" / "operations.md"
    assert f"{MIN_FREE_BYTES >> 20} MiB of the volume are always left" in page.read_text("utf-8")
    system = AlmostFullFs()
    store = Store(tmp_path / "state", system)
    store.prepare()
    system.free = MIN_FREE_BYTES - 1
    with pytest.raises(OSError, match="free") as caught:
        write(store, segment())
    assert caught.value.errno == errno.ENOSPC
    system.free = MIN_FREE_BYTES + (1 << 20)
    assert scanned(store) == []
    entry = write(store, segment())
    assert scanned(store) == [entry]
    store.close()
