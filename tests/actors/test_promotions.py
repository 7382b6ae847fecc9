"""PromotionDesk: what is made resident, and what need not be (T7)."""

import pytest

from prefixcached.actors import eviction
from prefixcached.actors.entries import Entry, WriteState
from prefixcached.protocol import messages as wire
from prefixcached.protocol.messages import Grant
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core, check_disk_idle, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


def one_on_disk() -> tuple[Core, FakeDisk, Client, Entry]:
    """A core with one entry, of ``sequence(20)``, that is on SSD only."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(20))
    disk.settle()
    (entry,) = core.index.entries.values()
    core.index.drop_memory(entry)
    return core, disk, client, entry


def test_what_is_resident_is_not_promoted() -> None:
    """T7: what RAM holds is not read again."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk = FakeDisk(core)
    Client(core).store(sequence(20))
    disk.settle()
    (entry,) = core.index.entries.values()
    assert entry.memory is not None
    assert entry.file is not None
    assert not core.promotions.promote(entry)
    assert core.promotions.in_flight == 0


@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_file_that_a_promotion_finds_broken_is_no_longer_held(kind: str) -> None:
    """D3, P3: as after a read it counts no more, and who stores the same again stores it."""
    core, disk, client, entry = one_on_disk()
    stored = entry.nbytes
    assert core.promotions.promote(entry)
    disk.accept()
    if kind == "missing":
        disk.files.clear()
    disk.finish_promotion(entry.id, kind)
    assert core.index.ssd.bytes == core.index.ram.bytes == 0
    assert core.statistics().disk[kind] == 1
    assert client.store(sequence(20)) == stored
    disk.settle()
    assert client.reuse(sequence(21)) == 20
    check_core(core)
    check_disk_idle(core, disk)


def test_a_promotion_that_fails_for_a_moment_leaves_the_file() -> None:
    """D4: what could not be read now is still held."""
    core, disk, client, entry = one_on_disk()
    assert core.promotions.promote(entry)
    disk.accept()
    disk.finish_promotion(entry.id, "transient")
    assert client.contains(sequence(20))
    assert core.statistics().disk["read_failures"] == 1
    check_disk_idle(core, disk)


def test_a_prefetch_whose_file_breaks_on_its_way_pins_nothing() -> None:
    """F1, D3: it was whole when it was verified, and not any more when it was copied."""
    core, disk, client, entry = one_on_disk()
    slot = client.prefetch(sequence(21))
    disk.accept()
    disk.finish_read(entry.id)
    disk.finish_promotion(entry.id, "damaged")
    assert slot.reply == wire.Pinned(pin=None, length=0)
    check_core(core)
    check_idle(core)


def with_full_ram(
    *, auto_free: bool = True, in_ram: tuple[tuple[int, int], ...] = ((10, 1), (10, 2))
) -> tuple[Core, FakeDisk, Client, Entry]:
    """Two prompts of a page in RAM, which holds two, and one of two pages, used more, on SSD."""
    config = small_config(ram_bytes=2 * PAGE, ssd_bytes=1 << 30, write_delay_seconds=0.0)
    core = Core(config, auto_free=auto_free)
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(30))
    disk.settle()
    (large,) = core.index.entries.values()
    assert large.charged_bytes == 2 * PAGE
    core.index.drop_memory(large)
    if not auto_free:
        core.finish_free()
    for length, salt in in_ram:
        client.store(sequence(length, salt))
        disk.settle()
    large.priority = 1e9
    return core, disk, client, large


def test_a_promotion_waits_until_what_it_evicted_is_freed() -> None:
    """T7, E2: what is being freed counts until then, and is not evicted in vain."""
    core, disk, _, large = with_full_ram(auto_free=False)
    told: list[float] = []
    assert core.promotions.promote(large, told.append)
    assert core.promotions.in_flight == 0
    core.finish_free()
    assert core.promotions.in_flight == 0
    core.finish_free()
    assert core.promotions.in_flight == 1
    disk.settle()
    assert large.memory is not None
    assert (len(told), core.promotions.promoted, core.promotions.declined) == (1, 1, 0)
    check_core(core)
    check_disk_idle(core, disk)


def test_two_who_ask_for_what_waits_for_room_are_both_told() -> None:
    """F2: one promotion however many ask, whether it waits for room or is under way."""
    core, disk, _, large = with_full_ram(auto_free=False)
    told: list[float] = []
    assert core.promotions.promote(large, told.append)
    assert core.promotions.promote(large, told.append)
    core.finish_free()
    core.finish_free()
    assert core.promotions.promote(large, told.append)
    disk.settle()
    assert (len(told), core.promotions.promoted) == (3, 1)
    check_disk_idle(core, disk)


