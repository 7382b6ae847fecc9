"""Take, leases, peek and contains (rules T1 to T9, T11, L1 to L3, N1)."""

from typing import Any

import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import Core, FakeMemory, small_config
from tests.support.core_checks import check_core, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


def on_disk_only(*lengths: int, **config: Any) -> tuple[Core, FakeDisk, Client]:
    """A core whose entries of ``sequence(length)`` have all left RAM."""
    settings: dict[str, Any] = {
        "ssd_bytes": 1 << 30, "write_delay_seconds": 0.0, "idle_seconds": 5.0, "promote": "never",
    }  # fmt: skip
    core = Core(small_config(**{**settings, **config}))
    disk, client = FakeDisk(core), Client(core)
    for length in lengths:
        client.store(sequence(length))
    disk.settle()
    core.advance(30.0)
    assert core.index.ram.bytes == 0
    return core, disk, client


def test_a_hit_is_the_longest_prefix() -> None:
    """T1: the longest resumable prefix over all that is stored."""
    client = Client(Core())
    tokens = sequence(50)
    client.store(tokens[:20])
    client.store(tokens[:35])
    client.store((*tokens[:30], 1, 2, 3))
    assert client.reuse(tokens) == 35
    assert client.reuse((*tokens[:30], 1, 2, 9)) == 32


def test_a_hit_is_the_longest_over_both_tiers() -> None:
    """T1, T4: the SSD serves where its prefix is longer, each part from RAM where RAM has it."""
    core, disk, client = on_disk_only(20, 40)
    client.store((*sequence(20), 1))  # brings nothing of the path back, only its own end
    slot = client.ask(sequence(41))
    assert slot.reply is None
    disk.accept()
    assert len(disk.reads) == 2
    for name in list(disk.reads):
        disk.finish_read(name)
    hit = client.verify(slot, sequence(41))
    assert (hit.length, hit.tier) == (40, "ssd")
    assert core.takes.counters.ssd_hits == 1


def test_parts_come_from_ram_where_it_has_them() -> None:
    """DESIGN 5: only what RAM lacks is read from the disk."""
    _core, disk, client = on_disk_only(20, 40, promote="always")
    slot = client.ask(sequence(21))
    disk.settle()
    client.release(client.verify(slot, sequence(21)))
    disk.settle()
    slot = client.ask(sequence(41))
    disk.accept()
    assert len(disk.reads) == 1
    disk.settle()
    hit = client.verify(slot, sequence(41))
    assert [p.data_offset for p in hit.parts] == [0, 4096]


def test_equal_prefixes_are_served_from_ram() -> None:
    """T4: with equal lengths the disk is not asked."""
    core, disk, client = on_disk_only(20)
    slot = client.ask(sequence(21))
    disk.settle()
    client.release(client.verify(slot, sequence(21)))
    core.promotions.promote(next(iter(core.index.entries.values())))
    disk.settle()
    orders = disk.read_orders
    assert client.hit(sequence(21)).tier == "ram"
    assert disk.read_orders == orders


def test_taking_consumes_nothing() -> None:
    """T2: many clients hold the same bytes at once, and no image is charged twice."""
    core = Core()
    clients = [Client(core, session) for session in range(1, 6)]
    clients[0].store(sequence(30))
    charged = core.index.ram.bytes
    hits = [client.hit(sequence(31)) for client in clients]
    assert {hit.length for hit in hits} == {30}
    assert core.index.ram.bytes == charged
    assert len({hit.lease for hit in hits}) == 5


def test_a_hit_never_covers_the_last_token() -> None:
    """T3: at least one token is left to forward."""
    client = Client(Core())
    tokens = sequence(20)
    client.store(tokens)
    assert client.reuse(tokens) == 19
    assert client.reuse(tokens[:2]) == 1
    assert client.miss(tokens[:1]).matched == 1
    assert client.miss(()).matched == 0


def test_a_failed_read_falls_back_to_ram() -> None:
    """T8: the best RAM prefix serves when the disk fails."""
    core, disk, client = on_disk_only(20, 40, promote="always")
    slot = client.ask(sequence(21))
    disk.settle()
    client.release(client.verify(slot, sequence(21)))
    disk.settle()  # 0..20 is resident again
    slot = client.ask(sequence(41))
    disk.accept()
    disk.finish_read(next(iter(disk.reads)), "transient")
    hit = client.verify(slot, sequence(41))
    assert (hit.length, hit.tier) == (20, "ram")
    assert core.takes.counters.restores_failed == 1
    assert len(disk.files) == 2, "D4: a transient error deletes nothing"


