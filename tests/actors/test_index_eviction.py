"""Budgets and eviction in RAM (rules E1, E2, E4 to E8, E10)."""

import random
from typing import Any

import pytest

from prefixcached.actors.checkpoint_policy import KEPT_PER_CHAIN
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import allocated_bytes
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk
from tests.support.core_payload import HEAVY_STATE


def two_tiers(**changes: Any) -> tuple[Core, FakeDisk, Client]:
    settings: dict[str, Any] = {"ssd_bytes": 1 << 30, "write_delay_seconds": 0.0, **changes}
    core = Core(small_config(**settings))
    return core, FakeDisk(core), Client(core)


def test_charged_bytes_are_whole_pages() -> None:
    """E1: what is charged is what is allocated, in flight and resident alike."""
    core = Core()
    client = Client(core)
    grant = client.grant(sequence(30))
    size = 30 * (12 + 700)
    assert core.index.ram.bytes == allocated_bytes(size) == 2 * PAGE
    client.commit(grant)
    assert core.index.ram.bytes == 2 * PAGE


def test_the_number_of_images_is_a_cap_too() -> None:
    """E1, E2: many small images are bounded by their count."""
    core = Core(small_config(max_images=5))
    client = Client(core)
    for salt in range(12):
        client.store(sequence(5, salt))
        assert core.index.ram.images <= 5
    assert core.index.counters["evictions"] == 7


def test_the_least_recently_used_goes_first() -> None:
    """E3: `lru` by default; a hit refreshes its whole path."""
    core = Core(small_config(max_images=3, retention="lru"))
    client = Client(core)
    for salt in range(3):
        client.store(sequence(10, salt))
    client.reuse(sequence(11, 0))
    client.store(sequence(10, 3))
    assert [client.contains(sequence(10, salt)) for salt in range(4)] == [True, False, True, True]


def test_leaves_go_before_their_ancestors() -> None:
    """E2: a chain shrinks from its end; what is left of it stays usable."""
    core = Core(small_config(max_images=4, retention="lru"))
    client = Client(core)
    tokens = sequence(40)
    for length in (10, 20, 30, 40):
        client.store(tokens[:length])
    lengths = []
    for salt in range(1, 4):
        client.store(sequence(10, salt))
        lengths.append(client.peek((*tokens, 1)))
    assert lengths == [30, 20, 10]


def test_what_is_held_is_no_victim() -> None:
    """E2: neither leased nor pinned entries, nor the path of a put in flight, are evicted."""
    core = Core(small_config(max_images=4))
    leased, pinned, putting, other = (Client(core, session) for session in range(1, 5))
    for salt, client in enumerate((leased, pinned, putting)):
        client.store(sequence(10, salt))
    hit = leased.hit(sequence(11, 0))
    pin = pinned.prefetch(sequence(11, 1)).reply
    assert isinstance(pin, wire.Pinned)
    grant = putting.grant(sequence(20, 2))
    assert other.refusal(sequence(10, 9)) == "no-space"
    assert [leased.contains(sequence(10, salt)) for salt in range(3)] == [True] * 3
    leased.release(hit)
    other.store(sequence(10, 9))
    assert not leased.contains(sequence(10, 0))
    putting.commit(grant)
    check_core(core)


def test_a_durable_victim_is_dropped_without_io() -> None:
    """E4: it leaves RAM and is still found on SSD."""
    core, disk, client = two_tiers(max_images=2)
    client.store(sequence(10, 0))
    client.store(sequence(10, 1))
    disk.settle()
    client.store(sequence(10, 2))
    assert core.index.counters["dropped_unwritten"] == 0
    assert client.contains(sequence(10, 0))
    assert not disk.reads


