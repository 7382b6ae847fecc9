"""One connection as seen by one side: bytes in, messages out, and the order they may come in.

Theory of operation. There is no I/O here: the caller reads from its socket and hands bytes and
descriptors to `receive`, then asks `next_event` until it answers `NEED_DATA`; it gives each message
that it wants to send to `send` and writes the bytes that come back. Both sides run the same table:

    state     the client may send                    the daemon may send
    START     hello -> GREETED                       failed
    GREETED   nothing                                welcome -> IDLE, failed
    IDLE      a request -> PENDING, one-way -> IDLE  failed
    PENDING   nothing                                a reply to that request -> IDLE, failed
    CLOSED    nothing                                nothing

`failed` always leads to CLOSED. A request has exactly the replies of `REPLIES`; the one-way
messages have none. So there is one request in flight, and bytes that arrive from a client while
its reply is pending are an error, not a queue.

Descriptors travel beside the bytes and reach `receive` no later than the frame that declares them.
A client never sends any. A reply carries at most one for each image it describes; the client gets
exactly as many as the frame declares, in order, with the message. Whatever was received and not
handed out with a message is kept until `take_unclaimed`: the caller closes those, also when it
gives the connection up.

Errors. `LocalProtocolError` says that this side's caller broke the table, `RemoteProtocolError`
that the peer did. After an error that side stays failed: each further `next_event` (after a remote
error) or `send` (after a local one) raises again. A daemon may still send `failed`, to say what
was wrong.

Versions. Both sides name (major, minor) in the first exchange. Another major raises
`VersionMismatchError`, whose text can be shown to the user; a newer minor only adds fields, which
the older side ignores, and messages, which a client sends only when the daemon named the
capability that they belong to.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

from prefixcached.protocol import limits, messages
from prefixcached.protocol.errors import LocalProtocolError, RemoteProtocolError
from prefixcached.protocol.framing import FrameDecoder, Message, encode, tag_of

CAPABILITIES: Final = (
    "cache", "prefetch", "flush", "claims", "labels", "objects", "inspect", "watch",
)  # fmt: skip
"""Groups of messages that this version has; a later minor version adds names."""


class Role(Enum):
    """Which side of a connection this is."""

    CLIENT = "client"
    DAEMON = "daemon"


class State(Enum):
    """Where the conversation stands; both sides compute the same."""

    START = auto()
    GREETED = auto()
    IDLE = auto()
    PENDING = auto()
    CLOSED = auto()


class Signal(Enum):
    """What `Connection.next_event` answers when there is no message."""

    NEED_DATA = auto()
    CLOSED = auto()


NEED_DATA: Final = Signal.NEED_DATA
"""Nothing complete has arrived; read more."""
CLOSED: Final = Signal.CLOSED
"""The conversation is over, in good order."""


class Received(NamedTuple):
    """A message of the peer and the descriptors that came with it, which now are the caller's."""

    message: Message
    descriptors: list[int]


class VersionMismatchError(RemoteProtocolError):
    """The peer speaks another major version; the text says which and what to do."""


MessageType = type[Message]

ONE_WAY: Final[frozenset[MessageType]] = frozenset(
    {messages.Release, messages.Abandon, messages.Unpin, messages.DropClaim}
)
REPLIES: Final[Mapping[MessageType, frozenset[MessageType]]] = {
    messages.Hello: frozenset({messages.Welcome}),
    messages.Take: frozenset({messages.Hit, messages.Miss}),
    messages.Fetch: frozenset({messages.Descriptors}),
    messages.Peek: frozenset({messages.Length}),
    messages.Contains: frozenset({messages.Length}),
    messages.Offer: frozenset({messages.Grant, messages.Stored, messages.Declined}),
    messages.Commit: frozenset({messages.Stored, messages.Declined}),
    messages.Prefetch: frozenset({messages.Pinned}),
    messages.CloseLabel: frozenset({messages.LabelClosed}),
    messages.OfferObject: frozenset({messages.Grant, messages.Stored, messages.Declined}),
    messages.TakeObject: frozenset({messages.Hit, messages.Miss}),
    messages.Flush: frozenset({messages.Flushed}),
    messages.Clear: frozenset({messages.Cleared}),
    messages.Status: frozenset({messages.StatusReport}),
    messages.List: frozenset({messages.Listing}),
    messages.Explain: frozenset({messages.Explanation}),
    messages.Activity: frozenset({messages.ActivityReport}),
    messages.Latency: frozenset({messages.LatencyReport}),
    messages.History: frozenset({messages.HistoryReport}),
}
"""The legal replies to each request, beside `Failed`."""

