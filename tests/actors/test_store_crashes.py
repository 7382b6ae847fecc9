"""Crashes at every call: the old state, the new one, or damage that is found (rules D1, D2)."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prefixcached.actors.crash_points import VARIABLE, CrashPoint, from_environment
from prefixcached.actors.storage_format import DamagedFile
from prefixcached.actors.store import Store
from prefixcached.protocol.actor_messages import FileEntry
from tests.support.filesystems import CrashFs, QuickFs, SimulatedCrash, scratch_directory
from tests.support.store_samples import checkpoint, segment, write

OLD = (segment(0, 900, seed=1), checkpoint(seed=2), segment(seed=3, namespace="other"))
CLEARED = (segment(seed=4, namespace="cleared"), segment(seed=5, namespace="cleared"))
DELETED = segment(seed=6)
NEW = (
    segment(0, 900, seed=7),
    checkpoint(seed=8),
    segment(seed=9, namespace="new"),
    segment(0, 2000, seed=10, namespace="new"),
)
BY_ID = {one.header.id: one for one in (*OLD, *CLEARED, DELETED, *NEW)}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A quick directory."""
    with scratch_directory() as path:
        yield path


@dataclass
class Confirmed:
    """What the store said is done, before the crash."""

    written: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    cleared: bool = False


def old_state(path: Path) -> dict[str, FileEntry]:
    store = Store(path, QuickFs(), min_free_bytes=0)
    store.prepare()
    entries = {one.header.id: write(store, one) for one in (*OLD, *CLEARED, DELETED)}
    store.close()
    return entries


def work(store: Store, entries: dict[str, FileEntry], confirmed: Confirmed) -> None:
    """Change the store, noting what is confirmed, until it is done or crashes."""
    store.prepare()
    for _ in store.scan():
        pass
    write(store, NEW[0])
    confirmed.written.add(NEW[0].header.id)
    store.delete(entries[DELETED.header.id].path)
    confirmed.deleted.add(DELETED.header.id)
    write(store, NEW[1])
    confirmed.written.add(NEW[1].header.id)
    write(store, NEW[2])
    confirmed.written.add(NEW[2].header.id)
    store.clear("cleared")
    confirmed.cleared = True
    store.empty_trash(1)
    write(store, NEW[3])
    confirmed.written.add(NEW[3].header.id)
    store.empty_trash(100)


def survivors(path: Path, data: dict[str, bytes]) -> set[str]:
    """Open what is left, check every byte that is served, and return the ids of it."""
    store = Store(path, QuickFs(), min_free_bytes=0)
    store.prepare()
    whole: set[str] = set()
    for batch in store.scan():
        for entry in batch.entries:
            id_ = entry.header.id
            try:
                file = store.reader.verify(entry)
            except DamagedFile as error:
                store.quarantine(entry, str(error))
                continue
            assert os.pread(file.descriptor, entry.data_bytes, file.data_offset) == data[id_]
            assert entry.tokens == BY_ID[id_].tokens
            file.close()
            whole.add(id_)
    assert not list(path.rglob("tmp-*"))
    write(store, NEW[0])  # the store is of use again
    store.close()
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "barriers_lie"),
    [(0, False), (1, False), (2, True)],
    ids=["honest-0", "honest-1", "lying"],
)
def test_a_crash_at_every_call(scratch: Path, seed: int, *, barriers_lie: bool) -> None:
    """D2: after a crash at any call every served byte is right, and what was confirmed is there.

    On a drive that ignores barriers what was confirmed may be lost, but nothing wrong is served.
    """
    entries = old_state(scratch / "old")
    data = {id_: one.data for id_, one in BY_ID.items()}
    source = random.Random(seed)
    lost = crash_at = 0
    for crash_at in itertools.count(1):
        path, spare = scratch / f"{crash_at}", scratch / f"{crash_at}.spare"
        shutil.copytree(scratch / "old", path)
        spare.mkdir()
        system = CrashFs(spare, crash_at, barriers_lie=barriers_lie)
        store = Store(path, system, min_free_bytes=0)
        confirmed = Confirmed()
        with contextlib.suppress(SimulatedCrash):
            work(store, entries, confirmed)
        store.close()
        system.lose(path, source)
        whole = survivors(path, data)
        expected = {one.header.id for one in OLD} | confirmed.written
        if barriers_lie:
            lost += len(expected - whole)
        else:
            assert expected <= whole
            if confirmed.cleared:
                assert not whole & {one.header.id for one in CLEARED}
        shutil.rmtree(path)
        shutil.rmtree(spare)
        if not system.crashed:
            break
    assert crash_at > 100
    assert barriers_lie is (lost > 0)


