"""What the index keeps together in rare orders of events: both ledgers, both tiers (E1, L2, D8)."""

from typing import Any

from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import Synced
from prefixcached.protocol.image import WindowRows
from prefixcached.protocol.tokens import pack_tokens, token_array
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core, check_disk, check_disk_idle, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk
from tests.support.core_payload import encoded


def two_tiers(**changes: Any) -> tuple[Core, FakeDisk, Client]:
    settings: dict[str, Any] = {
        "ssd_bytes": 1 << 30, "write_delay_seconds": 0.0, "put_wait_seconds": 0.0, **changes,
    }  # fmt: skip
    core = Core(small_config(**settings))
    return core, FakeDisk(core), Client(core)


def test_an_absorbed_leaf_that_is_lent_serves_from_ram_again() -> None:
    """D8, L2: its successor left unwritten; the bytes that a lease kept are resident again."""
    core, disk, client = two_tiers(segment_min_tokens=64, max_images=2)
    client.store(sequence(10))
    disk.settle()
    hit = client.hit(sequence(11))
    disk.set_healthy(False)
    client.store(sequence(20))
    assert core.index.ram.bytes_by_state["lingering"] == PAGE
    client.store(sequence(10, 1))
    assert client.peek(sequence(21)) == 10
    assert core.index.ram.bytes_by_state["lingering"] == 0
    assert core.index.ram.bytes_by_state["resident"] == 2 * PAGE
    check_core(core)
    again = client.hit(sequence(11))
    assert again.tier == "ram"
    client.release(hit)
    client.release(again)
    check_core(core)
    disk.set_healthy(True)
    client.clear()
    disk.settle()
    core.gone(1)
    assert (core.index.ram.bytes, core.index.ram.images) == (0, 0)


def test_what_the_disks_cap_pushed_out_is_said_to_be_evicted() -> None:
    """T9: a miss names the eviction, but only of what is in no tier any more."""
    core, disk, client = two_tiers(idle_seconds=5.0)
    for salt in range(2):
        client.store(sequence(10, salt))
        core.advance(1.0)
        disk.settle()
    core.advance(30.0)
    slot = client.ask(sequence(11, 1))
    disk.settle()
    client.release(client.verify(slot, sequence(11, 1)))
    core.index.ssd.bytes_cap = disk.bytes - 1
    assert core.eviction.make_room_on_disk(0)
    disk.settle()
    assert client.contains(sequence(10, 1))
    assert client.miss(sequence(11, 0)).reason == "evicted"
    cause = core.index.evicted_memory.cause("plain/a", token_array(sequence(11, 0)), 0)
    assert cause == "ssd-cap"


def test_a_file_that_leaves_while_ram_has_its_image_is_no_eviction() -> None:
    """T9: what is still served was not evicted, whatever the disk did with its copy."""
    core, disk, client = two_tiers()
    client.store(sequence(10, 0))
    client.store(sequence(10, 1))
    disk.settle()
    core.index.ssd.bytes_cap = disk.bytes - 1
    assert core.eviction.make_room_on_disk(0)
    disk.settle()
    assert len(disk.files) == 1
    assert client.contains(sequence(10, 0))
    assert client.contains(sequence(10, 1))
    client.clear()
    assert client.miss(sequence(11, 0)).reason == "empty"