def test_a_failed_read_without_ram_is_a_miss() -> None:
    """T8: with nothing in RAM the reason is `restore-failed`."""
    core, disk, client = on_disk_only(20)
    slot = client.ask(sequence(21))
    disk.accept()
    disk.finish_read(next(iter(disk.reads)), "damaged")
    assert isinstance(slot.reply, wire.Miss)
    assert slot.reply.reason == "restore-failed"
    assert client.miss(sequence(21)).reason == "empty"
    check_core(core)


def test_a_second_hit_on_ssd_makes_resident() -> None:
    """T7: the first hit is lent from the file, the second one promotes it, off the path."""
    core, disk, client = on_disk_only(20, promote="second-hit")
    for expected in ("ssd", "ssd", "ram"):
        slot = client.ask(sequence(21))
        disk.accept()
        for name in list(disk.reads):
            disk.finish_read(name)
        hit = client.verify(slot, sequence(21))
        assert hit.tier == expected
        client.release(hit)
        for name in list(disk.promotions):
            disk.finish_promotion(name)
    assert core.promotions.promoted == 1


@pytest.mark.parametrize(
    ("namespace", "prompt", "reason", "matched"),
    [
        ("plain/other", sequence(20), "empty", 0),
        ("plain/a", (9, 9, 9), "diverged", 0),
        ("hybrid/a", (*sequence(12), 9, 9), "no-checkpoint", 12),
        ("ring/a", (*sequence(30)[:20], 9), "window-gap", 20),
    ],
)
def test_every_miss_says_why(
    namespace: str, prompt: tuple[int, ...], reason: str, matched: int
) -> None:
    """T9: a reason, and how many tokens matched."""
    client = Client(Core())
    client.store(sequence(20))
    client.store(sequence(30), "hybrid/a", state=True)
    client.store(sequence(30), "ring/a")
    miss = client.miss(prompt, namespace)
    assert (miss.reason, miss.matched) == (reason, matched)


def test_a_miss_remembers_an_eviction() -> None:
    """T9: `evicted` where what would have matched had to leave."""
    client = Client(Core(small_config(max_images=2)))
    for salt in range(3):
        client.store(sequence(20, salt))
    assert client.miss(sequence(20, 0)).reason == "evicted"


def test_a_miss_while_the_index_loads_says_so() -> None:
    """T9: until the index is complete a miss is `loading`, and puts are declined so (P10)."""
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    client = Client(core)
    assert client.miss(sequence(20)).reason == "loading"
    assert client.refusal(sequence(20)) == "loading"


def test_peek_and_contains_change_nothing() -> None:
    """T11: no recency, no counters, no reads; contains answers for exactly these tokens."""
    core, disk, client = on_disk_only(20, 40)
    used = {e.id: (e.used, e.uses, e.priority) for e in core.index.entries.values()}
    counters = core.statistics().takes
    assert client.peek(sequence(41)) == 40
    assert client.peek(sequence(40)) == 39
    assert client.contains(sequence(40))
    assert client.contains(sequence(20))
    assert not client.contains(sequence(41))
    assert not client.contains((*sequence(39), 9))
    disk.accept()
    assert not disk.reads
    assert core.statistics().takes == counters
    assert {e.id: (e.used, e.uses, e.priority) for e in core.index.entries.values()} == used


def test_a_lease_lasts_until_it_is_released_or_its_session_ends() -> None:
    """L1: no time-out; a second release and another session's are harmless."""
    core = Core(small_config(max_images=1))
    client, other = Client(core, 1), Client(core, 2)
    client.store(sequence(20))
    slot = client.ask(sequence(21))
    hit = client.verify(slot, sequence(21))
    other.release(hit)
    core.advance(1e4)
    assert other.refusal(sequence(20, 1)) == "no-space"
    client.verify(slot, sequence(21))
    client.release(hit)
    client.release(hit)
    other.store(sequence(20, 1))
    other.hit(sequence(21, 1))
    core.gone(2)
    check_idle(core)


def test_an_unknown_boot_is_not_honoured() -> None:
    """L3: a lease of an earlier daemon is neither fetched from nor released."""
    core = Core()
    client = Client(core)
    client.store(sequence(20))
    hit = client.hit(sequence(21))
    core.send_one_way(1, wire.Release(hit.lease, boot="earlier"))
    assert hit.lease in core.takes.leases
    stale = core.reply(1, wire.Fetch(of=hit.lease, first=0, boot="earlier"))
    assert isinstance(stale, wire.Failed)
    core.send_one_way(1, wire.Release(hit.lease, boot=core.boot))
    assert not core.takes.leases


