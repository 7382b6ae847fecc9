"""What the index knows of the disk: room, files without a place, trash, lost files (E1, D3, D8)."""

import random

import pytest

from prefixcached.actors.entries import WriteState
from prefixcached.actors.index import TOUCH_SECONDS
from prefixcached.protocol.actor_messages import DropOthers, FilesLost
from prefixcached.protocol.messages import Flushed, Hit
from tests.actors.test_index_corners import two_tiers
from tests.support.core import PAGE, Core, small_config
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk

SPARE_PAGES = 3
"""A write reserves four pages for a file of one: with three free, one victim is enough."""


def at_the_cap(count: int) -> tuple[Core, FakeDisk, Client]:
    """A daemon whose disk holds ``count`` files of one page; the next write needs a victim."""
    core, disk, client = two_tiers()
    for salt in range(count):
        client.store(sequence(10, salt))
    disk.settle()
    core.index.ssd.bytes_cap = disk.bytes + SPARE_PAGES * PAGE
    return core, disk, client


def findable(core: Core) -> int:
    """Entries on the disk that can be found."""
    return sum(entry.file is not None for entry in core.index.entries.values())


def with_orphans(count: int) -> tuple[Core, FakeDisk, Client]:
    """A daemon that found files of one page each whose parents are gone."""
    _, disk, client = two_tiers()
    for salt in range(count):
        client.store(sequence(10, salt))
        client.store(sequence(20, salt))
    disk.settle()
    for path, file in list(disk.files.items()):
        if not file.entry.header.parent:
            disk.lose(path)
    core = Core(small_config(ssd_bytes=1 << 30), is_loaded=False)
    disk.restart(core, random.Random(0))
    assert len(core.index.unattached) == count
    return core, disk, Client(core)


