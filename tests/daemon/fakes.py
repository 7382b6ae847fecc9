"""A RamTier that only answers, for tests of what stands in front of it."""

from collections.abc import Callable, Sequence
from typing import Any

import trio
import trio.testing

from prefixcached.actors import ram_samples
from prefixcached.actors.holdings import NO_HOLDINGS, Holdings
from prefixcached.actors.mailbox import Outbox, ReplySlot
from prefixcached.protocol import messages as m
from prefixcached.protocol.actor_messages import ActorMessage, Call, ClientGone, Envelope
from prefixcached.protocol.messages import AnyRequest, Reply

Script = Callable[[AnyRequest], tuple[Reply, Sequence[int]] | None]


def echo(request: AnyRequest) -> tuple[Reply, Sequence[int]] | None:
    """Answer what has a plain answer; leave `Flush` pending."""
    match request:
        case m.Take():
            return m.Miss(reason="empty", matched=len(request.tokens) // 4), ()
        case m.Peek() | m.Contains():
            return m.Length(length=len(request.tokens) // 4), ()
        case m.Status():
            return m.StatusReport(report={"ram_tier": {}}), ()
        case m.Clear():
            return m.Cleared(images=0, ram_bytes=0), ()
        case _:
            return None


class FakeRamTier:
    """Answers calls by a script and remembers all that it was told.

    Its mailbox has room for `room` messages beyond the one being handled.
    """

    boot = "boot-of-the-fake"

    def __init__(self, script: Script = echo, *, room: int = 64) -> None:
        self.mailbox: Outbox
        self.mailbox, self._inbox = trio.open_memory_channel[Envelope](room)
        self.script = script
        self.heard: list[ActorMessage] = []
        self.pending: list[ReplySlot] = []
        self.statistics_sources: dict[str, Callable[[], Any]] = {}
        self._stop = trio.Event()
        self._is_failing = False
        self.loaded = trio.Event()
        self.loaded.set()

    async def wait_loaded(self) -> None:
        await self.loaded.wait()

    def sample(self) -> list[float]:
        return [0.0] * len(ram_samples.COLUMNS)

    def holdings(self) -> Holdings:
        return NO_HOLDINGS

    @property
    def calls(self) -> list[AnyRequest]:
        return [message.request for message in self.heard if isinstance(message, Call)]

    @property
    def gone(self) -> list[int]:
        return [message.session for message in self.heard if isinstance(message, ClientGone)]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            task_status.started()
            await self._stop.wait()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        if self._is_failing:
            self._inbox.close()

    async def _receive(self) -> None:
        async for envelope in self._inbox:
            self.heard.append(envelope.message)
            if not isinstance(envelope.message, Call) or envelope.handle is None:
                continue
            slot: ReplySlot = envelope.handle
            request = envelope.message.request
            if isinstance(request, m.Status):
                report = {name: source() for name, source in self.statistics_sources.items()}
                slot.set(m.StatusReport(report=report))
                continue
            answer = self.script(request)
            if answer is None:
                self.pending.append(slot)
            else:
                slot.set(*answer)

    def stop(self) -> None:
        self._stop.set()

    def fail(self) -> None:
        """Hear nothing more, as after a crash."""
        self._is_failing = True
        self._stop.set()
