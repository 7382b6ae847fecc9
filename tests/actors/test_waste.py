"""The account of what is no entry, to the byte and to the file (rules D3, D5, D10)."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from prefixcached.actors.filesystem import allocated_bytes
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import QUARANTINE, TRASH
from prefixcached.actors.waste import QuarantineLimits
from prefixcached.protocol.actor_messages import FileEntry
from tests.support.filesystems import QuickFs
from tests.support.store_samples import path_of, segment, write


class GhostFs(QuickFs):
    """Lists names in order and some that are gone already; deletes only so many images."""

    ghosts: tuple[str, ...] = ()
    images_left = 1 << 30
    stuck: frozenset[str] = frozenset()
    """Parts of names that cannot be deleted."""
    refused = 0

    def names(self, descriptor: int) -> list[str]:
        return [*self.ghosts, *sorted(super().names(descriptor))]

    def unlink(self, name: str, within: int) -> None:
        if any(part in name for part in self.stuck):
            self.refused += 1
            raise OSError(errno.EPERM, "injected")
        if name.endswith(".safetensors"):
            if not self.images_left:
                raise OSError(errno.EIO, "injected")
            self.images_left -= 1
        super().unlink(name, within)


@pytest.fixture
def system() -> GhostFs:
    """A file system that the test can trouble."""
    return GhostFs()


@pytest.fixture
def store(tmp_path: Path, system: GhostFs) -> Iterator[Store]:
    """A prepared store in a directory of its own."""
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    yield store
    store.close()


def write_one(path: Path) -> int:
    """What a file of a segment occupies, in a store of its own."""
    probe = Store(path, QuickFs(), min_free_bytes=0)
    probe.prepare()
    size = write(probe, segment()).allocated_bytes
    probe.close()
    return size


def set_aside(store: Store, count: int) -> list[FileEntry]:
    """Damaged files of one size, the oldest first."""
    first = store.waste.quarantined_files
    entries = [write(store, segment(seed=seed)) for seed in range(first, first + count)]
    for entry in entries:
        store.quarantine(entry, "for the test")
    assert len({entry.allocated_bytes for entry in entries}) == 1
    return entries


# -- quarantine ------------------------------------------------------------------------------------


def test_the_quarantine_keeps_as_much_as_fits(tmp_path: Path) -> None:
    """D3: what fills its bound exactly stays; each file dropped beyond it is counted."""
    size = write_one(tmp_path / "probe")
    store = Store(
        tmp_path / "state", QuickFs(), min_free_bytes=0, quarantine=QuarantineLimits(bytes=2 * size)
    )
    store.prepare()
    set_aside(store, 3)
    assert store.waste.quarantine_bytes == 2 * size
    assert store.waste.dropped_files == 1
    store.close()


def test_the_quarantine_keeps_64_files_and_a_gibibyte(store: Store) -> None:
    """D3: the bounds of docs/storage-format.md, also after a run that had others."""
    folder = Path(store.directory.path, QUARANTINE)
    for number in range(67):
        (folder / f"{number:02}").touch()
    list(store.scan())
    kept = sorted(path.name for path in folder.iterdir() if path.name[0] != ".")
    assert kept == [f"{number:02}" for number in range(3, 67)]
    bounds = QuarantineLimits()
    assert bounds.bytes == 1 << 30
    with pytest.raises(AttributeError):
        setattr(bounds, "bytes", 0)  # noqa: B010


def test_room_is_made_with_no_more_of_the_quarantine_than_is_wanted(store: Store) -> None:
    """D10: where one file is enough, the others stay for those who look into them."""
    first, *_ = set_aside(store, 3)
    assert store.waste.drop_foreign(first.allocated_bytes) == first.allocated_bytes
    assert store.waste.quarantine_bytes == 2 * first.allocated_bytes
    assert store.waste.dropped_files == 1


def test_a_quarantined_file_that_somebody_deletes_costs_nothing(
    store: Store, system: GhostFs
) -> None:
    """D1: whoever looked into it may delete it at any time, also while it is counted."""
    (entry,) = set_aside(store, 1)
    system.ghosts = ("0.ghost.segment.safetensors",)
    list(store.scan())
    assert store.waste.quarantine_bytes == entry.allocated_bytes
    assert store.waste.trim_quarantine(0) == entry.allocated_bytes
    assert store.waste.quarantine_bytes == 0


@pytest.mark.parametrize("bounds", [{"files": 2}, {"bytes": 2}], ids=["files", "bytes"])
def test_a_file_that_cannot_be_deleted_does_not_unbound_the_quarantine(
    tmp_path: Path, system: GhostFs, bounds: dict[str, int]
) -> None:
    """D3, D5: the next oldest goes in its place, and what stays is counted."""
    size = write_one(tmp_path / "probe")
    limits = QuarantineLimits(files=bounds.get("files", 64), bytes=bounds.get("bytes", 64) * size)
    store = Store(tmp_path / "state", system, min_free_bytes=0, quarantine=limits)
    store.prepare()
    oldest, *_ = set_aside(store, 1)
    system.stuck = frozenset({oldest.header.id})
    newest = set_aside(store, 5)[-1]
    names = [n for n in os.listdir(Path(store.directory.path, QUARANTINE)) if n[0] != "."]
    assert sorted(name.split(".")[2] for name in names) == sorted(
        [oldest.header.id, newest.header.id]
    )
    assert store.waste.quarantine_bytes == 2 * size
    assert store.waste.dropped_files == 4
    store.close()


def test_a_folder_of_the_quarantine_that_goes_in_part_counts_what_is_left(
    store: Store, system: GhostFs
) -> None:
    """D5: somebody's folder with one file that stays is charged that file."""
    folder = Path(store.directory.path, QUARANTINE, "0")
    folder.mkdir()
    for name in ("kept", "dropped"):
        (folder / name).write_bytes(bytes(5000))
    list(store.scan())
    kept = allocated_bytes((folder / "kept").stat())
    assert store.waste.quarantine_bytes == 2 * kept
    system.stuck = frozenset({"kept"})
    assert store.waste.trim_quarantine(0) == kept
    assert store.waste.quarantine_bytes == kept
    assert store.waste.dropped_files == 0


