"""One connection to the daemon: requests and replies with their descriptors.

A `BaseWire` owns its socket and every descriptor received over it, from the moment it arrives:
whoever used one gives it back with `close_descriptor`, and what is left is closed with the wire.
After any failure the wire is closed for good, since a late reply could be taken for the answer to
another request (rule C4). `Wire` waits by blocking, `prefixcached.client.trio_wire.TrioWire` as a
Trio task. Their calls take an absolute deadline on `time.monotonic`.
"""

import array
import errno
import math
import os
import select
import socket
import time
from pathlib import Path
from typing import Final, NoReturn

from prefixcached import __version__
from prefixcached.client.errors import CallTimeout, NoDaemon, PrefixCachedError, ProtocolFailure
from prefixcached.client.starting import Starter
from prefixcached.protocol import limits, messages
from prefixcached.protocol.connection import CAPABILITIES, Connection, Received, Role
from prefixcached.protocol.errors import ProtocolError
from prefixcached.protocol.messages import AnyRequest, OneWay, Reply

SOCKET_BUFFER_BYTES: Final = 256 * 1024
"""Both buffers. macOS starts at 8 KiB, where a set of descriptors may not fit (PLATFORM 3.2)."""

RECEIVE_BYTES: Final = 64 * 1024
"""Bytes of one `recvmsg`: most replies are far smaller."""

ANCILLARY_BYTES: Final = socket.CMSG_SPACE(254 * 4)
"""Room for the largest set of descriptors that either system sends: what does not fit would leak
or be lost."""

RECEIVE_FLAGS: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
"""Descriptors are close-on-exec from the first moment where the system can (Linux); elsewhere that
is set just afterwards."""

_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_NOBODY: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED})
"""What connecting to a Unix socket says where nobody listens."""

CONNECT_RETRY_SECONDS: Final = 0.005
"""Pause before the next attempt while the daemon's queue of new connections is full."""