def test_a_put_takes_the_room_that_a_promotion_waits_for() -> None:
    """T7, E6: whoever waits for an answer goes first; the promotion is not made."""
    core, disk, client, large = with_full_ram(auto_free=False)
    told: list[float] = []
    assert core.promotions.promote(large, told.append)
    slot = client.offer(sequence(10, 3))
    core.finish_free()
    client.fill(slot, sequence(10, 3))
    assert isinstance(slot.reply, Grant)
    core.finish_free()
    assert large.memory is None
    assert (len(told), core.promotions.promoted, core.promotions.declined) == (1, 0, 1)
    client.commit(slot.reply)
    disk.settle()
    assert client.contains(sequence(10, 3))
    check_core(core)
    check_disk_idle(core, disk)


@pytest.mark.parametrize("what", ["cleared", "suspended"])
def test_a_promotion_that_waits_for_room_ends_with_what_it_is_for(what: str) -> None:
    """T7, M2: a clear takes its file, pressure its permission."""
    core, disk, client, large = with_full_ram(auto_free=False)
    told: list[float] = []
    assert core.promotions.promote(large, told.append)
    if what == "cleared":
        client.clear()
    else:
        core.promotions.is_suspended = True
    while core.freeing:
        core.finish_free()
    disk.settle()
    assert (len(told), core.promotions.promoted, core.promotions.declined) == (1, 0, 1)
    check_core(core)
    check_idle(core)
    check_disk_idle(core, disk)


def test_all_parts_of_a_hit_wait_for_room_of_their_own() -> None:
    """T7, F1: a prompt of several images is promoted whole, also where freeing takes a while."""
    config = small_config(
        ram_bytes=4 * PAGE, ssd_bytes=1 << 30, write_delay_seconds=0.0, segment_max_bytes=PAGE
    )
    core = Core(config, auto_free=False)
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(60))
    disk.settle()
    parts = list(core.index.entries.values())
    assert len(parts) == 3
    for part in reversed(parts):
        core.index.drop_memory(part)
    while core.freeing:
        core.finish_free()
    for salt in range(1, 5):
        client.store(sequence(10, salt))
        disk.settle()
    for part in parts:
        part.priority = 1e9
        assert core.promotions.promote(part)
    while core.freeing:
        core.finish_free()
    disk.settle()
    assert all(part.memory is not None for part in parts)
    check_core(core)


