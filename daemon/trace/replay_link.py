"""Link: one connection of a replay to its daemon. It owns the socket and what it received."""

import os
import socket
from pathlib import Path
from typing import Final

import trio

from prefixcached.daemon.sockets import MessageSocket
from prefixcached.protocol import limits, messages
from prefixcached.protocol.connection import CAPABILITIES, CLOSED, Connection, Received, Role
from prefixcached.protocol.messages import AnyRequest, OneWay, Reply

CONNECT_ATTEMPTS: Final = 5
"""To be greeted. A daemon that follows a record leaps through its idle hours, and where one of them
lies in a greeting, that has come too late."""


class ReplayFailedError(Exception):
    """The daemon of the replay is gone, or does not answer."""


class Link(MessageSocket):
    """One connection to the daemon, greeted by `open_link`."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._connection = Connection(Role.CLIENT)
        self.sent = 0
        """Requests with a reply, of which `Activity` says how many have arrived."""
        self.is_ahead = False
        """Whether something was sent that may not have arrived."""

    async def say(self, request: AnyRequest) -> None:
        """Send one message."""
        self.is_ahead = True
        self.sent += not isinstance(request, OneWay | messages.Hello)
        await self.send(self._connection.send(request))

    async def hear(self) -> tuple[Reply, list[int]]:
        """Return the next reply with its descriptors, which are the caller's to close.

        Raises:
            ReplayFailedError: The connection ended.
        """
        while True:
            event = self._connection.next_event()
            if isinstance(event, Received):
                assert isinstance(event.message, Reply)
                self.is_ahead = False
                return event.message, event.descriptors
            if event is CLOSED:
                raise ReplayFailedError("the daemon ended a connection of the replay")
            data, descriptors = await self.receive()
            self._connection.receive(data, descriptors)
            if not data:
                self._connection.receive_eof()

    async def ask(self, request: AnyRequest) -> tuple[Reply, list[int]]:
        """Send one request and return its reply, as `hear`."""
        await self.say(request)
        return await self.hear()

    def close(self) -> None:
        """End the connection."""
        super().close()
        for descriptor in self._connection.take_unclaimed():
            os.close(descriptor)


async def open_link(path: Path, name: str) -> Link:
    """Connect, and say who it is; again where the record's time went on between the two."""
    for _ in range(CONNECT_ATTEMPTS - 1):
        try:
            return await _greeted(path, name)
        except (ReplayFailedError, ConnectionError):
            await trio.lowlevel.checkpoint()
    return await _greeted(path, name)


async def _greeted(path: Path, name: str) -> Link:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    link = Link(sock)
    try:
        reply, _ = await link.ask(_hello(name))
        if not isinstance(reply, messages.Welcome):
            raise ReplayFailedError(f"the daemon of the replay greets with {reply!r}")
    except BaseException:
        link.close()
        raise
    return link


def _hello(name: str) -> messages.Hello:
    return messages.Hello(
        version=limits.PROTOCOL_VERSION,
        capabilities=CAPABILITIES,
        client=name,
        pid=os.getpid(),
    )
