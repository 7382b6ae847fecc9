"""Write-behind, flush, deletions, what supersedes what (rules P8, E4, E5, D5, D6, D8, D11)."""

import random
from typing import Any

import pytest

from prefixcached.actors.write_policy import BUDGET_SPENT, CANCELLED
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import (
    Deleted,
    DeleteFile,
    FilesLost,
    SyncAll,
    Synced,
    TrashEmptied,
    WriteImage,
    Written,
)
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core, check_disk_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


def two_tiers(**changes: Any) -> tuple[Core, FakeDisk, Client]:
    settings: dict[str, Any] = {"ssd_bytes": 1 << 30, "write_delay_seconds": 0.5, **changes}
    core = Core(small_config(**settings))
    return core, FakeDisk(core), Client(core)


def orders(disk: FakeDisk) -> list[str]:
    """What waits for the writer."""
    disk.accept()
    return [type(envelope.message).__name__ for envelope in disk.writer]


def test_a_put_returns_before_it_is_written() -> None:
    """P8: visible at once, handed to the writer after the delay."""
    core, disk, client = two_tiers()
    client.store(sequence(20))
    assert client.contains(sequence(20))
    assert orders(disk) == []
    core.advance(0.4)
    assert orders(disk) == []
    core.advance(0.2)
    assert orders(disk) == ["WriteImage"]


def test_parents_are_written_before_their_children() -> None:
    """P8: a visible file's chain is durable before it; one image is written at a time."""
    core, disk, client = two_tiers(segment_max_bytes=4000)
    client.store(sequence(20))
    core.advance(1.0)
    ends = []
    while orders(disk):
        assert orders(disk) == ["WriteImage"]
        message = disk.writer[0].message
        assert isinstance(message, WriteImage)
        ends.append(message.header.spec.end)
        disk.step()
    assert ends == [5, 10, 15, 20]


def test_a_tail_absorbed_within_the_delay_is_never_written() -> None:
    """Issue 3: the delay is there so that short tails do not reach the disk."""
    core, disk, client = two_tiers(segment_min_tokens=64)
    for length in (10, 20, 30):
        client.store(sequence(length))
    core.advance(1.0)
    disk.settle()
    assert [f.entry.header.spec.end for f in disk.files.values()] == [30]


def test_a_flush_waits_until_everything_visible_is_durable() -> None:
    """P8: it does not wait for the delay, and says what was written."""
    core, disk, client = two_tiers()
    for length in (10, 20):
        client.store(sequence(length))
    slot = client.flush()
    disk.step()
    assert slot.reply is None
    disk.step()
    assert slot.reply == wire.Flushed(written=2, skipped=0, failed=0)
    assert client.flush().reply == wire.Flushed(written=0, skipped=0, failed=0)
    assert all(e.file for e in core.index.entries.values())


def test_a_flush_counts_failures_and_skips() -> None:
    """P8: what failed, and what policy does not write."""
    core, disk, client = two_tiers()
    client.store(sequence(10, 1))
    client.store(sequence(10, 2))
    slot = client.flush()
    disk.step(fails=True)
    disk.step()
    assert slot.reply == wire.Flushed(written=1, skipped=0, failed=1)
    disk.set_healthy(False)
    assert client.flush().reply == wire.Flushed(written=0, skipped=0, failed=1)
    assert core.writes.failed == 1
    client.store(sequence(10, 3))
    assert client.flush().reply == wire.Flushed(written=0, skipped=0, failed=2)


