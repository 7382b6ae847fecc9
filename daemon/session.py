"""Session: the actor of one connection. It owns that connection's socket and its one request.

It decides nothing about the cache. Requests go to RamTier, which answers through a `ReplySlot`; the
session adds the boot id and writes the answer with its descriptors. Meanwhile it watches the
socket, since a client that dies must cost nothing: at the end of the stream, in whatever state, it
tells RamTier `ClientGone`, exactly once, and every lease, pin and unfinished put ends with that.

All that a client can do to a session is bounded: the first exchange and each frame have a deadline,
one reply at most is waiting to be read and has one too (rule L4), and bad input ends this session
alone (rule C3).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, cast

import msgspec
import structlog
import trio

from prefixcached.actors.mailbox import Outbox, ReplySlot
from prefixcached.daemon.closing import Closer
from prefixcached.daemon.latency import Latencies
from prefixcached.daemon.restores import RestoreMeter
from prefixcached.daemon.sendable import sendable
from prefixcached.daemon.sockets import MessageSocket
from prefixcached.protocol import limits, messages
from prefixcached.protocol.actor_messages import ActorMessage, Call, ClientGone, Envelope
from prefixcached.protocol.connection import (
    CAPABILITIES,
    CLOSED,
    ONE_WAY,
    WATCH,
    Connection,
    MessageType,
    Received,
    Role,
    Signal,
    VersionMismatchError,
)
from prefixcached.protocol.errors import ProtocolError, RemoteProtocolError
from prefixcached.protocol.framing import tag_of
from prefixcached.protocol.messages import (
    AnyReply,
    AnyRequest,
    ClientActivity,
    Reply,
    WatchRequest,
)

HELLO_SECONDS: Final = 5.0
"""From accept to `Hello`: a client says it at once, and one that does not takes up a place."""

FRAME_SECONDS: Final = 30.0
"""From a frame's first byte to its last: 16 MiB take milliseconds, a stopped client forever."""

SEND_SECONDS: Final = 10.0
"""For a client to read its reply (rule L4). A client library gives up after 5."""

FAREWELL_SECONDS: Final = 1.0
"""For `Failed` to leave; the client that caused it may not be reading."""

GONE_SECONDS: Final = 30.0
"""For RamTier to take `ClientGone`. It never waits, so this only keeps a stuck one from keeping
the daemon from ending."""

MAX_DETAIL_CHARACTERS: Final = 1000
"""Of an error's text in `Failed` and in the log: it may quote what the client sent."""

_QUICK_TURNS: Final = 2
"""Turns of the event loop in which RamTier answers most requests that it did not answer at once. A
nursery, which waits for two things at once, would cost more than the request itself; it comes after
them."""

_RAM_TIER_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)

log = structlog.get_logger()


class Ending(StrEnum):
    """Why a session ended; the listener counts each kind (rule C5)."""

    CLOSED = "closed"
    """The client closed the connection between two requests or while one was pending."""
    BROKEN = "broken"
    """The connection broke, mostly because the client died with unread data."""
    PROTOCOL = "protocol"
    VERSION = "version"
    HELLO_TIMEOUT = "hello-timeout"
    FRAME_TIMEOUT = "frame-timeout"
    SLOW_READER = "slow-reader"
    INTERNAL = "internal"
    """A bug in the daemon: logged with its stack."""
    STOPPING = "stopping"
    """The daemon stops."""


def _nothing_to_watch(_: WatchRequest) -> Reply:
    return messages.Failed(reason="protocol", detail="this daemon cannot be watched")


def _nobody_listens(_session: int, _request: AnyRequest, _reply: Reply) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """What all sessions share: the boot id, the daemon's name and version, and the deadlines.

    They record their requests' times in ``latencies`` and clients' restores in ``restores``;
    ``watch`` answers the group `watch`, ``answered`` hears what they answer without RamTier, and
    ``closer`` closes what clients leave.
    """

    boot: str
    daemon: str
    watch: Callable[[WatchRequest], Reply] = _nothing_to_watch
    answered: Callable[[int, AnyRequest, Reply], None] = _nobody_listens
    latencies: Latencies = field(default_factory=Latencies)
    restores: RestoreMeter = field(default_factory=RestoreMeter)
    closer: Closer = field(default_factory=Closer)
    hello_seconds: float = HELLO_SECONDS
    frame_seconds: float = FRAME_SECONDS
    send_seconds: float = SEND_SECONDS