def test_foreign_files_make_room_before_entries_do() -> None:
    """D10: what is no entry is told to go first, by just so much as is needed."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    disk.settle()
    core.index.set_other_bytes(3 * PAGE)
    core.index.ssd.bytes_cap = core.index.ssd.bytes + PAGE
    assert core.eviction.make_room_on_disk(PAGE)
    assert core.to_ssd == []
    core.eviction.make_room_on_disk(PAGE + 1)
    orders = [order.message for order in core.to_ssd if isinstance(order.message, DropOthers)]
    assert orders == [DropOthers(1)]


def full_of_others(pages: int, kept: int = 0) -> tuple[Core, FakeDisk, Client]:
    """A disk with ``pages`` of files that are no entries below a cap of 40, ``kept`` for good."""
    core, disk, client = two_tiers()
    core.index.ssd.bytes_cap = 40 * PAGE
    disk.other_bytes, disk.kept_other_bytes = pages * PAGE, kept * PAGE
    disk.set_healthy(True)
    return core, disk, client


def test_other_files_below_the_cap_keep_nothing_out() -> None:
    """D10, D5: a cap that foreign files fill is had from them, write by write."""
    core, disk, client = full_of_others(39)
    for salt in range(20):
        client.store(sequence(10, salt))
        disk.settle()
    assert findable(core) == 20
    assert core.index.counters["ssd_evictions"] == 0
    assert core.index.ssd.bytes <= core.index.ssd.bytes_cap
    assert disk.other_bytes > 0


def test_others_that_cannot_be_dropped_leave_the_room_to_entries() -> None:
    """D10, E6: entries go where the others are not enough; nothing is asked for twice."""
    core, disk, client = full_of_others(30, kept=30)
    for salt in range(20):
        client.store(sequence(10, salt))
        disk.settle()
    assert findable(core) == 7  # ten pages, of which a write reserves four
    assert core.index.counters["ssd_evictions"] == 13
    client.store(sequence(10, 20))
    assert not [o for o in core.to_ssd if isinstance(o.message, DropOthers)]


def test_where_others_that_stay_fill_the_cap_nothing_is_written() -> None:
    """D10: it is tried once, and then the write is refused instead of waiting for ever."""
    _, disk, client = full_of_others(39, kept=38)
    client.store(sequence(10))
    flush = client.flush()
    disk.settle()
    assert flush.reply == Flushed(written=0, skipped=1, failed=0)
    assert disk.other_bytes == 38 * PAGE


def test_what_comes_after_others_that_stay_is_dropped_all_the_same() -> None:
    """D10: what cannot be dropped is known by its bytes; more than them is tried again."""
    core, disk, client = full_of_others(38, kept=38)
    client.store(sequence(10))
    disk.settle()
    assert findable(core) == 0
    disk.kept_other_bytes = 0
    disk.other_bytes = 39 * PAGE
    disk.set_healthy(True)
    disk.other_bytes = 20 * PAGE  # somebody deletes files
    disk.set_healthy(True)
    client.store(sequence(10, 1))
    disk.settle()
    assert findable(core) == 1


def test_what_is_lent_at_a_clear_is_discharged_once() -> None:
    """D11, L2: the disk reports it with the trash; what it lends counts until the lease ends."""
    core, disk, client = two_tiers()
    for salt in range(4):
        client.store(sequence(10, salt))
    disk.settle()
    for entry in list(core.index.entries.values()):
        core.index.drop_memory(entry)
    slot = client.ask(sequence(11, 0))
    disk.accept()
    for image_id in list(disk.reads):
        disk.finish_read(image_id)
    assert isinstance(slot.reply, Hit)
    client.clear()
    disk.step()
    assert core.index.ssd.bytes == disk.bytes
    while disk.trash_is_due:
        disk.empty_trash()  # the lent file first, whose blocks stay with its reader
        assert core.index.ssd.bytes >= disk.bytes + PAGE
    assert core.index.ssd.bytes == PAGE
    client.release(slot.reply)
    assert core.index.ssd.bytes == 0


def test_files_without_a_place_make_room_alone_where_they_suffice() -> None:
    """D10: no more of them goes than is needed, and nothing else."""
    core, disk, _ = with_orphans(2)
    index = core.index
    index.set_other_bytes(PAGE)
    index.ssd.bytes_cap = index.ssd.bytes
    assert core.eviction.make_room_on_disk(PAGE)
    assert len(index.unattached) == 1
    assert not [order for order in core.to_ssd if isinstance(order.message, DropOthers)]
    disk.settle()
    assert disk.bytes == PAGE
    assert index.ssd.bytes == 2 * PAGE


def test_the_whole_cap_can_be_had_from_files_without_a_place() -> None:
    """D10: what is no entry stands in nobody's way."""
    core, disk, _ = with_orphans(2)
    core.index.ssd.bytes_cap = core.index.ssd.bytes
    assert core.eviction.make_room_on_disk(core.index.ssd.bytes_cap)
    disk.settle()
    assert (disk.bytes, core.index.ssd.bytes) == (0, 0)


def test_cleared_files_without_a_place_are_known_no_more() -> None:
    """D11: `clear` takes them with the rest of their namespace."""
    core, disk, client = with_orphans(1)
    client.clear("plain/a")
    assert core.index.unattached == {}
    disk.settle()
    assert core.index.ssd.bytes == 0


def test_lost_files_without_a_place_are_known_no_more() -> None:
    """D7: with the directory went those that are no entries as well."""
    core, _, _ = with_orphans(1)
    core.send(FilesLost())
    assert core.index.unattached == {}
    assert core.index.ssd.bytes == 0


def test_foreign_bytes_are_what_was_said_last() -> None:
    """D5: each report of them replaces the one before, and counts orphans apart."""
    core, _, _ = with_orphans(1)
    for pages in (3, 1, 2):
        core.index.set_other_bytes(pages * PAGE)
        assert core.index.ssd.bytes_by_state["other"] == (pages + 1) * PAGE