def test_lent_bytes_linger_after_a_clear() -> None:
    """L2: what is lent leaves the tree at once, and its bytes count until the lease ends."""
    core = Core()
    client = Client(core)
    client.store(sequence(30))
    slot = client.ask(sequence(31))
    client.clear()
    assert client.miss(sequence(31)).reason == "empty"
    assert core.index.ram.bytes == core.index.ram.bytes_by_state["lingering"] > 0
    client.release(client.verify(slot, sequence(31)))
    assert core.index.ram.bytes == 0


def test_lent_bytes_linger_when_they_are_absorbed() -> None:
    """L2: an absorbed image that is lent stays whole until its lease ends."""
    core = Core(small_config(segment_min_tokens=64))
    client = Client(core)
    client.store(sequence(20))
    slot = client.ask(sequence(21))
    client.store(sequence(30))
    assert core.index.ram.bytes_by_state["lingering"] > 0
    client.release(client.verify(slot, sequence(21)))
    assert core.index.ram.bytes_by_state["lingering"] == 0
    check_core(core)


def test_a_take_that_waits_for_the_disk_ends_with_its_session() -> None:
    """L1: a client that dies while its files are verified holds nothing afterwards."""
    core, disk, client = on_disk_only(20, 40)
    client.ask(sequence(41))
    disk.accept()
    names = list(disk.reads)
    disk.finish_read(names[0])
    core.gone(1)
    disk.accept()
    assert not disk.reads, "the last asker gone cancels the read"
    check_idle(core)


def test_twenty_takes_of_a_cold_prefix_make_one_read() -> None:
    """F2: each image is read once, and cancelling nineteen changes nothing for the last."""
    core, disk, _ = on_disk_only(20)
    clients = [Client(core, session) for session in range(10, 30)]
    slots = [client.ask(sequence(21)) for client in clients]
    disk.accept()
    assert len(disk.reads) == 1
    for client in clients[:-1]:
        core.gone(client.session)
    disk.accept()
    (name,) = disk.reads
    disk.finish_read(name)
    assert [slot.reply is not None for slot in slots] == [False] * 19 + [True]
    assert clients[-1].verify(slots[-1], sequence(21)).length == 20


def test_a_clear_while_files_are_verified_wins() -> None:
    """D11: work of an older epoch is discarded when it ends: the take misses."""
    core, disk, client = on_disk_only(20)
    slot = client.ask(sequence(21))
    disk.accept()
    Client(core, 2).clear()
    disk.finish_read(next(iter(disk.reads)))
    assert isinstance(slot.reply, wire.Miss)
    assert slot.reply.reason == "empty"
    assert core.takes.counters.restores_failed == 0
    disk.settle()
    check_idle(core)
    assert core.index.ssd.bytes == 0


def test_a_clear_while_an_object_is_verified_wins() -> None:
    """D11, O1: an object that was cleared meanwhile is not handed out any more."""
    core, disk, client = on_disk_only()
    spec = ImageSpec(ImageKind.OBJECT, metadata=b"{}")
    grant = core.reply(1, wire.OfferObject("plain/a", "key", spec))
    assert isinstance(core.reply(1, wire.Commit(grant.put)), wire.Stored)
    client.flush()
    disk.settle()
    core.index.drop_memory(next(iter(core.index.entries.values())))
    slot = core.call(1, wire.TakeObject("plain/a", "key"))
    disk.accept()
    Client(core, 2).clear()
    disk.finish_read(next(iter(disk.reads)))
    assert slot.reply == wire.Miss(reason="empty")
    disk.settle()
    check_idle(core)


def test_losing_a_base_while_children_are_read_leaves_nothing_behind() -> None:
    """Issue 3: the base's file is gone while its child is verified: all of it goes, uncharged."""
    core, disk, client = on_disk_only(20, 40)
    slot = client.ask(sequence(41))
    disk.accept()
    base = next(p for p, f in disk.files.items() if not f.entry.header.parent)
    image_id = disk.files[base].entry.header.id
    disk.lose(base)
    disk.finish_read(image_id)
    disk.settle()
    assert isinstance(slot.reply, wire.Miss)
    assert not core.index.entries
    assert core.index.ssd.bytes == 0
    assert not disk.files
    check_idle(core)


def test_many_parts_come_in_batches_of_sixteen() -> None:
    """PLATFORM 3.2: sixteen descriptors at most on one frame; `Fetch` brings the others."""
    core = Core(small_config(segment_max_bytes=800))
    client = Client(core)
    client.store(sequence(40))
    slot = client.ask(sequence(41))
    assert isinstance(slot.reply, wire.Hit)
    assert len(slot.reply.parts) > 32
    assert len(slot.descriptors) == 16
    client.verify(slot, sequence(41))
    beyond = core.reply(1, wire.Fetch(of=slot.reply.lease, first=1000))
    assert isinstance(beyond, wire.Failed)
    stranger = core.reply(2, wire.Fetch(of=slot.reply.lease, first=0))
    assert isinstance(stranger, wire.Failed)