# -- foreign files ---------------------------------------------------------------------------------


def test_a_foreign_folder_goes_as_far_as_it_can(store: Store, system: GhostFs) -> None:
    """D5, D10: a file that cannot be deleted saves no others, and is all that counts then."""
    folder = path_of(store, write(store, segment())).parent / "somebodys"
    folder.mkdir()
    for name in ("a", "kept", "z"):
        (folder / name).write_bytes(bytes(5000))
    list(store.scan())
    kept = allocated_bytes((folder / "kept").stat())
    system.stuck = frozenset({"kept"})
    assert store.waste.drop_foreign(1 << 40) == 2 * kept
    assert os.listdir(folder) == ["kept"]
    assert (store.waste.foreign_files, store.waste.foreign_bytes) == (1, kept)
    system.stuck = frozenset()
    assert store.waste.drop_foreign(1 << 40) == kept
    assert (store.waste.foreign_files, store.waste.foreign_bytes) == (0, 0)


def test_a_foreign_file_that_went_with_its_folder_no_longer_counts(store: Store) -> None:
    """D1, D5: whoever deletes a namespace's folder deletes what lay beside its entries."""
    folder = path_of(store, write(store, segment())).parent
    (folder / "somebodys").write_bytes(bytes(5000))
    list(store.scan())
    assert store.waste.foreign_files == 1
    shutil.rmtree(folder)
    store.waste.drop_foreign(1 << 40)
    assert (store.waste.foreign_files, store.waste.foreign_bytes) == (0, 0)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_folder_that_cannot_be_opened_keeps_no_foreign_file_of_another(
    store: Store, broken: int
) -> None:
    """D10: what is out of reach is passed over, still counts, and made no room."""
    folders = [path_of(store, write(store, segment(namespace=n))).parent for n in ("a", "b")]
    for folder in folders:
        (folder / "somebodys").write_bytes(bytes(5000))
    list(store.scan())
    size = allocated_bytes((folders[0] / "somebodys").stat())
    shutil.rmtree(folders[broken])
    folders[broken].touch()  # a file of that name
    assert store.waste.drop_foreign(1 << 40) == size
    assert (store.waste.foreign_files, store.waste.foreign_bytes) == (1, size)
    assert store.waste.dropped_files == 1


def test_what_stays_is_logged_with_its_error(store: Store, system: GhostFs) -> None:
    """C5: whoever wonders why there is no room finds the file and what the system said."""
    folder = path_of(store, write(store, segment())).parent
    (folder / "kept").write_bytes(bytes(5000))
    list(store.scan())
    system.stuck = frozenset({"kept"})
    with structlog.testing.capture_logs() as logs:
        store.waste.drop_foreign(1)
    assert [(one["event"], one["error"]) for one in logs] == [
        ("foreign-file-stays", "[Errno 1] injected")
    ]


# -- trash -----------------------------------------------------------------------------------------


def test_files_of_the_trash_that_cannot_be_deleted_keep_no_others(
    store: Store, system: GhostFs
) -> None:
    """D5, D11: a step passes over what failed, however many; the last one ends with the error."""
    entries = [write(store, segment(seed=seed)) for seed in range(8)]
    store.clear("demo")
    stuck = {entry.header.id for entry in entries[:5]}
    system.stuck = frozenset(stuck)
    steps: list[tuple[int, bool]] = []
    with pytest.raises(OSError, match="injected"):
        steps.extend(iter(lambda: store.empty_trash(2), (0, True)))
    assert sum(freed for freed, _ in steps) == sum(entry.allocated_bytes for entry in entries[5:])
    left = [p for p in Path(store.directory.path, TRASH).rglob("*") if p.suffix == ".safetensors"]
    assert {path.name.split(".")[0] for path in left} == stuck
    assert system.refused == len(stuck), "each once"
    system.stuck = frozenset()
    assert store.empty_trash(100) == (sum(e.allocated_bytes for e in entries[:5]), True)


