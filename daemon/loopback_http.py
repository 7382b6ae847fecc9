"""A small HTTP server for this machine alone: it reads, it never changes anything.

It listens on 127.0.0.1 only, and answers only those who say so in `Host`: a page of the web whose
name resolves to 127.0.0.1 would send its own. One request a connection, GET or HEAD.
`LoopbackServer` owns its listening socket and its counters.
"""

import errno
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import h11
import structlog
import trio

ADDRESS: Final = "127.0.0.1"

REQUEST_SECONDS: Final = 5.0
"""From accept to the last byte of the answer: local programs take milliseconds."""

LINGER_SECONDS: Final = 1.0
"""For the peer to close after its answer."""

MAX_TOLD: Final = 8
"""Connections beyond `MAX_CONNECTIONS` that are answered at all; more are closed at once."""

MAX_CONNECTIONS: Final = 16
"""At a time. A scraper has one, a browser at most six."""

MAX_HEAD_BYTES: Final = 16 * 1024
"""Of a request's head."""

RECEIVE_BYTES: Final = 16 * 1024

ACCEPT_PAUSE_SECONDS: Final = 0.25
"""As the listener's: without descriptors the loop would spin."""

REFUSALS: Final = {
    "host": 403, "method": 405, "path": 404, "malformed": 400, "internal": 500, "too-many": 503,
    "slow": 408,
}  # fmt: skip
"""Why a request got no answer, and the status it got instead."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a path has."""

    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    """More than those that every answer has."""


Respond = Callable[[str], Awaitable[Answer | None]]
"""Gets the target of a request, its query included; None is "not found"."""


class _Refused(Exception):  # noqa: N818, it is no error but the way out
    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status or REFUSALS[reason]


class LoopbackServer:
    """Serves one port.

    Args:
        port: To listen on; 0 takes any that is free.
        respond: Gives the answers.
    """

    def __init__(self, port: int, respond: Respond) -> None:
        self.port = port
        """The port listened on, after `open`."""
        self.served = 0
        """Requests that were answered."""
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))
        """Requests that were not, by reason."""
        self._respond = respond
        self._current = 0
        self._listener: trio.SocketListener | None = None

    async def open(self) -> None:
        """Listen: whoever connects from now on is served once `run` runs.

        Raises:
            OSError: The port cannot be had.
        """
        (self._listener,) = await trio.open_tcp_listeners(self.port, host=ADDRESS)
        self.port = self._listener.socket.getsockname()[1]

    async def run(self) -> None:
        """Serve until cancelled, after `open`."""
        listener = self._listener
        assert listener is not None, "open() comes first"
        async with listener, trio.open_nursery() as nursery:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        raise
                    await trio.sleep(ACCEPT_PAUSE_SECONDS)
                    continue
                if self._current >= MAX_CONNECTIONS + MAX_TOLD:
                    # Descriptors are the daemon's: who comes now is not even told.
                    self.refused["too-many"] += 1
                    await trio.aclose_forcefully(stream)
                    continue
                self._current += 1
                nursery.start_soon(self._serve, stream, self._current > MAX_CONNECTIONS)

    async def _serve(self, stream: trio.SocketStream, is_one_too_many: bool) -> None:
        try:
            async with stream:
                with trio.move_on_after(REQUEST_SECONDS) as scope:
                    await self._converse(stream, is_one_too_many)
                self.refused["slow"] += scope.cancelled_caught
                with trio.move_on_after(LINGER_SECONDS):
                    await self._linger(stream)
        except trio.BrokenResourceError:
            pass  # whoever asked does not wait for the answer
        finally:
            self._current -= 1

    async def _linger(self, stream: trio.SocketStream) -> None:
        """Read what was not read: closing with it there would take the answer back."""
        await stream.send_eof()
        while await stream.receive_some(RECEIVE_BYTES):
            pass

    async def _converse(self, stream: trio.SocketStream, is_one_too_many: bool) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        answer: Answer | None = None
        status, is_head = 200, False
        try:
            if is_one_too_many:
                raise _Refused("too-many")
            request = await self._request(stream, connection)
            is_head = request.method == b"HEAD"
            answer = await self._respond(request.target.decode("ascii"))
            if answer is None:
                raise _Refused("path")
            self.served += 1
        except _Refused as refused:
            self.refused[refused.reason] += 1
            status = refused.status
        except (trio.BrokenResourceError, trio.Cancelled):
            raise
        except Exception:
            log.exception("a local HTTP request failed; the daemon goes on")
            self.refused["internal"] += 1
            status = REFUSALS["internal"]
        if answer is None:
            answer = Answer("text/plain; charset=utf-8", f"{status}\n".encode())
        head = h11.Response(
            status_code=status,
            headers=[
                ("Content-Type", answer.content_type),
                ("Content-Length", str(len(answer.body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Connection", "close"),
                *answer.headers,
            ],
        )
        with suppress(h11.LocalProtocolError):  # the peer closed before it had asked anything
            data = connection.send(head) or b""
            if not is_head:
                data += connection.send(h11.Data(data=answer.body)) or b""
            await stream.send_all(data)

    async def _request(self, stream: trio.SocketStream, connection: h11.Connection) -> h11.Request:
        """Return the request if it is one that may be answered."""
        try:
            while (event := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(RECEIVE_BYTES))
        except h11.RemoteProtocolError as error:
            raise _Refused("malformed", error.error_status_hint) from error
        if not isinstance(event, h11.Request):
            raise _Refused("malformed")
        hosts = [value for name, value in event.headers if name == b"host"]
        if hosts not in ([f"{name}:{self.port}".encode()] for name in (ADDRESS, "localhost")):
            raise _Refused("host")
        if event.method not in (b"GET", b"HEAD"):
            raise _Refused("method")
        return event
