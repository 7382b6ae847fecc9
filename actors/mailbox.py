"""How actors are reached: a mailbox is a memory channel of envelopes, an answer a reply slot."""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import trio

from prefixcached.protocol.actor_messages import Envelope
from prefixcached.protocol.messages import Reply

MAILBOX_MESSAGES: Final = 1024
"""Envelopes that wait for RamTier; senders block beyond it."""

UNBOUNDED: Final = math.inf
"""Envelopes that wait for the actors that RamTier tells: it must never wait for them, and what it
sends is charged to a budget already."""

Inbox = trio.MemoryReceiveChannel[Envelope]


class Outbox(Protocol):
    """Where an actor is told something: a memory channel, or one that a trace listens to."""

    async def send(self, value: Envelope, /) -> None:
        """Put an envelope into the mailbox once there is room."""
        ...

    def send_nowait(self, value: Envelope, /) -> None:
        """Put an envelope into the mailbox; `trio.WouldBlock` without room."""
        ...

    async def aclose(self) -> None:
        """Send nothing more."""
        ...

    def close(self) -> None:
        """Send nothing more."""
        ...


class Receiver(Protocol):
    """Where RamTier takes envelopes from: a memory channel, or one that a trace listens to."""

    async def receive(self) -> Envelope:
        """Return the oldest envelope once there is one."""
        ...

    def close(self) -> None:
        """Receive nothing more: trio tells who sends, or waits for room, that nobody hears it."""
        ...


class Mailbox(NamedTuple):
    """Both ends of one."""

    outbox: Outbox
    inbox: Receiver


def open_mailbox(messages: float = MAILBOX_MESSAGES) -> Mailbox:
    """Return a new mailbox with room for so many envelopes."""
    return Mailbox(*trio.open_memory_channel[Envelope](messages))


class DirectMailbox:
    """RamTier's mailbox: a call is handled in its caller's turn of the loop if RamTier is waiting.

    Waking RamTier's task up, and its caller's again, takes two turns of the event loop, which cost
    more than a look-up. So `send_nowait` of a call runs `handle` at once where nothing can tell the
    difference: RamTier waits in `receive`, nothing is on its way to it, and `handle` never waits.
    Everything else is queued: what has no reply may come in thousands and must let others run.

    Args:
        handle: Handles one envelope as RamTier's task would; never raises.
        messages: Envelopes that may be queued; senders block beyond it.
    """

    def __init__(
        self, handle: Callable[[Envelope], None], messages: float = MAILBOX_MESSAGES
    ) -> None:
        self._handle = handle
        self._outbox, self._inbox = open_mailbox(messages)
        self._on_their_way = 0
        self._is_waiting = False

    def send_nowait(self, value: Envelope, /) -> None:
        """See `Outbox`."""
        if self._is_waiting and not self._on_their_way and isinstance(value.handle, ReplySlot):
            # What `handle` itself sends, if anything, has to be queued.
            self._is_waiting = False
            self._handle(value)
            self._is_waiting = True
            return
        self._outbox.send_nowait(value)
        self._on_their_way += 1

    async def send(self, value: Envelope, /) -> None:
        """See `Outbox`."""
        self._on_their_way += 1
        try:
            await self._outbox.send(value)
        except BaseException:
            self._on_their_way -= 1
            raise

    async def receive(self) -> Envelope:
        """See `Receiver`."""
        self._is_waiting = True
        try:
            envelope = await self._inbox.receive()
        finally:
            self._is_waiting = False
        self._on_their_way -= 1
        return envelope

    async def aclose(self) -> None:
        """See `Outbox`."""
        await self._outbox.aclose()

    def close(self) -> None:
        """Neither send nor receive anything more; see `Outbox` and `Receiver`."""
        self._outbox.close()
        self._inbox.close()


class ReplySlot:
    """Holds the one reply to one call. RamTier fills it, the session waits for it.

    The descriptors are lent: they stay valid until the session's next request or `ClientGone`,
    since only these can end the lease or put that owns them.
    """

    def __init__(self) -> None:
        # Most calls are answered before anybody has to wait.
        self._event: trio.Event | None = None
        self._value: tuple[Reply, Sequence[int]] | None = None

    def set(self, reply: Reply, descriptors: Sequence[int] = ()) -> None:
        """Answer the call. Setting twice is a bug in the actor."""
        if self._value is not None:
            raise RuntimeError(f"a call was answered twice: {self._value[0]!r}, then {reply!r}")
        self._value = (reply, descriptors)
        if self._event is not None:
            self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the call has been answered."""
        return self._value is not None

    @property
    def answer(self) -> tuple[Reply, Sequence[int]]:
        """The reply and its descriptors, once `is_set`."""
        assert self._value is not None, "the call has not been answered"
        return self._value

    async def wait(self) -> tuple[Reply, Sequence[int]]:
        """Wait for the reply and its descriptors, at most `MAX_DESCRIPTORS` of them."""
        if self._event is None:
            self._event = trio.Event()
            if self.is_set:
                self._event.set()
        await self._event.wait()
        return self.answer
