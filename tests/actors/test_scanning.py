"""What the scan makes of odd directories: nothing hides what comes after it (rules D1, D4, D10)."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prefixcached.actors import scanning
from prefixcached.actors.filesystem import allocated_bytes
from prefixcached.actors.storage_format import schema_name
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import SEGMENTS
from prefixcached.protocol.actor_messages import FileEntry
from prefixcached.protocol.schema import Schema
from tests.actors.test_hostile_files import forged
from tests.support.filesystems import QuickFs
from tests.support.store_samples import PLAIN, WINDOWED, path_of, segment, write


class OrderedFs(QuickFs):
    """Lists a chosen name before all others; files of one name cannot be opened."""

    first = ""
    unreadable = ""

    def names(self, descriptor: int) -> list[str]:
        return sorted(super().names(descriptor), key=lambda name: (name != self.first, name))

    def open_file(self, name: str, within: int) -> int:
        if name == self.unreadable:
            raise OSError(errno.EIO, "injected")
        return super().open_file(name, within)


@pytest.fixture
def system() -> OrderedFs:
    """A file system that lists as the test says."""
    return OrderedFs()


@pytest.fixture
def store(tmp_path: Path, system: OrderedFs) -> Iterator[Store]:
    """A prepared store in a directory of its own."""
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    yield store
    store.close()


def found(store: Store) -> list[FileEntry]:
    return [entry for batch in store.scan() for entry in batch.entries]


def test_a_leftover_among_the_namespaces_hides_none_of_them(
    store: Store, system: OrderedFs
) -> None:
    """D2, D10: an unfinished file is removed, and what is listed after it is indexed."""
    entry = write(store, segment())
    system.first = "tmp-left"
    (path_of(store, entry).parent.parent / system.first).write_bytes(b"x")
    assert found(store) == [entry]


@pytest.mark.parametrize("how", ["damaged", "unreadable"])
def test_a_schema_that_cannot_be_used_hides_no_other(
    store: Store, system: OrderedFs, how: str
) -> None:
    """D3, D4: files of the namespace that name another schema are indexed, and are no victims."""
    lost = write(store, segment(seed=1))
    kept = write(store, segment(seed=2, schema=WINDOWED))
    system.first = schema_name(lost.header.schema_digest)
    if how == "damaged":
        (path_of(store, lost).parent / system.first).write_bytes(b"torn")
    else:
        system.unreadable = system.first
    assert found(store) == [kept]
    store.waste.drop_foreign(1 << 40)
    assert path_of(store, kept).exists()


def test_a_file_that_other_programs_leave_everywhere_is_counted(store: Store) -> None:
    """D5, D10: of the names that begin with a dot, only our own mark is passed over."""
    entry = write(store, segment())
    litter = Path(store.directory.path, SEGMENTS, ".DS_Store")
    litter.write_bytes(bytes(5000))
    assert found(store) == [entry]
    assert store.waste.foreign_bytes == allocated_bytes(litter.stat())


def test_the_scan_says_what_the_entries_occupy(store: Store) -> None:
    """D10: by this number it is known how much has to go where the cap is smaller than before."""
    entries = [write(store, segment(seed=seed)) for seed in range(3)]
    scan = store.scan()
    assert len([entry for batch in scan for entry in batch.entries]) == 3
    assert scan.entry_bytes == sum(entry.allocated_bytes for entry in entries)


def test_the_quarantine_of_an_earlier_run_is_counted(store: Store) -> None:
    """D5: its bytes count in the cap from the start, not from the next damaged file on."""
    entry = write(store, segment())
    store.quarantine(entry, "for the test")
    store.close()
    later = Store(store.directory.path, QuickFs(), min_free_bytes=0)
    later.prepare()
    assert found(later) == []
    assert later.waste.quarantine_bytes == entry.allocated_bytes
    later.close()


def test_a_scan_whose_directory_goes_away_is_not_complete(tmp_path: Path) -> None:
    """D7, D10: what it did not find may be on an unplugged volume, and is looked for again."""
    state = tmp_path / "state"

    class Unplugged(QuickFs):
        def open_file(self, name: str, within: int) -> int:
            if state.exists():
                state.rename(tmp_path / "away")
            return super().open_file(name, within)

    writer = Store(state, QuickFs(), min_free_bytes=0)
    writer.prepare()
    write(writer, segment())
    writer.close()
    store = Store(state, Unplugged(), min_free_bytes=0)
    store.prepare()
    with pytest.raises(OSError, match="not where it was"):
        found(store)
    store.close()


@pytest.mark.parametrize("bound", [13, 14])
def test_batches_are_bounded_by_their_tokens_too(
    store: Store, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """D10: files of long prompts are reported fewer at a time, whatever their exact sizes."""
    monkeypatch.setattr(scanning, "BATCH_TOKEN_BYTES", 4 * bound)
    for seed in range(5):
        write(store, segment(0, 7, seed=seed))
    assert [len(batch.entries) for batch in store.scan()] == [2, 2, 1]


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_file_of_another_user_is_no_image(tmp_path: Path, difference: int) -> None:
    """D9: what somebody else may still change is counted, and neither believed nor lent."""

    class Theirs(QuickFs):
        is_theirs = False

        def status(self, descriptor: int) -> os.stat_result:
            status = super().status(descriptor)
            if not self.is_theirs or not stat.S_ISREG(status.st_mode):
                return status
            fields = list(status)
            fields[stat.ST_UID] += difference
            return os.stat_result(fields)

    system = Theirs()
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    entry = write(store, segment())
    system.is_theirs = True
    assert found(store) == []
    assert store.waste.foreign_bytes == entry.allocated_bytes
    store.close()


def test_a_file_of_another_size_than_its_schema_says_is_damage(store: Store) -> None:
    """D3: somebody made it name a schema of larger rows; its bytes are no image of that."""
    wide = Schema(
        (msgspec.structs.replace(PLAIN.tensors[0], shape=(1, 2, 8)), *PLAIN.tensors[1:]),
        description=PLAIN.description,
    )
    forgery, other = write(store, segment(seed=1)), write(store, segment(seed=2, schema=wide))
    path = path_of(store, forgery)
    header = msgspec.structs.replace(forgery.header, schema_digest=other.header.schema_digest)
    path.write_bytes(forged(path.read_bytes(), msgspec.json.encode(header).decode()))
    assert found(store) == [other]
    assert not path.exists()


def test_a_file_that_a_later_scan_can_read_is_charged_once(store: Store, system: OrderedFs) -> None:
    """D4, D5: what was unreadable in a scan that broke off is an entry of the next."""
    entry = write(store, segment())
    system.unreadable = Path(entry.path).name
    assert found(store) == []
    assert store.other_bytes > 0
    charged = store.other_bytes
    system.unreadable = ""
    assert found(store) == [entry]
    assert store.other_bytes == charged - entry.allocated_bytes
