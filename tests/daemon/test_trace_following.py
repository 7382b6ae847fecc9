"""Turns of a record, and a daemon that is kept to them: order, time, and where that ends."""

from collections.abc import Iterable
from typing import Any

import pytest
import trio

from prefixcached.daemon.trace.followed_mailboxes import FollowedInbox, HeldOutbox
from prefixcached.daemon.trace.guide import NO_TURNS, Followed, Guide
from prefixcached.daemon.trace.plain import PlainForm
from prefixcached.daemon.trace.trace_file import Record
from prefixcached.daemon.trace.tracer import OWN, REPLIES, REQUESTS, TO_PREFETCHER, WORKERS
from prefixcached.daemon.trace.turn_clock import FollowingClock
from prefixcached.daemon.trace.turns import name_of, outcomes_of, plain_of, turns_of
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import ActorMessage, Envelope
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.messages import AnyRequest, Reply

FORM = PlainForm(keep_tokens=True)
FROM_PREFETCHER = "prefetcher->ram_tier"
TAKE = wire.Take("n", bytes(40))
MISS = wire.Miss(reason="empty")
HEADER = inner.FileHeader(1, "a" * 32, ImageKind.SEGMENT, "n", ImageSpec(ImageKind.SEGMENT, 0, 4))
ENTRY = inner.FileEntry(HEADER, "n/x", b"", 0, 1, 1)


def call(session: int, request: AnyRequest = TAKE) -> Record:
    return Record(1.0, REQUESTS, f"{session}.1", FORM.of(inner.Call(session, request)))


def reply(session: int, message: Reply = MISS) -> Record:
    return Record(1.0, REPLIES, f"{session}.1", FORM.of(message))


def said(channel: str, message: ActorMessage) -> Record:
    return Record(1.0, channel, "", FORM.of(message))


def turn(now: float, *, wake: bool = False) -> Record:
    return Record(1.0, OWN, "", {"type": "turn", "now": now, "wake": wake})


def name(channel: str, message: ActorMessage | Reply) -> tuple[object, ...]:
    return (channel, *name_of(plain_of(message)))


class Followers:
    """What stands around a RamTier that follows ``records``."""

    def __init__(self, *records: Record) -> None:
        self.ended: list[Followed] = []
        self.clock = FollowingClock()
        self.sessions = {100 + number: number for number in range(10)}
        self.guide = Guide(turns_of(records), outcomes_of(records), self.end)
        self.forgotten: list[Any] = []
        self.outbox, inbox = trio.open_memory_channel[Envelope](99)
        self.inbox = FollowedInbox(
            inbox, self.guide, self.clock, self.sessions.get, self.forgotten.append
        )

    def end(self, followed: Followed) -> None:
        self.ended.append(followed)
        self.clock.go()
        if hasattr(self, "inbox"):
            self.inbox.let_go()

    def arrive(self, *messages: ActorMessage) -> None:
        for message in messages:
            self.outbox.send_nowait(Envelope(message))

    async def heard(self, count: int) -> list[ActorMessage]:
        with trio.fail_after(30):
            return [(await self.inbox.receive()).message for _ in range(count)]


def guided(records: Iterable[Record]) -> tuple[Guide, list[Followed]]:
    ended: list[Followed] = []
    records = list(records)
    return Guide(turns_of(records), outcomes_of(records), ended.append), ended


def test_a_turn_is_a_message_its_time_and_what_was_decided() -> None:
    """Messages are handled in the order in which they were sent, however late."""
    prelude, first, woken, second = turns_of(
        [
            said("ram_tier->ssd_tier", inner.ScanDirectory()),
            call(1), call(2), turn(5.0), reply(1), turn(5.5, wake=True), turn(6.0), reply(2),
        ]
    )  # fmt: skip
    assert prelude.decided == (name("ram_tier->ssd_tier", inner.ScanDirectory()),)
    assert (first.now, first.heard, first.decided) == (5.0, call(1), (name(REPLIES, MISS),))
    assert (woken.now, woken.heard, woken.decided) == (5.5, None, ())
    assert (second.now, second.heard, second.is_whole) == (6.0, call(2), False)


@pytest.mark.parametrize(
    "end",
    [Record(1.0, OWN, "", {"type": "gap", "records": 2}), said(WORKERS, inner.SyncAll())],
)
def test_turns_end_at_a_gap_and_where_the_daemon_was_stopped(end: Record) -> None:
    """What follows is no longer known, or no longer RamTier's own doing."""
    assert len(list(turns_of([call(1), turn(5.0), end, call(2), turn(6.0)]))) == 2