def test_a_crash_on_the_first_day(scratch: Path) -> None:
    """D2: what is confirmed is there although the directories themselves are new."""
    for seed in range(60):
        path, spare = scratch / str(seed), scratch / f"{seed}.spare"
        spare.mkdir()
        system = CrashFs(spare)
        store = Store(path, system, min_free_bytes=0)
        store.prepare()
        write(store, OLD[0])
        store.clear(None)
        write(store, OLD[1])
        store.close()
        system.lose(scratch, random.Random(seed))
        whole = survivors(path, {id_: one.data for id_, one in BY_ID.items()})
        assert whole == {OLD[1].header.id}


def test_the_simulator_loses_what_was_not_synced(scratch: Path) -> None:
    """The crash simulator can fail a store: one without barriers loses confirmed files."""

    class NoBarrier(CrashFs):
        def barrier(self, descriptor: int) -> None:
            os.fstat(descriptor)

    damaged = 0
    for seed in range(20):
        path, spare = scratch / str(seed), scratch / f"{seed}.spare"
        spare.mkdir()
        system = NoBarrier(spare)
        store = Store(path, system, min_free_bytes=0)
        store.prepare()
        write(store, OLD[0])
        store.close()
        system.lose(path, random.Random(seed))
        damaged += not survivors(path, {OLD[0].header.id: OLD[0].data})
    assert 0 < damaged < 20


# -- named points, a real process and a real SIGKILL -----------------------------------------------

CHILD = """
import os, sys
from prefixcached.actors.crash_points import from_environment
from prefixcached.actors.store import Store
from tests.actors.test_store_crashes import Confirmed, old_state, work

path = sys.argv[1]
entries = old_state(path)
store = Store(path, min_free_bytes=0, crash_point=from_environment(os.environ))
work(store, entries, Confirmed())
"""


@pytest.mark.parametrize("point", CrashPoint)
def test_a_kill_at_every_named_point(scratch: Path, point: CrashPoint) -> None:
    """D2, D11: a process killed at a named point leaves the old state, the new one, or a part."""
    root = Path(__file__).parents[2]
    python_path = os.pathsep.join([str(root / "src"), str(root)])
    for times in (1, 2):
        path = scratch / str(times)
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(path)],
            env={**os.environ, VARIABLE: f"{point}:{times}", "PYTHONPATH": python_path},
            capture_output=True,
            check=False,
        )
        is_late = times == 2 and ("delete" in point or "clear" in point)
        assert child.returncode == (0 if is_late else -signal.SIGKILL), child.stderr.decode()
        whole = survivors(path, {id_: one.data for id_, one in BY_ID.items()})
        assert {one.header.id for one in OLD} <= whole
        if point is CrashPoint.AFTER_CLEAR:
            assert not whole & {one.header.id for one in CLEARED}
        if point in (CrashPoint.AFTER_RENAME, CrashPoint.AFTER_DIRECTORY_BARRIER):
            assert {one.header.id for one in NEW[:times]} <= whole


def test_an_unknown_point_is_refused() -> None:
    """A test that names a point that does not exist must not pass for want of a crash."""
    with pytest.raises(ValueError, match="nowhere"):
        from_environment({VARIABLE: "nowhere"})
