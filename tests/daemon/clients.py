"""A client for tests of the daemon: raw bytes where they are wanted, messages where not."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from prefixcached.daemon.sockets import MessageSocket
from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.connection import CAPABILITIES, CLOSED, Connection, Received, Role
from prefixcached.protocol.messages import AnyRequest

HELLO = m.Hello(version=limits.PROTOCOL_VERSION, capabilities=CAPABILITIES, client="tests")


class Client(MessageSocket):
    """One side of a socket, with a `Connection` beside it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.connection = Connection(Role.CLIENT)

    async def say(self, message: AnyRequest) -> None:
        await self.send(self.connection.send(message))

    async def hear(self) -> Received | None:
        """The next message, or None at the end of the stream in good order."""
        while True:
            event = self.connection.next_event()
            if isinstance(event, Received):
                return event
            if event is CLOSED:
                return None
            try:
                data, descriptors = await self.receive()
            except ConnectionResetError:
                # The daemon closed with our bytes unread; what it said before is read by now.
                data, descriptors = b"", []
            self.connection.receive(data, descriptors)
            if not data:
                self.connection.receive_eof()

    async def ask(self, message: AnyRequest) -> m.Reply:
        await self.say(message)
        received = await self.hear()
        assert received is not None
        assert not received.descriptors
        assert isinstance(received.message, m.Reply)
        return received.message

    async def failed(self) -> m.Failed:
        """The `Failed` that the daemon says next, and that it closes then."""
        received = await self.hear()
        assert received is not None
        assert isinstance(received.message, m.Failed), received
        await self.ended()
        return received.message

    async def ended(self) -> None:
        """Return when the daemon has closed the connection; it says nothing before."""
        with suppress(ConnectionResetError):
            assert await self.receive() == (b"", [])


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Client]:
    """A client of a listening daemon, greeted."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    client = Client(sock)
    try:
        with trio.fail_after(5):
            assert isinstance(await client.ask(HELLO), m.Welcome)
        yield client
    finally:
        client.close()