def test_no_file_goes_in_vain() -> None:
    """E6: what is lent keeps its file; if the rest is too little, all stays."""
    core, disk, client = two_tiers()
    for salt in range(2):
        client.store(sequence(10, salt))
    disk.settle()
    client.hit(sequence(11, 0))
    core.index.ssd.bytes_cap = disk.bytes
    assert not core.eviction.make_room_on_disk(2 * PAGE)
    assert core.index.counters["ssd_evictions"] == 0
    disk.settle()
    assert len(disk.files) == 2


def test_one_file_goes_where_its_bytes_are_just_enough() -> None:
    """D5: a need that is met exactly is met."""
    core, disk, client = two_tiers()
    for salt in range(2):
        client.store(sequence(10, salt))
    disk.settle()
    core.index.ssd.bytes_cap = disk.bytes - PAGE
    assert core.eviction.make_room_on_disk(0)
    disk.settle()
    assert disk.bytes == PAGE


def test_the_files_of_a_chain_go_from_its_end_in_one_sweep() -> None:
    """E2: a parent's file may go as soon as no file names it, though RAM keeps both images."""
    core, disk, client = two_tiers()
    for length in (10, 20):
        client.store(sequence(length))
    disk.settle()
    core.index.ssd.bytes_cap = 0
    assert core.eviction.make_room_on_disk(0)
    disk.settle()
    assert not disk.files
    assert client.contains(sequence(20))


def test_a_file_whose_childs_file_was_lost_may_go() -> None:
    """D1, E2: no file names it any more."""
    core, disk, client = two_tiers()
    for length in (10, 20):
        client.store(sequence(length))
    disk.settle()
    (child,) = (entry for entry in core.index.entries.values() if entry.spec.end == 20)
    core.index.lose_file(child)
    core.index.ssd.bytes_cap = 0
    assert core.eviction.make_room_on_disk(0)
    assert core.index.counters["ssd_evictions"] == 1


@pytest.mark.parametrize("cap", [0, PAGE - 1])
def test_a_file_whose_child_will_not_be_written_may_go(cap: int) -> None:
    """E4, D7: a queued write binds its parent's file only until the disk fails."""
    core, disk, client = two_tiers(write_delay_seconds=1.0)
    client.store(sequence(10))
    core.advance(2.0)
    disk.settle()
    client.store(sequence(20))
    client.reuse((*sequence(10), 7))
    core.index.ssd.bytes_cap = cap
    assert not core.eviction.make_room_on_disk(0)
    disk.set_healthy(False)
    assert core.eviction.make_room_on_disk(0)


def test_what_the_disk_evicts_makes_the_rest_older() -> None:
    """E3: under `cost-size` the age rises to what any tier has evicted."""
    core, disk, client = two_tiers(retention="cost-size")
    for length, salt in ((10, 0), (12, 1)):
        client.store(sequence(length, salt))
    disk.settle()
    core.index.ssd.bytes_cap = disk.bytes - PAGE
    assert core.eviction.make_room_on_disk(0)
    disk.settle()
    core.index.ssd.bytes_cap = 1 << 30
    client.store(sequence(5, 2))
    disk.settle()
    core.index.ssd.bytes_cap = disk.bytes - PAGE
    assert core.eviction.make_room_on_disk(0)
    disk.settle()
    assert [file.entry.header.spec.end for file in disk.files.values()] == [5]


