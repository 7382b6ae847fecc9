"""How actors are reached: a mailbox is a memory channel of envelopes, an answer a reply slot."""

import math
from collections.abc import Sequence
from typing import Final

import trio

from prefixcached.protocol.actor_messages import Envelope
from prefixcached.protocol.messages import Reply

MAILBOX_MESSAGES: Final = 1024
"""Envelopes that wait for RamTier; senders block beyond it."""

UNBOUNDED: Final = math.inf
"""Envelopes that wait for the actors that RamTier tells: it must never wait for them, and what it
sends is charged to a budget already."""

Outbox = trio.MemorySendChannel[Envelope]
Inbox = trio.MemoryReceiveChannel[Envelope]


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
