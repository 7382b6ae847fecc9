"""What a start counts, and which files it must not believe (rules D1, D5, D8, D10, D11)."""

import random

import msgspec
import pytest
import xxhash

from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import DeleteFile, Loaded
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens
from tests.actors.test_loading import filled, object_and_prompt, replaced, restarted
from tests.support.core import Core, small_config
from tests.support.core_checks import check_core, check_disk_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk, StoredFile
from tests.support.core_payload import encoded


def starting() -> Core:
    """A core whose index is not complete yet."""
    return Core(small_config(ssd_bytes=1 << 30), is_loaded=False)


def test_all_that_is_placed_is_counted_once() -> None:
    """D10: segments and checkpoints alike."""
    disk, _ = filled()
    core, _ = restarted(disk, 0)
    assert core.loads.loaded == len(core.index.entries) == len(disk.files)


def test_what_is_in_the_directory_beside_images_is_charged() -> None:
    """D5: the cap counts foreign files and the quarantine from the start."""
    core = starting()
    core.send(Loaded((), done=True, foreign_bytes=5000, quarantine_bytes=700))
    assert core.index.ssd.bytes_by_state["other"] == 5700
    assert core.index.ssd.images_by_state["other"] == 0


def test_one_byte_over_the_cap_is_over_the_cap() -> None:
    """D5: after the start the directory is within its cap to the byte."""
    disk, _ = filled()
    cap = disk.bytes - 1
    core, _ = restarted(disk, 0, ssd_bytes=cap)
    disk.settle()
    assert disk.bytes <= core.index.ssd.bytes <= cap
    check_disk_idle(core, disk)


def test_an_unattached_file_is_one_image() -> None:
    """D10: files without their parent are charged in bytes and in images, each once."""
    disk, _ = filled()
    files = [f.entry for f in disk.files.values() if f.entry.header.parent]
    core = starting()
    core.send(Loaded(tuple(files), done=True))
    assert core.loads.unattached == len(files)
    assert core.index.ssd.images_by_state["other"] == len(files)


def test_a_clear_while_the_index_loads_is_of_its_namespace_alone() -> None:
    """D11: of three namespaces whose files wait the cleared one goes, whatever their names."""
    core = Core(small_config(ssd_bytes=1 << 30, segment_max_bytes=6000))
    disk, client = FakeDisk(core), Client(core)
    names = ("hybrid/a", "hybrid/b", "hybrid/c")
    for name in names:
        client.store(sequence(30), name, state=True)
    client.flush()
    disk.settle()
    files = list(disk.files.values())
    schemas = {f.entry.header.schema_digest: f.schema for f in files}
    tops = [f.entry for f in files if _is_top(f)]
    core = starting()
    client = Client(core)
    core.send(Loaded(tuple(f.entry for f in files if not _is_top(f)), schemas))
    client.clear("hybrid/b")
    core.send(Loaded(tuple(tops), done=True))
    assert [client.peek(sequence(31), name) for name in names] == [30, 0, 30]
    assert core.loads.unattached == 0
    check_core(core)


def _is_top(file: StoredFile) -> bool:
    header = file.entry.header
    return header.kind is ImageKind.SEGMENT and not header.parent


def test_a_parent_of_another_namespace_is_none() -> None:
    """D1, N4: bytes of one model never appear below those of another, whatever a file says."""
    core = Core(small_config(ssd_bytes=1 << 30, segment_max_bytes=6000))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(10))
    client.store(sequence(10), "plain/b")
    client.flush()
    disk.settle()
    files = list(disk.files.values())
    tops = {f.entry.header.namespace: f.entry for f in files if _is_top(f)}
    child = next(
        f.entry for f in files if not _is_top(f) and f.entry.header.namespace == "plain/a"
    )  # fmt: skip
    moved = replaced(child, parent=tops["plain/b"].header.id)
    core = starting()
    schemas = {f.entry.header.schema_digest: f.schema for f in files}
    core.send(Loaded((*tops.values(), moved), schemas, done=True))
    assert set(core.index.entries) == {top.header.id for top in tops.values()}
    assert core.loads.unattached == 1
    check_core(core)


