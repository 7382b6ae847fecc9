"""The index from files at start-up (rules D1, D5, D8, D10, D11)."""

import random
from typing import Any

import pytest

from prefixcached.actors.entries import Checkpoint
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import Loaded
from prefixcached.protocol.image import ImageKind, ImageSpec
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core, check_disk, check_disk_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk, StoredFile

SEEDS = pytest.mark.parametrize("seed", range(4))


def filled(**changes: Any) -> tuple[FakeDisk, Client]:
    """A disk with chains, branches, windows and checkpoints on it."""
    settings: dict[str, Any] = {"ssd_bytes": 1 << 30, "segment_max_bytes": 6000, **changes}
    core = Core(small_config(**settings))
    disk, client = FakeDisk(core), Client(core)
    for length in (10, 30, 50):
        client.store(sequence(length))
        client.store(sequence(length), "hybrid-ring/a", state=True)
    client.store((*sequence(20), *sequence(10, 1)))
    client.store((*sequence(20), *sequence(10, 1)), "ring/a")
    client.flush()
    disk.settle()
    return disk, client


def restarted(disk: FakeDisk, seed: int, **changes: Any) -> tuple[Core, Client]:
    """The daemon after a crash: a new core that finds the files in some order."""
    settings: dict[str, Any] = {"ssd_bytes": 1 << 30, **changes}
    core = Core(small_config(**settings), is_loaded=False)
    disk.restart(core, random.Random(seed), batch_files=1 + seed)
    return core, Client(core)


@SEEDS
def test_everything_flushed_is_found_after_a_restart(seed: int) -> None:
    """Issue 3: whatever the order in which files are found, all of it is there, byte for byte."""
    disk, _ = filled()
    core, client = restarted(disk, seed)
    for length in (10, 30, 50):
        assert client.contains(sequence(length))
        assert client.contains(sequence(length), "hybrid-ring/a")
    assert client.contains((*sequence(20), *sequence(10, 1)), "ring/a")
    assert core.loads.unattached == 0
    for namespace in ("plain/a", "hybrid-ring/a"):
        slot = client.ask(sequence(51), namespace)
        disk.settle()
        assert client.verify(slot, sequence(51), namespace).length == 50
    check_core(core)
    check_disk_idle(core, disk)


def test_the_index_answers_while_it_loads() -> None:
    """D10: hits appear as it grows, puts wait until it is complete."""
    disk, _ = filled()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    client = Client(core)
    files = sorted(disk.files.values(), key=lambda f: f.entry.header.spec.end)
    tops = [f for f in files if not f.entry.header.parent]
    for file in tops:
        core.send(Loaded((file.entry,), {file.entry.header.schema_digest: file.schema}))
    assert client.peek(sequence(51)) > 0
    assert client.refusal(sequence(10, 9)) == "loading"
    assert client.miss(sequence(10, 9)).reason == "loading"
    core.send(Loaded((), done=True))
    client.store(sequence(10, 9))


@SEEDS
def test_a_crash_between_rename_and_unlink_leaves_the_successor(seed: int) -> None:
    """D8: of an absorbed segment and what absorbed it the longer one is kept, the other deleted."""
    core = Core(small_config(ssd_bytes=1 << 30, segment_min_tokens=64))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(10))
    client.flush()
    disk.settle()
    old = dict(disk.files)
    client.store(sequence(20))
    client.store(sequence(30), minimum=1)
    client.flush()
    disk.settle()
    disk.files.update(old)
    core, client = restarted(disk, seed)
    assert client.contains(sequence(20))
    assert client.contains(sequence(30))
    assert core.loads.duplicates == 1
    disk.settle()
    assert len(disk.files) == 2
    check_disk_idle(core, disk)


@SEEDS
def test_of_two_versions_the_newest_is_kept(seed: int) -> None:
    """P3, D8: attachments that were replaced before a crash do not come back after it."""
    core = Core(small_config(ssd_bytes=1 << 30))
    disk, client = FakeDisk(core), Client(core)
    versions: dict[str, StoredFile] = {}
    for version in (b"1", b"2", b"3"):
        client.store(sequence(20), attachments=version)
        client.flush()
        disk.settle()
        versions.update(disk.files)
    disk.files.update(versions)
    core, client = restarted(disk, seed)
    disk.settle()
    kept = [e for e in core.index.entries.values() if isinstance(e, Checkpoint)]
    assert [e.spec.metadata for e in kept] == [b"3"]
    assert len(disk.files) == 2
    check_disk_idle(core, disk)