class BaseWire:
    """What all wires know and do without waiting.

    Args:
        path: The daemon's socket. Nothing is connected before `open`.
        starter: Starts the daemon where nobody listens; None lets others do that.
    """

    def __init__(self, path: Path, starter: Starter | None = None) -> None:
        self._path = path
        self._starter = starter
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._connection = Connection(role=Role.CLIENT)
        self._descriptors: set[int] = set()
        self._error: PrefixCachedError | None = None
        self.answered_at = -math.inf
        """When the last reply arrived, on `time.monotonic`."""

    @property
    def is_open(self) -> bool:
        """Whether it can carry another request."""
        return self._socket.fileno() >= 0

    @property
    def error(self) -> PrefixCachedError | None:
        """How the daemon failed this wire; None while it works, and when it was just closed."""
        return self._error

    @property
    def capabilities(self) -> frozenset[str]:
        """Groups of messages that both sides named when it was opened (rule C2)."""
        return self._connection.capabilities

    @property
    def holds_descriptors(self) -> bool:
        """Whether received descriptors are still open."""
        return bool(self._descriptors)

    def is_quiet(self) -> bool:
        """Whether an idle wire is as it was left: no end of file, nothing unasked for."""
        if not self.is_open or self._connection.has_partial_frame:
            return False
        return not self._poller.poll(0)

    def tell(self, message: OneWay) -> None:
        """Send ``message``, which has no reply, without ever waiting or raising.

        Whatever stands in the way closes the wire, which ends a lease, pin or claim as well.
        """
        if not self.is_open:
            return
        try:
            data = self._connection.send(message)
            self._socket.setblocking(False)
            is_sent = self._socket.send(data) == len(data)
        except (OSError, ProtocolError):
            is_sent = False
        if not is_sent:
            self.close()

    def close_descriptor(self, fd: int) -> None:
        """Close one received descriptor. A second call for it does nothing."""
        if fd in self._descriptors:
            self._descriptors.remove(fd)
            os.close(fd)

    def close(self) -> None:
        """Close the socket and all received descriptors. Idempotent, never blocks.

        The daemon ends every lease, pin and unfinished put of this connection (rule L1). In a
        forked child it closes only the child's copies: the parent's connection lives on.
        """
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._socket.close()

    def _encode(self, message: AnyRequest) -> bytes:
        """Return the bytes of a request that is legal now."""
        try:
            return self._connection.send(message)
        except ProtocolError as error:
            self._fail(ProtocolFailure(str(error)), error)

    def _reply_to(self, message: AnyRequest) -> tuple[Reply, list[int]] | None:
        """Return the reply to ``message`` if it has arrived, never `Failed`."""
        try:
            event = self._connection.next_event()
        except ProtocolError as error:
            self._fail(ProtocolFailure(f"at {self._path}: {error}"), error)
        if not isinstance(event, Received):
            return None
        reply, descriptors = event
        if isinstance(reply, messages.Failed):
            detail = f" ({reply.detail})" if reply.detail else ""
            self._fail(
                ProtocolFailure(
                    f"the daemon at {self._path} refused {type(message).__name__}: "
                    f"{reply.reason}{detail}"
                )
            )
        assert isinstance(reply, Reply), "the connection admits nothing else"
        self.answered_at = time.monotonic()
        return reply, descriptors

    def _take_in(self, data: bytes, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        """Feed the connection with what `recvmsg` gave."""
        descriptors = _received_descriptors(ancillary)
        # Before anything else: until then Ctrl-C would leave them open for good.
        self._descriptors.update(descriptors)
        if not RECEIVE_FLAGS:
            for fd in descriptors:
                os.set_inheritable(fd, False)
        self._connection.receive(data, descriptors)
        if flags & _TRUNCATED:
            self._fail(ProtocolFailure(f"descriptors from {self._path} were lost on the way"))
        if not data:
            self._fail(NoDaemon(f"the daemon at {self._path} closed the connection"))

    def _take_starter(self, error: OSError) -> Starter | None:
        """Return who may start the daemon after ``error``: once, and where nobody listens."""
        starter, self._starter = self._starter, None
        return starter if error.errno in _NOBODY else None

    def _not_connected(self, error: OSError, failure: str = "") -> NoDaemon:
        todo = failure or "start one with `prefixcached serve`"
        return NoDaemon(f"no daemon at {self._path} ({error.strerror or error}); {todo}")

    def _explain(self, error: OSError, doing: str) -> PrefixCachedError:
        if isinstance(error, TimeoutError):
            return CallTimeout(f"the daemon at {self._path} is too slow: {doing} timed out")
        return NoDaemon(f"the daemon at {self._path} went away while {doing}: {error}")

    def _check_time(self, deadline: float, *, waiting: bool = False) -> float:
        """Return the seconds that are left, more than 0."""
        left_seconds = deadline - time.monotonic()
        if not self.is_open:
            raise NoDaemon(f"the connection to {self._path} is closed")
        if left_seconds > 0:
            return left_seconds
        if waiting:
            self._fail(CallTimeout(f"the daemon at {self._path} is too slow"))
        # Not the daemon's fault: no `error`, so that the pool does not back off.
        self.close()
        raise CallTimeout(f"no time left to ask the daemon at {self._path}")

    def _fail(self, error: PrefixCachedError, cause: Exception | None = None) -> NoReturn:
        # A copy that nobody raises: the pool keeps it, and with a traceback it would keep all that
        # the caller's stack refers to, the KV of the put above all.
        self._error = type(error)(*error.args)
        self.close()
        try:
            raise error from cause
        finally:
            # This frame is in the traceback: a cycle, which only a collection would end.
            del error, cause


class Wire(BaseWire):
    """A wire for threads, of one thread at a time."""

    def open(self, deadline: float) -> None:
        """Connect, and exchange versions and capabilities.

        Raises:
            NoDaemon: Nobody listens there.
            CallTimeout: Not connected and greeted at the deadline (a launchd socket accepts while
                its daemon is down).
            ProtocolFailure: The peer is no such daemon, or speaks another major version.
        """
        self._connect(deadline)
        self.request(hello(), deadline)

    def request(self, message: AnyRequest, deadline: float) -> tuple[Reply, list[int]]:
        """Send ``message`` and wait for its one reply.

        Returns:
            One of the replies that `connection.REPLIES` admits, never `Failed`, and its
            descriptors, close-on-exec; see `close_descriptor`.

        Raises:
            NoDaemon: The daemon ended or closed the connection.
            CallTimeout: The reply is not complete at the deadline.
            ProtocolFailure: The daemon sent what the protocol forbids, or answered `Failed`.
        """
        self._send(message, deadline)
        answer = None
        while answer is None:
            self._receive(deadline)
            answer = self._reply_to(message)
        return answer

    def _connect(self, deadline: float) -> None:
        while True:
            self._bound(deadline)
            try:
                self._socket.connect(os.fspath(self._path))
                return
            except OSError as error:
                if isinstance(error, TimeoutError):
                    self._fail(CallTimeout(f"nobody accepts connections at {self._path}"), error)
                # Linux answers EAGAIN at once where the queue of new connections is full.
                if error.errno != errno.EAGAIN:
                    starter = self._take_starter(error)
                    if starter is None:
                        self._fail(self._not_connected(error), error)
                    if failure := starter.start(deadline):
                        self._fail(self._not_connected(error, failure), error)
                    continue
            time.sleep(max(0.0, min(CONNECT_RETRY_SECONDS, deadline - time.monotonic())))

    def _send(self, message: AnyRequest, deadline: float) -> None:
        self._bound(deadline)
        data = self._encode(message)
        try:
            self._socket.sendall(data)
        except OSError as error:
            self._fail(self._explain(error, "sending"), error)

    def _receive(self, deadline: float) -> None:
        self._bound(deadline, waiting=True)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                RECEIVE_BYTES, ANCILLARY_BYTES, RECEIVE_FLAGS
            )
        except OSError as error:
            self._fail(self._explain(error, "waiting for a reply"), error)
        self._take_in(data, ancillary, flags)

    def _bound(self, deadline: float, *, waiting: bool = False) -> None:
        """Let the next socket call end at ``deadline``."""
        self._socket.settimeout(self._check_time(deadline, waiting=waiting))


def hello() -> messages.Hello:
    """Return the first message of a connection."""
    return messages.Hello(
        version=limits.PROTOCOL_VERSION,
        capabilities=CAPABILITIES,
        client=f"prefixcached {__version__}",
        pid=os.getpid(),
    )


def _received_descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return descriptors.tolist()
