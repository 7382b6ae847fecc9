"""Following: a daemon that is kept to a record, so that a replay of it decides what it decided.

RamTier gets its messages in the record's order and at the record's times. What the disk and the
machine did of their own accord is told from the record; all else really happens: requests come from
the replay, images are sealed, written, read and copied, and whatever comes before its turn waits
(`followed_mailboxes`). Where the daemon decides otherwise (`guide`), all that waits is let go and
time goes on by itself. `FollowingTracer` owns the record's file and the report on it.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec
import trio

from prefixcached.actors.mailbox import Mailbox, Outbox
from prefixcached.daemon.config import Config
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.trace.followed_mailboxes import FollowedInbox, HeldOutbox, is_aside
from prefixcached.daemon.trace.guide import Followed, Guide
from prefixcached.daemon.trace.trace_file import Record, TraceError, reading
from prefixcached.daemon.trace.tracer import (
    OWN,
    REPLIES,
    TO_PREFETCHER,
    TO_SSD_TIER,
    Statistics,
    Tracer,
)
from prefixcached.daemon.trace.turn_clock import FollowingClock
from prefixcached.daemon.trace.turns import Name, name_of, outcomes_of, plain_of, turns_of
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import ActorMessage, Envelope
from prefixcached.protocol.messages import AnyRequest, Reply

STALL_SECONDS: Final = 20.0
"""Without a turn, before the following is given up. A large image on a busy disk takes seconds."""

_SESSION: Final = re.compile(r"replay of session (\d{1,18}), connection \d+")


class FollowingTracer(Tracer):
    """A tracer between actors that also keeps them to a record.

    Args:
        path: See `Tracer`. Beside it, under `report_path`, appears how far the record was followed
            once that has ended.
        config: See `Tracer`.
        record: The trace to follow.
        record_bytes: How much of it, where it may still grow.

    Raises:
        StartError: The trace cannot be written, or the record not be read.
    """

    def __init__(
        self, path: Path, config: Config, record: Path, record_bytes: int | None = None
    ) -> None:
        self._standing_clock = FollowingClock()
        super().__init__(path, config, keep_tokens=False, clock=self._standing_clock)
        self._report = report_path(path)
        self._report.unlink(missing_ok=True)
        self._sessions: dict[int, int] = {}
        self._orders: list[HeldOutbox] = []
        self._at_end: list[Callable[[], None]] = []
        self._files = ExitStack()
        try:
            if record_bytes is None:
                record_bytes = record.stat().st_size
            with reading(record, record_bytes) as (_, records):
                outcomes = outcomes_of(_readable(records))
            _, records = self._files.enter_context(reading(record, record_bytes))
        except (OSError, TraceError) as error:
            raise StartError(f"cannot follow {record}: {error}") from error
        self.guide = Guide(turns_of(_readable(records)), outcomes, self._has_ended)
        self._standing_clock.stand_at(self.guide.now)

    def close(self) -> None:
        """See `Tracer`."""
        self._files.close()
        super().close()

    # -- between actors -------------------------------------------------------------------------

    def mailbox(self, messages: float) -> Mailbox:
        """See `Tracer`: RamTier is kept to the record's order."""
        outbox, inbox = trio.open_memory_channel[Envelope](messages)
        followed = FollowedInbox(
            inbox, self.guide, self._standing_clock, self._sessions.get, self._forget
        )
        self._at_end.append(followed.let_go)
        return self._traced_mailbox(outbox, followed)

    def traced(self, outbox: Outbox, channel: str) -> Outbox:
        """See `Tracer`: what the record's disk failed at, or never ended, is not tried."""
        if channel in (TO_SSD_TIER, TO_PREFETCHER):
            held = HeldOutbox(outbox, self.guide)
            self._orders.append(held)
            self._at_end.append(held.let_go)
            return super().traced(held, channel)
        return super().traced(outbox, channel)

    def _forget(self, order: Name) -> None:
        for held in self._orders:
            held.forget(order)

    def new_id(self, make: Callable[[], str]) -> Callable[[], str]:
        """See `Tracer`: images are called as in the record."""

        def made() -> str:
            image = self.guide.image_id() or make()
            self.guide.decide((OWN, "new-image", image))
            return image

        return super().new_id(made)

    def sent(self, channel: str, message: ActorMessage) -> str:
        """See `Tracer`."""
        if channel in (TO_SSD_TIER, TO_PREFETCHER) and self.guide.is_following:
            self.guide.decide((channel, *name_of(plain_of(message))))
        if isinstance(message, inner.Written):
            for held in self._orders:
                held.written()
        return super().sent(channel, message)

    def replied(self, flow: str, request: AnyRequest | None, reply: Reply) -> None:
        """See `Tracer`."""
        if self.guide.is_following and request is not None and not is_aside(request):
            session = flow.partition(".")[0]
            if int(session or 0) in self._sessions:
                self.guide.decide((REPLIES, *name_of(plain_of(reply))))
        super().replied(flow, request, reply)

    def answered(self, session: int, request: AnyRequest, reply: Reply) -> None:
        """See `Tracer`; a greeting says whose session of the record it is."""
        if isinstance(request, wire.Hello) and (found := _SESSION.fullmatch(request.client)):
            self._sessions[session] = int(found[1])
        super().answered(session, request, reply)

    # -- its end ---------------------------------------------------------------------------------

    async def run(self, sources: Statistics) -> None:
        """See `Tracer`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await super().run(sources)

    async def _watch(self) -> None:
        """Give up when nothing comes any more. trio's clock stands still: a thread waits."""
        while self.guide.is_following:
            before = self.guide.followed
            await trio.to_thread.run_sync(time.sleep, STALL_SECONDS, abandon_on_cancel=True)
            if self.guide.followed == before:
                self.guide.stall(STALL_SECONDS)

    def _has_ended(self, followed: Followed) -> None:
        # Whoever waits for it finds it whole.
        unfinished = self._report.with_suffix(".unfinished")
        try:
            unfinished.write_bytes(msgspec.json.encode(followed))
            unfinished.replace(self._report)
        except OSError as error:
            raise StartError(f"cannot write {self._report}: {error.strerror}") from error
        self._standing_clock.go()
        for function in self._at_end:
            function()


def report_path(trace: Path) -> Path:
    """Where a daemon that writes ``trace`` says how far it followed a record."""
    return trace.with_name(f"{trace.name}.followed")


def _readable(records: Iterator[Record]) -> Iterator[Record]:
    """What stands before damage; the replay says that it is there."""
    with suppress(TraceError):
        yield from records