@pytest.mark.parametrize(("error", "refused"), [(BUDGET_SPENT, 1), (CANCELLED, 0)])
def test_a_flush_skips_what_was_never_tried(error: str, refused: int) -> None:
    """P8: what the daily budget forbids, and what a clear makes pointless, has not failed."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    slot = client.flush()
    assert orders(disk) == ["WriteImage"]
    write = disk.writer.pop().message
    assert isinstance(write, WriteImage)
    core.send(Written(write.header.id, error=error))
    assert slot.reply == wire.Flushed(written=0, skipped=1, failed=0)
    assert (core.writes.failed, core.writes.refused) == (0, refused)


def test_a_flush_learns_first_that_all_files_are_gone() -> None:
    """D7, P8: what was durable in a directory that was deleted is written again."""
    core, disk, client = two_tiers()
    client.store(sequence(10, 1))
    client.store(sequence(10, 2))
    client.flush()
    disk.settle()
    core.index.drop_memory(next(iter(core.index.entries.values())))
    core.auto_sync = False
    slot = client.flush()
    assert slot.reply is None
    disk.files.clear()
    core.send(FilesLost())
    assert core.index.ssd.bytes_by_state["durable"] == 0
    assert len(core.index.entries) == 1
    core.auto_sync = True
    core.send(Synced(core.syncing.pop().sync))
    disk.settle()
    assert slot.reply == wire.Flushed(written=1, skipped=0, failed=0)
    check_core(core)


def test_what_was_queued_before_its_parents_were_lost_is_written_behind_them() -> None:
    """D7: what RAM still has is written again, in the order of the chain."""
    core, disk, client = two_tiers()
    client.store(sequence(40))
    client.flush()
    disk.settle()
    for salt in range(1, 6):
        client.store((*sequence(30), *sequence(20, salt)))
    disk.files.clear()
    core.send(FilesLost())
    core.advance(1.0)
    disk.settle()
    assert len(core.index.entries) == 6
    assert all(entry.file for entry in core.index.entries.values())
    check_core(core)


def test_files_without_a_place_go_with_the_directory_too() -> None:
    """D7, D10: nothing of a deleted directory stays charged."""
    core, disk, client = two_tiers(segment_max_bytes=4000)
    client.store(sequence(20))
    client.flush()
    disk.settle()
    disk.lose(next(path for path, file in disk.files.items() if file.entry.header.spec.start == 0))
    later = Core(core.config, is_loaded=False)
    disk.restart(later, random.Random(1))
    assert later.index.unattached
    later.send(FilesLost())
    assert later.index.ssd.bytes == 0
    check_core(later)


def test_a_flush_that_runs_out_of_time_is_incomplete() -> None:
    """C4: it answers before its client gives up."""
    core, _, client = two_tiers()
    client.store(sequence(10))
    slot = client.flush(seconds=2.0)
    core.advance(1.7)
    assert slot.reply is None
    core.advance(0.2)
    assert slot.reply == wire.Flushed(written=0, skipped=0, failed=0, complete=False)


def test_a_flush_has_the_drive_drained_behind_its_last_write() -> None:
    """P8: what it confirms survives a loss of power, also what was written long before it."""
    core, disk, client = two_tiers()
    for number_of_images in (3, 0):
        for salt in range(number_of_images):
            client.store(sequence(10, salt))
        core.auto_sync = False
        slot = client.flush()
        (looks,) = core.syncing
        core.syncing.clear()
        core.send(Synced(looks.sync))
        for _ in range(number_of_images):
            assert not core.syncing, "not everything is written yet"
            disk.step()
        assert core.syncing == [SyncAll(looks.sync, drain=True)]
        assert slot.reply is None
        core.send(Synced(core.syncing.pop().sync))
        assert slot.reply == wire.Flushed(written=number_of_images, skipped=0, failed=0)


def test_a_flush_without_an_ssd_tier_is_answered_at_once() -> None:
    """P8: nobody is asked to look at a directory or to drain a drive."""
    core = Core()
    core.auto_sync = False
    client = Client(core)
    client.store(sequence(10))
    assert client.flush().reply == wire.Flushed(written=0, skipped=1, failed=0)
    assert core.syncing == []


def test_a_look_for_a_client_that_left_says_nothing_to_another() -> None:
    """P8, D7: each flush waits for a look at the directory that began after it was asked."""
    core, _, leaving = two_tiers()
    staying = Client(core, session=2)
    core.auto_sync = False
    leaving.flush()
    slot = staying.flush()
    first, second = core.syncing
    core.syncing.clear()
    core.gone(leaving.session)
    core.send(Synced(first.sync))
    assert core.syncing == []
    core.send(Synced(second.sync))
    assert core.syncing == [SyncAll(second.sync, drain=True)]
    core.send(Synced(second.sync))
    assert slot.reply == wire.Flushed(written=0, skipped=0, failed=0)


def test_a_flush_without_a_drain_is_incomplete() -> None:
    """P8: it claims nothing that a loss of power may take."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    core.auto_sync = False
    slot = client.flush()
    core.send(Synced(core.syncing.pop().sync))
    disk.step()
    core.send(Synced(core.syncing.pop().sync, error="the drive fails"))
    assert slot.reply == wire.Flushed(written=1, skipped=0, failed=0, complete=False)