def test_what_will_be_written_is_written_first() -> None:
    """E4, E5: a queued write is no copy; a put waits for the writer, and then gets the room."""
    core, disk, client = two_tiers(max_images=2)
    client.store(sequence(10, 0))
    client.store(sequence(10, 1))
    slot = client.offer(sequence(10, 2))
    assert slot.reply is None
    assert client.contains(sequence(10, 0))
    disk.step()
    assert isinstance(slot.reply, wire.Grant)
    assert client.contains(sequence(10, 0))
    assert core.puts.counters.waits_for_room == 1


def test_while_the_writer_is_behind_a_put_is_busy_after_a_while() -> None:
    """E4, P10: waiting is brief."""
    core, _, client = two_tiers(max_images=2)
    client.store(sequence(10, 0))
    client.store(sequence(10, 1))
    slot = client.offer(sequence(10, 2))
    core.advance(1.1)
    assert slot.reply == wire.Declined(reason="busy")


def test_what_will_never_be_written_is_dropped_and_counted() -> None:
    """E4: the cap wins over persistence while the disk fails."""
    core, disk, client = two_tiers(max_images=2)
    disk.set_healthy(False)
    for salt in range(3):
        client.store(sequence(10, salt))
    assert core.index.counters["dropped_unwritten"] == 1
    assert not client.contains(sequence(10, 0))
    assert client.miss(sequence(11, 0)).reason == "evicted"


@pytest.mark.parametrize("auto_free", [True, False])
def test_memory_that_is_being_freed_still_counts(auto_free: bool) -> None:
    """E2: an offer that needs it waits until the system has it back."""
    core = Core(small_config(max_images=1), auto_free=auto_free)
    client = Client(core)
    client.store(sequence(10, 0))
    slot = client.offer(sequence(10, 1))
    assert core.index.ram.images == 1
    if not auto_free:
        assert slot.reply is None
        core.finish_free()
    assert isinstance(slot.reply, wire.Grant)


def test_a_promotion_never_evicts_what_is_used_more() -> None:
    """E7: with RAM full of more recent entries it is not made."""
    core, disk, client = two_tiers(max_images=1, promote="always")
    client.store(sequence(10, 0))
    disk.settle()
    client.store(sequence(10, 1))
    disk.settle()
    slot = client.ask(sequence(11, 0))
    client.hit(sequence(11, 1))
    disk.settle()
    client.verify(slot, sequence(11, 0))
    assert core.promotions.declined == 1
    assert client.hit(sequence(11, 1)).tier == "ram"


def test_idle_entries_leave_ram_when_they_are_durable() -> None:
    """E8: unused, unpinned and durable ones go, whole chains in one sweep."""
    core, disk, client = two_tiers(idle_seconds=100.0)
    for length in range(5, 30, 5):
        client.store(sequence(length))
    disk.settle()
    client.store(sequence(10, 1))  # not durable
    client.store(sequence(10, 2))
    core.advance(95.0)
    assert core.index.ram.images == 7
    client.reuse(sequence(11, 2))
    core.advance(20.0)
    assert core.index.ram.images == 2
    assert core.index.counters["demotions"] == 5
    assert client.peek(sequence(26)) == 25


def test_without_a_disk_nothing_is_demoted() -> None:
    """E8: idle entries stay where they are the only copy."""
    core = Core(small_config(idle_seconds=1.0))
    client = Client(core)
    client.store(sequence(10))
    core.advance(1e4)
    assert client.contains(sequence(10))


def test_releasing_a_lease_lets_a_put_in() -> None:
    """E10: the end of a lease re-runs the budget for whoever waits."""
    core = Core(small_config(max_images=2), auto_free=False)
    first, second = Client(core, 1), Client(core, 2)
    first.store(sequence(10, 0))
    hit = first.hit(sequence(11, 0))
    first.clear()
    second.store(sequence(10, 1))
    slot = second.offer(sequence(10, 2))
    assert slot.reply is None, "one image lingers, one can go"
    first.release(hit)
    core.finish_free()
    assert isinstance(slot.reply, wire.Grant)


