"""The writer's decisions: order, delays, the daily budget, the pauses."""

import random

import msgspec
import pytest

from prefixcached.actors.write_policy import (
    KEPT_HOURS,
    WINDOW_HOURS,
    BackOff,
    FailedDeletions,
    WriteMeter,
    WriteQueue,
)
from prefixcached.protocol.actor_messages import (
    ClearNamespace,
    DeleteFile,
    Envelope,
    WriteImage,
)
from tests.support.store_samples import segment

HOUR = 3600.0


def write(seed: int, namespace: str = "demo") -> Envelope:
    one = segment(seed=seed, namespace=namespace)
    return Envelope(WriteImage(one.header, one.tokens, one.schema))


def delete(id_: str) -> Envelope:
    return Envelope(DeleteFile(id_, "path", 1))


def test_writes_wait_for_their_delay() -> None:
    """A tail that may yet be absorbed is not written before its time."""
    queue = WriteQueue()
    first = write(1)
    queue.add_write(first, not_before=5.0)
    assert queue.next(4.9) is None
    assert queue.next_deadline == 5.0
    assert queue.next(5.0) is first
    assert queue.next_deadline is None


def test_a_due_write_overtakes_a_delayed_one() -> None:
    """A write that is due does not wait for the delay of an earlier one."""
    queue = WriteQueue()
    delayed, due = write(1), write(2)
    queue.add_write(delayed, not_before=5.0)
    queue.add_write(due, not_before=0.0)
    assert queue.next(1.0) is due
    assert queue.next(1.0) is None


def test_deletions_wait_for_earlier_writes() -> None:
    """D8: a deletion comes after every write before it, and nothing overtakes it."""
    queue = WriteQueue()
    before, deletion, after = write(1), delete("x"), write(2)
    queue.add_write(before, not_before=5.0)
    queue.add_delete(deletion)
    queue.add_write(after, not_before=0.0)
    assert queue.next(1.0) is None
    assert queue.next_deadline == 5.0
    assert [queue.next(5.0) for _ in range(4)] == [before, deletion, after, None]


def test_sync_voids_delays() -> None:
    """P8: a flush does not wait for delays; what is queued later has its own again."""
    queue = WriteQueue()
    first, second = write(1), write(2)
    queue.add_write(first, not_before=5.0)
    queue.hurry()
    queue.add_write(second, not_before=5.0)
    assert queue.next(0.0) is first
    assert queue.next(0.0) is None


@pytest.mark.parametrize("which", [0, 1])
def test_the_write_that_is_meant_is_cancelled_and_no_other(which: int) -> None:
    """P4: images are known by their ids, whatever order these have."""
    queue = WriteQueue()
    writes = [write(1), write(2)]
    for envelope in writes:
        queue.add_write(envelope, 0.0)
    meant = writes[which].message
    assert queue.cancel(meant.header.id) is meant  # type: ignore[attr-defined]


def test_a_cancelled_write_is_gone() -> None:
    """A tail absorbed before it was written is never written."""
    queue = WriteQueue()
    first = write(1)
    queue.add_write(first, not_before=5.0)
    assert queue.cancel("0" * 32) is None
    assert queue.cancel(first.message.header.id) is first.message  # type: ignore[attr-defined]
    assert queue.next(9.0) is None
    assert len(queue) == queue.writes == 0


def test_a_clear_drops_its_namespace_and_goes_before_other_writes() -> None:
    """D11: what a clear makes pointless is not written; deletions before it stay before it."""
    queue = WriteQueue()
    mine, deletion, other, clear = write(1, "a"), delete("x"), write(2, "b"), ClearNamespace("a", 1)
    queue.add_write(write(3, "b"), not_before=9.0)
    queue.add_write(mine, not_before=0.0)
    queue.add_delete(deletion)
    queue.add_write(other, not_before=0.0)
    assert queue.add_clear(Envelope(clear), "a") == [mine.message]
    order = [queue.next(0.0) for _ in range(5)]
    assert order[1] is deletion
    assert order[2] is not None
    assert order[2].message is clear
    assert order[3] is other
    assert order[4] is None


def test_a_clear_of_everything_drops_every_write() -> None:
    """D11: nothing queued before a clear of everything is written."""
    queue = WriteQueue()
    envelopes = [write(seed, f"n{seed}") for seed in range(3)]
    for envelope in envelopes:
        queue.add_write(envelope, not_before=0.0)
    dropped = queue.add_clear(Envelope(ClearNamespace(None, 1)), None)
    assert dropped == [envelope.message for envelope in envelopes]
    assert len(queue) == 1