class _End(Exception):  # noqa: N818, it is no error but the way out
    """The session ends; ``detail`` is what the client is told, if anything."""

    def __init__(self, ending: Ending, detail: str = "") -> None:
        super().__init__(ending)
        self.ending = ending
        self.detail = detail


class Session:
    """One connection.

    Args:
        number: Names this session in every message to RamTier; never used again.
        peer: The accepted socket, which the session closes.
        ram_tier: Where requests go.
        settings: What all sessions share.
    """

    def __init__(
        self, number: int, peer: MessageSocket, ram_tier: Outbox, settings: SessionSettings
    ) -> None:
        self.number = number
        self._peer = peer
        self._ram_tier = ram_tier
        self._settings = settings
        self._connection = Connection(Role.DAEMON)
        self._hello = messages.Hello(version=limits.PROTOCOL_VERSION)
        self._since = self._doing_since = time.monotonic()
        self._doing: MessageType | None = None
        self._requests = 0

    def activity(self) -> ClientActivity:
        """Return what the client does now; what it holds is RamTier's to say."""
        now = time.monotonic()
        return ClientActivity(
            session=self.number,
            pid=self._hello.pid,
            client=self._hello.client,
            connected_seconds=now - self._since,
            requests=self._requests,
            doing=tag_of(self._doing) if self._doing is not None else "",
            doing_seconds=now - self._doing_since if self._doing is not None else 0.0,
        )

    async def run(self) -> Ending:
        """Serve the connection until it ends, and say why it did. Raises only `trio.Cancelled`."""
        try:
            return await self._guarded()
        finally:
            sock, truncated = self._peer.detach()
            # Also when cancelled: only this message frees what the client held. RamTier outlives
            # its sessions; where it failed itself, the daemon is ending anyway.
            with (
                trio.move_on_after(GONE_SECONDS, shield=True) as scope,
                suppress(*_RAM_TIER_GONE),
            ):
                await self._tell_ram_tier(ClientGone(self.number))
            if scope.cancelled_caught:
                log.error("RamTier hears nothing; its mailbox is full", session=self.number)
            # Last, since it may take long; meanwhile the connection counts as open.
            descriptors = [*truncated, *self._connection.take_unclaimed()]
            await self._settings.closer.close(sock, descriptors)

    async def _guarded(self) -> Ending:
        """Converse, and turn every way that this can end into an `Ending`."""
        try:
            await self._greet()
            while True:
                await self._serve_one()
        except _End as end:
            ending, detail = end.ending, end.detail
        except VersionMismatchError as error:
            ending, detail = Ending.VERSION, str(error)
        except RemoteProtocolError as error:
            ending, detail = Ending.PROTOCOL, str(error)
        except ConnectionError:
            return Ending.BROKEN
        except _RAM_TIER_GONE:
            return Ending.STOPPING
        except Exception:
            log.exception("a session failed; the daemon goes on", session=self.number)
            ending, detail = Ending.INTERNAL, "the daemon failed at this request; its log says why"
        if detail:
            detail = detail[:MAX_DETAIL_CHARACTERS]
            log.info("ended a session", session=self.number, reason=ending.value, detail=detail)
            await self._say_failed(ending, detail)
        return ending

    async def _greet(self) -> None:
        with trio.move_on_after(self._settings.hello_seconds):
            # The table admits nothing else as the first message.
            self._hello = cast("messages.Hello", await self._next_message())
            self._refuse_more()
            welcome = messages.Welcome(
                version=limits.PROTOCOL_VERSION,
                capabilities=CAPABILITIES,
                daemon=self._settings.daemon,
                boot=self._settings.boot,
            )
            self._settings.answered(self.number, self._hello, welcome)
            await self._peer.send(self._connection.send(welcome))
            return
        seconds = self._settings.hello_seconds
        raise _End(Ending.HELLO_TIMEOUT, f"no hello within {seconds:g} s of connecting")

    async def _serve_one(self) -> None:
        """Take one message from the client and see it through."""
        request = await self._next_message()
        if type(request) in ONE_WAY:
            if isinstance(request, messages.Release):
                self._settings.restores.note(request)
            await self._tell_ram_tier(Call(self.number, request))
            return
        self._refuse_more()
        kind, started = type(request), time.monotonic()
        self._requests += 1
        self._doing, self._doing_since = kind, started
        descriptors: Sequence[int] = ()
        if kind in WATCH:
            reply = self._settings.watch(cast("WatchRequest", request))
            self._settings.answered(self.number, request, reply)
        else:
            slot = ReplySlot()
            await self._tell_ram_tier(Call(self.number, request), slot)
            reply, descriptors = await self._answer(slot)
        if isinstance(reply, messages.StatusReport):
            reply = messages.StatusReport(report=sendable(reply.report))
        reply = msgspec.structs.replace(reply, boot=self._settings.boot)
        # The table checks RamTier's replies, like anybody's.
        data = self._connection.send(cast("AnyReply", reply), len(descriptors))
        try:
            await self._peer.send(data, descriptors, self._settings.send_seconds)
        except trio.TooSlowError:
            # Nothing can be told to whom reads nothing.
            raise _End(Ending.SLOW_READER) from None
        self._doing = None
        self._settings.latencies.record(kind, time.monotonic() - started)
        if isinstance(reply, messages.Failed):
            raise _End(Ending.PROTOCOL)

    def _refuse_more(self) -> None:
        """What came in one piece with a request is as wrong as what comes before its reply."""
        if self._connection.has_partial_frame:
            self._connection.next_event()

    async def _tell_ram_tier(self, message: ActorMessage, slot: ReplySlot | None = None) -> None:
        envelope = Envelope(message, slot)
        try:
            self._ram_tier.send_nowait(envelope)
        except trio.WouldBlock:
            await self._ram_tier.send(envelope)

    async def _answer(self, slot: ReplySlot) -> tuple[Reply, Sequence[int]]:
        """Return RamTier's answer; end the session if the client does not wait for it."""
        for _ in range(_QUICK_TURNS):
            if slot.is_set:
                break
            # Cheaper than a checkpoint that can be cancelled; every path has one elsewhere.
            await trio.lowlevel.cancel_shielded_checkpoint()
        if not slot.is_set:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._wait_readable_then_cancel, nursery.cancel_scope)
                await slot.wait()
                nursery.cancel_scope.cancel()
            if not slot.is_set:
                await self._read()
                if self._connection.next_event() is CLOSED:
                    raise _End(Ending.CLOSED)
        return slot.answer

    async def _wait_readable_then_cancel(self, scope: trio.CancelScope) -> None:
        await self._peer.wait_readable()
        scope.cancel()

    async def _next_message(self) -> AnyRequest:
        """Wait for the client's next message, however long it says nothing."""
        deadline = float("inf")
        while True:
            match self._connection.next_event():
                case Received(message=message):
                    # The table lets a daemon hear nothing else.
                    return cast("AnyRequest", message)
                case Signal.CLOSED:
                    raise _End(Ending.CLOSED)
                case Signal.NEED_DATA:
                    pass
            if self._connection.has_partial_frame and deadline == float("inf"):
                deadline = trio.current_time() + self._settings.frame_seconds
            if deadline == float("inf"):
                await self._read()
                continue
            with trio.CancelScope(deadline=deadline) as scope:
                await self._read()
            if scope.cancelled_caught:
                seconds = self._settings.frame_seconds
                raise _End(Ending.FRAME_TIMEOUT, f"a frame took longer than {seconds:g} s")

    async def _read(self) -> None:
        """Hand the connection whatever the socket has next."""
        data, descriptors = await self._peer.receive()
        self._connection.receive(data, descriptors)
        if not data:
            self._connection.receive_eof()

    async def _say_failed(self, ending: Ending, detail: str) -> None:
        failed = messages.Failed(reason=ending.value, detail=detail, boot=self._settings.boot)
        with suppress(ProtocolError, OSError, trio.TooSlowError):
            await self._peer.send(self._connection.send(failed), seconds=FAREWELL_SECONDS)
