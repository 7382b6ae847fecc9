"""Tracer: records every message that passes. It owns the trace file and the names of flows.

A traced outbox stands in the place of an actor's outbox and records what is sent through it; for a
call it puts a slot of its own around the reply slot, which records the reply. On the event loop a
record is an append to a list. A thread gives the messages their plain form and writes them, a few
times a second; so kill -9 loses the last moment alone. Whatever goes wrong ends the trace, with a
log line and a counter, and never the daemon.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import structlog
import trio

from prefixcached import __version__
from prefixcached.actors.mailbox import Mailbox, Outbox, Receiver, ReplySlot, open_mailbox
from prefixcached.daemon.config import Config
from prefixcached.daemon.trace.flows import Flows
from prefixcached.daemon.trace.plain import PlainForm
from prefixcached.daemon.trace.trace_file import FORMAT, Header, Record, TraceWriter, encoded
from prefixcached.daemon.trace.turn_clock import TurnClock
from prefixcached.protocol.actor_messages import ActorMessage, Call, Envelope
from prefixcached.protocol.messages import AnyRequest, Reply

FLUSH_SECONDS: Final = 0.25
"""Between two writes: what a killed daemon loses at most, and rare enough to cost nothing."""

STATISTICS_SECONDS: Final = 10.0
"""Between two records of the statistics, from which a killed daemon's evictions are known."""

MAX_QUEUED_BYTES: Final = 64 << 20
"""What waits to be written, about; beyond it records are left out. A busy second is a tenth."""

RECORD_BYTES: Final = 512
"""What a record that waits is taken for, beside its tokens."""

REQUESTS: Final = "session->ram_tier"
REPLIES: Final = "ram_tier->session"
WORKERS: Final = "ram_tier->ram_tier"
TO_SSD_TIER: Final = "ram_tier->ssd_tier"
TO_PREFETCHER: Final = "ram_tier->prefetcher"
FROM_CLIENT: Final = "client->session"
"""What a session answers itself: the greeting, and who watches the daemon."""
TO_CLIENT: Final = "session->client"
OWN: Final = "tracer"
"""What the trace says itself: "statistics" and "gap"; and what RamTier does without saying it:
"turn", when it begins to handle the next message, or nothing but what is due; "new-image"."""

ENDS_HERE: Final = "the trace ends here; the daemon goes on"
"""The log's line with the ``reason``; a replay whose own trace ends so has no result."""

Statistics = Mapping[str, Callable[[], Any]]

log = structlog.get_logger()


class TraceStatistics(msgspec.Struct, frozen=True):
    """What was recorded. ``left_out`` counts records for which the writer was too slow."""

    path: str
    is_recording: bool
    records: int
    written_bytes: int
    left_out: int
    failures: int
    failure: str


class _Waiting(NamedTuple):
    """A record that has no plain form yet; ``request`` is what a reply answers."""

    seconds: float
    channel: str
    flow: str
    message: Any
    request: Any = None