def test_a_clear_without_deletions_goes_first() -> None:
    """D11: writes of other namespaces that wait for their delay neither hold it up nor lose it."""
    queue = WriteQueue()
    others, clear = [write(1, "b"), write(2, "b")], Envelope(ClearNamespace("a", 1))
    for other in others:
        queue.add_write(other, not_before=5.0)
    queue.add_clear(clear, "a")
    assert [queue.next(0.0), queue.next(0.0)] == [clear, None]
    assert [queue.next(5.0), queue.next(5.0)] == others


def test_what_was_written_before_a_clock_was_set_back_adds_up() -> None:
    """D6: it counts as written now, beside what was written at this hour before."""
    meter = WriteMeter(100)
    meter.record(3, 10 * HOUR)
    meter.record(1, 12 * HOUR)
    meter.record(3, 10 * HOUR)
    assert meter.written_bytes(10 * HOUR) == 7


def test_clears_that_are_taken_back_leave_the_rest_in_order() -> None:
    """D7, D11: a disk that does not answer is to carry them out later, once each."""
    queue = WriteQueue()
    deletion, clears = delete("x"), [Envelope(ClearNamespace(name, 1)) for name in ("a", None)]
    queue.add_delete(deletion)
    for clear in clears:
        queue.add_clear(clear, None)
    assert queue.take_clears() == clears
    assert queue.take_clears() == []
    assert [queue.next(0.0), queue.next(0.0)] == [deletion, None]


def test_the_meter_stops_at_its_budget() -> None:
    """D6: what would exceed the budget of 24 hours is refused until the window has moved."""
    meter = WriteMeter(100)
    assert meter.allows(100, 0.0)
    meter.record(60, 0.0)
    meter.record(40, 5 * HOUR)
    assert not meter.allows(1, 23 * HOUR)
    assert meter.allows(60, (WINDOW_HOURS + 1) * HOUR)
    assert not meter.allows(61, (WINDOW_HOURS + 1) * HOUR)
    assert meter.written_bytes((WINDOW_HOURS + 6) * HOUR) == 0


def test_the_meter_counts_by_the_clock_of_today() -> None:
    """D6: half a million hours after the epoch an hour is as long as in the first."""
    now = 500_000 * HOUR
    meter = WriteMeter(100)
    meter.record(60, now)
    meter.record(40, now + HOUR)
    assert meter.written_bytes(now + HOUR) == 100
    assert meter.written_bytes(now + (WINDOW_HOURS + 1) * HOUR) == 40


def test_a_clock_that_is_ahead_for_a_moment_gives_no_budget() -> None:
    """D6: what was written counts again when the clock is right again."""
    meter = WriteMeter(100)
    meter.record(100, 0.0)
    assert meter.allows(100, 48 * HOUR)
    assert not meter.allows(1, HOUR)


def test_a_meter_that_nobody_reads_does_not_grow() -> None:
    """D6: without a budget too, what is stored does not grow over the months."""
    meter = WriteMeter(None)
    for hour in range(1000):
        meter.record(1, hour * HOUR)
    assert len(msgspec.json.decode(meter.encode())["hours"]) == KEPT_HOURS + 1


def test_no_budget_is_no_bound_but_is_counted() -> None:
    """D6: without a budget everything is allowed, and still measured."""
    meter = WriteMeter(None)
    meter.record(1 << 50, 0.0)
    assert meter.allows(1 << 50, 0.0)
    assert meter.written_bytes(0.0) == 1 << 50


def test_the_meter_survives_a_restart() -> None:
    """D6: a restart does not reset the budget; a damaged meter counts as empty."""
    meter = WriteMeter(100)
    meter.record(70, 10 * HOUR)
    again = WriteMeter(100, meter.encode())
    assert again.written_bytes(11 * HOUR) == 70
    for damaged in (b"{", b"[]", b'{"hours":{"x":1}}', b"\xff"):
        assert WriteMeter(100, damaged).written_bytes(0.0) == 0


def test_a_clock_set_back_keeps_the_count() -> None:
    """D6: bytes counted under a later clock are counted as written now, once."""
    meter = WriteMeter(100)
    meter.record(70, 1000 * HOUR)
    assert meter.written_bytes(10 * HOUR) == 70
    assert meter.written_bytes((11 + WINDOW_HOURS) * HOUR) == 0