def test_no_promotion_takes_the_room_that_an_offer_waits_for() -> None:
    """T7, E6: an offer of three pages waits for an image to be written, with two pages free."""
    core = Core(small_config(ram_bytes=4 * PAGE, ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(30))
    disk.settle()
    (large,) = core.index.entries.values()
    core.index.drop_memory(large)
    for salt in range(1, 5):
        client.store(sequence(10, salt))
        if salt < 3:
            disk.settle()
    slot = client.offer(sequence(60, 9))
    assert slot.reply is None
    large.priority = 1e9
    assert not core.promotions.promote(large)
    disk.settle()
    assert isinstance(slot.reply, Grant)


def test_a_promotion_looks_at_so_many_images_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: RamTier is not held up by a promotion that thousands of images would make room for."""
    core, _, _, large = with_full_ram()
    monkeypatch.setattr(eviction, "MOST_FOR_PROMOTION", 1)
    assert not core.promotions.promote(large)
    monkeypatch.setattr(eviction, "MOST_FOR_PROMOTION", 2)
    assert core.promotions.promote(large)


def test_a_promotion_that_would_not_fit_evicts_nothing() -> None:
    """T7, E7: one of two is used more than it, so the other's room would not be enough."""
    core, _, _, large = with_full_ram()
    first, second = (e for e in core.index.entries.values() if e.memory is not None)
    assert first.priority < second.priority
    large.priority = second.priority
    assert not core.promotions.promote(large)
    assert core.index.ram.bytes == 2 * PAGE
    assert core.promotions.declined == 1


def with_a_chain() -> tuple[Core, Client, Entry]:
    """As `with_full_ram`, where the two in RAM are one prompt and its continuation."""
    core, _, client, large = with_full_ram(in_ram=((5, 1), (10, 1)))
    return core, client, large


def test_a_promotion_evicts_a_whole_chain_that_is_used_less() -> None:
    """E7: the one above leaves after the one that hangs on it, so both count as room."""
    core, _, large = with_a_chain()
    assert core.promotions.promote(large)
    assert core.index.ram.bytes == 2 * PAGE
    assert core.promotions.in_flight == 1


@pytest.mark.parametrize("which", ["lent", "unwritten", "used more"])
def test_a_promotion_counts_on_nothing_above_that_stays(which: str) -> None:
    """E7, E4, L2: the end of a chain alone would not be enough, so it stays as well."""
    core, client, large = with_a_chain()
    parent = next(e for e in core.index.entries.values() if e.spec.end == 5)
    if which == "lent":
        client.hit((*sequence(5, 1), 7))
    elif which == "used more":
        parent.priority = large.priority
    else:
        core.index.drop_file(parent)
        parent.write = WriteState.QUEUED
    assert not core.promotions.promote(large)
    assert core.index.ram.bytes == 2 * PAGE


def test_a_promotion_needs_the_place_of_one_image() -> None:
    """E2, T7: the last place among the images that RAM may hold is enough."""
    core, disk, _, entry = one_on_disk()
    core.index.ram.images_cap, core.auto_free = 1, False
    Client(core).store(sequence(10, 1))
    disk.settle()
    entry.priority = 1e9
    assert core.promotions.promote(entry)
    assert core.promotions.in_flight == 0
    core.finish_free()
    assert core.promotions.in_flight == 1


def test_a_promotion_whose_bytes_a_put_took_is_not_made() -> None:
    """T7, E2: what fitted at once had the room first, and what is left is too little."""
    core, _, client, large = with_full_ram(auto_free=False, in_ram=((10, 1),))
    told: list[float] = []
    assert core.promotions.promote(large, told.append)
    client.grant(sequence(10, 3))
    core.finish_free()
    assert (len(told), core.promotions.in_flight, core.promotions.declined) == (1, 0, 1)
    assert core.index.ram.bytes == PAGE
    check_core(core)


def test_a_promotion_whose_place_an_offer_took_that_waited_for_a_put_is_not_made() -> None:
    """T7, E2: nothing that leaves makes up for it, so nobody is left to wait for nothing."""
    core, disk, client, entry = one_on_disk()
    core.index.ram.images_cap, core.auto_free = 2, False
    client.store(sequence(10, 1))
    disk.settle()
    client.grant(sequence(30, 2))
    slot = Client(core, 2, fills=False).offer(sequence(30, 2))
    assert slot.reply is None
    entry.priority = 1e9
    told: list[float] = []
    assert core.promotions.promote(entry, told.append)
    core.clock += 3.0  # the patience of the offer ends with the same turn in which memory is freed
    core.finish_free()
    assert isinstance(slot.reply, Grant)
    assert (len(told), core.promotions.in_flight, core.promotions.declined) == (1, 0, 1)
    assert core.index.ram.images == 2


def test_a_small_promotion_does_not_wait_for_a_large_one() -> None:
    """T7: each begins as soon as there is room for it, and in the end both are made."""
    core = Core(
        small_config(ram_bytes=3 * PAGE, ssd_bytes=1 << 30, write_delay_seconds=0.0),
        auto_free=False,
    )
    disk, client = FakeDisk(core), Client(core)
    for length, salt in ((30, 0), (10, 1)):
        client.store(sequence(length, salt))
        disk.settle()
    large, small = list(core.index.entries.values())
    for entry in (large, small):
        core.index.drop_memory(entry)
        core.finish_free()
    for salt in (2, 3, 4):
        client.store(sequence(10, salt))
        disk.settle()
    large.priority = small.priority = 1e9
    assert core.promotions.promote(large)
    assert core.promotions.promote(small)
    core.finish_free()
    assert core.index.ram.bytes_by_state["promoting"] == PAGE
    while core.freeing:
        core.finish_free()
    disk.settle()
    assert None not in (large.memory, small.memory)
    check_core(core)


def test_a_promotion_counts_on_nothing_above_that_a_branch_keeps() -> None:
    """E7, E2: of two continuations one is used more, so what they share stays with it."""
    core = Core(small_config(ram_bytes=3 * PAGE, ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(30))
    disk.settle()
    (large,) = core.index.entries.values()
    core.index.drop_memory(large)
    for end in ((), sequence(5, 2), sequence(5, 3)):
        client.store((*sequence(5, 1), *end))
        disk.settle()
    large.priority = 1e9
    list(core.index.entries.values())[-1].priority = large.priority
    assert not core.promotions.promote(large)
    assert core.index.ram.bytes == 3 * PAGE