def test_what_a_replay_does_not_ask_is_told() -> None:
    """Who looks on is not repeated, and who did nothing else has no session to end."""
    requests = [call(1, wire.Status()), call(2), said(REQUESTS, inner.ClientGone(1)),
                said(REQUESTS, inner.ClientGone(2))]  # fmt: skip
    turns = list(turns_of([*requests, *(turn(float(n)) for n in range(4))]))
    assert [one.is_repeated for one in turns[1:]] == [False, True, False, True]


def test_the_same_decisions_are_followed_to_the_end() -> None:
    """The end of the record is no difference."""
    guide, ended = guided([call(1), turn(5.0), reply(1), call(2), turn(6.0)])
    for decided in ([name(REPLIES, MISS)], []):
        assert guide.upcoming() is not None
        guide.begin()
        for one in decided:
            guide.decide(one)
    assert guide.upcoming() is None
    assert ended == [Followed(turns=2, seconds=1.0, flow="2.1", reason="")]


@pytest.mark.parametrize(
    ("decided", "reason"),
    [
        ([wire.Miss(reason="diverged")], "the record goes on with miss empty 0, here with miss"),
        ([], "the record goes on with miss empty 0, and this daemon does not"),
        ([MISS, MISS], "this daemon goes on with miss empty 0, and the record does not"),
    ],
)
def test_the_first_difference_ends_it(decided: list[Reply], reason: str) -> None:
    """Another decision, one less or one more: it is said where and which."""
    guide, ended = guided([call(1), turn(5.0), reply(1), call(2), turn(6.0), turn(7.0, wake=True)])
    guide.upcoming()
    guide.begin()
    for one in decided:
        guide.decide(name(REPLIES, one))
    assert guide.upcoming() is None
    assert (len(ended), ended[0].turns, ended[0].flow) == (1, 1, "1.1")
    assert reason in ended[0].reason


def test_images_are_called_as_in_the_record() -> None:
    """So that files, reads and copies are told from one another by their names."""
    image = Record(1.0, OWN, "", {"type": "new-image", "id": "b" * 32})
    guide, _ = guided([call(1), turn(5.0), image, turn(6.0, wake=True)])
    assert guide.image_id() is None
    guide.upcoming()
    guide.begin()
    assert guide.image_id() == "b" * 32


def test_without_turns_nothing_is_followed() -> None:
    """A trace of an older version, or an empty one."""
    guide, ended = guided([call(1), reply(1)])
    assert (guide.is_following, ended[0].reason) == (False, NO_TURNS)


def test_time_does_not_leap_while_a_request_is_on_its_way() -> None:
    """L4: a client's frame has a deadline, and what happens next may be hours later."""
    wakes = [turn(10.0 * number, wake=True) for number in range(1, 4)]
    guide, _ = guided([*wakes, call(7), turn(50.0)])
    guide.upcoming()
    assert guide.awaited_request() == ("session", 7)
    guide, _ = guided([*wakes, reply(3), call(7), turn(50.0)])
    guide.upcoming()
    assert guide.awaited_request() is None, "the client may have waited for that reply"


async def test_messages_are_heard_in_the_records_order_and_at_its_times() -> None:
    """Whatever order they arrive in; another actor's too."""
    read = inner.ImageRead(4, "a" * 32)
    order = inner.ReadImage(4, ENTRY)
    around = Followers(
        call(1), turn(5.0), said(TO_PREFETCHER, order), said(FROM_PREFETCHER, read), call(2),
        turn(6.0), turn(7.0), turn(8.0, wake=True),
    )  # fmt: skip
    around.arrive(inner.Call(102, TAKE), inner.Call(101, TAKE))
    times = []
    async with trio.open_nursery() as nursery:

        async def ram_tier() -> None:
            for number in range(4):
                (message,) = await around.heard(1)
                times.append((type(message).__name__, around.clock.now()))
                if number == 0:
                    around.guide.decide(name(TO_PREFETCHER, order))

        nursery.start_soon(ram_tier)
        await trio.testing.wait_all_tasks_blocked()
        assert times == [("Call", 5.0)], "the second request waits for the read"
        around.arrive(read)
    assert times == [("Call", 5.0), ("ImageRead", 6.0), ("Call", 7.0), ("SyncAll", 8.0)]


async def test_what_a_replay_asks_itself_is_answered_at_once() -> None:
    """Its own questions have no turn; they come while a message is awaited."""
    around = Followers(call(1), turn(5.0))
    around.arrive(inner.Call(200, wire.Status()))
    assert await around.heard(1) == [inner.Call(200, wire.Status())]
    assert around.guide.followed == 0