def test_the_meter_never_exceeds_its_budget_in_any_window() -> None:
    """D6: whatever is asked when, no 24 hours exceed the budget, wherever they begin."""
    source = random.Random(1)
    meter = WriteMeter(1000)
    written: list[tuple[float, int]] = []
    now = 0.0
    for _ in range(2000):
        now += source.random() * HOUR
        nbytes = source.randrange(1, 200)
        if meter.allows(nbytes, now):
            meter.record(nbytes, now)
            written.append((now, nbytes))
        recent = sum(n for at, n in written if at > now - WINDOW_HOURS * HOUR)
        assert recent <= 1000
    assert len(written) > 100


def test_pauses_grow_to_their_bound() -> None:
    """D7: a failing disk is tried ever more rarely, and from the start after a success."""
    back_off = BackOff(1.0, 5.0)
    assert [back_off.failed(10.0) for _ in range(5)] == [11.0, 12.0, 14.0, 15.0, 15.0]
    back_off.succeeded()
    assert back_off.failed(0.0) == 1.0


def test_deletions_that_failed_are_tried_again_at_their_time() -> None:
    """D5: all of them at once, ever more rarely, and never one whose file was written anew."""
    failed = FailedDeletions(BackOff(1.0, 60.0))
    assert (failed.take_due(0.0), failed.next_deadline, failed.error) == ([], None, "")
    orders = [DeleteFile(str(number), f"path {number}", 1) for number in range(3)]
    for order in orders:
        failed.add(order, f"not {order.id}", 10.0)
    assert (len(failed), failed.next_deadline, failed.error) == (3, 11.0, "not 2")
    assert failed.retire("path 1") == orders[1]
    assert failed.retire("path 1") is None
    assert failed.take_due(10.9) == []
    assert failed.take_due(11.0) == [orders[0], orders[2]]
    assert (len(failed), failed.next_deadline, failed.error) == (0, None, "")
    failed.succeeded()
    failed.add(orders[0], "again", 20.0)
    assert failed.next_deadline == 21.0


def test_many_failed_deletions_are_one_round() -> None:
    """D5: the pause grows by rounds, not by files, and what fails later joins the next round."""
    failed = FailedDeletions(BackOff(1.0, 60.0))
    orders = [DeleteFile(str(number), f"path {number}", 1) for number in range(7)]
    for order in orders:
        failed.add(order, "not", 0.0)
    assert failed.next_deadline == 1.0
    late = DeleteFile("late", "late", 1)
    failed.add(late, "not", 0.9)
    assert failed.take_due(1.0) == [*orders, late]
    for order in (*orders, late):
        failed.add(order, "not", 1.0, is_retry=True)
    assert failed.next_deadline == 3.0


def test_failures_in_a_row_are_of_so_many_files() -> None:
    """D5, D7: one file that is tried again and again does not look like a disk that fails."""
    failed = FailedDeletions(BackOff(1.0, 60.0))
    order = DeleteFile("x", "path", 1)
    failed.add(order, "not", 0.0)
    for now in (1.0, 3.0, 7.0):
        assert failed.take_due(now) == [order]
        failed.add(order, "not", now, is_retry=True)
    assert failed.in_a_row == 1
    failed.add(DeleteFile("y", "other path", 1), "not", 8.0)
    assert failed.in_a_row == 2
    failed.succeeded()
    assert failed.in_a_row == 0


def test_a_clear_makes_the_failed_deletions_of_its_directory_void() -> None:
    """D11: what it moved away is not tried again where it was."""
    failed = FailedDeletions(BackOff(1.0, 60.0))
    orders = [DeleteFile(path, path, 1) for path in ("a/1", "b/1", "a/2", "ab/1")]
    for order in orders:
        failed.add(order, "not", 0.0)
    assert failed.retire_below("a") == [orders[0], orders[2]]
    assert failed.retire_below(None) == [orders[1], orders[3]]
    assert failed.next_deadline is None


def test_a_clear_follows_the_last_deletion_wherever_it_stands() -> None:
    """D11: files that were to be deleted are reported as deleted, not as trash."""
    queue = WriteQueue()
    first, second, clear = delete("x"), delete("y"), ClearNamespace("a", 1)
    queue.add_delete(first)
    queue.add_write(write(1, "b"), not_before=0.0)
    queue.add_delete(second)
    queue.add_write(write(2, "b"), not_before=0.0)
    queue.add_clear(Envelope(clear), "a")
    order = [queue.next(0.0) for _ in range(5)]
    assert [order[0], order[2]] == [first, second]
    assert order[3] is not None
    assert order[3].message is clear