def test_a_lent_image_of_a_cleared_namespace_is_charged_until_its_lease_ends() -> None:
    """D11, L2: its file went with the trash; the last reader leaves nothing charged."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    disk.settle()
    hit = client.hit(sequence(11))
    client.clear()
    disk.settle()
    assert core.index.ssd.bytes == PAGE
    client.release(hit)
    assert (core.index.ram.bytes, core.index.ssd.bytes) == (0, 0)


def test_what_was_being_deleted_is_not_discharged_twice() -> None:
    """D5, D11: the disk may report it as trash too, so the first reports count for that."""
    core, disk, client = two_tiers()
    for salt in range(4):
        client.store(sequence(10, salt))
    disk.settle()
    index = core.index
    for entry in list(index.entries.values())[:2]:
        index.remove(entry)
    client.clear()
    index.departures.namespace_cleared()
    left: list[int] = []
    for done in (False, False, False, True):
        index.departures.trash_emptied(PAGE, done=done)
        left.append(index.ssd.bytes_by_state["trash"] // PAGE)
    assert left == [2, 2, 1, 0]


def test_what_was_being_deleted_at_one_clear_does_not_count_at_the_next() -> None:
    """D5, D11: with the trash empty nothing is expected of an earlier clear."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    disk.settle()
    core.index.remove(*core.index.entries.values())
    client.clear()
    disk.settle()
    for salt in range(2):
        client.store(sequence(10, salt))
    disk.settle()
    client.clear()
    disk.step()
    disk.empty_trash()
    assert core.index.ssd.bytes_by_state["trash"] == PAGE


def test_a_disk_that_deletes_nothing_costs_three_entries_at_most() -> None:
    """D5: puts and flushes go on without it, and are written again once files can be deleted."""
    core, disk, client = at_the_cap(20)
    disk.refuses_deletions = True
    for salt in range(100, 110):
        client.store(sequence(10, salt))
        disk.settle()
        core.advance(1.0)
        disk.retry_deletions()
    flush = client.flush()
    assert flush.reply == Flushed(written=0, skipped=13, failed=0)  # those that were evicted too
    assert findable(core) == 17
    assert len(disk.files) == 20
    disk.refuses_deletions = False
    disk.retry_deletions()
    flush = client.flush()
    disk.settle()
    assert flush.reply == Flushed(written=13, skipped=0, failed=0)
    assert findable(core) == len(disk.files) == 20


def test_other_files_that_can_be_deleted_show_that_it_was_the_files() -> None:
    """D5: three that cannot be deleted, with others that can between them, hold up nobody."""
    core, disk, client = at_the_cap(10)
    for salt in range(100, 104):
        disk.refuses_deletions = True
        client.store(sequence(10, salt))
        disk.step()
        disk.refuses_deletions = False
        disk.settle()
        assert not [e for e in core.index.entries.values() if e.write is WriteState.REFUSED]
    assert len(disk.undeletable) == 4


def test_a_write_in_an_undeletable_files_place_shows_nothing_of_deletions() -> None:
    """D5: only a deletion that worked lets others be tried."""
    core, disk, client = at_the_cap(20)
    disk.refuses_deletions = True
    client.store(sequence(10, 100))
    disk.settle()
    assert findable(core) == 17
    core.index.ssd.bytes_cap += PAGE
    assert client.reuse((*sequence(10, 0), 7)) == 10  # so that it is written again
    disk.settle()
    assert findable(core) == 18
    core.index.ssd.bytes_cap -= PAGE
    for salt in range(200, 204):
        client.store(sequence(10, salt))
        disk.settle()
    assert findable(core) == 17


