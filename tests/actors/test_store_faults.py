"""A disk that refuses calls: nothing good is deleted, nothing wrong is served (rules D4, D7)."""

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixcached.actors import memory
from prefixcached.actors.storage_format import DamagedFile
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import QUARANTINE, SEGMENTS
from prefixcached.protocol.actor_messages import FileEntry
from tests.support.filesystems import FaultyFs, QuickFs, scratch_directory
from tests.support.store_samples import checkpoint, segment, write

ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES)

KEPT = (segment(seed=1), checkpoint(seed=2), segment(seed=3, namespace="other"))
CLEARED = segment(seed=4, namespace="cleared")
DELETED = segment(seed=5)
NEW = segment(seed=6, namespace="new")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A quick directory."""
    with scratch_directory() as path:
        yield path


def template(path: Path) -> dict[str, FileEntry]:
    """Make a good store at ``path``."""
    store = Store(path, QuickFs(), min_free_bytes=0)
    store.prepare()
    entries = {one.header.id: write(store, one) for one in (*KEPT, CLEARED, DELETED)}
    store.close()
    return entries


def work(store: Store, entries: dict[str, FileEntry]) -> tuple[set[str], list[BaseException]]:
    """Do everything that a store can do once. Returns what succeeded, and what was raised."""
    succeeded: set[str] = set()
    raised: list[BaseException] = []
    first = entries[KEPT[0].header.id]
    image = memory.create(first.data_bytes)

    def scan() -> None:
        for _ in store.scan():
            pass

    steps: dict[str, Callable[[], object]] = {
        "prepare": store.prepare,
        "scan": scan,
        "load-meter": store.load_meter,
        "write": lambda: write(store, NEW),
        "rewrite": lambda: write(store, NEW),
        "verify": lambda: store.reader.verify(first).close(),
        "load": lambda: store.reader.load(first, image),
        "touch": lambda: store.reader.touch(first, 10**18, None),
        "save-meter": lambda: store.save_meter(b"{}"),
        "delete": lambda: store.delete(entries[DELETED.header.id].path),
        "clear": lambda: store.clear("cleared"),
        "trash": lambda: store.empty_trash(100),
        "probe": lambda: store.probe(1),
        "others": lambda: store.drop_others(0),
    }
    for name, step in steps.items():
        try:
            step()
        except (OSError, DamagedFile) as error:
            raised.append(error)
        else:
            succeeded.add(name)
    image.free()
    return succeeded, raised


def check(path: Path, entries: dict[str, FileEntry], succeeded: set[str]) -> None:
    """With a disk that works again, all good files are there, and the others whole or absent."""
    store = Store(path, QuickFs(), min_free_bytes=0)
    store.prepare()
    scan = store.scan()
    found = {entry.header.id: entry for batch in scan for entry in batch.entries}
    assert scan.damaged == 0
    assert not [name for name in os.listdir(path / QUARANTINE) if name[0] != "."]
    for one in (*KEPT, CLEARED, DELETED, NEW):
        entry = found.pop(one.header.id, None)
        if entry is None:
            assert one not in KEPT
            assert one is not NEW or not {"write", "rewrite"} & succeeded
            continue
        assert one is not CLEARED or "clear" not in succeeded
        assert one is not DELETED or "delete" not in succeeded
        file = store.reader.verify(entry)
        assert os.pread(file.descriptor, entry.data_bytes, file.data_offset) == one.data
        file.close()
    assert not found
    assert not list((path / SEGMENTS).rglob("tmp-*"))
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: errno.errorcode[e])
def test_every_call_may_fail(scratch: Path, error: int, *, persistent: bool) -> None:
    """D4, D7: whichever call fails, only OSError is raised and every good file survives."""
    entries = template(scratch / "template")
    names: set[str] = set()
    fail_at = 0
    for fail_at in itertools.count(1):
        path = scratch / str(fail_at)
        shutil.copytree(scratch / "template", path)
        system = FaultyFs(fail_at, error, persistent=persistent)
        store = Store(path, system, min_free_bytes=0)
        descriptors = len(os.listdir("/dev/fd"))
        succeeded, raised = work(store, entries)
        store.close()
        assert all(isinstance(e, OSError) for e in raised), raised
        assert len(os.listdir("/dev/fd")) == descriptors
        names.update(system.failed)
        system.heal()
        check(path, entries, succeeded)
        shutil.rmtree(path)
        if not system.failed:
            break
    assert fail_at > 100
    assert {"rename", "barrier", "write_image", "open_file", "unlink", "read"} <= names


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: errno.errorcode[e])
def test_a_scan_over_the_cap_drops_no_good_file(scratch: Path, error: int) -> None:
    """D4, D10: files that could not be read for a moment are no victims, not even over the cap."""
    entries = template(scratch / "template")
    fail_at = 0
    for fail_at in itertools.count(1):
        path = scratch / str(fail_at)
        shutil.copytree(scratch / "template", path)
        system = FaultyFs(0, error)
        store = Store(path, system, min_free_bytes=0)
        store.prepare()
        system.fail_at, system.persistent = system.calls + fail_at, True
        with contextlib.suppress(OSError):
            list(store.scan())
        failed = bool(system.failed)
        system.heal()
        store.drop_others(1 << 40)
        store.close()
        for entry in entries.values():
            assert (path / SEGMENTS / entry.path).exists()
        shutil.rmtree(path)
        if not failed:
            break
    assert fail_at > 20


def test_a_file_that_fails_twice_stays_and_counts(scratch: Path) -> None:
    """D4, D5: an unreadable file is no entry, but its bytes count and it comes back."""

    class UnreadableFs(FaultyFs):
        def before(self, name: str) -> None:
            if name == "open_file":
                super().before(name)

    entries = template(scratch / "state")
    store = Store(scratch / "state", UnreadableFs(1, errno.EACCES, persistent=True))
    store.prepare()
    scan = store.scan()
    assert list(scan) == []
    assert scan.unreadable == len(entries)
    assert store.other_bytes >= sum(e.allocated_bytes for e in entries.values())
    store.close()
    again = Store(scratch / "state")
    again.prepare()
    assert sum(len(batch.entries) for batch in again.scan()) == len(entries)
    again.close()


def test_a_momentary_failure_costs_no_entry(scratch: Path) -> None:
    """D4: a file that cannot be opened once is opened again."""

    class OnceFs(FaultyFs):
        def before(self, name: str) -> None:
            if name == "open_file":
                super().before(name)

    entries = template(scratch / "state")
    schemas = 3
    store = Store(scratch / "state", OnceFs(schemas + 2, errno.EMFILE))
    store.prepare()
    assert sum(len(batch.entries) for batch in store.scan()) == len(entries)
    store.close()