@pytest.mark.parametrize("is_shorter_first", [True, False])
def test_of_two_segments_behind_one_parent_the_longer_is_kept(is_shorter_first: bool) -> None:
    """D8: also where they begin in the middle of a prompt."""
    core = Core(small_config(ssd_bytes=1 << 30, segment_min_tokens=64))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(10), minimum=1)  # absorbs nothing and is not absorbed
    kept: dict[str, StoredFile] = {}
    for length in (15, 20):
        client.store(sequence(length))
        client.flush()
        disk.settle()
        kept.update(disk.files)
    order = sorted(
        (f.entry for f in kept.values()),
        key=lambda f: f.header.spec.end if is_shorter_first else -f.header.spec.end,
    )
    assert [f.header.position for f in order if f.header.parent] == [10, 10]
    core = starting()
    schemas = {f.entry.header.schema_digest: f.schema for f in kept.values()}
    core.send(Loaded(tuple(order), schemas, done=True))
    assert Client(core).contains(sequence(20))
    assert core.loads.duplicates == 1


def test_a_checkpoint_whose_segment_is_lost_is_left_unattached() -> None:
    """D1, D10: the beginning of its prompt alone is no place for it, and no reason to fail."""
    core = Core(small_config(ssd_bytes=1 << 30, segment_max_bytes=6000))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(30), "hybrid/a", state=True)
    client.flush()
    disk.settle()
    for path, file in list(disk.files.items()):
        if file.entry.header.kind is ImageKind.SEGMENT and not _is_top(file):
            disk.lose(path)
    core, client = restarted(disk, 0)
    assert core.loads.loaded == 1
    assert core.loads.unattached == 1
    assert client.peek(sequence(31), "hybrid/a") == 0


@pytest.mark.parametrize("digest", ["0" * 32, "f" * 32])
def test_a_schema_that_is_not_that_of_its_digest_is_not_believed(digest: str) -> None:
    """D1: bytes are never read by a layout that is not theirs."""
    core, file = one_file()
    core.send(
        Loaded((replaced(file.entry, schema_digest=digest),), {digest: file.schema}, done=True)
    )
    assert not core.index.entries
    assert core.loads.unattached == 1


def test_a_schema_that_cannot_be_read_leaves_its_files_unattached() -> None:
    """D1: whatever wrote it, the daemon starts."""
    core, file = one_file()
    schema = b"no schema"
    digest = xxhash.xxh3_128_hexdigest(schema)
    core.send(Loaded((replaced(file.entry, schema_digest=digest),), {digest: schema}, done=True))
    assert not core.index.entries
    assert core.loads.unattached == 1


def one_file() -> tuple[Core, StoredFile]:
    """The file of a stored prompt, and a core that starts."""
    core = Core(small_config(ssd_bytes=1 << 30))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(10))
    client.flush()
    disk.settle()
    (file,) = disk.files.values()
    return starting(), file


def test_a_prompt_found_behind_an_object_is_lent_whole() -> None:
    """N4, O1: the namespace has the prompt's schema then, so a hit has all its slices."""
    disk, files = object_and_prompt()
    schemas = {f.entry.header.schema_digest: f.schema for f in files if f.schema}
    core = disk.core = starting()
    core.send(Loaded(tuple(f.entry for f in files), schemas, done=True))
    client = Client(core)
    slot = client.ask(sequence(11))
    disk.settle()
    assert client.verify(slot, sequence(11)).length == 10


def test_files_that_a_late_scan_finds_are_placed() -> None:
    """D7, D10: the disk failed at the start, RAM went on alone, and what it holds comes later."""
    core, file = one_file()
    client = Client(core)
    core.send(Loaded((), done=True, later=True))
    assert client.peek(sequence(11)) == 0
    core.send(Loaded((file.entry,), {file.entry.header.schema_digest: file.schema}))
    core.send(Loaded((), done=True))
    assert client.contains(sequence(10))
    check_core(core)


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("stored", [sequence(30, 2), sequence(4), sequence(0)])
def test_a_late_scan_drops_nothing_that_ram_alone_has(
    stored: tuple[int, ...], is_pinned: bool
) -> None:
    """D7, D8: what was stored while the disk failed stays, and so does what the scan finds then.

    Both begin alike; the one is not durable yet, and its pin holds.
    """
    core, file = one_file()
    disk, client = FakeDisk(core), Client(core)
    prompt = (*sequence(5), *stored)
    core.send(Loaded((), done=True, later=True))
    client.store(prompt)
    if is_pinned:
        client.prefetch((*prompt, 1))
    core.send(Loaded((file.entry,), {file.entry.header.schema_digest: file.schema}))
    core.send(Loaded((), done=True))
    assert client.contains(prompt)
    assert set(core.index.unattached) == {file.entry.header.id}
    disk.accept()
    assert not [e for e in disk.writer if isinstance(e.message, DeleteFile)]
    check_core(core)