def test_absorbing_an_unwritten_leaf_drops_it_at_once() -> None:
    """P11: the absorbed image's bytes are free as soon as nobody reads them."""
    core, disk, client = two_tiers(segment_min_tokens=64, write_delay_seconds=0.5)
    client.store(sequence(10))
    client.store(sequence(20))
    assert core.index.ram.images == 1
    core.advance(1.0)
    disk.settle()
    assert [f.entry.header.spec.end for f in disk.files.values()] == [20]


@pytest.mark.parametrize("seed", range(4))
def test_caps_hold_over_many_random_operations(seed: int) -> None:
    """E2: 500 operations with images of random sizes never exceed a cap at any observation."""
    order = random.Random(seed)
    core, disk, _ = two_tiers(
        ram_bytes=20 * PAGE, max_images=12, ssd_bytes=30 * PAGE, segment_max_bytes=16000,
        write_delay_seconds=0.1, idle_seconds=3.0, promote="always",
    )  # fmt: skip
    hits: list[tuple[Client, wire.Hit]] = []
    for step in range(500):
        client = Client(core, step % 5 + 1)
        tokens = sequence(order.randrange(1, 90), order.randrange(6))
        kind = order.choice(["put"] * 5 + ["take"] * 4 + ["release", "write", "write", "clear"])
        if kind == "put":
            heavy = order.random() < 0.3
            if heavy:
                client.put(tokens, "hybrid/a", state=True, tensor=HEAVY_STATE, seconds=0.0)
            else:
                client.put(tokens, seconds=0.0)
        elif kind == "take":
            slot = client.ask(tokens)
            disk.accept()
            for name in list(disk.reads):
                disk.finish_read(name)
            if isinstance(slot.reply, wire.Hit):
                hits.append((client, slot.reply))
        elif kind == "release" and hits:
            holder, hit = hits.pop(0)
            holder.release(hit)
        elif kind == "write":
            disk.step()
            core.advance(0.2)
        elif kind == "clear" and order.random() < 0.1:
            client.clear()
        for name in list(disk.promotions):
            disk.finish_promotion(name)
        while len(hits) > 4:
            holder, hit = hits.pop(0)
            holder.release(hit)
        check_core(core)
        assert disk.bytes <= core.index.ssd.bytes <= core.index.ssd.bytes_cap
    assert core.index.ram.peak_bytes <= core.index.ram.bytes_cap
    assert core.index.counters["evictions"] > 5


def test_surplus_snapshots_leave_before_segments_that_are_older() -> None:
    """E11: what a conversation has grown past goes first, whatever was used before it."""
    turns = KEPT_PER_CHAIN + 1
    core = Core(small_config(ram_bytes=(2 * turns + 1) * PAGE))
    client = Client(core)
    client.store(sequence(10, 1))
    for turn in range(1, turns + 1):
        client.store(sequence(10 * turn), "hybrid/a", state=True)
    client.store(sequence(10, 2))
    assert client.contains(sequence(10, 1))
    assert not client.contains(sequence(10), "hybrid/a")
    assert client.contains(sequence(20), "hybrid/a")


def test_what_absorbs_a_leaf_has_its_uses() -> None:
    """E9, P11: a conversation that was hit stays protected when its next turn absorbs it."""
    client = Client(Core(small_config(segment_min_tokens=64, max_images=2)))
    client.store(sequence(10))
    client.reuse(sequence(11))
    client.store(sequence(20))
    for salt in (1, 2, 3):
        client.store(sequence(10, salt))
    assert client.contains(sequence(20))


def test_a_lower_cap_takes_no_more_than_exceeds_it() -> None:
    """M5: a cap that no sum of images meets exactly ends the eviction as well."""
    core = Core(small_config(ram_bytes=4 * PAGE))
    client = Client(core)
    for salt in range(4):
        client.store(sequence(10, salt))
    core.eviction.evict_beyond(3 * PAGE + 1)
    assert core.index.ram.bytes == 3 * PAGE