WATCH: Final[frozenset[MessageType]] = frozenset(
    {messages.Activity, messages.Latency, messages.History}
)
"""Requests about the daemon itself, which its front answers without RamTier."""

_FAILED: Final[frozenset[MessageType]] = frozenset({messages.Failed})
_HELLO: Final[frozenset[MessageType]] = frozenset({messages.Hello})
_AWAITED: Final = {request: replies | _FAILED for request, replies in REPLIES.items()}
_NOTHING: Final[frozenset[MessageType]] = frozenset()
_IDLE_CLIENT: Final[frozenset[MessageType]] = frozenset({*REPLIES, *ONE_WAY} - {messages.Hello})


class Connection:
    """The conversation over one socket, from one side.

    Args:
        role: Which side the caller is.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._peer = Role.DAEMON if role is Role.CLIENT else Role.CLIENT
        self._state = State.START
        self._request: MessageType = messages.Hello
        self._decoder = FrameDecoder("reply" if role is Role.CLIENT else "request")
        self._descriptors: deque[int] = deque()
        self._eof = False
        self._local_error: LocalProtocolError | None = None
        self._remote_error: RemoteProtocolError | None = None
        self._named: dict[Role, frozenset[str]] = {}

    @property
    def state(self) -> State:
        """Where the conversation stands."""
        return self._state

    @property
    def has_partial_frame(self) -> bool:
        """Whether the peer has begun a frame and not finished it."""
        return self._decoder.buffered_bytes > 0

    @property
    def capabilities(self) -> frozenset[str]:
        """What both sides named in the first exchange; empty before it is over."""
        if len(self._named) < len(Role):
            return frozenset()
        return self._named[Role.CLIENT] & self._named[Role.DAEMON]

    def send(self, message: Message, descriptors: int = 0) -> bytes:
        """Return the bytes to write for ``message``.

        The caller writes all of them, ``descriptors`` descriptors beside the first of them.

        Raises:
            LocalProtocolError: The message is not legal now, or breaks a limit.
        """
        if self._local_error is not None and not isinstance(message, messages.Failed):
            raise LocalProtocolError(f"this side failed before: {self._local_error}")
        try:
            self._check_legal(self._role, message, LocalProtocolError)
            _check_descriptors(message, descriptors, LocalProtocolError)
            data = encode(message, descriptors)
        except LocalProtocolError as error:
            # A copy: the one that is raised holds, by its traceback, this object and all that the
            # peer sent, and would keep them until the garbage collector looks for cycles.
            self._local_error = type(error)(*error.args)
            raise
        self._advance(self._role, message)
        return data

    def receive(self, data: bytes, descriptors: Iterable[int] = ()) -> None:
        """Take what the socket gave; `next_event` judges it.

        Args:
            data: Bytes in the order in which they arrived.
            descriptors: Received with these bytes, in order. They belong to the connection until
                `next_event` or `take_unclaimed` returns them.

        Raises:
            LocalProtocolError: The caller has said `receive_eof` before.
        """
        self._descriptors.extend(descriptors)
        if self._eof and data:
            raise LocalProtocolError("receive() after receive_eof()")
        if self._remote_error is None and self._state is not State.CLOSED:
            self._decoder.feed(data)

    def receive_eof(self) -> None:
        """Note that the peer will send nothing more."""
        self._eof = True

    def next_event(self) -> Received | Signal:
        """Return the next message, `NEED_DATA`, or `CLOSED` when the conversation is over.

        Raises:
            RemoteProtocolError: The peer broke the protocol; so will every later call.
        """
        if self._remote_error is not None:
            raise type(self._remote_error)(*self._remote_error.args)
        try:
            return self._next()
        except RemoteProtocolError as error:
            self._remote_error = type(error)(*error.args)  # a copy, as in `send`
            self._decoder.discard()
            raise

    def take_unclaimed(self) -> list[int]:
        """Return the descriptors that no message claimed, for the caller to close."""
        unclaimed = list(self._descriptors)
        self._descriptors.clear()
        return unclaimed

    def _next(self) -> Received | Signal:
        if self._state is State.CLOSED:
            return CLOSED
        if self._role is Role.DAEMON and self._descriptors:
            raise RemoteProtocolError(
                f"the client sent {len(self._descriptors)} descriptors; clients send none"
            )
        if self._decoder.buffered_bytes and not self._legal(self._peer):
            raise RemoteProtocolError(
                f"the {self._peer.value} sent data while the reply to its "
                f"{tag_of(self._request)} was pending"
            )
        frame = self._decoder.next_frame()
        if frame is None:
            return self._without_frame()
        message, declared = frame
        self._check_legal(self._peer, message, RemoteProtocolError)
        _check_descriptors(message, declared, RemoteProtocolError)
        held = len(self._descriptors)
        # Surplus ones may belong to a frame whose beginning has arrived with this one.
        if held < declared or (held > declared and not self.has_partial_frame):
            raise RemoteProtocolError(f"the daemon declared {declared} descriptors and sent {held}")
        self._advance(self._peer, message)
        return Received(message, [self._descriptors.popleft() for _ in range(declared)])

    def _without_frame(self) -> Signal:
        if self._descriptors and not self.has_partial_frame:
            raise RemoteProtocolError(
                f"the daemon sent {len(self._descriptors)} descriptors that no frame declares"
            )
        if not self._eof:
            return NEED_DATA
        if self.has_partial_frame:
            raise RemoteProtocolError(
                f"the {self._peer.value} closed the connection in the middle of a frame"
            )
        if self._role is Role.CLIENT and self._state in (State.GREETED, State.PENDING):
            raise RemoteProtocolError(
                f"the daemon closed the connection before it replied to {tag_of(self._request)}"
            )
        self._state = State.CLOSED
        return CLOSED

    def _legal(self, speaker: Role) -> frozenset[MessageType]:
        """The row of the table: what ``speaker`` may say in the present state."""
        state = self._state
        if state is State.CLOSED:
            return _NOTHING
        if speaker is Role.DAEMON:
            awaited = state is State.PENDING or state is State.GREETED
            return _AWAITED[self._request] if awaited and not self._remote_error else _FAILED
        if state is State.IDLE and not self._remote_error:
            return _IDLE_CLIENT
        return _HELLO if state is State.START and not self._remote_error else _NOTHING

    def _check_legal(
        self,
        speaker: Role,
        message: Message,
        error: type[LocalProtocolError] | type[RemoteProtocolError],
    ) -> None:
        if type(message) not in self._legal(speaker):
            state = self._state.name.lower()
            if self._remote_error is not None and speaker is self._role:
                state = f"failed ({self._remote_error})"
            elif self._state is State.PENDING:
                state = f"pending, after {tag_of(self._request)}"
            raise error(
                f"the {speaker.value} must not send {tag_of(type(message))} while the connection "
                f"is {state}"
            )

    def _advance(self, speaker: Role, message: Message) -> None:
        """Move along the table; the message is legal."""
        match message:
            case messages.Failed():
                self._state = State.CLOSED
            case messages.Hello() | messages.Welcome():
                if speaker is self._peer:
                    _check_version(speaker, message)
                self._named[speaker] = frozenset(message.capabilities)
                self._state = State.GREETED if speaker is Role.CLIENT else State.IDLE
            case messages.Release() | messages.Abandon() | messages.Unpin() | messages.DropClaim():
                pass
            case _ if speaker is Role.CLIENT:
                self._state = State.PENDING
                self._request = type(message)
            case _:
                self._state = State.IDLE


def _check_version(speaker: Role, message: messages.Hello | messages.Welcome) -> None:
    ours, theirs = limits.PROTOCOL_VERSION, message.version
    if theirs[0] != ours[0]:
        other: Literal["client", "daemon"] = "daemon" if speaker is Role.CLIENT else "client"
        raise VersionMismatchError(
            f"the {speaker.value} speaks protocol {theirs[0]}.{theirs[1]} and the {other} "
            f"{ours[0]}.{ours[1]}; install the same major version of prefixcached on both sides "
            "and restart the daemon"
        )


def _check_descriptors(
    message: Message, count: int, error: type[LocalProtocolError] | type[RemoteProtocolError]
) -> None:
    """A reply carries at most one descriptor for each image that it describes."""
    if not count and not isinstance(message, messages.Descriptors):
        return
    least, most = 0, 0
    match message:
        case messages.Hit(parts=parts):
            most = min(len(parts), limits.MAX_DESCRIPTORS)
        case messages.Grant(images=images):
            most = min(len(images), limits.MAX_DESCRIPTORS)
        case messages.Descriptors(count=announced):
            least = most = announced
        case _:
            pass
    if not least <= count <= most:
        expected = f"{most}" if least == most else f"at most {most}"
        raise error(f"{tag_of(type(message))} with {count} descriptors; expected {expected}")