def test_a_file_of_the_trash_that_somebody_deletes_costs_nothing(
    store: Store, system: GhostFs
) -> None:
    """D1: whatever is gone by the time that it is reached is deleted."""
    entry = write(store, segment())
    store.clear("demo")
    system.ghosts = ("ghost",)
    assert store.empty_trash(100) == (entry.allocated_bytes, True)


def test_a_step_deletes_as_many_files_as_it_may(store: Store) -> None:
    """C6, D11: no more, so that writes are not kept waiting; and no fewer, so that it ends."""
    entries = [write(store, segment(seed=seed)) for seed in range(4)]
    store.clear("demo")
    trash = Path(store.directory.path, TRASH)
    counts = []
    for most_files in (1, 3):
        store.empty_trash(most_files)
        counts.append(len([path for path in trash.rglob("[!.]*") if path.is_file()]))
    assert counts == [4, 1], f"{len(entries)} images and a schema"


def test_bytes_that_became_free_are_told_before_the_error(store: Store, system: GhostFs) -> None:
    """D5: room that there is, is not withheld because of a file that stays."""
    entries = [write(store, segment(seed=seed)) for seed in range(2)]
    store.clear("demo")
    system.images_left = 1
    size = entries[0].allocated_bytes
    assert store.empty_trash(100) == (size, False)
    with pytest.raises(OSError, match="injected"):
        store.empty_trash(100)
    system.images_left = 1
    assert store.empty_trash(100) == (size, True)


def test_a_file_that_stays_at_the_top_of_the_trash_is_not_taken_for_deleted(
    store: Store, system: GhostFs
) -> None:
    """D5: passed over by a later step, it is what that one ends with."""
    trash = Path(store.directory.path, TRASH)
    for name in ("a-kept", "b"):
        (trash / name).touch()
    system.stuck = frozenset({"kept"})
    assert store.empty_trash(1) == (0, False)
    with pytest.raises(OSError, match="injected"):
        store.empty_trash(1)
    assert [path.name for path in trash.iterdir() if path.name[0] != "."] == ["a-kept"]


def test_the_trash_says_that_a_folder_of_too_many_folders_stays(store: Store) -> None:
    """C3, D5: nobody descends for ever, and nobody takes it for an empty trash."""
    bottom = Path(store.directory.path, TRASH).joinpath(*("inner" for _ in range(20)))
    bottom.mkdir(parents=True)
    (bottom / "file").touch()
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        store.empty_trash(100)
    assert (bottom / "file").exists()


def test_whatever_an_earlier_run_left_in_the_trash_is_counted(store: Store) -> None:
    """D5: of the names that begin with a dot, only our own mark is passed over."""
    litter = Path(store.directory.path, TRASH, ".DS_Store")
    litter.write_bytes(bytes(5000))
    list(store.scan())
    assert store.other_bytes == allocated_bytes(litter.stat())
    assert store.empty_trash(100) == (0, True)
    assert store.other_bytes == 0


def test_an_empty_foreign_file_is_charged_nothing_wherever_it_goes(store: Store) -> None:
    """D5, D11: a clear moves the account along with the files, and changes no number."""
    entry = write(store, segment())
    (path_of(store, entry).parent / "empty").touch()
    list(store.scan())
    before = (store.other_bytes, store.waste.foreign_bytes, store.waste.foreign_files)
    assert before[1:] == (0, 1)
    store.clear("demo")
    assert (store.other_bytes, store.waste.foreign_bytes, store.waste.foreign_files) == before


# -- trees -----------------------------------------------------------------------------------------


def test_a_foreign_folder_costs_no_descriptors(store: Store) -> None:
    """C3: every folder that is looked into is closed again."""
    (Path(store.directory.path, QUARANTINE) / "a" / "b").mkdir(parents=True)
    before = len(os.listdir("/dev/fd"))
    list(store.scan())
    assert len(os.listdir("/dev/fd")) == before


def test_a_folder_of_ten_folders_counts_and_goes_as_a_whole(store: Store) -> None:
    """D5, D10: somebody's project within our directory is charged and makes room."""
    top = path_of(store, write(store, segment())).parent / "project"
    bottom = top.joinpath(*("inner" for _ in range(10)))
    bottom.mkdir(parents=True)
    (bottom / "file").write_bytes(bytes(5000))
    size = allocated_bytes((bottom / "file").stat())
    list(store.scan())
    assert store.waste.foreign_bytes == size
    assert store.waste.drop_foreign(1) == size
    assert not top.exists()


def test_a_folder_of_too_many_folders_is_left_alone(store: Store) -> None:
    """C3, D10: nobody can make us open folder within folder without end, to count or to delete."""
    entry = write(store, segment())
    top = path_of(store, entry).parent / "deep"
    bottom = top.joinpath(*("inner" for _ in range(20)))
    bottom.mkdir(parents=True)
    (bottom / "file").write_bytes(bytes(5000))
    list(store.scan())
    assert (store.waste.foreign_files, store.waste.foreign_bytes) == (1, 0)
    assert store.waste.drop_foreign(1) == 0
    assert (bottom / "file").exists()
    assert store.waste.foreign_files == 1
