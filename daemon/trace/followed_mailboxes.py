"""What stands between RamTier and the others while a record is followed (`following`).

`FollowedInbox` owns what waits for its turn, `HeldOutbox` the orders that are not tried.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from prefixcached.actors.mailbox import Inbox, Outbox
from prefixcached.daemon.trace.guide import Guide, Key, heard_key, key_of
from prefixcached.daemon.trace.replay_steps import BARRIER
from prefixcached.daemon.trace.trace_file import Record
from prefixcached.daemon.trace.turn_clock import FollowingClock
from prefixcached.daemon.trace.turns import UNFOLLOWED, Name, Turn, outcome_key, plain_of
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol.actor_messages import ActorMessage, Envelope
from prefixcached.protocol.framing import tag_of
from prefixcached.protocol.messages import AnyRequest


def _tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


_TOLD: Final = {
    _tag(kind): kind
    for kind in (
        inner.PressureChanged, inner.RamCapChanged, inner.DiskChanged, inner.FilesLost,
        inner.TrashEmptied, inner.Written, inner.ImageRead, inner.Promoted, inner.NamespaceCleared,
        inner.Synced, inner.Deleted,
    )
}  # fmt: skip


class FollowedInbox:
    """RamTier's inbox in the record's order (`mailbox.Receiver`).

    Args:
        inbox: Where messages arrive.
        guide: Says what is next.
        clock: What trio is run with.
        session_of: The record's session behind one of this daemon, None where there is none.
        failed: Called when RamTier is told that an order failed in the record.
    """

    def __init__(
        self,
        inbox: Inbox,
        guide: Guide,
        clock: FollowingClock,
        session_of: Callable[[int], int | None],
        failed: Callable[[Name], None],
    ) -> None:
        self._inbox = inbox
        self._guide = guide
        self._clock = clock
        self._session_of = session_of
        self._failed = failed
        self._waiting: dict[Key, deque[Envelope]] = {}
        self._arrived: list[Envelope] = []
        self._aside: deque[Envelope] = deque()
        self._kept: dict[type[ActorMessage], Envelope] = {}
        self._trash_bytes = 0
        self._is_trash_gone = False
        self._scope = trio.CancelScope()

    async def receive(self) -> Envelope:
        """Return what the record has next, once it is there; in the end what comes."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        guide = self._guide
        while guide.is_following:
            self._sort_all()
            turn = guide.upcoming()
            if turn is None:
                break
            request = None if turn.is_repeated else guide.awaited_request()
            is_time = request is None or self._waiting.get(request)
            if is_time and (envelope := self._of(turn)) is not None:
                self._clock.stand_at(turn.now)
                guide.begin()
                return envelope
            if self._aside:
                return self._aside.popleft()
            if guide.is_following:
                # RamTier's own deadlines are turns as well: none may end this from outside.
                with trio.CancelScope(shield=True) as self._scope:
                    self._sort(await self._inbox.receive())
        return self._next_left() or await self._inbox.receive()

    def close(self) -> None:
        """See `Receiver`."""
        self._inbox.close()

    def let_go(self) -> None:
        """Wait for no turn any more: the following has ended."""
        self._scope.cancel()

    # -- what is next -----------------------------------------------------------------------------

    def _of(self, turn: Turn) -> Envelope | None:
        """What RamTier hears in ``turn``, if it is there."""
        heard = turn.heard
        if heard is None:
            return Envelope(inner.SyncAll())  # it only wakes RamTier up, as its deadline did
        if not turn.is_repeated:
            return self._told(heard)
        waiting = self._waiting.get(key_of(heard))
        if not waiting:
            return None
        message = waiting[0].message
        said: msgspec.Struct = message.request if isinstance(message, inner.Call) else message
        failure: object = getattr(message, "error", None)
        if _tag(type(said)) != heard.type or failure:
            self._guide.end(f"the record goes on with {heard.type}, here with {message!r}")
            return None
        envelope = waiting.popleft()
        self._arrived = [one for one in self._arrived if one is not envelope]
        return envelope

    def _told(self, heard: Record) -> Envelope:
        kind = _TOLD.get(heard.type)
        if kind is None:  # a request that changed nothing, or files that are not here
            return Envelope(inner.SyncAll())
        try:
            message = msgspec.convert(heard.message, kind)
        except msgspec.ValidationError as error:
            self._guide.end(f"the record has a {heard.type} that is none: {error}")
            return Envelope(inner.SyncAll())
        if isinstance(message, inner.Written) and message.entry is not None:
            # A write that failed has no file. This one's would be the record's, not ours.
            self._guide.end("the record has a written that failed and has a file")
            return Envelope(inner.SyncAll())
        if isinstance(message, inner.TrashEmptied):
            self._trash_bytes -= message.allocated_bytes
        self._failed(outcome_key(heard.message))
        return Envelope(message)

    def _next_left(self) -> Envelope | None:
        """Of what waits once nothing is followed: what this machine said, then all in its order."""
        if self._kept:
            return self._kept.pop(next(iter(self._kept)))
        if self._trash_bytes > 0 or self._is_trash_gone:
            emptied = inner.TrashEmptied(max(0, self._trash_bytes), done=self._is_trash_gone)
            self._trash_bytes, self._is_trash_gone = 0, False
            return Envelope(emptied)
        if self._aside:
            return self._aside.popleft()
        return self._arrived.pop(0) if self._arrived else None

    # -- what comes -------------------------------------------------------------------------------

    def _sort_all(self) -> None:
        while True:
            try:
                self._sort(self._inbox.receive_nowait())
            except trio.WouldBlock:
                return

    def _sort(self, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case inner.Call(session=session) | inner.ClientGone(session=session):
                recorded = self._session_of(session)
                is_ours = isinstance(message, inner.Call) and is_aside(message.request)
                if recorded is None or is_ours:
                    self._aside.append(envelope)
                    return
                key: Key = ("session", recorded)
            case (
                inner.PressureChanged() | inner.RamCapChanged() | inner.DiskChanged()
                | inner.FilesLost()
            ):  # fmt: skip
                self._kept[type(message)] = envelope
                return
            case inner.TrashEmptied(allocated_bytes=nbytes, done=done):
                self._trash_bytes += nbytes
                self._is_trash_gone = done
                return
            case _:
                key = heard_key(plain_of(message))
        self._waiting.setdefault(key, deque()).append(envelope)
        self._arrived.append(envelope)


class HeldOutbox:
    """RamTier's orders to an actor (`mailbox.Outbox`), of which some are held back.

    What failed or was cancelled in the record is not tried. A write that succeeded there is not
    overtaken by a clear: SsdTier drops writes that it has not begun when one comes.
    """

    def __init__(self, outbox: Outbox, guide: Guide) -> None:
        self._outbox = outbox
        self._guide = guide
        self._untried: list[Envelope] = []
        self._behind: list[Envelope] = []
        self._is_writing = False

    def send_nowait(self, value: Envelope, /) -> None:
        """See `Outbox`."""
        order = value.message
        if not self._guide.is_following:
            self._outbox.send_nowait(value)
        elif not self._is_tried(order):
            self._untried.append(value)
        elif self._behind or (self._is_writing and isinstance(order, inner.ClearNamespace)):
            self._behind.append(value)
        else:
            self._is_writing |= isinstance(order, inner.WriteImage)
            self._outbox.send_nowait(value)

    def written(self) -> None:
        """The write has ended: what stands behind it may go on, up to the next one."""
        self._is_writing = False
        while self._behind and not self._is_writing:
            envelope = self._behind.pop(0)
            self._is_writing = isinstance(envelope.message, inner.WriteImage)
            self._outbox.send_nowait(envelope)

    def _is_tried(self, order: ActorMessage) -> bool:
        """What was cancelled in the record is never begun, so there is nothing to cancel."""
        if isinstance(order, inner.CancelRead | inner.CancelWrite):
            return False
        key = _order_key(order)
        return key is None or self._guide.succeeds(key)

    def forget(self, order: Name) -> None:
        """Do not try an order later on either."""
        for untried in self._untried:
            if _order_key(untried.message) == order:
                self._untried.remove(untried)
                return

    def let_go(self) -> None:
        """Hold nothing back any more."""
        held, self._untried, self._behind = [*self._untried, *self._behind], [], []
        for envelope in held:
            self._outbox.send_nowait(envelope)

    async def send(self, value: Envelope, /) -> None:
        """See `Outbox`."""
        await trio.lowlevel.checkpoint()
        self.send_nowait(value)

    async def aclose(self) -> None:
        """See `Outbox`."""
        await self._outbox.aclose()

    def close(self) -> None:
        """See `Outbox`."""
        self._outbox.close()


def is_aside(request: AnyRequest) -> bool:
    """Whether a request changes nothing and a replay asks it at its own times."""
    return tag_of(type(request)) in UNFOLLOWED or request == BARRIER


def _order_key(order: ActorMessage) -> Name | None:
    """What an order has in common with its outcome (`turns.outcome_key`); None without such."""
    match order:
        case inner.WriteImage(header=header):
            return ("written", header.id)
        case inner.ReadImage(read=read):
            return ("image-read", read)
        case inner.PromoteImage(entry=entry):
            return ("promoted", entry.header.id)
        case _:
            return None