def test_a_late_scan_drops_nothing_that_is_lent() -> None:
    """D10, L1: what was found and is in use stays, whatever newer file claims its place."""
    core, file = one_file()
    newer = msgspec.structs.replace(
        replaced(file.entry, id="a" * 32), path="0" * 32 + "/a",
        tokens=pack_tokens((*sequence(5), *sequence(5, 2))), used_seconds=1e12,
    )  # fmt: skip
    core.send(Loaded((file.entry,), {file.entry.header.schema_digest: file.schema}))
    (entry,) = core.index.entries.values()
    core.index.hold((entry,))
    core.send(Loaded((newer,), done=True))
    assert entry.attached
    assert set(core.index.unattached) == {newer.header.id}


def test_what_was_used_since_the_start_is_newer_than_any_file() -> None:
    """D5: its file's time was read before that."""
    core, file = one_file()
    newer = msgspec.structs.replace(
        replaced(file.entry, id="a" * 32), path="0" * 32 + "/a",
        tokens=pack_tokens((*sequence(5), *sequence(5, 2))), used_seconds=1e12,
    )  # fmt: skip
    core.send(Loaded((file.entry,), {file.entry.header.schema_digest: file.schema}))
    core.index.use(core.index.entries.values(), core.clock)
    core.send(Loaded((newer,), done=True))
    assert set(core.index.entries) == {file.entry.header.id}
    assert core.loads.duplicates == 1


@pytest.mark.parametrize("namespace", ["plain/a", None])
def test_a_clear_before_a_late_scan_is_for_good(namespace: str | None) -> None:
    """D11: the disk failed at the start; what it still holds of a cleared namespace stays away."""
    core, file = one_file()
    client = Client(core)
    core.send(Loaded((), done=True, later=True))
    client.clear(namespace)
    core.send(Loaded((file.entry,), {file.entry.header.schema_digest: file.schema}))
    core.send(Loaded((), done=True, later=True))  # it failed again, and goes on
    core.send(Loaded((file.entry,), {file.entry.header.schema_digest: file.schema}))
    core.send(Loaded((), done=True))
    assert not client.contains(sequence(10))
    check_core(core)


def test_what_is_beside_images_is_charged_once() -> None:
    """D5: a scan that ends twice, since the disk failed meanwhile, says the same twice."""
    core = starting()
    core.send(Loaded((), done=True, foreign_bytes=5000, quarantine_bytes=700, later=True))
    core.send(Loaded((), done=True, foreign_bytes=5000, quarantine_bytes=700))
    assert core.index.ssd.bytes_by_state["other"] == 5700


@pytest.mark.parametrize("seed", range(4))
def test_what_lost_its_parent_does_not_bring_a_schema_back(seed: int) -> None:
    """N4: files of an older schema that lead nowhere hide none of those that were stored since."""
    core = Core(small_config(ssd_bytes=1 << 30, segment_max_bytes=6000))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(30), "hybrid/a")
    client.flush()
    disk.settle()
    for path, file in list(disk.files.items()):
        if _is_top(file):
            disk.lose(path)
    assert disk.files, "something is left of it"
    core = Core(core.config, is_loaded=False)
    disk.restart(core, random.Random(seed), 1)
    offer = wire.Offer("hybrid/a", pack_tokens(sequence(10, 1)), encoded("plain"))
    grant = core.reply(1, offer)
    assert isinstance(grant, wire.Grant)
    core.reply(1, wire.Commit(grant.put))
    Client(core).flush()
    disk.settle()
    core = Core(core.config, is_loaded=False)
    disk.restart(core, random.Random(seed), 1)
    assert Client(core).peek((*sequence(10, 1), 1), "hybrid/a") == 10
    check_core(core)