def test_bytes_in_flight_are_not_waited_for() -> None:
    """E2, E6: what only another put's end can free is no room that comes soon."""
    core = Core(small_config(ram_bytes=2 * PAGE))
    first, second = Client(core, 1), Client(core, 2)
    first.grant(sequence(30))
    assert second.refusal(sequence(10, 1)) == "no-space"


@pytest.mark.parametrize("cap", [{"max_images": 1}, {"ram_bytes": PAGE}])
def test_what_only_the_writer_holds_is_waited_for(cap: dict[str, int]) -> None:
    """E4: the one image in RAM is being written; a put gets its place once it is durable."""
    _, disk, client = two_tiers(**cap)
    client.store(sequence(10, 0))
    disk.accept()
    slot = client.offer(sequence(10, 1))
    assert slot.reply is None
    disk.step()
    assert isinstance(slot.reply, wire.Grant)


def test_what_is_lent_while_it_is_written_is_not_waited_for() -> None:
    """E2, E4: the end of the write frees nothing that a reader holds as well."""
    _, disk, client = two_tiers(max_images=1)
    client.store(sequence(10, 0))
    disk.accept()
    client.hit(sequence(11, 0))
    assert client.refusal(sequence(10, 1)) == "no-space"


def two_with_room_for_one() -> tuple[Core, FakeDisk, Client]:
    """Two durable prompts, the second one in RAM, where only one image fits."""
    core, disk, client = two_tiers(max_images=1, promote="always")
    for salt in range(2):
        client.store(sequence(10, salt))
        disk.settle()
    return core, disk, client


def test_a_promotion_evicts_what_is_used_less() -> None:
    """E7: what was read again takes the place of what was only stored."""
    core, disk, client = two_with_room_for_one()
    slot = client.ask(sequence(11, 0))
    disk.settle()
    client.release(client.verify(slot, sequence(11, 0)))
    assert core.promotions.promoted == 1
    assert client.hit(sequence(11, 0)).tier == "ram"


def test_a_promotion_leaves_what_was_hit_and_given_back() -> None:
    """E7: no lease is needed to stay; it is enough to rank above the promoted."""
    core, disk, client = two_with_room_for_one()
    slot = client.ask(sequence(11, 0))
    client.reuse(sequence(11, 1))
    disk.settle()
    client.release(client.verify(slot, sequence(11, 0)))
    assert core.promotions.declined == 1
    assert client.hit(sequence(11, 1)).tier == "ram"


def test_what_left_ram_for_the_disk_is_no_part_of_a_quota() -> None:
    """E8, E9: a quota counts resident bytes alone."""
    core, disk, client = two_tiers(idle_seconds=5.0)
    client.store(sequence(10))
    disk.settle()
    core.advance(30.0)
    assert client.contains(sequence(10))
    assert core.index.quotas.resident_bytes == {}


def test_images_of_no_bytes_come_and_go() -> None:
    """E1: a pure state model's segments have no bytes; they count as images all the same."""
    core = Core(small_config(namespace_quota=0.5))
    client = Client(core)
    for length in (10, 20):
        client.store(sequence(length), "state/a", state=True)
    client.store(sequence(30), "state/a")
    assert core.index.ram.images == 5
    check_core(core)
    client.clear()
    assert (core.index.ram.bytes, core.index.ram.images) == (0, 0)


def test_a_snapshot_that_is_among_the_newest_of_a_branch_is_surplus_no_more() -> None:
    """E11: it was passed by one conversation, and another one goes on from it."""
    turns = KEPT_PER_CHAIN + 1
    core = Core(small_config(ram_bytes=(2 * turns + 3) * PAGE))
    client = Client(core)
    client.store(sequence(10, 1))
    for turn in range(1, turns + 1):
        client.store(sequence(10 * turn), "hybrid/a", state=True)
    client.store((*sequence(10), *sequence(10, 1)), "hybrid/a", state=True)
    client.store(sequence(10, 2))
    assert not client.contains(sequence(10, 1))
    assert client.contains(sequence(10), "hybrid/a")