def test_leases_of_one_session_are_bounded() -> None:
    """C3: a client that only ever takes is told off before it holds everything."""
    core = Core()
    client = Client(core)
    client.store(sequence(20))
    replies = [client.ask(sequence(21)).reply for _ in range(65)]
    assert isinstance(replies[-1], wire.Failed)
    assert all(isinstance(reply, wire.Hit) for reply in replies[:-1])


def test_the_schema_travels_once() -> None:
    """The reply leaves the schema out where the client names its digest."""
    core = Core()
    client = Client(core)
    client.store(sequence(20))
    first = client.hit(sequence(21))
    assert first.schema
    digest = bytes.fromhex(core.index.namespaces["plain/a"].schema_digest)
    again = core.reply(1, wire.Take("plain/a", pack_tokens(sequence(21)), schema_digest=digest))
    assert again.schema == b""


def test_namespaces_share_nothing() -> None:
    """N1: what one namespace holds is not found in another."""
    client = Client(Core())
    client.store(sequence(20), "plain/a")
    assert client.miss(sequence(21), "plain/b").reason == "empty"
    client.store(sequence(20), "plain/b")
    assert client.reuse(sequence(21), "plain/b") == 20


def test_memory_is_freed_exactly_once() -> None:
    """M4, E1: whatever left is given back to the system."""
    core = Core()
    client = Client(core)
    for salt in range(5):
        client.store(sequence(20, salt))
    memories: list[FakeMemory] = list(core.memories)
    client.clear()
    assert all(memory.is_freed for memory in memories)


def test_waiting_takes_hear_of_a_put_that_is_declined_after_waiting() -> None:
    """Q2: also where the claimant's offer waited for room first, they are answered at once."""
    core = Core(small_config(max_images=1, claim_min_tokens=16), auto_free=False)
    first, second = Client(core, 1), Client(core, 2)
    first.store(sequence(10, 1))
    assert first.miss(sequence(40)).claim is not None
    waiting = second.ask(sequence(40), wait=100.0)
    offer = first.offer(sequence(40))  # the old image is being freed, and that takes long
    core.advance(0.9)
    assert offer.reply is None
    assert waiting.reply is None
    core.advance(0.2)
    assert isinstance(offer.reply, wire.Declined)
    assert isinstance(waiting.reply, wire.Miss)


def test_nobody_ends_or_uses_the_lease_of_another() -> None:
    """L1: ids belong to their session, whichever of two came first."""
    core = Core()
    clients = [Client(core, session) for session in (1, 2, 3)]
    clients[0].store(sequence(20))
    hit = clients[1].hit(sequence(21))
    for other in (clients[0], clients[2]):
        other.release(hit)
        reply = core.call(other.session, wire.Fetch(of=hit.lease, first=0)).reply
        assert isinstance(reply, wire.Failed)
    assert core.statistics().leases == 1
    clients[1].release(hit)
    assert core.statistics().leases == 0


def test_a_take_that_waits_for_anothers_prefill_is_counted_once() -> None:
    """Q2, C5: however often it looks again before it is answered."""
    core = Core(small_config(claim_min_tokens=16))
    first, second = Client(core, 1), Client(core, 2)
    first.miss(sequence(40))
    assert core.takes.counters.waits == 0
    slot = second.ask(sequence(40), wait=100.0)
    first.store(sequence(20))
    assert slot.reply is None
    first.store(sequence(39))
    second.verify(slot, sequence(40))
    assert core.takes.counters.waits == 1


def test_what_serves_instead_of_a_failed_read_leaves_the_last_token_too() -> None:
    """T3, T8: the prompt became resident while its file was read, and the read failed."""
    core, disk, client = on_disk_only(20)
    slot = client.ask(sequence(20))
    (entry,) = core.index.entries.values()
    core.promotions.promote(entry)
    disk.accept()
    disk.finish_promotion(entry.id)
    disk.finish_read(entry.id, "transient")
    hit = client.verify(slot, sequence(20))
    assert (hit.length, hit.tier) == (19, "ram")


def test_a_hit_whose_end_was_absorbed_meanwhile_marks_nothing() -> None:
    """S1, L2: a label is never left on an image that no prompt finds any more."""
    core, disk, client = on_disk_only(20, 24, segment_min_tokens=8)
    slot = client.ask(sequence(25), label="talk")
    disk.accept()
    Client(core, 2).store(sequence(40))
    for name in list(disk.reads):
        disk.finish_read(name)
    hit = client.verify(slot, sequence(25))
    assert hit.length == 24
    assert core.statistics().labels == 0
    client.release(hit)
    check_core(core)
