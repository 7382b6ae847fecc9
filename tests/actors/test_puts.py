"""Put: offer, grant, commit, abandon (rules P3 to P8, P10, E6, N1, N4)."""

import msgspec
import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import PAGE, Core, Slot, small_config
from tests.support.core_checks import check_core, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk
from tests.support.core_payload import encoded


def test_nothing_is_visible_before_the_commit() -> None:
    """P4: granted bytes count in the budget, and nobody finds them."""
    core = Core(auto_seal=False)
    client = Client(core)
    grant = client.grant(sequence(30))
    assert client.peek(sequence(31)) == 0
    assert core.index.ram.bytes_by_state["in_flight"] == core.index.ram.bytes > 0
    slot = core.call(1, wire.Commit(grant.put))
    assert slot.reply is None
    assert client.peek(sequence(31)) == 0, "not before all images are immutable"
    core.finish_seal()
    assert isinstance(slot.reply, wire.Stored)
    assert client.peek(sequence(31)) == 30
    assert core.index.ram.bytes_by_state["in_flight"] == 0


def test_all_images_become_visible_at_once_or_not_at_all() -> None:
    """P4: a put whose images cannot be sealed leaves nothing."""
    core = Core(small_config(segment_max_bytes=8000), auto_seal=False)
    client = Client(core)
    grant = client.grant(sequence(40))
    assert len(grant.images) > 1
    slot = core.call(1, wire.Commit(grant.put))
    core.finish_seal("device busy")
    assert slot.reply == wire.Declined(reason="invalid")
    assert client.peek(sequence(41)) == 0
    assert core.index.ram.bytes == 0
    check_idle(core)


@pytest.mark.parametrize("how", ["abandon", "die"])
def test_a_put_given_up_leaves_nothing(how: str) -> None:
    """P4: abandoned puts and those of a connection that ended are freed, namespace and all."""
    core = Core()
    client = Client(core)
    grant = client.grant(sequence(30))
    core.advance(1e5)
    assert core.index.ram.bytes > 0, "never by a timeout"
    if how == "abandon":
        core.send_one_way(1, wire.Abandon(grant.put))
    else:
        core.gone(1)
    assert core.index.ram.bytes == 0
    assert not core.index.namespaces
    assert core.puts.counters.abandoned == 1
    late = core.reply(1, wire.Commit(grant.put))
    assert late == wire.Declined(reason="invalid")
    check_idle(core)


def test_what_was_committed_is_published_though_its_client_died() -> None:
    """P4: after the commit the put ends as any other, without its connection."""
    core = Core(auto_seal=False)
    client = Client(core)
    grant = client.grant(sequence(30))
    core.call(1, wire.Commit(grant.put))
    core.gone(1)
    core.finish_seal()
    assert Client(core, 2).reuse(sequence(31)) == 30
    check_idle(core)


@pytest.mark.parametrize(("owner", "other"), [(1, 2), (2, 1)])
def test_a_put_belongs_to_its_session(owner: int, other: int) -> None:
    """L1: another connection can neither commit, abandon nor fetch it."""
    core = Core()
    grant = Client(core, owner).grant(sequence(30))
    assert core.reply(other, wire.Commit(grant.put)) == wire.Declined(reason="invalid")
    core.send_one_way(other, wire.Abandon(grant.put))
    assert isinstance(core.reply(other, wire.Fetch(of=grant.put, first=0)), wire.Failed)
    assert core.reply(owner, wire.Commit(grant.put, boot="earlier")).reason == "invalid"
    assert isinstance(core.reply(owner, wire.Commit(grant.put)), wire.Stored)


@pytest.mark.parametrize("sessions", [(1, 2), (2, 1)])
def test_an_offer_waits_for_a_put_of_its_first_missing_tokens(sessions: tuple[int, int]) -> None:
    """P5: it is answered by what is held once that put has ended."""
    core = Core()
    first, second = (Client(core, session) for session in sessions)
    tokens = sequence(60)
    grant = first.grant(tokens[:40])
    slot = second.offer(tokens)
    assert slot.reply is None
    first.commit(grant)
    assert isinstance(slot.reply, wire.Grant)
    assert slot.reply.base == 40
    assert core.puts.counters.waits_for_put == 1


def test_an_offer_waits_two_seconds_at_most() -> None:
    """P5: then it is granted by what is held, and a bounded client is answered in its time."""
    for seconds_left, patience in ((60.0, 2.0), (1.0, 0.8)):
        core = Core()
        first, second = Client(core, 1), Client(core, 2)
        first.grant(sequence(40))
        slot = second.offer(sequence(40), seconds=seconds_left)
        core.advance(patience - 0.01)
        assert slot.reply is None
        core.advance(0.02)
        assert isinstance(slot.reply, wire.Grant)