def test_a_file_that_is_lost_twice_is_lost_once() -> None:
    """D1: several readers may find the same file gone."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    disk.settle()
    (entry,) = core.index.entries.values()
    before = core.index.ssd.bytes
    core.index.lose_file(entry)
    after = core.index.ssd.bytes
    core.index.lose_file(entry)
    assert (before - after, core.index.ssd.bytes) == (before, after)
    assert client.contains(sequence(10))
    check_core(core)


def test_two_puts_of_one_state_leave_one_of_each_image() -> None:
    """P6: of what was granted twice the images of the second commit are surplus and freed."""
    core = Core(small_config(put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    grant = first.grant(sequence(20), "hybrid/a", state=True)
    second.store(sequence(20), "hybrid/a", state=True)
    before = core.index.ram.bytes_by_state["resident"]
    assert first.commit(grant) == wire.Stored(new_bytes=0, length=20)
    assert core.puts.counters.surplus_images == 2
    assert core.index.ram.bytes == before
    assert first.contains(sequence(20), "hybrid/a")
    check_core(core)


def test_rows_that_another_put_stored_meanwhile_are_surplus() -> None:
    """P6, T13: rows alone do not replace rows alone that are the same."""
    core = Core(small_config(put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    first.store(sequence(40), "ring/a")
    grant = first.grant(sequence(20), "ring/a")
    second.store(sequence(20), "ring/a")
    assert first.commit(grant) == wire.Stored(new_bytes=0, length=20)
    assert core.puts.counters.surplus_images == 1
    assert first.hit((*sequence(20), 1), "ring/a").length == 20
    core.gone(1)
    core.gone(2)
    check_idle(core)


def test_rows_of_as_many_groups_as_the_schema_has_are_offered() -> None:
    """P1, C3: an offer whose rows belong to no window of its schema is invalid."""
    core = Core()
    client = Client(core)
    for windows in ((), (WindowRows(), WindowRows())):
        offer = wire.Offer("ring/a", pack_tokens(sequence(20)), encoded("ring"), windows=windows)
        assert core.reply(1, offer) == wire.Declined(reason="invalid")
    client.store(sequence(20), "ring/a")
    check_core(core)


def test_a_promotion_without_memory_is_served_from_its_file() -> None:
    """E6, D7: a machine that gives no memory costs the promotion, not the hit."""
    core, disk, client = two_tiers(idle_seconds=5.0, promote="always")
    client.store(sequence(10))
    disk.settle()
    core.advance(30.0)
    core.memories_left = 0
    slot = client.ask(sequence(11))
    disk.settle()
    assert client.verify(slot, sequence(11)).tier == "ssd"
    assert core.promotions.declined == 1
    assert (core.index.ram.bytes, core.promotions.in_flight) == (0, 0)
    check_disk(core, disk)


def test_a_flush_without_a_disk_is_answered_at_once() -> None:
    """P8: with the tier off everything is left out by policy, and nothing failed."""
    core = Core()
    client = Client(core)
    client.store(sequence(10))
    client.store(sequence(10, 1))
    assert client.flush().reply == wire.Flushed(written=0, skipped=2, failed=0)


def test_a_flush_whose_client_left_is_nobodys() -> None:
    """L1: SsdTier's answer for a connection that is gone changes nothing."""
    core, disk, client = two_tiers()
    core.auto_sync = False
    client.store(sequence(10))
    other = Client(core, 2)
    gone, waiting = client.flush(), other.flush()
    core.gone(1)
    core.auto_sync = True
    disk.settle()
    while core.syncing:
        core.send(Synced(core.syncing.pop(0).sync))
    disk.settle()
    assert gone.reply is None
    assert isinstance(waiting.reply, wire.Flushed)
    assert len(disk.files) == 1


def test_a_namespace_back_within_its_quota_pays_no_more() -> None:
    """E9: what is over the quota goes first; the rest of the room comes from the least used."""
    cap = 8
    core = Core(small_config(ram_bytes=cap * PAGE, namespace_quota=0.5, retention="lru"))
    client = Client(core)
    for salt in range(3):
        client.store(sequence(10, salt), "plain/small")
    for salt in range(5):
        client.store(sequence(10, salt), "plain/big")
    client.store(sequence(60, 9), "plain/new")
    held = {
        namespace.name: nbytes // PAGE
        for namespace, nbytes in core.index.quotas.resident_bytes.items()
    }
    assert held["plain/new"] == 3
    assert held["plain/big"] == 4, "one over its quota of four"
    assert held["plain/small"] == 1, "the oldest of all"
    check_core(core)


def test_a_promotion_takes_the_place_of_one_image() -> None:
    """E1, T7: where one more image fits, it is made resident."""
    core, disk, client = two_tiers(idle_seconds=5.0, promote="always", max_images=1)
    client.store(sequence(10))
    disk.settle()
    core.advance(30.0)
    slot = client.ask(sequence(11))
    disk.settle()
    assert client.verify(slot, sequence(11)).length == 10
    assert core.promotions.promoted == 1
    assert core.index.ram.images == 1


