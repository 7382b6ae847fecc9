"""The account of what is no entry, to the byte and to the file (rules D3, D5, D10)."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.actors.filesystem import allocated_bytes
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import QUARANTINE, TRASH
from prefixcached.actors.waste import QuarantineLimits
from prefixcached.protocol.actor_messages import FileEntry
from tests.support.filesystems import QuickFs
from tests.support.store_samples import path_of, segment, write


class GhostFs(QuickFs):
    """Lists names that are gone when they are asked about; deletes only so many images."""

    ghosts: tuple[str, ...] = ()
    images_left = 1 << 30

    def names(self, descriptor: int) -> list[str]:
        return [*self.ghosts, *super().names(descriptor)]

    def unlink(self, name: str, within: int) -> None:
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


def set_aside(store: Store, count: int) -> list[FileEntry]:
    """Damaged files of one size, the oldest first."""
    entries = [write(store, segment(seed=seed)) for seed in range(count)]
    for entry in entries:
        store.quarantine(entry, "for the test")
    assert len({entry.allocated_bytes for entry in entries}) == 1
    return entries


# -- quarantine ------------------------------------------------------------------------------------


def test_the_quarantine_keeps_as_much_as_fits(tmp_path: Path) -> None:
    """D3: what fills its bound exactly stays; each file dropped beyond it is counted."""
    probe = Store(tmp_path / "probe", QuickFs(), min_free_bytes=0)
    probe.prepare()
    size = write(probe, segment()).allocated_bytes
    probe.close()
    store = Store(
        tmp_path / "state", QuickFs(), min_free_bytes=0, quarantine=QuarantineLimits(bytes=2 * size)
    )
    store.prepare()
    set_aside(store, 3)
    assert store.waste.quarantine_bytes == 2 * size
    assert store.waste.dropped_files == 1
    store.close()


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


# -- trash -----------------------------------------------------------------------------------------


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


def test_bytes_freed_before_an_error_are_told_though_nothing_is_left(
    store: Store, system: GhostFs
) -> None:
    """D5: the entry that was deleted before the error is reported with the next success."""
    entries = [write(store, segment(seed=seed)) for seed in range(2)]
    store.clear("demo")
    system.images_left = 1
    with pytest.raises(OSError, match="injected"):
        store.empty_trash(100)
    system.images_left = 1
    assert store.empty_trash(100) == (sum(e.allocated_bytes for e in entries), True)


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