def test_an_offer_does_not_wait_for_what_it_does_not_need() -> None:
    """P5: neither for another continuation, nor for its own session, nor in another namespace."""
    core = Core()
    first, second = Client(core, 1), Client(core, 2)
    tokens = sequence(40)
    first.store(tokens[:20])
    first.grant(tokens)
    assert isinstance(second.offer((*tokens[:20], 7, 7)).reply, wire.Grant)
    assert isinstance(second.offer(tokens, "plain/b").reply, wire.Grant)
    assert isinstance(first.offer(tokens).reply, wire.Grant)


def test_a_waiting_offer_ends_with_its_session() -> None:
    """L1: a client that died while it waited is not granted anything."""
    core = Core()
    first, second = Client(core, 1), Client(core, 2)
    grant = first.grant(sequence(40))
    slot = second.offer(sequence(50))
    core.gone(2)
    first.commit(grant)
    assert slot.reply is None
    assert not core.puts.puts


@pytest.mark.parametrize("goes", [2, 3])
def test_a_client_that_dies_takes_no_other_waiting_offer_with_it(goes: int) -> None:
    """P5, L1: the others are answered as if it had never been there."""
    core = Core()
    first = Client(core, 1)
    grant = first.grant(sequence(40))
    slots = {session: Client(core, session).offer(sequence(50)) for session in (2, 3)}
    core.gone(goes)
    first.commit(grant)
    assert [s for s, slot in slots.items() if isinstance(slot.reply, wire.Grant)] == [5 - goes]


def test_twenty_offers_at_once_store_the_shared_tokens_once() -> None:
    """P5, P6: twenty clients offer the same 8,000 tokens plus 1,000 of their own together."""
    core = Core()
    shared = sequence(8000)
    clients = [Client(core, session, fills=False) for session in range(1, 21)]
    prompts = [(*shared, *sequence(1000, salt)) for salt in range(1, 21)]
    slots = [c.offer(p, "chunk/a") for c, p in zip(clients, prompts, strict=True)]
    assert [slot.reply is not None for slot in slots] == [True] + [False] * 19
    granted = 0
    for client, slot in zip(clients, slots, strict=True):
        grant = slot.reply
        assert isinstance(grant, wire.Grant)
        granted += sum(image.end - image.start for image in grant.images)
        client.commit(grant)
    assert granted == 8000 + 20 * 1000
    assert all(client.contains(p, "chunk/a") for client, p in zip(clients, prompts, strict=True))
    # E1: the namespace costs what its distinct tokens cost, and a page an image at most.
    payload = 700 * 28000 + 20 * 12 * 4
    assert core.index.ram.bytes <= 1.05 * payload


