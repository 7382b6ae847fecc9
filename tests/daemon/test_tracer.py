"""The tracer between actors: what it records, and that it stands in nobody's way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from prefixcached.actors.mailbox import DirectMailbox, Inbox, ReplySlot
from prefixcached.daemon import config
from prefixcached.daemon.options import Options
from prefixcached.daemon.storage import Storage
from prefixcached.daemon.trace import tracer as tracer_module
from prefixcached.daemon.trace.trace_file import Record, reading
from prefixcached.daemon.trace.tracer import OWN, REPLIES, REQUESTS, TracedOutbox, Tracer
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import Call, ClientGone, Envelope, Freed, Sealed, SyncAll

PEEK = Call(1, wire.Peek("n", b""))


@pytest.fixture
def effective(tmp_path: Path) -> config.Config:
    options = Options(state_dir=tmp_path / "state", ram_bytes="1MiB", ssd_bytes="4MiB")
    return config.load(options, socket=tmp_path / "s")


@pytest.fixture
def tracer(tmp_path: Path, effective: config.Config) -> Tracer:
    return Tracer(tmp_path / "t", effective, keep_tokens=False)


def records(tracer: Tracer) -> list[Record]:
    """What the file has once it is closed."""
    tracer.close()
    with reading(Path(tracer.statistics().path)) as (_, found):
        return list(found)


def mailbox(tracer: Tracer, room: float = 8) -> tuple[TracedOutbox, Inbox]:
    outbox, inbox = trio.open_memory_channel[Envelope](room)
    traced = tracer.traced(outbox, REQUESTS)
    assert isinstance(traced, TracedOutbox)
    return traced, inbox


async def test_without_a_trace_nothing_stands_between_actors(effective: config.Config) -> None:
    """Tracing that is off costs nothing: sessions send into RamTier's own mailbox."""
    assert isinstance(Storage(effective).mailbox, DirectMailbox)


async def test_every_channel_is_traced(effective: config.Config, tracer: Tracer) -> None:
    """With a trace each actor sends through an outbox of its own channel."""
    storage = Storage(effective, tracer)
    assert isinstance(storage.mailbox, TracedOutbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(storage.run)
        slot = ReplySlot()
        await storage.mailbox.send(Envelope(Call(1, wire.Clear()), slot))
        await slot.wait()
        storage.stop()
    # SsdTier and RamTier have said all of it before `run` ends; the monitor once when it starts.
    assert {record.channel for record in records(tracer)} >= {
        "session->ram_tier", "ram_tier->session", "ram_tier->ssd_tier", "ssd_tier->ram_tier",
        "ram_tier->ram_tier",
    }  # fmt: skip


async def test_a_call_and_its_reply_are_one_flow(tracer: Tracer) -> None:
    """The reply reaches the caller, descriptors and all, and the trace has both."""
    outbox, inbox = mailbox(tracer)
    slot = ReplySlot()
    outbox.send_nowait(Envelope(PEEK, slot))
    handle = inbox.receive_nowait().handle
    assert not slot.is_set
    handle.set(wire.Length(length=5), [3])
    assert slot.answer == (wire.Length(length=5), [3])
    asked, answered = records(tracer)
    assert (asked.channel, asked.flow, asked.type) == (REQUESTS, "1.1", "peek")
    assert (answered.channel, answered.flow, answered.message["length"]) == (REPLIES, "1.1", 5)
    assert answered.seconds >= asked.seconds


async def test_what_was_not_sent_is_not_recorded(tracer: Tracer) -> None:
    """A full mailbox refuses; the request is recorded once, when it goes in."""
    outbox, inbox = mailbox(tracer, room=1)
    outbox.send_nowait(Envelope(ClientGone(9)))
    slot = ReplySlot()
    with pytest.raises(trio.WouldBlock):
        outbox.send_nowait(Envelope(PEEK, slot))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.send, Envelope(PEEK, slot))
        await trio.testing.wait_all_tasks_blocked()
        await inbox.receive()
        await inbox.receive()
    assert [(r.type, r.flow) for r in records(tracer)] == [
        ("client-gone", "9.end"), ("peek", "1.1"),
    ]  # fmt: skip


async def test_who_sends_into_a_traced_mailbox_hears_that_nobody_receives(tracer: Tracer) -> None:
    """A stop waits for no room in it, as without a trace."""
    box = tracer.mailbox(0)
    box.inbox.close()
    with trio.fail_after(20), pytest.raises(trio.BrokenResourceError):
        await tracer.traced(box.outbox, REQUESTS).send(Envelope(ClientGone(1)))