class Tracer:
    """One trace, from the daemon's start to `close`.

    Args:
        path: The file; see `TraceWriter`.
        config: What is in force; the header holds it.
        keep_tokens: Write tokens, labels and keys in the clear.
        clock: What trio is run with; turns are recorded only where it is.

    Raises:
        StartError: The file cannot be written.
    """

    def __init__(
        self, path: Path, config: Config, *, keep_tokens: bool, clock: TurnClock | None = None
    ) -> None:
        self.clock = TurnClock() if clock is None else clock
        self._path = path
        self._started = time.monotonic()
        self._writer = TraceWriter(
            path,
            Header(
                format=FORMAT,
                version=__version__,
                started=time.time(),
                tokens="ids" if keep_tokens else "digests",
                config=msgspec.to_builtins(config, enc_hook=str),
            ),
        )
        self._form = PlainForm(keep_tokens=keep_tokens)
        self._flows = Flows()
        self._waiting: list[_Waiting] = []
        self._waiting_bytes = 0
        self._is_recording = True
        self._records = 0
        self._written_bytes = 0
        self._left_out = 0
        self._left_out_unsaid = 0
        self._failure = ""

    # -- where the actors meet it ---------------------------------------------------------------

    def mailbox(self, messages: float) -> Mailbox:
        """Return a new mailbox for RamTier: what it tells itself, and what it handles, is seen."""
        outbox, inbox = open_mailbox(messages)
        return self._traced_mailbox(outbox, inbox)

    def _traced_mailbox(self, outbox: Outbox, inbox: Receiver) -> Mailbox:
        return Mailbox(TracedOutbox(outbox, self, WORKERS), TracedInbox(inbox, self, self._flows))

    def traced(self, outbox: Outbox, channel: str) -> Outbox:
        """Return an outbox that sends to ``outbox`` and records it under ``channel``."""
        inner = outbox.untraced if isinstance(outbox, TracedOutbox) else outbox
        return TracedOutbox(inner, self, channel)

    def new_id(self, make: Callable[[], str]) -> Callable[[], str]:
        """Return a function that makes image ids and notes whose they are."""

        def made() -> str:
            image = make()
            self._flows.new_image(image)
            self._record(OWN, "", {"type": "new-image", "id": image})
            return image

        return made

    def sent(self, channel: str, message: ActorMessage) -> str:
        """Record what is sent on ``channel``; return its flow."""
        if channel == REQUESTS and isinstance(message, Call):
            flow = self._flows.of_request(message.session, message.request)
        elif channel in (TO_SSD_TIER, TO_PREFETCHER):
            flow = self._flows.of_order(message)
        else:
            flow = self._flows.of_outcome(message)
        self._record(channel, flow, message)
        return flow

    def replied(self, flow: str, request: AnyRequest | None, reply: Reply) -> None:
        """Record RamTier's reply."""
        self._flows.replied(flow, reply)
        self._record(REPLIES, flow, reply, request)

    def answered(self, session: int, request: AnyRequest, reply: Reply) -> None:
        """Record what a session answered itself."""
        flow = self._flows.of_request(session, request)
        self._record(FROM_CLIENT, flow, request)
        self._record(TO_CLIENT, flow, reply, request)

    def next_turn(self, *, is_wake: bool) -> None:
        """Record what time RamTier is given now, for a message, or of a deadline (``is_wake``)."""
        self.clock.listen(self._wake if is_wake else self._turn)

    def _turn(self, now: float) -> None:
        self._record(OWN, "", {"type": "turn", "now": now})

    def _wake(self, now: float) -> None:
        self._record(OWN, "", {"type": "turn", "now": now, "wake": True})

    # -- the file -------------------------------------------------------------------------------

    def statistics(self) -> TraceStatistics:
        """Return a frozen copy of the counters."""
        return TraceStatistics(
            path=str(self._path),
            is_recording=self._is_recording,
            records=self._records,
            written_bytes=self._written_bytes,
            left_out=self._left_out,
            failures=int(bool(self._failure)),
            failure=self._failure,
        )

    async def run(self, sources: Statistics) -> None:
        """Write what was recorded until cancelled, and ``sources`` now and then and at the end."""
        next_statistics = 0.0
        try:
            while self._is_recording:
                if trio.current_time() >= next_statistics:
                    self._record_statistics(sources)
                    next_statistics = trio.current_time() + STATISTICS_SECONDS
                await trio.to_thread.run_sync(self._write, self._take_waiting())
                await trio.sleep(FLUSH_SECONDS)
        finally:
            self._record_statistics(sources)

    def close(self) -> None:
        """Write what is left, and end the trace."""
        self._write(self._take_waiting())
        self._is_recording = False
        self._writer.close()

    def _record(self, channel: str, flow: str, message: Any, request: Any = None) -> None:
        if not self._is_recording:
            return
        nbytes = RECORD_BYTES + _tokens_bytes(message)
        if self._waiting_bytes + nbytes > MAX_QUEUED_BYTES:
            self._left_out += 1
            self._left_out_unsaid += 1
            return
        self._waiting_bytes += nbytes
        self._waiting.append(_Waiting(self._seconds(), channel, flow, message, request))

    def _record_statistics(self, sources: Statistics) -> None:
        report = {name: source() for name, source in sources.items()}
        plain = msgspec.to_builtins({"type": "statistics", "report": report})
        self._record(OWN, "", plain)

    def _take_waiting(self) -> list[_Waiting]:
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        if self._left_out_unsaid:
            # Before what else waits: from here on the record is not complete.
            gap = {"type": "gap", "records": self._left_out_unsaid}
            seconds = waiting[0].seconds if waiting else self._seconds()
            waiting.insert(0, _Waiting(seconds, OWN, "", gap))
            self._left_out_unsaid = 0
        return waiting

    def _write(self, waiting: list[_Waiting]) -> None:
        """In a thread, or after the loop's end: the one user of the form and the writer."""
        if not self._is_recording or not waiting:
            return
        try:
            values = [self._encoded(one) for one in waiting]
            self._written_bytes += self._writer.append(values)
            self._records += len(values)
        except OSError as error:
            self._fail(error.strerror or str(error))
        except Exception as error:
            log.exception("a message cannot be traced", path=str(self._path))
            self._fail(repr(error))

    def _encoded(self, one: _Waiting) -> bytes:
        plain = one.message
        if not isinstance(plain, dict):
            plain = self._form.of(plain, one.request)
        return encoded(Record(one.seconds, one.channel, one.flow, plain))

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._is_recording = False
        log.error(ENDS_HERE, path=str(self._path), reason=reason)

    def _seconds(self) -> float:
        return time.monotonic() - self._started