def test_what_could_not_be_deleted_is_trash_once_it_is_cleared() -> None:
    """D5, D11: it counts until the trash is empty, and others' files are not taken for it."""
    core, disk, client = two_tiers()
    for namespace in ("plain/a", "plain/b"):
        for salt in range(3):
            client.store(sequence(10, salt), namespace)
    disk.settle()
    disk.refuses_deletions = True
    for namespace in ("plain/a", "plain/b"):
        entries = core.index.namespaces[namespace].root.children.values()
        core.index.remove(next(iter(entries)))
    disk.settle()
    states = core.index.ssd.bytes_by_state
    assert states["undeletable"] == 2 * PAGE
    client.clear("plain/a")
    disk.step()
    left = [(states["undeletable"] // PAGE, states["trash"] // PAGE)]
    while disk.trash_is_due:
        disk.empty_trash()
        left.append((states["undeletable"] // PAGE, states["trash"] // PAGE))
    assert left == [(1, 3), (1, 2), (1, 1), (1, 0)]
    assert core.index.ssd.bytes == disk.bytes


def test_what_is_in_the_trash_is_room_to_come() -> None:
    """D5, D11: nobody's file is deleted for bytes that a clear gives back."""
    core, disk, client = two_tiers()
    for namespace in ("plain/a", "plain/b"):
        client.store(sequence(10), namespace)
    disk.settle()
    client.clear("plain/a")
    disk.step()
    core.index.ssd.bytes_cap = core.index.ssd.bytes
    assert core.eviction.make_room_on_disk(PAGE)
    assert core.index.counters["ssd_evictions"] == 0


def test_one_byte_over_the_cap_is_had_from_files_without_a_place() -> None:
    """D10: however little is missing, no entry goes for it."""
    core, _, _ = with_orphans(2)
    core.index.ssd.bytes_cap = core.index.ssd.bytes
    assert core.eviction.make_room_on_disk(1)
    assert len(core.index.unattached) == 1


def with_one_undeletable(core: Core, disk: FakeDisk, nbytes: int) -> None:
    """Order a deletion for so much room; it fails."""
    disk.refuses_deletions = True
    assert core.eviction.make_room_on_disk(nbytes)
    disk.step()
    assert len(disk.undeletable) == 1


def test_after_a_deletion_that_failed_files_without_a_place_go_one_at_a_time() -> None:
    """D5, D10: what cannot be deleted shall not be lost from the index file by file."""
    core, disk, _ = with_orphans(3)
    core.index.ssd.bytes_cap = core.index.ssd.bytes
    with_one_undeletable(core, disk, PAGE)
    assert core.eviction.make_room_on_disk(2 * PAGE)
    assert len(core.index.unattached) == 1


def test_after_a_deletion_that_failed_entries_go_one_at_a_time() -> None:
    """D5: the next one goes once it is known what became of the last one."""
    core, disk, _ = at_the_cap(10)
    with_one_undeletable(core, disk, (SPARE_PAGES + 1) * PAGE)
    for evicted in (2, 2, 2):
        assert core.eviction.make_room_on_disk((SPARE_PAGES + 3) * PAGE)
        assert core.index.counters["ssd_evictions"] == evicted
    disk.step()
    assert core.eviction.make_room_on_disk((SPARE_PAGES + 3) * PAGE)
    assert core.index.counters["ssd_evictions"] == 3


def test_a_write_waits_for_the_outcome_of_a_deletion() -> None:
    """D5, E4: while it is not known whether files can be deleted, none is refused its write."""
    core, disk, client = at_the_cap(10)
    with_one_undeletable(core, disk, (SPARE_PAGES + 1) * PAGE)
    client.store(sequence(10, 100))
    core.index.ssd.bytes_cap -= PAGE
    client.store(sequence(10, 101))
    assert core.index.counters["ssd_evictions"] == 2
    disk.refuses_deletions = False
    disk.settle()
    stored = list(core.index.entries.values())[-2:]
    assert all(entry.file is not None for entry in stored)


def test_a_disk_that_deletes_nothing_is_filled_to_its_cap() -> None:
    """D5: what fits without a deletion is written."""
    core, disk, client = at_the_cap(20)
    disk.refuses_deletions = True
    client.store(sequence(10, 100))
    disk.settle()
    assert core.index.departures.most_deletions == 0
    core.index.ssd.bytes_cap += 3 * PAGE
    client.store(sequence(10, 101))
    disk.settle()
    assert findable(core) == 18


def test_a_use_is_recorded_in_a_file_once_a_minute() -> None:
    """D5: a restart may forget a minute of recency; what has no file has nothing to record."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    client.reuse((*sequence(10), 7))
    disk.settle()
    assert disk.touched == []
    for seconds, touches in ((0.0, 1), (30.0, 1), (TOUCH_SECONDS, 2), (1.0, 2)):
        core.clock += seconds
        client.reuse((*sequence(10), 7))
        disk.accept()
        assert len(disk.touched) == touches