def test_a_flush_waits_for_what_absorbed_its_images() -> None:
    """P8: tokens visible at the flush are durable at its answer, whatever image has them."""
    _core, disk, client = two_tiers(segment_min_tokens=64, write_delay_seconds=0.0)
    client.store(sequence(20, 5))
    assert orders(disk) == ["WriteImage"]
    client.store(sequence(10))
    slot = client.flush()
    client.store(sequence(20))
    disk.step()
    assert slot.reply is None, "the absorbing image is not durable yet"
    disk.step()
    assert slot.reply == wire.Flushed(written=2, skipped=0, failed=0)


def test_a_failed_write_can_be_made_good() -> None:
    """E5: only a completed write makes an image durable; a flush tries again."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    core.advance(1.0)
    disk.step(fails=True)
    (entry,) = core.index.entries.values()
    assert entry.file is None
    client.flush()
    disk.step()
    assert entry.file is not None


def test_a_healthy_disk_gets_everything_after_all() -> None:
    """D7: when the disk works again what was not written is."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    core.advance(1.0)
    disk.step(fails=True, retry=True)
    assert not core.writes.disk_healthy
    client.store(sequence(20))
    core.advance(1.0)
    assert orders(disk) == []
    disk.set_healthy(True)
    core.advance(1.0)
    disk.settle()
    assert sorted(f.entry.header.spec.end for f in disk.files.values()) == [10, 20]


def test_the_absorbed_file_stays_until_its_successor_is_durable() -> None:
    """D8: and goes then."""
    core, disk, client = two_tiers(segment_min_tokens=64)
    client.store(sequence(10))
    core.advance(1.0)
    disk.settle()
    client.store(sequence(20))
    assert orders(disk) == []
    assert core.index.ssd.bytes_by_state["lingering"] > 0
    core.advance(1.0)
    assert orders(disk) == ["WriteImage"]
    disk.step()
    assert orders(disk) == ["DeleteFile"]
    disk.settle()
    assert core.index.ssd.bytes_by_state["lingering"] == 0
    check_disk_idle(core, disk)


def test_an_absorbed_file_serves_again_if_its_successor_is_evicted_unwritten() -> None:
    """D8, E4: what was durable is not lost with what replaced it."""
    core, disk, client = two_tiers(segment_min_tokens=64, max_images=1)
    client.store(sequence(10))
    core.advance(1.0)
    disk.settle()
    core.index.drop_memory(next(iter(core.index.entries.values())))
    disk.set_healthy(False)
    client.store(sequence(20))
    assert client.contains(sequence(20))
    client.store(sequence(10, 1))
    assert client.peek(sequence(20)) == 10
    check_core(core)
    disk.settle()
    check_disk_idle(core, disk)


def test_a_replaced_checkpoint_stays_on_disk_until_the_new_one_is_durable() -> None:
    """D8, P3: a crash in between finds the old one."""
    core, disk, client = two_tiers()
    client.store(sequence(10), attachments=b"1")
    core.advance(1.0)
    disk.settle()
    client.store(sequence(10), attachments=b"2")
    core.advance(1.0)
    assert orders(disk) == ["WriteImage"]
    disk.step()
    assert orders(disk) == ["DeleteFile"]
    disk.settle()
    assert sorted(f.entry.header.spec.metadata for f in disk.files.values()) == [b"", b"2"]
    check_disk_idle(core, disk)


def test_a_replacement_that_never_became_durable_takes_the_old_version_along() -> None:
    """P3: newest wins for good: an older version does not come back."""
    core, disk, client = two_tiers(max_images=3)
    client.store(sequence(10), attachments=b"1")
    core.advance(1.0)
    disk.settle()
    disk.set_healthy(False)
    client.store(sequence(10), attachments=b"2")
    for salt in range(3):
        client.store(sequence(10, salt + 1))
    disk.settle()
    hit = client.ask(sequence(11))
    disk.settle()
    assert client.verify(hit, sequence(11)).length == 10
    assert isinstance(hit.reply, wire.Hit)
    assert all(not part.spec.metadata for part in hit.reply.parts)
    assert not [f for f in disk.files.values() if f.entry.header.spec.metadata]


