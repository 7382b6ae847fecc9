"""Descriptors that hold whoever closes them: a hostile client's cost nobody else anything."""

import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from prefixcached.daemon import closing
from prefixcached.daemon import listener as listener_module
from prefixcached.daemon.socket_file import SocketFile
from prefixcached.daemon.sockets import MessageSocket
from prefixcached.protocol import messages as m
from prefixcached.protocol.framing import encode
from tests.daemon.clients import HELLO, Client, connected
from tests.daemon.conftest import Front, FrontMaker
from tests.daemon.fakes import FakeRamTier

CLEAR = m.Clear()
LINGER_SECONDS = 5
SOON_SECONDS = 2


class SlowToClose:
    """A TCP socket whose last close takes `LINGER_SECONDS`, or until `release`."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._own = socket.create_connection(server.getsockname())
            self._peer, _ = server.accept()
        self._own.setblocking(False)
        try:
            while True:
                self._own.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        self._own.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS)
        )

    @property
    def descriptor(self) -> int:
        return self._own.fileno()

    def leave(self) -> None:
        """Close the client's own descriptor; another is on its way."""
        self._own.close()

    def release(self) -> None:
        self._peer.close()


@pytest.fixture
def slow() -> Iterator[SlowToClose]:
    made = SlowToClose()
    yield made
    made.release()
    made.leave()


def fresh(front: Front) -> Client:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(front.path))
    return Client(sock)


async def served(front: Front) -> None:
    """Another client is, at once."""
    with trio.fail_after(SOON_SECONDS):
        async with connected(front.path) as other:
            assert isinstance(await other.ask(CLEAR), m.Cleared)


async def comes_to(front: Front, **endings: int) -> None:
    with trio.fail_after(SOON_SECONDS):
        while front.endings() != endings:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()


async def test_a_descriptor_that_is_slow_to_close_holds_nobody(
    front: Front, slow: SlowToClose
) -> None:
    """C3: the session is over and RamTier knows; its connection counts until all is closed."""
    async with connected(front.path) as client:
        await client.send(encode(m.Status()), [slow.descriptor])
        slow.leave()
        await client.failed()
    await served(front)
    await comes_to(front, closed=1)
    assert sorted(front.ram_tier.gone) == [1, 2]
    assert front.listener.statistics().current == 1
    slow.release()
    await comes_to(front, protocol=1, closed=1)


async def test_a_descriptor_that_nobody_read_holds_nobody(front: Front, slow: SlowToClose) -> None:
    """C3: a socket is closed with what waits in it."""
    front.listener._buffer = bytearray(64)
    client = fresh(front)
    with trio.fail_after(SOON_SECONDS):
        await client.send(bytes(64))
        await client.send(b"x", [slow.descriptor])  # the session has not run yet
        slow.leave()
        await client.failed()
        client.close()
        await served(front)
    slow.release()


@pytest.mark.skipif(sys.platform == "darwin", reason="its Unix sockets have no urgent bytes")
async def test_a_descriptor_with_an_urgent_byte_holds_nobody(
    front: Front, slow: SlowToClose
) -> None:
    """C3: urgent bytes are read like others, since who reads them over closes what they carry."""
    with trio.fail_after(SOON_SECONDS):
        async with connected(front.path) as client:
            socket.send_fds(client._socket, [b"x"], [slow.descriptor], socket.MSG_OOB)
            slow.leave()
            await client.send(encode(m.Flush()))
            await client.failed()
        await served(front)
    slow.release()


async def test_a_refused_client_whose_socket_is_slow_to_close_holds_nobody(
    make_front: FrontMaker, slow: SlowToClose
) -> None:
    """C3: what it has sent is not read, and is closed with its socket."""
    async with make_front(max_connections=1) as front, connected(front.path) as client:
        other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        other.connect(str(front.path))
        socket.send_fds(other, [b"x"], [slow.descriptor])
        slow.leave()
        with other, trio.fail_after(SOON_SECONDS):
            while not front.listener.statistics().refused["too-many-connections"]:
                await trio.lowlevel.checkpoint()
            assert isinstance(await client.ask(CLEAR), m.Cleared)
        slow.release()


async def test_a_stop_waits_a_moment_at_most(
    make_front: FrontMaker, slow: SlowToClose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 4: storage has its time to write; the end of the process closes what is left."""
    monkeypatch.setattr(closing, "STOP_SECONDS", 0.05)
    large = m.Hit(lease=1, length=1, tier="ram", parts=(), schema=bytes(8 << 20))
    async with make_front(FakeRamTier(lambda _: (large, ()))) as front:
        async with connected(front.path) as client:
            await client.say(m.Take(namespace="n", tokens=bytes(8)))
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.send(b"x", [slow.descriptor])  # while nobody reads
            slow.leave()
            front.scope.cancel()
            await comes_to(front, stopping=1)
            assert front.ram_tier.gone == [1]
        slow.release()


async def test_a_close_that_fails_ends_one_session(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3: NFS reports at a close what it could not write; RamTier hears that the client is gone."""
    close, failed = os.close, []
    read, write = os.pipe()
    inode = os.fstat(read).st_ino

    def failing(descriptor: int) -> None:
        is_it = os.fstat(descriptor).st_ino == inode
        close(descriptor)
        if is_it:
            failed.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with connected(front.path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", failing)
            await client.send(encode(m.Status()), [read])
            await client.failed()
            await comes_to(front, protocol=1)
        assert failed
        assert front.ram_tier.gone == [1]
        await served(front)
    close(read)
    close(write)


async def test_a_socket_that_cannot_be_set_up_ends_one_session(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3: whatever the kernel says of one connection, others are served."""

    def broken(*_: Any) -> MessageSocket:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patch:
        patch.setattr(listener_module, "MessageSocket", broken)
        client = fresh(front)
        await client.send(encode(HELLO))
        await client.ended()
        client.close()
    await comes_to(front, broken=1)
    await served(front)


async def test_where_no_thread_can_be_started_others_are_served(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3: the session is closed once there is one."""
    monkeypatch.setattr(closing, "RETRY_SECONDS", 0.01)
    run_sync = trio.to_thread.run_sync
    read, write = os.pipe()

    async def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with connected(front.path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(trio.to_thread, "run_sync", refuse)
            await client.send(encode(m.Status()), [read])
            await client.failed()
            await served(front)
        assert trio.to_thread.run_sync is run_sync
        await comes_to(front, protocol=1, closed=1)
    os.close(read)
    os.close(write)


async def test_clients_that_nobody_accepted_hold_no_stop(tmp_path: Path, slow: SlowToClose) -> None:
    """C3, DESIGN 4: what they sent is closed with the listening socket."""
    path = tmp_path / "s"
    with SocketFile(path) as socket_file, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        socket.send_fds(client, [b"x"], [slow.descriptor])
        slow.leave()
        started = time.monotonic()
        listening = socket_file.remove()
        with trio.move_on_after(0.1):
            await closing.Closer().close_listener(listening)
        assert time.monotonic() - started < SOON_SECONDS
        assert not path.exists()
    slow.release()