def test_a_lower_cap_counts_what_is_on_its_way_out() -> None:
    """M5: bytes that the system has not got back yet are not evicted for a second time."""
    core = Core(small_config(ram_bytes=4 * PAGE), auto_free=False)
    client = Client(core)
    for salt in range(4):
        client.store(sequence(10, salt))
    core.eviction.evict_beyond(3 * PAGE)
    assert core.index.counters["evictions"] == 1
    core.eviction.evict_beyond(2 * PAGE)
    assert core.index.counters["evictions"] == 2
    while core.freeing:
        core.finish_free()
    assert core.index.ram.bytes == 2 * PAGE


def test_a_leaf_that_is_still_being_written_serves_nobody_again() -> None:
    """E5, D8: a pending write is no copy, so what absorbed it takes it along when it leaves."""
    core, disk, client = two_tiers(segment_min_tokens=64)
    client.store(sequence(10))
    disk.accept()
    client.store(sequence(20))
    (successor,) = core.index.entries.values()
    assert [old.file for old in successor.superseded] == [None]
    core.index.remove(successor)
    assert client.peek(sequence(21)) == 0
    disk.settle()
    assert not disk.files
    assert (core.index.ram.bytes, core.index.ssd.bytes) == (0, 0)
    check_disk(core, disk)


def test_the_longest_of_what_was_absorbed_serves_again() -> None:
    """D8: also where it became durable only after it was absorbed; the shorter file goes."""
    core, disk, client = two_tiers(segment_min_tokens=64)
    client.store(sequence(10))
    disk.settle()
    client.store(sequence(20))
    disk.accept()
    client.store(sequence(30))
    disk.step()
    (successor,) = core.index.entries.values()
    core.index.remove(successor)
    assert client.peek(sequence(31)) == 20
    check_core(core)
    disk.settle()
    assert [file.entry.header.spec.end for file in disk.files.values()] == [20]
    check_disk_idle(core, disk)


def test_what_serves_again_from_its_file_can_be_evicted() -> None:
    """D8, E2: back in the tree it is a victim as any other."""
    core, disk, client = two_tiers(segment_min_tokens=64)
    client.store(sequence(10))
    disk.settle()
    disk.set_healthy(False)
    client.store(sequence(20))
    (successor,) = core.index.entries.values()
    core.index.remove(successor)
    assert client.peek(sequence(21)) == 10
    core.index.ssd.bytes_cap = 0
    assert core.eviction.make_room_on_disk(0)
    disk.settle()
    assert not disk.files


def test_what_serves_again_from_ram_counts_for_its_quota() -> None:
    """D8, E9: a namespace's resident bytes are those of its entries, revived ones included."""
    core, disk, client = two_tiers(segment_min_tokens=64)
    client.store(sequence(10))
    disk.settle()
    client.hit(sequence(11))
    disk.set_healthy(False)
    client.store(sequence(20))
    (successor,) = core.index.entries.values()
    core.index.remove(successor)
    assert list(core.index.quotas.resident_bytes.values()) == [PAGE]


def test_what_leaves_with_its_parent_takes_along_what_it_absorbed() -> None:
    """D8, E2: nobody can find that file any more, so it is deleted."""
    core, disk, client = two_tiers(segment_min_tokens=64)
    for length in (70, 80):
        client.store(sequence(length))
    disk.settle()
    disk.set_healthy(False)
    client.store(sequence(90))
    (top,) = (entry for entry in core.index.entries.values() if entry.spec.end == 70)
    core.index.remove(top)
    disk.settle()
    assert not disk.files
    assert core.index.ssd.bytes == 0


def test_a_label_of_what_was_evicted_marks_nothing() -> None:
    """S1: neither the label nor the index keeps what is in no tier any more."""
    core = Core(small_config(max_images=1))
    client = Client(core)
    client.store(sequence(10), label="talk")
    client.store(sequence(10, 1))
    assert [label.entry for label in core.labels.labels.values()] == [None]
    assert core.index._labels == {}  # it would grow with every turn
