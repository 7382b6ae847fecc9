"""The message socket: whole messages, descriptors, and credentials over a real socket pair."""

import errno
import fcntl
import gc
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from prefixcached.daemon import sockets
from prefixcached.daemon.sockets import MessageSocket, peer_credentials
from prefixcached.protocol.errors import RemoteProtocolError


@pytest.fixture
async def pair() -> AsyncIterator[tuple[MessageSocket, MessageSocket]]:
    left, right = (MessageSocket(sock) for sock in socket.socketpair(socket.AF_UNIX))
    yield left, right
    left.close()
    right.close()


async def receive_bytes(source: MessageSocket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more, descriptors = await source.receive()
        assert more
        assert not descriptors
        data += more
    return data


async def test_a_large_message_arrives_whole(pair: tuple[MessageSocket, MessageSocket]) -> None:
    """A send completes its partial writes while the peer reads."""
    left, right = pair
    data = bytes(range(256)) * 20_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.send, data)
        assert await receive_bytes(right, len(data)) == data


async def test_descriptors_arrive_in_order_and_close_on_exec(
    pair: tuple[MessageSocket, MessageSocket], tmp_path: Path
) -> None:
    """Sixteen at once, each naming the file that was sent, none inherited by a child."""
    left, right = pair
    files = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(16)]
    await left.send(b"x" * 1000, files)
    data, received = await right.receive()
    assert data == b"x" * 1000
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in files]
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in received)
    for descriptor in files + received:
        os.close(descriptor)


async def test_descriptors_travel_with_a_message_larger_than_the_buffers(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    """They come once, with the first bytes, although the rest takes more writes."""
    left, right = pair
    data = os.urandom(3_000_000)
    source = os.open(os.devnull, os.O_RDONLY)
    received: list[int] = []
    arrived = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.send, data, [source, source])
        while len(arrived) < len(data):
            more, descriptors = await right.receive()
            assert not descriptors or not arrived
            arrived += more
            received += descriptors
    assert arrived == data
    assert len(received) == 2
    for descriptor in (source, *received):
        os.close(descriptor)


async def test_the_end_of_the_stream_is_empty_bytes(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    """As with any stream."""
    left, right = pair
    left.close()
    assert await right.receive() == (b"", [])
    with pytest.raises(ConnectionError):
        await right.send(b"x")


async def test_a_cancelled_receive_consumes_nothing(
    pair: tuple[MessageSocket, MessageSocket],
) -> None:
    """A session that stops waiting does not lose what comes later."""
    left, right = pair
    with trio.CancelScope() as scope:
        scope.cancel()
        await right.receive()
    assert scope.cancelled_caught
    await left.send(b"later")
    assert await right.receive() == (b"later", [])


async def test_descriptors_that_find_no_room_are_a_remote_error(
    pair: tuple[MessageSocket, MessageSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3: a truncated set is not used, and closed with the socket: no earlier, as that may wait."""
    left, right = pair
    monkeypatch.setattr(sockets, "_ANCILLARY_BYTES", socket.CMSG_LEN(4))
    source = os.open(os.devnull, os.O_RDONLY)
    gc.collect()  # what earlier tests left must not be closed in between
    before = len(os.listdir("/dev/fd"))
    await left.send(b"x", [source, source])
    with pytest.raises(RemoteProtocolError, match="no room"):
        await right.receive()
    assert len(os.listdir("/dev/fd")) == before + 1
    right.close()
    assert len(os.listdir("/dev/fd")) == before - 1
    os.close(source)


class Refusing(socket.socket):
    """A real socket whose kernel has no room for descriptors the first few times."""

    refusals = 0

    def sendmsg(self, *arguments: Any, **more: Any) -> int:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMSGSIZE, "Message too long")
        return super().sendmsg(*arguments, **more)


def refusing(sock: socket.socket, refusals: int) -> MessageSocket:
    other = Refusing(fileno=sock.detach())
    other.refusals = refusals
    return MessageSocket(other)


async def test_want_of_room_for_descriptors_is_retried(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """PLATFORM 3.2: EMSGSIZE passes when the peer has read what it had."""
    left, right = socket.socketpair(socket.AF_UNIX)
    sender, receiver = refusing(left, 3), MessageSocket(right)
    source = os.open(os.devnull, os.O_RDONLY)
    await sender.send(b"x", [source])
    assert trio.current_time() >= 3 * sockets.DESCRIPTOR_RETRY_SECONDS
    data, received = await receiver.receive()
    assert data == b"x"
    assert len(received) == 1
    for descriptor in (source, *received):
        os.close(descriptor)
    sender.close()
    receiver.close()


async def test_want_of_room_is_not_retried_forever(autojump_clock: trio.testing.MockClock) -> None:
    """L4: a peer that never reads costs a bounded wait."""
    left, right = socket.socketpair(socket.AF_UNIX)
    sender = refusing(left, 10**6)
    with right, pytest.raises(trio.TooSlowError, match="no room for 1 descriptors"):
        await sender.send(b"x", [0])
    sender.close()


async def test_both_buffers_are_raised(pair: tuple[MessageSocket, MessageSocket]) -> None:
    """PLATFORM 3.2: 8 KiB, macOS's default, would refuse descriptors to a peer that lags."""
    left, right = socket.socketpair(socket.AF_UNIX)
    with right:
        MessageSocket(left)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            assert left.getsockopt(socket.SOL_SOCKET, option) >= 256 * 1024
        left.close()


async def test_a_peer_that_closed_at_once_is_the_end_of_the_stream() -> None:
    """C3: macOS refuses to set options of a socket whose peer has gone; that ends no listener."""

    class AsOnMacOS(socket.socket):
        def getsockopt(self, *_: Any) -> int:  # type: ignore[override]
            return 8192

        def setsockopt(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    left, right = socket.socketpair(socket.AF_UNIX)
    left.close()
    peer = MessageSocket(AsOnMacOS(fileno=right.detach()))
    assert await peer.receive() == (b"", [])
    peer.close()


def test_credentials_name_the_process_at_the_other_end(tmp_path: Path) -> None:
    """C1: the kernel says who connected."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        program = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({path!r})\ninput()"
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
            accepted, _ = listener.accept()
            with accepted:
                assert peer_credentials(accepted) == (os.getuid(), child.pid)
            child.communicate(b"\n")