def test_a_lent_file_is_deleted_when_its_lease_ends() -> None:
    """L2: on SSD too what is lent lingers, counted, until the last lease ends."""
    core, disk, client = two_tiers(segment_min_tokens=64, idle_seconds=5.0, promote="never")
    client.store(sequence(10))
    core.advance(1.0)
    disk.settle()
    core.advance(30.0)
    slot = client.ask(sequence(11))
    disk.settle()
    client.store(sequence(20))
    core.advance(1.0)
    disk.settle()
    assert core.index.ssd.bytes_by_state["lingering"] > 0
    assert len(disk.files) == 2
    client.release(client.verify(slot, sequence(11)))
    disk.settle()
    assert len(disk.files) == 1
    check_disk_idle(core, disk)


def test_an_image_that_was_cleared_while_it_was_written_leaves_no_file() -> None:
    """D11: its write is dropped, or its file deleted; nothing stays charged."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    core.advance(1.0)
    disk.accept()
    (write,) = disk.writer
    disk.writer = []
    slot = client.clear()
    assert slot.reply is None, "the answer follows the rename"
    clear, core.to_ssd = core.to_ssd, []
    disk.writer = [write]
    disk.step()
    disk.writer += clear
    disk.settle()
    assert isinstance(slot.reply, wire.Cleared)
    assert not disk.files
    assert core.index.ssd.bytes == 0
    assert core.index.ram.bytes == 0


def test_cleared_files_count_until_they_are_gone() -> None:
    """D5, D11: bytes in the trash are charged until the disk has them back."""
    core, disk, client = two_tiers()
    for salt in range(3):
        client.store(sequence(10, salt))
    client.flush()
    disk.settle()
    client.clear("plain/a")
    client.store(sequence(10, 9), "plain/b")
    client.flush()
    while disk.step():
        pass
    assert core.index.ssd.bytes_by_state["trash"] == sum(disk.trash) > 0
    disk.empty_trash()
    assert sum(disk.trash) <= core.index.ssd.bytes_by_state["trash"]
    disk.settle()
    assert core.index.ssd.bytes == disk.bytes > 0


def test_lent_files_of_a_cleared_namespace_are_not_forgotten_too_early() -> None:
    """D5: the ledger is never below what the disk still has, however leases and trash end."""
    core, disk, client = two_tiers(idle_seconds=5.0, promote="never")
    for salt in range(3):
        client.store(sequence(10, salt))
    client.flush()
    disk.settle()
    core.advance(30.0)
    slot = client.ask(sequence(11, 0))
    disk.settle()
    hit = client.verify(slot, sequence(11, 0))
    client.clear()
    disk.step()
    client.release(hit)
    while disk.trash_is_due:
        assert sum(disk.trash) <= core.index.ssd.bytes
        disk.empty_trash()
    assert core.index.ssd.bytes == 0


def test_a_full_disk_evicts_its_least_recently_used_files() -> None:
    """D5, E2: the cap holds before each write; victims go leaves first, unwritten ones never."""
    core, disk, client = two_tiers(ssd_bytes=9 * PAGE, retention="lru")
    for salt in range(8):
        client.store(sequence(10, salt))
        client.flush()
        disk.settle()
        assert disk.bytes <= core.index.ssd.bytes <= 9 * PAGE
        assert core._next_deadline() > core.clock, "no spinning while deletions are on their way"
    assert core.index.counters["ssd_evictions"] > 0
    assert len(disk.files) > 3
    check_disk_idle(core, disk)


def test_waiting_for_deletions_does_not_spin() -> None:
    """DESIGN 4: a write that waits for a deletion has no deadline of its own."""
    core, disk, client = two_tiers(ssd_bytes=6 * PAGE)
    for salt in range(9):
        client.store(sequence(10, salt))
        core.advance(0.6)
        core.check_no_livelock()
        if orders(disk)[:1] == ["WriteImage"]:
            disk.step()
    assert "DeleteFile" in orders(disk)
    disk.settle()
    assert core.writes.is_idle


def test_a_file_that_cannot_be_deleted_makes_no_room() -> None:
    """D5, E4: others go in its place, and no write waits for it; it counts until it is gone."""
    core, disk, client = two_tiers(ssd_bytes=9 * PAGE, write_delay_seconds=0.0)
    salt = 0
    while orders(disk)[:1] != ["DeleteFile"]:
        disk.step()
        salt += 1
        client.store(sequence(10, salt))
    order = disk.writer.pop(0).message
    assert isinstance(order, DeleteFile)
    for _ in range(2):
        core.send(Deleted(order.id, order.allocated_bytes, error="not permitted"))
    assert orders(disk) == ["DeleteFile"]
    disk.settle()
    assert core.writes.is_idle
    assert core.index.ssd.bytes_by_state["undeletable"] == order.allocated_bytes
    del disk.files[order.path]
    core.send(Deleted(order.id, order.allocated_bytes))
    check_disk_idle(core, disk)


def test_trash_that_cannot_be_emptied_makes_no_room() -> None:
    """D5, D11: no write and no flush waits for it, until it can."""
    core, disk, client = two_tiers(ssd_bytes=9 * PAGE)
    while core.index.ssd.bytes <= 5 * PAGE:
        client.store(sequence(10, len(disk.files)), "plain/b")
        client.flush()
        while disk.step():
            pass
    client.clear("plain/b")
    client.store(sequence(10))
    while disk.step():
        pass
    slot = client.flush()
    assert slot.reply is None, "room comes with the trash"
    core.send(TrashEmptied(0, error="not permitted"))
    assert slot.reply == wire.Flushed(written=0, skipped=1, failed=0)
    disk.settle()
    client.flush()
    disk.settle()
    assert len(disk.files) == 1
    check_disk_idle(core, disk)


def test_foreign_bytes_that_fill_the_cap_evict_nothing_in_vain() -> None:
    """D5: what cannot help is not thrown away."""
    _core, disk, client = two_tiers(ssd_bytes=20 * PAGE)
    client.store(sequence(10, 0))
    client.flush()
    disk.settle()
    disk.other_bytes = disk.kept_other_bytes = 21 * PAGE
    disk.set_healthy(True)
    client.store(sequence(10, 1))
    flush = client.flush()
    disk.settle()
    assert flush.reply == wire.Flushed(written=0, skipped=1, failed=0)
    disk.settle()
    assert len(disk.files) == 1


def test_a_lost_file_is_written_again() -> None:
    """P8: an image whose file was lost is made durable again while RAM has it."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    client.flush()
    disk.settle()
    (path,) = disk.files
    disk.lose(path)
    core.index.lose_file(next(iter(core.index.entries.values())))
    client.peek(sequence(10))
    core.advance(1.0)
    disk.settle()
    assert list(disk.files) == [path]
    check_disk_idle(core, disk)