def test_surplus_tokens_are_not_stored_twice() -> None:
    """P6: at commit the tree is walked again; images that became surplus are freed."""
    core = Core(small_config(segment_max_bytes=8000, put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    tokens = sequence(40)
    late = first.grant(tokens)
    second.store(tokens[:30])
    reply = first.commit(late)
    assert isinstance(reply, wire.Stored)
    assert 0 < reply.new_bytes < core.index.ram.bytes
    assert core.puts.counters.surplus_images == sum(i.end <= 30 for i in late.images) > 1
    assert first.reuse((*tokens, 1)) == 40
    check_core(core)


def test_a_put_that_became_surplus_altogether_is_stored() -> None:
    """P6: with no new bytes."""
    core = Core(small_config(put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    late = first.grant(sequence(30))
    second.store(sequence(40))
    assert first.commit(late) == wire.Stored(new_bytes=0, length=30)
    assert core.index.ram.images == 1


def test_a_surplus_segment_with_rows_that_are_needed_declines_the_put() -> None:
    """P6: `Stored` promises the end; rows that went with a surplus image are offered again."""
    core = Core(small_config(put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    tokens = sequence(60)
    late = first.grant(tokens[:30], "ring/a")
    second.store(tokens, "ring/a")
    assert first.commit(late) == wire.Declined(reason="busy")
    assert core.index.ram.bytes_by_state["in_flight"] == 0
    first.store(tokens[:30], "ring/a")
    assert first.contains(tokens[:30], "ring/a")


def test_the_base_of_a_put_stays_while_it_is_in_flight() -> None:
    """P6, E2: the path of a put is no victim, in either tier."""
    core = Core(small_config(ram_bytes=3 * PAGE))
    first, second = Client(core, 1), Client(core, 2)
    first.store(sequence(10))
    grant = first.grant(sequence(20))
    second.store(sequence(10, 1))
    second.store(sequence(10, 2))
    assert second.peek(sequence(11)) == 10
    first.commit(grant)
    assert first.reuse(sequence(21)) == 20


def test_the_base_of_a_put_follows_what_replaces_its_end() -> None:
    """P6, P11: another put absorbs the leaf that this one builds on; what took its place stays."""
    core = Core(small_config(ram_bytes=5 * PAGE, segment_min_tokens=50, put_wait_seconds=0.0))
    one, two, others = Client(core, 1), Client(core, 2), Client(core, 3)
    base = sequence(10)
    one.store(base)
    absorbing = one.grant(base + sequence(10, 7))
    building = two.grant(base + sequence(10, 9))
    assert building.base == 10
    assert isinstance(one.commit(absorbing), wire.Stored)
    for salt in range(20, 26):
        others.put(sequence(20, salt))
        others.reuse(sequence(21, salt))
    assert isinstance(two.commit(building), wire.Stored)
    assert two.reuse((*base, *sequence(10, 9), 1)) == 20
    check_core(core)


def test_a_put_whose_base_was_lost_is_declined() -> None:
    """P6, issue 3: a base that is gone with its file leaves no unreachable continuation."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0, idle_seconds=5.0))
    disk = FakeDisk(core)
    first, second = Client(core, 1), Client(core, 2)
    first.store(sequence(30))
    disk.settle()
    core.advance(30.0)
    grant = first.grant(sequence(40))
    slot = second.ask(sequence(31))
    disk.accept()
    disk.lose(next(iter(disk.files)))
    disk.finish_read(next(iter(disk.reads)))
    assert isinstance(slot.reply, wire.Miss)
    assert first.commit(grant) == wire.Declined(reason="busy")
    disk.settle()
    check_idle(core)
    assert (core.index.ram.bytes, core.index.ssd.bytes) == (0, 0)


def test_a_commit_after_clear_is_declined() -> None:
    """P6: `cleared`, and nothing of it is found."""
    core = Core()
    client = Client(core)
    client.store(sequence(20))
    grant = client.grant(sequence(40))
    client.clear("plain/a")
    assert client.commit(grant) == wire.Declined(reason="cleared")
    assert client.miss(sequence(41)).reason == "empty"
    assert core.index.ram.bytes == 0


def test_a_put_after_clear_starts_anew() -> None:
    """D11: a clear ends a namespace; the next put is of another epoch."""
    core = Core()
    client = Client(core)
    old = client.grant(sequence(40))
    client.clear()
    client.store(sequence(20))
    assert client.commit(old) == wire.Declined(reason="cleared")
    assert client.reuse(sequence(40)) == 20
    check_core(core)


def test_more_than_the_cap_is_too_large() -> None:
    """P7: declined at once, and nothing is evicted for it."""
    core = Core(small_config(ram_bytes=2 * PAGE))
    client = Client(core)
    client.store(sequence(10))
    assert client.refusal(sequence(100, 1)) == "too-large"
    assert client.contains(sequence(10))
    few = Core(small_config(max_images=2, segment_max_bytes=3000))
    assert Client(few).refusal(sequence(40)) == "too-large"


def test_every_refusal_has_its_reason_and_a_counter() -> None:
    """P10: declining is normal, and says why."""
    core = Core(small_config(put_min_tokens=16, ram_bytes=20 * PAGE))
    client = Client(core)
    assert client.refusal(sequence(15)) == "too-short"
    client.store(sequence(20))
    offer = wire.Offer("plain/a", pack_tokens(sequence(30)), encoded("chunk"))
    assert core.reply(1, offer).reason == "schema-mismatch"
    broken = wire.Offer("plain/b", pack_tokens(sequence(30)), b"no schema")
    assert core.reply(1, broken).reason == "invalid"
    misplaced = wire.Offer(
        "hybrid/a", pack_tokens(sequence(30)), encoded("hybrid"),
        checkpoint=ImageSpec(ImageKind.CHECKPOINT, 29, 29),
    )  # fmt: skip
    assert core.reply(1, misplaced).reason == "invalid"
    core.memories_left = 0
    assert client.refusal(sequence(30)) == "no-space"
    assert core.statistics().puts["declined"] == {
        "too-short": 1, "schema-mismatch": 1, "invalid": 2, "no-space": 1,
    }  # fmt: skip
    check_idle(core)


def test_no_ram_means_disabled() -> None:
    """P10: with a cap of nothing every put is `disabled`."""
    assert Client(Core(small_config(ram_bytes=0))).refusal(sequence(20)) == "disabled"


def test_a_schema_binds_a_namespace_as_long_as_it_holds_something() -> None:
    """N4: another schema is declined, never mixed; an emptied namespace is free again."""
    core = Core()
    client = Client(core)
    client.store(sequence(20))
    other = wire.Offer("plain/a", pack_tokens(sequence(20)), encoded("hybrid"))
    assert core.reply(1, other) == wire.Declined(reason="schema-mismatch")
    client.clear("plain/a")
    grant = core.reply(1, other)
    assert isinstance(grant, wire.Grant)
    again = wire.Offer("plain/a", pack_tokens(sequence(20)), encoded("plain"))
    assert core.reply(2, again) == wire.Declined(reason="schema-mismatch")
    core.send_one_way(1, wire.Abandon(grant.put))
    assert isinstance(core.reply(2, again), wire.Grant)


def test_reservations_are_all_or_nothing() -> None:
    """E6: a put that fits only in part holds nothing while it is declined."""
    core = Core(small_config(ram_bytes=3 * PAGE, segment_max_bytes=15000))
    client, other = Client(core, 1), Client(core, 2)
    client.store(sequence(40))  # two images of a page each, with a lease on each
    client.hit(sequence(41))
    before = core.index.ram.bytes
    assert other.refusal(sequence(40, 1)) == "no-space"
    assert core.index.ram.bytes == before
    assert not core.puts.puts


def test_a_failed_allocation_frees_what_it_had() -> None:
    """E6: out of descriptors in the middle of a put, everything is given back."""
    core = Core(small_config(segment_max_bytes=3000))
    client = Client(core)
    core.memories_left = 2
    assert client.refusal(sequence(40)) == "no-space"
    assert [memory.is_freed for memory in core.memories] == [True, True]
    check_idle(core)


def test_a_session_has_a_bounded_number_of_puts() -> None:
    """C3: one connection cannot reserve everything."""
    core = Core()
    client = Client(core)
    for salt in range(16):
        client.grant(sequence(10, salt))
    assert client.refusal(sequence(10, 99)) == "busy"


def test_only_the_extension_moves() -> None:
    """Issue 2: a put of 1,000 tokens on held 8,000 transfers the bytes of the 1,000."""
    core = Core()
    client = Client(core, fills=False)
    tokens = sequence(9000)
    client.store(tokens[:8000], "chunk/a")
    grant = client.grant(tokens, "chunk/a")
    reply = client.commit(grant)
    assert grant.base == 8000
    assert reply.new_bytes == 1000 * 700  # no rows: 9000 is a chunk's boundary


def test_an_observer_cannot_fail_a_put() -> None:
    """P9: it is told namespace, tokens and length of every publication."""
    core = Core()
    seen: list[tuple[str, bytes, int]] = []

    def broken(namespace: str, tokens: bytes, length: int) -> None:
        seen.append((namespace, tokens, length))
        raise RuntimeError("not my day")

    core.observers.append(broken)
    client = Client(core)
    client.store(sequence(20))
    assert seen == [("plain/a", pack_tokens(sequence(20)), 20)]
    assert client.contains(sequence(20))


def test_observers_hear_nothing_of_a_put_that_failed() -> None:
    """P9: what could not be sealed was not published."""
    core = Core(auto_seal=False)
    seen: list[str] = []
    core.observers.append(lambda namespace, _tokens, _length: seen.append(namespace))
    client = Client(core)
    core.call(1, wire.Commit(client.grant(sequence(20)).put))
    core.finish_seal("device busy")
    assert seen == []


def test_the_least_that_a_put_may_have_is_enough() -> None:
    """P10: `too-short` is what has fewer tokens than put_min_tokens, and what has none."""
    assert Client(Core(small_config(put_min_tokens=1))).put(sequence(1)).length == 1
    assert Client(Core(small_config(put_min_tokens=0))).refusal(()) == "too-short"


def test_commit_of_a_sealing_put_is_refused() -> None:
    """C3: a put is committed once."""
    core = Core(auto_seal=False)
    client = Client(core)
    grant = client.grant(sequence(20))
    first = core.call(1, wire.Commit(grant.put))
    assert core.reply(1, wire.Commit(grant.put)) == wire.Declined(reason="invalid")
    core.send_one_way(1, wire.Abandon(grant.put))
    core.finish_seal()
    assert isinstance(first.reply, wire.Stored)


def test_objects_are_replaced_by_key() -> None:
    """O1, P3: the newest object wins; a lease on the old one stays valid."""
    core = Core()

    def put(data: bytes) -> None:
        spec = ImageSpec(ImageKind.OBJECT, metadata=data)
        offer = wire.OfferObject("plain/a", "key", spec)
        grant = core.reply(1, offer)
        assert isinstance(grant, wire.Grant)
        assert (grant.base, grant.images) == (0, (spec,))
        assert isinstance(core.reply(1, wire.Commit(grant.put)), wire.Stored)

    put(b"1")
    old: Slot = core.call(1, wire.TakeObject("plain/a", "key"))
    put(b"2")
    new = core.reply(1, wire.TakeObject("plain/a", "key"))
    assert [p.spec.metadata for p in new.parts] == [b"2"]
    assert isinstance(old.reply, wire.Hit)
    assert msgspec.structs.asdict(old.reply)["parts"][0].spec.metadata == b"1"
    check_core(core)
