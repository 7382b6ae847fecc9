"""RamTier's mailbox: which calls are handled in their caller's turn, and that nothing is overtaken.

DESIGN 4: an actor owns its state alone, and what is sent to it is handled in the order of sending.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from prefixcached.actors.mailbox import DirectMailbox, ReplySlot
from prefixcached.protocol.actor_messages import Call, ClientGone, Envelope
from prefixcached.protocol.messages import Length, Peek

PEEK = Peek(namespace="n", tokens=b"")


class Actor:
    """Handles whatever its mailbox has, and remembers in which order it did."""

    def __init__(self, messages: float = 16) -> None:
        self.mailbox = DirectMailbox(self.handle, messages)
        self.handled: list[int] = []
        self.while_handling: Callable[[], None] = lambda: None

    def handle(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Call | ClientGone)
        self.while_handling()
        self.handled.append(envelope.message.session)
        if isinstance(envelope.handle, ReplySlot):
            envelope.handle.set(Length(length=envelope.message.session))

    async def run(self) -> None:
        while True:
            self.handle(await self.mailbox.receive())


def call(number: int) -> Envelope:
    return Envelope(Call(number, PEEK), ReplySlot())


def is_answered(envelope: Envelope) -> bool:
    assert isinstance(envelope.handle, ReplySlot)
    return envelope.handle.is_set


@asynccontextmanager
async def running(actor: Actor) -> AsyncIterator[None]:
    """The actor has handled what was queued, and waits."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor.run)
        await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


async def test_a_waiting_actor_answers_a_call_before_its_sender_goes_on() -> None:
    """No turn of the event loop lies between a call and its answer."""
    actor = Actor()
    async with running(actor):
        for number in range(3):
            envelope = call(number)
            actor.mailbox.send_nowait(envelope)
            assert is_answered(envelope)
    assert actor.handled == [0, 1, 2]


async def test_nothing_overtakes_what_is_on_its_way() -> None:
    """A call behind a message that has not been handled waits for its turn."""
    actor = Actor()
    async with running(actor):
        actor.mailbox.send_nowait(Envelope(ClientGone(1)))
        behind = call(2)
        actor.mailbox.send_nowait(behind)
        assert not is_answered(behind)
        await trio.testing.wait_all_tasks_blocked()
        assert is_answered(behind)
    assert actor.handled == [1, 2]


async def test_a_call_to_an_actor_that_has_not_begun_waits_for_it() -> None:
    actor = Actor()
    early = call(1)
    actor.mailbox.send_nowait(early)
    assert not is_answered(early)
    async with running(actor):
        assert is_answered(early)


async def test_what_has_no_reply_is_queued() -> None:
    """Rule C6: a client may send thousands of these in one piece, and others must run meanwhile."""
    actor = Actor()
    async with running(actor):
        actor.mailbox.send_nowait(Envelope(ClientGone(1)))
        assert actor.handled == []
        await trio.testing.wait_all_tasks_blocked()
        assert actor.handled == [1]


async def test_what_is_sent_while_a_message_is_handled_is_handled_after_it() -> None:
    """An actor's state is never entered twice."""
    actor = Actor()
    inner = call(2)

    def send_once() -> None:
        actor.while_handling = lambda: None
        actor.mailbox.send_nowait(inner)
        assert not is_answered(inner)

    async with running(actor):
        actor.while_handling = send_once
        actor.mailbox.send_nowait(call(1))
        assert actor.handled == [1]
        await trio.testing.wait_all_tasks_blocked()
    assert actor.handled == [1, 2]


async def test_a_send_that_was_given_up_holds_up_no_later_call() -> None:
    actor = Actor(messages=0)
    with trio.move_on_after(0):
        await actor.mailbox.send(Envelope(ClientGone(1)))
    async with running(actor):
        envelope = call(2)
        actor.mailbox.send_nowait(envelope)
        assert is_answered(envelope)
    assert actor.handled == [2]


async def test_a_send_without_room_raises_and_holds_up_no_later_call() -> None:
    actor = Actor(messages=0)
    with pytest.raises(trio.WouldBlock):
        actor.mailbox.send_nowait(call(1))
    async with running(actor):
        envelope = call(2)
        actor.mailbox.send_nowait(envelope)
        assert is_answered(envelope)


async def test_a_receive_that_was_cancelled_is_no_waiting_actor() -> None:
    """As at a deadline of its own: what comes then is queued, and is not lost."""
    actor = Actor()
    with trio.move_on_after(0):
        await actor.mailbox.receive()
    envelope = call(1)
    actor.mailbox.send_nowait(envelope)
    assert not is_answered(envelope)
    async with running(actor):
        assert is_answered(envelope)
