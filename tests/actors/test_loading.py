"""The index from files at start-up (rules D1, D5, D8, D10, D11)."""

import random
import time
from typing import Any

import msgspec
import pytest

from prefixcached.actors.entries import Checkpoint
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import DeleteFile, FileEntry, Loaded
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core, check_disk, check_disk_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk, StoredFile
from tests.support.core_payload import encoded

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
def test_an_evicted_file_that_stayed_does_not_win_over_a_newer_one(seed: int) -> None:
    """D5, D8: it could not be deleted before a stop; other tokens behind its first ones came since.

    The newer file is served whatever the order in which both are found, though it is the shorter.
    """
    core = Core(small_config(ssd_bytes=1 << 30, segment_max_bytes=6000))
    disk, client = FakeDisk(core), Client(core)
    old, new = (*sequence(5), *sequence(60, 1)), (*sequence(5), *sequence(30, 2))
    client.store(old)
    client.flush()
    disk.settle()
    stayed = dict(disk.files)
    for entry in reversed(list(core.index.entries.values())):
        core.index.drop_memory(entry)
        core.index.drop_file(entry)
    disk.settle()
    client.store(new)
    client.flush()
    disk.settle()
    kept = set(disk.files)
    disk.files.update(stayed)
    core, client = restarted(disk, seed)
    assert client.contains(new)
    disk.settle()
    assert kept <= set(disk.files)
    check_core(core)


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
    assert core.loads.duplicates == 2
    assert len(disk.files) == 2
    check_disk_idle(core, disk)


@SEEDS
def test_a_clock_that_is_set_back_brings_no_older_version_back(seed: int) -> None:
    """P3, D8: a file names what it replaces, and that counts more than the times of both."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk, client = FakeDisk(core), Client(core)
    versions: dict[str, StoredFile] = {}
    for version in (b"1", b"2"):
        client.store(sequence(20), attachments=version)
        disk.settle()
        versions.update(disk.files)
        disk.wall_clock -= 3600
    disk.files.update(versions)
    core, client = restarted(disk, seed)
    disk.settle()
    kept = [e for e in core.index.entries.values() if isinstance(e, Checkpoint)]
    assert [e.spec.metadata for e in kept] == [b"2"]
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
    core.send(Loaded((), damaged=2))
    core.send(Loaded(tuple(f.entry for f in disk.files.values()), {}, done=True, damaged=1))
    assert core.loads.damaged == 3
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


@pytest.mark.parametrize("other_pages", [0, 1])
def test_a_directory_over_its_cap_is_cut_down_at_start(other_pages: int) -> None:
    """D5: the cap holds once the index is complete; the least recently used files go.

    That some of what is no entry cannot be dropped, as schemas cannot, makes no difference.
    """
    disk, _ = filled()
    disk.other_bytes = disk.kept_other_bytes = other_pages * PAGE
    cap = disk.bytes // 2
    core, _ = restarted(disk, 0, ssd_bytes=cap)
    disk.settle()
    assert disk.bytes + disk.other_bytes <= core.index.ssd.bytes <= cap
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
        core.eviction.make_room_on_disk(0)
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


@pytest.mark.parametrize("namespace", ["plain/a", None])
def test_a_clear_while_the_index_loads_reaches_what_waits_and_what_comes(
    namespace: str | None,
) -> None:
    """D11: neither files that wait for their parents nor whole trees found later come back."""
    disk, _ = filled()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    client = Client(core)
    files = [f for f in disk.files.values() if f.entry.header.namespace == "plain/a"]
    schemas = {f.entry.header.schema_digest: f.schema for f in files}
    children = [f.entry for f in files if f.entry.header.parent]
    tops = [f.entry for f in files if not f.entry.header.parent]
    core.send(Loaded(tuple(children), schemas))
    client.clear(namespace)
    core.send(Loaded(tuple(tops)))
    core.send(Loaded((), done=True))
    assert not core.index.entries
    assert core.loads.unattached == 0
    assert core.index.ssd.bytes_by_state["other"] == 0


def test_a_clear_of_one_namespace_leaves_what_waits_of_others() -> None:
    """D11: segments and snapshots of other namespaces still find their places."""
    disk, _ = filled()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    client = Client(core)
    files = sorted(disk.files.values(), key=lambda f: -f.entry.header.spec.end)
    schemas = {f.entry.header.schema_digest: f.schema for f in files}
    for file in files[:-3]:
        core.send(Loaded((file.entry,), schemas))
    client.clear("plain/a")
    core.send(Loaded(tuple(f.entry for f in files[-3:]), done=True))
    assert client.peek(sequence(51)) == 0
    assert client.contains(sequence(50), "hybrid-ring/a")
    assert client.contains((*sequence(20), *sequence(10, 1)), "ring/a")
    check_core(core)


def test_after_the_index_is_complete_a_cleared_name_is_a_name_again() -> None:
    """D11: a clear during the start is for what the start finds, not for what is stored later."""
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    client = Client(core)
    client.clear("plain/a")
    core.send(Loaded((), done=True))
    client.store(sequence(10))
    assert client.contains(sequence(10))


def replaced(entry: FileEntry, **changes: Any) -> FileEntry:
    """A file whose header says something else."""
    return msgspec.structs.replace(entry, header=msgspec.structs.replace(entry.header, **changes))


def test_files_that_cannot_be_placed_are_kept_apart() -> None:
    """D10: one without tokens, one beyond its parent's end, one with an id that is taken."""
    disk, _ = filled()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    files = [f for f in disk.files.values() if f.entry.header.namespace == "plain/a"]
    schemas = {f.entry.header.schema_digest: f.schema for f in files}
    (top,) = [f.entry for f in files if not f.entry.header.parent]
    child = next(f.entry for f in files if f.entry.header.parent == top.header.id)
    wrong = (
        msgspec.structs.replace(replaced(child, id="1" * 32), tokens=b""),
        replaced(child, id="2" * 32, position=top.header.spec.end + 1),
        replaced(child, id=top.header.id),
    )
    core.send(Loaded((top, *wrong), schemas, done=True))
    assert set(core.index.entries) == {top.header.id}
    assert core.loads.unattached == 3
    assert core.index.ssd.bytes_by_state["other"] == sum(f.allocated_bytes for f in wrong)
    assert core.index.ssd.bytes_by_state["durable"] == top.allocated_bytes