async def test_what_ram_tier_orders_belongs_to_what_it_handles(tracer: Tracer) -> None:
    """Its inbox notes what is handled, until it asks for the next message."""
    box = tracer.mailbox(8)
    requests = tracer.traced(box.outbox, REQUESTS)
    orders, _orders_inbox = trio.open_memory_channel[Envelope](8)
    traced_orders = tracer.traced(orders, "ram_tier->ssd_tier")
    make = tracer.new_id(lambda: "a" * 32)

    slot = ReplySlot()
    requests.send_nowait(Envelope(Call(1, wire.Offer("n", b"", b"")), slot))
    (await box.inbox.receive()).handle.set(wire.Grant(put=4, base=0, images=()))
    box.outbox.send_nowait(Envelope(Sealed(4)))
    await box.inbox.receive()
    assert make() == "a" * 32
    traced_orders.send_nowait(Envelope(SyncAll()))
    box.outbox.send_nowait(Envelope(Freed(1, 1)))
    await box.inbox.receive()
    traced_orders.send_nowait(Envelope(SyncAll(1)))
    assert [(r.type, r.flow) for r in records(tracer)] == [
        ("offer", "1.1"), ("grant", "1.1"), ("sealed", "1.1"), ("new-image", ""),
        ("sync-all", "1.1"), ("freed", ""), ("sync-all", ""),
    ]  # fmt: skip


async def test_what_a_session_answers_is_recorded(tracer: Tracer) -> None:
    """The greeting, and who watches the daemon."""
    tracer.answered(2, wire.Hello((1, 0)), wire.Welcome(version=(1, 0)))
    tracer.answered(2, wire.Latency(), wire.LatencyReport(bounds_seconds=(), requests=()))
    assert [(r.channel, r.flow, r.type) for r in records(tracer)] == [
        ("client->session", "2.0", "hello"), ("session->client", "2.0", "welcome"),
        ("client->session", "2.1", "latency"), ("session->client", "2.1", "latency-report"),
    ]  # fmt: skip


async def test_a_writer_that_cannot_keep_up_leaves_a_gap(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is bounded; what was left out is counted, and said in the trace."""
    monkeypatch.setattr(tracer_module, "MAX_QUEUED_BYTES", 3 * tracer_module.RECORD_BYTES)
    outbox, _inbox = mailbox(tracer)
    for session in range(5):
        outbox.send_nowait(Envelope(ClientGone(session)))
    found = records(tracer)
    assert [record.type for record in found] == ["gap", *["client-gone"] * 3]
    assert found[0].message == {"type": "gap", "records": 2}
    assert tracer.statistics().left_out == 2


async def test_statistics_are_recorded_at_once_and_at_the_end(tracer: Tracer) -> None:
    """Evictions and bytes written are in no message; a killed daemon's are those of seconds ago."""
    counts = iter(range(10))
    sources: dict[str, Callable[[], Any]] = {"ram_tier": lambda: {"evictions": next(counts)}}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tracer.run, sources)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    found = records(tracer)
    assert {(record.channel, record.type) for record in found} == {(OWN, "statistics")}
    assert [record.message["report"]["ram_tier"]["evictions"] for record in found] == [0, 1]


async def test_a_message_that_has_no_plain_form_ends_the_trace_alone(tracer: Tracer) -> None:
    """A bug in the trace is logged and counted; the actors go on."""
    outbox, inbox = mailbox(tracer)
    outbox.send_nowait(Envelope(ClientGone(1)))
    tracer._write(tracer._take_waiting())
    outbox.send_nowait(Envelope(ClientGone(1 << 70)))
    tracer._write(tracer._take_waiting())
    outbox.send_nowait(Envelope(ClientGone(2)))
    assert inbox.statistics().current_buffer_used == 3
    statistics = tracer.statistics()
    assert (statistics.is_recording, statistics.failures, statistics.records) == (False, 1, 1)
    assert [record.type for record in records(tracer)] == ["client-gone"]


def test_the_header_says_what_was_in_force(tracer: Tracer, effective: config.Config) -> None:
    """A replay starts from it."""
    records(tracer)
    with reading(Path(tracer.statistics().path)) as (header, _):
        assert header.tokens == "digests"
        assert header.config["ram_bytes"] == effective.ram_bytes
        assert header.config["options"]["ssd_bytes"] == "4MiB"
        assert header.config["options"]["state_dir"] == str(effective.state_dir)