def test_files_without_their_parent_are_the_first_victims() -> None:
    """D10: unattached files are counted, kept apart, and go first when space is short."""
    disk, _ = filled()
    for path, file in list(disk.files.items()):
        header = file.entry.header
        if header.namespace == "plain/a" and not header.parent:
            disk.lose(path)
    core, client = restarted(disk, 0)
    assert core.loads.unattached > 2
    assert client.peek(sequence(51)) == 0
    assert client.miss(sequence(51)).reason == "empty"
    check_disk(core, disk)
    other = core.index.ssd.bytes_by_state["other"]
    assert other > 0
    spare = core.index.ssd.bytes + PAGE
    core.index.ssd.bytes_cap = spare
    client.store(sequence(10, 3), "chunk/a")
    client.flush()
    disk.settle()
    assert core.index.ssd.bytes_by_state["other"] < other
    assert core.index.counters["ssd_evictions"] == 0
    assert core.index.ssd.bytes <= spare


def test_a_namespace_of_unattached_files_holds_nothing() -> None:
    """N4: it is free for another schema, and a clear takes its files along."""
    disk, _ = filled()
    for path, file in list(disk.files.items()):
        header = file.entry.header
        if header.namespace != "plain/a" or not header.parent:
            disk.lose(path)
    core, client = restarted(disk, 0)
    check_core(core)
    assert not core.index.namespaces
    assert core.index.ssd.bytes > 0
    client.clear("plain/a")
    disk.settle()
    assert core.index.ssd.bytes == 0
    assert not disk.files


def test_a_lost_schema_leaves_its_files_unattached() -> None:
    """D1: without its schema a namespace's files cannot be understood, and are not deleted."""
    disk, _ = filled()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    core.send(Loaded(tuple(f.entry for f in disk.files.values()), {}, done=True))
    assert not core.index.entries
    assert core.loads.unattached == len(disk.files)
    assert core.index.ssd.bytes == disk.bytes


@pytest.mark.parametrize("namespace", ["plain/a", None])
def test_a_clear_while_the_index_loads_is_for_good(namespace: str | None) -> None:
    """D11: what was found before, and what is found after it, does not come back."""
    disk, _ = filled()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    client = Client(core)
    files = list(disk.files.values())
    half = len(files) // 2
    schemas = {f.entry.header.schema_digest: f.schema for f in files}
    core.send(Loaded(tuple(f.entry for f in files[:half]), schemas))
    client.clear(namespace)
    core.send(Loaded(tuple(f.entry for f in files[half:])))
    core.send(Loaded((), done=True))
    assert client.peek(sequence(51)) == 0
    assert client.peek(sequence(51), "hybrid-ring/a") == (0 if namespace is None else 50)
    check_core(core)


def test_a_directory_over_its_cap_is_cut_down_at_start() -> None:
    """D5: the cap holds once the index is complete; the least recently used files go."""
    disk, _ = filled()
    cap = disk.bytes // 2
    core, _ = restarted(disk, 0, ssd_bytes=cap)
    assert core.index.ssd.bytes - core.index.ssd.bytes_by_state["deleting"] <= cap
    disk.settle()
    assert disk.bytes <= core.index.ssd.bytes <= cap
    assert core.index.entries
    check_disk_idle(core, disk)


def test_recency_survives_a_restart() -> None:
    """D5: files are ordered by their modification time, and all are older than what is used now."""
    core = Core(small_config(ssd_bytes=1 << 30))
    disk, client = FakeDisk(core), Client(core)
    for salt in range(4):
        client.store(sequence(10, salt))
        client.flush()
        disk.settle()
    core, client = restarted(disk, 3, ssd_bytes=10 * PAGE, retention="lru")
    slot = client.ask(sequence(11, 0))
    disk.settle()
    client.release(client.verify(slot, sequence(11, 0)))
    while len(disk.files) > 2:
        core.index.ssd.bytes_cap = disk.bytes - 1
        core.index.make_room_on_disk(0)
        disk.settle()
    assert client.contains(sequence(10, 0))
    assert client.contains(sequence(10, 3))


@SEEDS
def test_objects_come_back_by_key(seed: int) -> None:
    """O1: an object is found after a restart, and of two versions the newest."""
    core = Core(small_config(ssd_bytes=1 << 30))
    disk, client = FakeDisk(core), Client(core)
    kept: dict[str, StoredFile] = {}
    for version in (b"1", b"2"):
        spec = ImageSpec(ImageKind.OBJECT, metadata=version)
        grant = core.reply(1, wire.OfferObject("plain/a", "key", spec))
        assert isinstance(core.reply(1, wire.Commit(grant.put)), wire.Stored)
        client.flush()
        disk.settle()
        kept.update(disk.files)
    disk.files.update(kept)
    core, client = restarted(disk, seed)
    slot = core.call(1, wire.TakeObject("plain/a", "key"))
    disk.settle()
    assert isinstance(slot.reply, wire.Hit)
    assert [part.spec.metadata for part in slot.reply.parts] == [b"2"]
    core.gone(1)
    check_disk_idle(core, disk)