def test_an_object_whose_id_is_taken_is_deleted() -> None:
    """D1: somebody copied a file; what the index has stays, and two things never share an id."""
    core = Core(small_config(ssd_bytes=1 << 30))
    disk, client = FakeDisk(core), Client(core)
    grant = core.reply(1, wire.OfferObject("plain/a", "key", ImageSpec(ImageKind.OBJECT)))
    core.reply(1, wire.Commit(grant.put))
    client.flush()
    disk.settle()
    (file,) = disk.files.values()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    copied = msgspec.structs.replace(replaced(file.entry, key="copy"), path="0" * 32 + "/copy")
    core.send(Loaded((file.entry, copied), done=True))
    assert core.loads.duplicates == 1
    (order,) = core.to_ssd
    assert isinstance(order.message, DeleteFile)
    assert order.message.path == copied.path
    assert [entry.id for entry in core.index.entries.values()] == [file.entry.header.id]


def object_and_prompt() -> tuple[FakeDisk, list[StoredFile]]:
    """A disk with an object and a prompt of one namespace, and its files, the object's first."""
    core = Core(small_config(ssd_bytes=1 << 30))
    disk, client = FakeDisk(core), Client(core)
    grant = core.reply(1, wire.OfferObject("plain/a", "key", ImageSpec(ImageKind.OBJECT)))
    core.reply(1, wire.Commit(grant.put))
    client.store(sequence(10))
    client.flush()
    disk.settle()
    files = sorted(disk.files.values(), key=lambda f: f.entry.header.kind is not ImageKind.OBJECT)
    return disk, files


def test_a_namespace_of_objects_takes_on_the_schema_of_its_first_segment() -> None:
    """N4, O1: objects have none, so whichever file is found first decides nothing."""
    _, files = object_and_prompt()
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    client = Client(core)
    for file in files:
        digest = file.entry.header.schema_digest
        core.send(Loaded((file.entry,), {digest: file.schema} if digest else {}))
    core.send(Loaded((), done=True))
    assert client.contains(sequence(10))
    offer = wire.Offer("plain/a", pack_tokens(sequence(20)), encoded("chunk"))
    assert core.reply(1, offer) == wire.Declined(reason="schema-mismatch")
    assert core.loads.loaded == 2
    check_core(core)


def test_what_was_used_just_before_the_stop_is_older_than_what_is_used_since() -> None:
    """D5: a restart within a second keeps the order, whatever the clock has counted before."""
    core = Core(small_config(ssd_bytes=1 << 30))
    disk, client = FakeDisk(core), Client(core)
    disk.wall_clock = time.time() - 100.0
    for salt in range(2):
        client.store(sequence(10, salt))
        client.flush()
        disk.settle()
    core, client = restarted(disk, 0, retention="lru")
    slot = client.ask(sequence(11, 0))
    disk.settle()
    client.release(client.verify(slot, sequence(11, 0)))
    core.index.ssd.bytes_cap = disk.bytes - 1
    core.eviction.make_room_on_disk(0)
    assert client.contains(sequence(10, 0))
    assert not client.contains(sequence(10, 1))