class TracedOutbox:
    """An outbox that is listened to."""

    def __init__(self, untraced: Outbox, tracer: Tracer, channel: str) -> None:
        self.untraced = untraced
        self._tracer = tracer
        self._channel = channel

    def send_nowait(self, value: Envelope, /) -> None:
        """See `Outbox`. What raises was not sent, and is not recorded."""
        envelope, slot = self._wrapped(value)
        self.untraced.send_nowait(envelope)
        self._sent(value, slot)

    async def send(self, value: Envelope, /) -> None:
        """See `Outbox`. Recorded before it waits: afterwards it may have been answered."""
        envelope, slot = self._wrapped(value)
        self._sent(value, slot)
        await self.untraced.send(envelope)

    async def aclose(self) -> None:
        """See `Outbox`."""
        await self.untraced.aclose()

    def close(self) -> None:
        """See `Outbox`."""
        self.untraced.close()

    def _wrapped(self, value: Envelope) -> "tuple[Envelope, TracedSlot | None]":
        if not isinstance(value.handle, ReplySlot):
            return value, None
        message = value.message
        request = message.request if isinstance(message, Call) else None
        slot = TracedSlot(value.handle, self._tracer, request)
        return Envelope(message, slot), slot

    def _sent(self, value: Envelope, slot: "TracedSlot | None") -> None:
        flow = self._tracer.sent(self._channel, value.message)
        if slot is not None:
            slot.flow = flow


class TracedSlot:
    """A reply slot (`desk.Answer`) that records the reply on its way."""

    def __init__(self, slot: ReplySlot, tracer: Tracer, request: AnyRequest | None) -> None:
        self.flow = ""
        self._slot = slot
        self._tracer = tracer
        self._request = request

    def set(self, reply: Reply, descriptors: Sequence[int] = ()) -> None:
        """See `ReplySlot`."""
        self._tracer.replied(self.flow, self._request, reply)
        self._slot.set(reply, descriptors)


class TracedInbox:
    """RamTier's inbox; it notes the flow of what RamTier handles until it asks for more."""

    def __init__(self, untraced: Receiver, tracer: Tracer, flows: Flows) -> None:
        self._untraced = untraced
        self._tracer = tracer
        self._flows = flows

    async def receive(self) -> Envelope:
        """See `Receiver`."""
        self._flows.current = ""
        try:
            envelope = await self._untraced.receive()
        except trio.Cancelled:
            self._tracer.next_turn(is_wake=True)
            raise
        self._tracer.next_turn(is_wake=False)
        handle = envelope.handle
        self._flows.current = (
            handle.flow
            if isinstance(handle, TracedSlot)
            else self._flows.of_outcome(envelope.message)
        )
        return envelope

    def close(self) -> None:
        """See `Receiver`."""
        self._untraced.close()


def _tokens_bytes(message: Any) -> int:
    tokens = getattr(getattr(message, "request", message), "tokens", b"")
    return len(tokens) if isinstance(tokens, bytes) else 0
