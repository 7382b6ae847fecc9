"""Listener: accepts connections and runs one `Session` for each. It owns the listening socket.

A peer of another user is closed before a byte of it is read (rule C1). When the process is out of
descriptors, accepting pauses and is tried again: the clients that hold them end some day, and a
crash would cost all of them their cache.
"""

import errno
import os
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import structlog
import trio

from prefixcached.actors.mailbox import Outbox
from prefixcached.daemon.session import Ending, Session, SessionSettings
from prefixcached.daemon.sockets import RECEIVE_BYTES, MessageSocket, peer_credentials
from prefixcached.protocol import messages
from prefixcached.protocol.connection import Connection, Role
from prefixcached.protocol.messages import ClientActivity

ACCEPT_PAUSE_SECONDS: Final = 0.25
"""Pause after accept found no descriptor or memory: short for a client that waits, long for the
processor (the socket stays readable, so the loop would spin)."""

EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What passes once a client goes."""
_CLIENT_LEFT: Final = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ECONNRESET})

log = structlog.get_logger()


class Refusal(StrEnum):
    """Why a connection was closed before it had a session."""

    OTHER_USER = "other-user"
    TOO_MANY = "too-many-connections"
    GONE = "gone"
    """It ended before the kernel could say who it was."""


@dataclass(frozen=True, slots=True)
class ListenerStatistics:
    """Counts since the start.

    ``accepted`` connections got a session; ``endings`` says by kind how sessions ended;
    ``refused`` were closed at once, by kind; ``accept_pauses`` counts descriptor shortages.
    """

    accepted: int
    current: int
    refused: dict[str, int]
    endings: dict[str, int]
    accept_pauses: int


class Listener:
    """Serves one listening socket.

    Args:
        sock: A listening Unix socket; it stays open when the listener ends.
        ram_tier: Where sessions send requests.
        settings: What all sessions share.
        max_connections: Sessions at a time; a further client is told so and closed.
        user: The only user id whose processes are served.
    """

    def __init__(
        self,
        sock: socket.socket,
        ram_tier: Outbox,
        settings: SessionSettings,
        max_connections: int,
        user: int | None = None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._ram_tier = ram_tier
        self._settings = settings
        self._max_connections = max_connections
        self._user = os.getuid() if user is None else user
        self._buffer = bytearray(RECEIVE_BYTES)
        self._accepted = 0
        self._current = 0
        self._refused = Counter({kind.value: 0 for kind in Refusal})
        self._endings = Counter({kind.value: 0 for kind in Ending})
        self._accept_pauses = 0
        self._sessions: dict[int, Session] = {}
        # So many refused clients may keep their sockets from being closed, then accepting waits.
        self._leaving = trio.Semaphore(max_connections)

    def statistics(self) -> ListenerStatistics:
        """Return what happened so far."""
        return ListenerStatistics(
            accepted=self._accepted,
            current=self._current,
            refused=dict(self._refused),
            endings=dict(self._endings),
            accept_pauses=self._accept_pauses,
        )

    @property
    def current(self) -> int:
        """Connections that have a session now."""
        return self._current

    def clients(self) -> list[ClientActivity]:
        """Return what each connection does now, the oldest first."""
        return [session.activity() for session in self._sessions.values()]

    async def move_to(self, sock: socket.socket) -> None:
        """Accept from another listening socket, and close the one before; sessions go on."""
        sock.setblocking(False)
        before, self._socket = self._socket, sock
        trio.lowlevel.notify_closing(before)
        await self._settings.closer.close_listener(before)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept until cancelled; then every session is cancelled too."""
        async with trio.open_nursery() as sessions:
            task_status.started()
            while True:
                await self._leaving.acquire()
                sock = await self._accept()
                refusal = self._refusal(sock)
                if refusal is None:
                    self._leaving.release()
                    self._accepted += 1
                    self._current += 1
                    sessions.start_soon(self._serve, self._accepted, sock)
                else:
                    self._refuse(sock, refusal)
                    sessions.start_soon(self._leave, sock)

    async def _accept(self) -> socket.socket:
        while True:
            try:
                await trio.lowlevel.wait_readable(self._socket)
                sock, _ = self._socket.accept()
            except (BlockingIOError, trio.ClosedResourceError):  # the latter by `move_to`
                continue
            except OSError as error:
                if error.errno in _CLIENT_LEFT:
                    continue
                if error.errno not in EXHAUSTED:
                    raise
                self._accept_pauses += 1
                log.warning(
                    "cannot accept a connection; trying again",
                    error=error.strerror,
                    sessions=self._current,
                )
                await trio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            return sock

    def _refusal(self, sock: socket.socket) -> Refusal | None:
        try:
            user, _ = peer_credentials(sock)
        except OSError:
            return Refusal.GONE
        if user != self._user:
            return Refusal.OTHER_USER
        if self._current >= self._max_connections:
            return Refusal.TOO_MANY
        return None

    def _refuse(self, sock: socket.socket, refusal: Refusal) -> None:
        self._refused[refusal.value] += 1
        if refusal is Refusal.TOO_MANY:
            failed = messages.Failed(
                reason=refusal.value,
                detail=f"{self._current} connections are open, and that is the limit",
                boot=self._settings.boot,
            )
            # A new socket has room for these few bytes, and nobody waits if it has not.
            with suppress(OSError):
                sock.setblocking(False)
                sock.send(Connection(Role.DAEMON).send(failed))

    async def _leave(self, sock: socket.socket) -> None:
        try:
            await self._settings.closer.close(sock)
        finally:
            self._leaving.release()

    async def _serve(self, number: int, sock: socket.socket) -> None:
        ending = Ending.STOPPING
        try:
            ending = await self._converse(number, sock)
        finally:
            self._sessions.pop(number, None)
            self._current -= 1
            self._endings[ending.value] += 1

    async def _converse(self, number: int, sock: socket.socket) -> Ending:
        try:
            peer = MessageSocket(sock, self._buffer)
        except OSError:
            await self._settings.closer.close(sock)
            return Ending.BROKEN
        session = self._sessions[number] = Session(number, peer, self._ram_tier, self._settings)
        return await session.run()
