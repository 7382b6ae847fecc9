"""Objects by key on the core: rules O1, O2, P3, L2, D8, D11 for what has no tokens."""

import random
from typing import Any

import pytest

from prefixcached.actors.takes import MAX_LEASES
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor
from tests.support.core import PAGE, Core, Slot, fill, small_config
from tests.support.core_checks import check_core, check_disk, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk

SPACE = "plain/a"
SIZE = 3000


def spec_of(size: int = SIZE, metadata: bytes = b"") -> ImageSpec:
    tensors = (StateTensor("a", "U8", (size // 2,)), StateTensor("b", "U8", (size - size // 2,)))
    return ImageSpec(ImageKind.OBJECT, tensors=tensors, metadata=metadata)


def offer(core: Core, key: str, byte: int, *, session: int = 1, size: int = SIZE) -> Slot:
    """Offer an object of one byte, repeated; a grant's image is filled."""
    slot = core.call(session, wire.OfferObject(SPACE, key, spec_of(size, b"%d" % byte)))
    if isinstance(slot.reply, wire.Grant):
        fill(core, session, slot, [bytes([byte]) * size])
    return slot


def put(core: Core, key: str, byte: int, **options: Any) -> Any:
    slot = offer(core, key, byte, **options)
    if not isinstance(slot.reply, wire.Grant):
        return slot.reply
    return core.reply(options.get("session", 1), wire.Commit(slot.reply.put))


def take(core: Core, key: str, session: int = 1) -> Slot:
    return core.call(session, wire.TakeObject(SPACE, key))


def contents(core: Core, slot: Slot) -> tuple[int, str]:
    """The byte that a lent object consists of, and its tier."""
    hit = slot.reply
    assert isinstance(hit, wire.Hit), hit
    (part,) = hit.parts
    assert (hit.length, part.use_start, part.use_end) == (0, 0, 0), "an object has no tokens"
    size = sum(tensor.nbytes for tensor in part.spec.tensors)
    data = core.descriptors.read(slot.descriptors[0], part.data_offset, size)
    assert part.spec.metadata == b"%d" % data[0]
    assert data == data[:1] * size
    return data[0], hit.tier


def missed(core: Core, key: str) -> str:
    reply = take(core, key).reply
    assert isinstance(reply, wire.Miss)
    return reply.reason


def release(core: Core, slot: Slot, session: int = 1) -> None:
    assert isinstance(slot.reply, wire.Hit)
    core.send_one_way(session, wire.Release(slot.reply.lease))


def with_disk(**changes: Any) -> tuple[Core, FakeDisk]:
    core = Core(small_config(**{"ssd_bytes": 1 << 30, **changes}))
    return core, FakeDisk(core)


def only_on_disk(core: Core, disk: FakeDisk, key: str) -> str:
    """Have an object written and taken out of RAM; its id."""
    core.advance(core.config.write_delay_seconds)
    disk.settle()
    entry = core.index.namespaces[SPACE].objects[key]
    core.index.drop_memory(entry)
    return entry.id


# -- O1: by key, exactly -------------------------------------------------------------------------


def test_an_object_is_found_by_its_exact_key() -> None:
    """O1: no other key, and no other namespace, finds it."""
    core = Core()
    assert put(core, "key", 7) == wire.Stored(new_bytes=SIZE, length=0)
    assert contents(core, take(core, "key", session=2)) == (7, "ram")
    assert missed(core, "key2") == "empty"
    assert missed(core, "ke") == "empty"
    other = core.reply(1, wire.TakeObject("plain/b", "key"))
    assert isinstance(other, wire.Miss)


def test_an_object_of_no_bytes_is_an_object() -> None:
    """O1: metadata alone, or empty tensors, are kept like any others."""
    core = Core()
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("none", "F32", (0, 3)),), metadata=b"m")
    slot = core.call(1, wire.OfferObject(SPACE, "key", spec))
    assert isinstance(slot.reply, wire.Grant)
    assert core.reply(1, wire.Commit(slot.reply.put)).new_bytes == 0
    hit = take(core, "key").reply
    assert isinstance(hit, wire.Hit)
    assert hit.parts[0].spec == spec


def test_objects_are_charged_and_evicted_like_the_rest() -> None:
    """O1, E1, E2: they share the byte cap with segments, least used first."""
    core = Core(small_config(ram_bytes=4 * PAGE))
    for number in range(3):
        put(core, f"key {number}", number + 1)
    Client(core).store(sequence(10))
    release(core, slot := take(core, "key 0"))
    del slot
    put(core, "key 3", 4)
    assert core.index.ram.bytes == 4 * PAGE
    assert missed(core, "key 1") == "empty"
    assert contents(core, take(core, "key 0")) == (1, "ram")
    check_core(core)


def test_an_object_larger_than_the_cap_is_declined() -> None:
    """P7: what can never fit is refused before anything is evicted for it."""
    core = Core(small_config(ram_bytes=2 * PAGE))
    put(core, "small", 1)
    assert put(core, "large", 2, size=3 * PAGE) == wire.Declined(reason="too-large")
    assert contents(core, take(core, "small")) == (1, "ram")


def test_without_any_tier_objects_are_declined() -> None:
    """O1: with RAM and SSD off there is nowhere to keep one."""
    core = Core(small_config(ram_bytes=0))
    assert put(core, "key", 1) == wire.Declined(reason="disabled")
    assert missed(core, "key") == "empty"


@pytest.mark.parametrize("kind", [ImageKind.SEGMENT, ImageKind.CHECKPOINT])
def test_only_an_object_is_an_object(kind: ImageKind) -> None:
    """P1: an image of another kind is refused."""
    core = Core()
    assert core.reply(1, wire.OfferObject(SPACE, "key", ImageSpec(kind))) == wire.Declined(
        reason="invalid"
    )
    assert core.index.namespaces == {}


def test_objects_and_prefixes_share_a_namespace() -> None:
    """O1, N4: an object has no schema, so it never keeps a model's KV out, in whatever order."""
    core = Core()
    in_flight = offer(core, "key", 1)
    client = Client(core, 2)
    client.store(sequence(10))
    assert isinstance(in_flight.reply, wire.Grant)
    assert isinstance(core.reply(1, wire.Commit(in_flight.reply.put)), wire.Stored)
    assert client.reuse(sequence(11)) == 10
    assert contents(core, take(core, "key")) == (1, "ram")
    put(core, "other", 2)
    check_core(core)


def test_an_offered_object_is_found_by_nobody() -> None:
    """P4: nothing is findable before its commit, and a dead client leaves nothing."""
    core = Core()
    offer(core, "key", 1)
    assert missed(core, "key") == "empty"
    core.gone(1)
    assert core.index.ram.bytes == 0
    check_idle(core)


# -- P3: replacement -----------------------------------------------------------------------------


def test_the_newest_object_of_a_key_wins_and_leases_stay_valid() -> None:
    """P3, L2: what was lent before shows the old bytes to its end, then is freed."""
    core = Core()
    put(core, "key", 1)
    old = take(core, "key", session=2)
    put(core, "key", 2)
    assert contents(core, old) == (1, "ram")
    assert contents(core, take(core, "key")) == (2, "ram")
    assert core.index.ram.bytes_by_state["lingering"] == PAGE
    release(core, old, session=2)
    assert core.index.ram.bytes_by_state["lingering"] == 0
    assert core.index.ram.bytes == PAGE


def test_two_puts_of_one_key_at_once_leave_the_one_that_committed_last() -> None:
    """P3, P4: neither waits for the other, and exactly one object is left."""
    core = Core()
    first, second = offer(core, "key", 1), offer(core, "key", 2, session=2)
    assert isinstance(first.reply, wire.Grant)
    assert isinstance(second.reply, wire.Grant)
    core.reply(2, wire.Commit(second.reply.put))
    core.reply(1, wire.Commit(first.reply.put))
    assert contents(core, take(core, "key")) == (1, "ram")
    assert len(core.index.entries) == 1
    assert core.index.ram.bytes == PAGE


# -- the SSD tier --------------------------------------------------------------------------------


def test_an_object_on_ssd_is_verified_and_lent_as_its_file() -> None:
    """O1, T7: found on SSD it is read once, and a second hit makes it resident."""
    core, disk = with_disk()
    put(core, "key", 5)
    image = only_on_disk(core, disk, "key")
    slot = take(core, "key")
    assert slot.reply is None
    disk.accept()
    disk.finish_read(image)
    assert contents(core, slot) == (5, "ssd")
    release(core, slot)
    again = take(core, "key")
    disk.accept()
    disk.finish_read(image)
    release(core, again)
    disk.settle()
    assert contents(core, take(core, "key")) == (5, "ram")
    assert core.statistics().objects == {
        "object_hits": 3, "object_misses": 0, "object_restores": 2
    }  # fmt: skip


@pytest.mark.parametrize(("outcome", "is_left"), [("transient", True), ("damaged", False)])
def test_an_object_that_cannot_be_read_is_a_miss(outcome: str, is_left: bool) -> None:
    """T8, D3, D4: a damaged file is gone for good, a transient error costs this call."""
    core, disk = with_disk()
    put(core, "key", 5)
    image = only_on_disk(core, disk, "key")
    slot = take(core, "key")
    disk.accept()
    disk.finish_read(image, outcome)
    assert slot.reply == wire.Miss(reason="restore-failed")
    assert (core.index.namespaces.get(SPACE) is not None) is is_left
    assert core.statistics().objects["object_misses"] == 1
    check_core(core)
    check_disk(core, disk)


def test_an_object_cleared_while_it_is_read_is_not_shown() -> None:
    """D11, F4: work that began before a clear is discarded when it ends."""
    core, disk = with_disk()
    put(core, "key", 5)
    image = only_on_disk(core, disk, "key")
    slot = take(core, "key")
    disk.accept()
    core.call(2, wire.Clear(SPACE))
    disk.finish_read(image)
    assert slot.reply == wire.Miss(reason="empty")
    assert not core.takes.leases
    disk.settle()
    assert missed(core, "key") == "empty"


def test_a_client_that_dies_while_its_object_is_read_leaves_nothing() -> None:
    """L1: neither a hold nor an open file stays."""
    core, disk = with_disk()
    put(core, "key", 5)
    image = only_on_disk(core, disk, "key")
    take(core, "key", session=2)
    disk.accept()
    core.gone(2)
    disk.accept()
    assert image not in disk.reads
    check_idle(core)
    check_core(core)


def test_objects_survive_a_restart_and_only_the_newest_does() -> None:
    """O1, P3, D8: whatever a crash left of two versions, the newer one is served."""
    for seed in range(4):
        core, disk = with_disk()
        put(core, "key", 1)
        core.advance(core.config.write_delay_seconds)
        disk.settle()
        put(core, "key", 2)
        core.advance(core.config.write_delay_seconds)
        disk.step()
        assert len(disk.files) == 2
        restarted = Core(core.config, is_loaded=False)
        disk.restart(restarted, random.Random(seed), 1)
        slot = take(restarted, "key")
        disk.accept()
        disk.finish_read(restarted.index.namespaces[SPACE].objects["key"].id)
        assert contents(restarted, slot) == (2, "ssd")
        disk.settle()
        assert len(disk.files) == 1


def test_while_the_index_loads_an_unknown_key_may_yet_be_found() -> None:
    """D10: before the index is complete a miss says so, and a put is declined."""
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    assert missed(core, "key") == "loading"
    assert put(core, "key", 1) == wire.Declined(reason="loading")


# -- counters and limits -------------------------------------------------------------------------


def test_objects_are_counted_apart() -> None:
    """O2: neither prefixes nor their hit rate know of objects."""
    core = Core()
    put(core, "key", 1)
    release(core, take(core, "key"))
    missed(core, "nothing")
    statistics = core.statistics()
    assert statistics.objects == {"object_hits": 1, "object_misses": 1, "object_restores": 0}
    assert (statistics.takes["takes"], statistics.takes["ram_hits"]) == (0, 0)
    assert statistics.takes["misses"] == {}


def test_a_session_has_so_many_leases_on_objects_too() -> None:
    """L4: a client that never releases is refused, not served without end."""
    core = Core()
    put(core, "key", 1)
    for _ in range(MAX_LEASES):
        contents(core, take(core, "key"))
    assert isinstance(take(core, "key").reply, wire.Failed)
    assert contents(core, take(core, "key", session=2)) == (1, "ram")


@pytest.mark.parametrize("outcome", ["good", "transient"])
def test_an_object_that_was_read_is_held_by_its_lease_alone(outcome: str) -> None:
    """L1, E2: once it is answered the reading holds nothing, so that the object can go again."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0, promote="never"))
    disk = FakeDisk(core)
    put(core, "key", 1)
    disk.settle()
    (entry,) = core.index.entries.values()
    core.index.drop_memory(entry)
    slot = take(core, "key")
    assert entry.holders == 1
    disk.accept()
    (name,) = disk.reads
    disk.finish_read(name, outcome)
    if isinstance(slot.reply, wire.Hit):
        assert entry.holders == 1
        core.send_one_way(1, wire.Release(slot.reply.lease))
    assert entry.holders == 0
    check_core(core)


def test_a_first_hit_on_ssd_makes_no_object_resident() -> None:
    """T7: it takes a second one."""
    core, disk = with_disk()
    put(core, "key", 5)
    image = only_on_disk(core, disk, "key")
    slot = take(core, "key")
    disk.accept()
    disk.finish_read(image)
    release(core, slot)
    assert not disk.promotions
    again = take(core, "key")
    disk.accept()
    disk.finish_read(image)
    release(core, again)
    assert list(disk.promotions) == [image]