async def test_the_machine_is_the_records_until_the_following_ends() -> None:
    """M1: its memory pressure is told; this machine's own comes afterwards."""
    warn, normal = inner.PressureChanged("warn", "then"), inner.PressureChanged("normal", "now")
    around = Followers(said("pressure_monitor->ram_tier", warn), turn(5.0), call(1), turn(6.0))
    around.arrive(normal, inner.Call(101, TAKE))
    assert await around.heard(1) == [warn]
    around.guide.end("for a reason")
    assert await around.heard(2) == [normal, inner.Call(101, TAKE)]


async def test_what_waits_is_let_go_in_its_order_when_the_following_ends() -> None:
    """Nothing is lost or overtaken where the two daemons part, and time goes on."""
    around = Followers(call(1), turn(5.0), call(2), turn(6.0))
    around.arrive(inner.Call(103, TAKE), inner.ClientGone(103), inner.Call(102, TAKE))
    async with trio.open_nursery() as nursery:
        heard: list[ActorMessage] = []

        async def ram_tier() -> None:
            heard.extend(await around.heard(3))

        nursery.start_soon(ram_tier)
        await trio.testing.wait_all_tasks_blocked()
        assert heard == []
        around.guide.end("for a reason")
    assert heard == [inner.Call(103, TAKE), inner.ClientGone(103), inner.Call(102, TAKE)]


async def test_another_request_than_the_records_ends_it() -> None:
    """The session's next message is of another kind."""
    around = Followers(call(1), turn(5.0))
    around.arrive(inner.Call(101, wire.Peek("n", b"")))
    assert await around.heard(1) == [inner.Call(101, wire.Peek("n", b""))]
    assert "the record goes on with take, here with Call" in around.ended[0].reason


async def test_what_failed_in_the_record_is_told_and_not_tried() -> None:
    """D4, D7: this disk would not fail; once nothing is followed, what is left is tried."""
    failed = said(FROM_PREFETCHER, inner.ImageRead(4, "a" * 32, error="EIO"))
    good = said(FROM_PREFETCHER, inner.ImageRead(5, "a" * 32))
    around = Followers(failed, good, turn(5.0), turn(6.0))
    outbox, orders = trio.open_memory_channel[Envelope](9)
    held = HeldOutbox(outbox, around.guide)
    for read in (4, 5, 6):
        held.send_nowait(Envelope(inner.ReadImage(read, ENTRY)))
    held.send_nowait(Envelope(inner.CancelRead(7, "a" * 32)))
    assert orders.receive_nowait().message == inner.ReadImage(5, ENTRY)
    assert await around.heard(1) == [inner.ImageRead(4, "a" * 32, error="EIO")]
    assert around.forgotten == [("image-read", 4)]
    held.forget(around.forgotten[0])
    around.guide.end("for a reason")
    held.let_go()
    left = [orders.receive_nowait().message for _ in range(orders.statistics().current_buffer_used)]
    assert left == [inner.ReadImage(6, ENTRY), inner.CancelRead(7, "a" * 32)]


async def test_a_clear_does_not_overtake_a_write_that_succeeded() -> None:
    """D11: SsdTier drops the writes that it has not begun, and the record's had begun this one."""
    around = Followers(said("ssd_tier->ram_tier", inner.Written("a" * 32, ENTRY)), turn(5.0))
    outbox, orders = trio.open_memory_channel[Envelope](9)
    held = HeldOutbox(outbox, around.guide)
    write, clear = inner.WriteImage(HEADER, b"", b""), inner.ClearNamespace("n", 1)
    for order in (write, clear, inner.SyncAll(3)):
        held.send_nowait(Envelope(order))
    assert [orders.receive_nowait().message, orders.statistics().current_buffer_used] == [write, 0]
    held.written()
    assert [orders.receive_nowait().message for _ in range(2)] == [clear, inner.SyncAll(3)]


def test_the_clock_stands_and_then_goes() -> None:
    """Only what is due at the record's time is due while it stands."""
    clock = FollowingClock()
    clock.stand_at(100.0)
    assert (clock.current_time(), clock.deadline_to_sleep_time(101.0)) == (100.0, float("inf"))
    assert clock.deadline_to_sleep_time(99.0) < 0
    heard: list[float] = []
    clock.listen(heard.append)
    assert clock.now() == 100.0
    assert clock.current_time() == clock.current_time() == 100.0
    assert heard == [100.0]
    clock.go()
    assert clock.current_time() >= 100.0
    assert clock.deadline_to_sleep_time(1e6) < 1e6