def test_of_two_files_from_the_future_the_newer_is_kept() -> None:
    """D5: the clock was ahead and was set back; none was used since the start for that."""
    core, file = one_file()
    old = msgspec.structs.replace(file.entry, used_seconds=1e12)
    new = msgspec.structs.replace(
        replaced(file.entry, id="a" * 32), path="0" * 32 + "/a",
        tokens=pack_tokens((*sequence(5), *sequence(5, 2))), used_seconds=1e12 + 5,
    )  # fmt: skip
    core.send(Loaded((old, new), {file.entry.header.schema_digest: file.schema}, done=True))
    assert set(core.index.entries) == {new.header.id}


def test_of_one_path_the_longer_file_stays_though_the_shorter_was_used_later() -> None:
    """D8: a crash came between the rename of what absorbed it and its deletion."""
    core, file = one_file()
    long = file.entry
    short = msgspec.structs.replace(
        replaced(long, id="a" * 32, spec=ImageSpec(ImageKind.SEGMENT, 0, 5)), path="0" * 32 + "/a",
        tokens=pack_tokens(sequence(5)), used_seconds=long.used_seconds + 5,
    )  # fmt: skip
    core.send(Loaded((short, long), {long.header.schema_digest: file.schema}, done=True))
    assert set(core.index.entries) == {long.header.id}


def test_a_file_from_the_future_is_as_recent_as_one_of_now() -> None:
    """E9: a clock that was set back makes nothing old."""
    core, file = one_file()
    future = msgspec.structs.replace(file.entry, used_seconds=1e12)
    core.send(Loaded((future,), {file.entry.header.schema_digest: file.schema}, done=True))
    (entry,) = core.index.entries.values()
    assert entry.used == 0


@pytest.mark.parametrize("digest", ["0" * 32, "f" * 32])
def test_files_of_another_schema_are_not_taken_into_a_namespace(digest: str) -> None:
    """D1, N4: neither as a prompt of their own nor as the continuation of one."""
    core, file = one_file()
    top = file.entry
    own = replaced(top, id="1" * 32, schema_digest=digest)
    own = msgspec.structs.replace(own, tokens=pack_tokens(sequence(10, 1)))
    below = replaced(top, id="2" * 32, schema_digest=digest, parent=top.header.id, position=10)
    core.send(Loaded((top, own, below), {top.header.schema_digest: file.schema}, done=True))
    assert set(core.index.entries) == {top.header.id}
    assert core.loads.unattached == 2


def test_a_namespace_whose_only_file_could_not_be_placed_holds_nothing() -> None:
    """N4: somebody copied a file for another namespace, which is free for any schema."""
    core, file = one_file()
    copied = replaced(file.entry, namespace="plain/b")
    schemas = {file.entry.header.schema_digest: file.schema}
    core.send(Loaded((file.entry, copied), schemas, done=True))
    assert set(core.index.namespaces) == {"plain/a"}


@pytest.mark.parametrize("first", ["child", "checkpoint"])
def test_what_a_scan_that_broke_off_could_not_place_is_placed_by_the_next(first: str) -> None:
    """D7, D10: its parents were found once the volume was back."""
    disk, _ = filled()
    files = [file.entry for file in disk.files.values()]
    schemas = {f.entry.header.schema_digest: f.schema for f in disk.files.values() if f.schema}
    is_checkpoint = [f.header.kind is ImageKind.CHECKPOINT for f in files]
    early = [
        f for f, checkpoint in zip(files, is_checkpoint, strict=True)
        if (checkpoint if first == "checkpoint" else bool(f.header.parent) and not checkpoint)
    ]  # fmt: skip
    late = [f for f in files if f not in early]
    core = starting()
    core.send(Loaded(tuple(early), schemas))
    core.send(Loaded((), done=True, later=True))
    assert len(core.index.unattached) == len(early)
    core.send(Loaded(tuple(late), schemas))
    core.send(Loaded((), done=True))
    assert core.index.unattached == {}
    assert core.loads.unattached == 0
    assert len(core.index.entries) == len(files)
    assert core.index.ssd.bytes == sum(f.allocated_bytes for f in files)