def test_files_in_use_are_touched_now_and_then() -> None:
    """D5: recency survives a restart in the file's modification time."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    client.flush()
    disk.settle()
    for _ in range(5):
        client.reuse(sequence(11))
        core.advance(50.0)
    disk.accept()
    assert disk.touched == ["TouchFile"] * 3


@pytest.mark.parametrize("namespace", ["plain/a", "hybrid/a"])
@pytest.mark.parametrize("gap_seconds", [0.0, 10.0])
def test_fifty_turns_write_at_most_twice_their_bytes(namespace: str, gap_seconds: float) -> None:
    """Issue 3: 50 turns of 200 tokens on 8,000 write at most 2.0x the final segment bytes."""
    core, disk, _ = two_tiers(segment_min_tokens=256)
    client = Client(core, fills=False)
    is_hybrid = namespace == "hybrid/a"
    tokens = sequence(8000)
    client.store(tokens, namespace, state=is_hybrid)
    for turn in range(50):
        # A turn stores twice: when the prompt is done, and with the answer.
        for tail in (120, 80):
            tokens = (*tokens, *sequence(tail, 100 + 2 * turn + (tail == 80)))
            client.store(tokens, namespace, state=is_hybrid)
            core.advance(gap_seconds)
            while disk.step():
                pass
    client.flush()
    disk.settle()
    final = sum(f.entry.data_bytes for f in disk.files.values() if f.entry.header.kind == "segment")
    assert client.contains(tokens, namespace)
    assert final == len(tokens) * 712
    new_bytes = 50 * 200 * 712
    assert disk.written_segment_bytes <= 2.0 * final
    assert disk.written_segment_bytes - 8000 * 712 <= 2.0 * new_bytes
    check_disk_idle(core, disk)


def test_twenty_agents_write_the_shared_tokens_once() -> None:
    """Issue 3: entries that share 8,000 tokens write them once."""
    core, disk, _ = two_tiers()
    for session in range(1, 21):
        tokens = (*sequence(8000), *sequence(1000, session))
        Client(core, session, fills=False).store(tokens, "chunk/a")
    Client(core, 1).flush()
    disk.settle()
    assert disk.written_segment_bytes <= 1.01 * 28000 * 700


def test_deletions_follow_children_first() -> None:
    """D8: a file goes after every file that names it as parent."""
    core, disk, client = two_tiers()
    for length in (5, 10, 15):
        client.store(sequence(length))
    client.flush()
    disk.settle()
    top = min(core.index.entries.values(), key=lambda e: e.spec.end)
    core.index.remove(top)
    disk.accept()
    paths = [e.message.path for e in disk.writer if isinstance(e.message, DeleteFile)]
    assert [disk.files[path].entry.header.spec.end for path in paths] == [15, 10, 5]


def test_the_backlog_counts_what_waits_and_what_is_written() -> None:
    """C5: the history shows how far the writer is behind."""
    core, disk, client = two_tiers()
    assert core.writes.backlog == core.writes.queued == 0
    for salt in range(3):
        client.store(sequence(10, salt))
    assert core.writes.backlog == core.writes.queued == 3
    core.advance(1.0)
    disk.step()
    assert core.writes.backlog == core.writes.queued == 2
    client.store(sequence(10, 4))
    assert core.writes.backlog == core.writes.queued == 3
    core.advance(1.0)
    disk.settle()
    assert core.writes.backlog == 0


def test_one_write_follows_the_other_without_a_clock() -> None:
    """E4: the next image is handed over as soon as the writer is free."""
    core, disk, client = two_tiers(write_delay_seconds=0.0)
    for salt in range(3):
        client.store(sequence(10, salt))
    for _ in range(3):
        assert orders(disk) == ["WriteImage"]
        disk.step()
    assert orders(disk) == []
    assert core.writes.written == 3
    assert core.writes.written_bytes == sum(f.entry.allocated_bytes for f in disk.files.values())


def test_a_file_says_all_that_a_restart_needs() -> None:
    """D1: minimum, parent and position stand in the header; a snapshot has no minimum."""
    core, disk, client = two_tiers(write_delay_seconds=0.0)
    client.store(sequence(20), "hybrid/a", state=True, minimum=12)
    client.store(sequence(30), "hybrid/a", attachments=b"{}", minimum=25)
    disk.settle()
    headers = sorted(
        (f.entry.header for f in disk.files.values()), key=lambda h: (h.kind, h.spec.end)
    )
    first = next(h for h in headers if h.kind == "segment" and h.spec.end == 20)
    assert [
        (h.kind, h.position, h.spec.end, h.minimum, h.attachments, h.parent) for h in headers
    ] == [
        ("checkpoint", 20, 20, 0, False, first.id),
        ("checkpoint", 30, 30, 0, True, headers[3].id),
        ("segment", 0, 20, 12, False, ""),
        ("segment", 20, 30, 25, False, first.id),
    ]
    assert len(core.index.entries) == 4


def test_under_second_hit_an_image_is_written_when_it_was_hit() -> None:
    """D6: what nobody asked for again is not written, and no flush calls that a failure."""
    core, disk, client = two_tiers(write_delay_seconds=0.0, write_policy="second-hit")
    client.store(sequence(10))
    slot = client.flush()
    disk.settle()
    assert slot.reply == wire.Flushed(written=0, skipped=1, failed=0)
    for _ in range(3):
        client.reuse(sequence(11))
        core.advance(1.0)
    disk.settle()
    assert len(disk.files) == 1
