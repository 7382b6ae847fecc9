"""A Unix stream socket under Trio that carries bytes and descriptors (docs/protocol.md).

`trio.SocketStream` knows no descriptors, and on macOS a plain `recv` of a message that carries some
installs them in this process where nobody can name or close them. So every read here is a `recvmsg`
with room for as many as the kernel can deliver. A `MessageSocket` owns its socket; it is used by
one task at a time in each direction.
"""

import array
import contextlib
import errno
import math
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Final

import trio

from prefixcached.protocol import limits
from prefixcached.protocol.errors import RemoteProtocolError

SOCKET_BUFFER_BYTES: Final = 256 * 1024
"""Kernel buffer asked for in each direction. macOS gives 8 KiB, and there a send of descriptors
fails while the peer's unread bytes fill it (PLATFORM 3.2)."""

RECEIVE_BYTES: Final = 256 * 1024
"""One read. A prompt of 50,000 tokens is 200 KB: it should not take several turns of the loop."""

KERNEL_MAX_DESCRIPTORS: Final = 254
"""Most descriptors that one message can carry: 254 on macOS, 253 on Linux."""

DESCRIPTOR_RETRIES: Final = 200
"""How often a send of descriptors is repeated while the kernel refuses for want of room."""

DESCRIPTOR_RETRY_SECONDS: Final = 0.005
"""Pause between them. No event announces the room: the socket is writable all the while."""

_RECEIVE_FLAGS: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
"""Linux sets close-on-exec as it delivers; elsewhere it is set just after."""

_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_WANT_OF_ROOM: Final = frozenset({errno.EMSGSIZE, errno.ETOOMANYREFS, errno.ENOBUFS})
_INT_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(KERNEL_MAX_DESCRIPTORS * _INT_BYTES)


class MessageSocket:
    """One connected socket.

    Args:
        sock: A connected Unix stream socket; it is made non-blocking and belongs to this object.
        buffer: Where reads land before they are returned as bytes, `RECEIVE_BYTES` by default.
            Sockets of one event loop may share it. A new object for each read would cost more
            than the read itself: the allocator returns and faults in its pages every time.
    """

    def __init__(self, sock: socket.socket, buffer: bytearray | None = None) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            if sock.getsockopt(socket.SOL_SOCKET, option) < SOCKET_BUFFER_BYTES:
                # XNU answers EINVAL once the peer has closed; the next read will show that.
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        # Linux drops urgent bytes that are read over, and descriptors with them, in `recvmsg`:
        # that takes as long as the last close of one does (`closing`).
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        self._socket = sock
        self._truncated: list[int] = []
        self._buffer = memoryview(bytearray(RECEIVE_BYTES) if buffer is None else buffer)

    async def wait_readable(self) -> None:
        """Wait for bytes or the end of the stream, and consume nothing."""
        await trio.lowlevel.wait_readable(self._socket)

    async def receive(self) -> tuple[bytes, list[int]]:
        """Return what has arrived: bytes, empty at the end of the stream, and descriptors.

        The descriptors are close-on-exec and the caller's. A cancelled call has consumed nothing.

        Raises:
            RemoteProtocolError: The peer sent descriptors that the kernel could not deliver.
            OSError: The connection broke.
        """
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                length, ancillary, flags, _ = self._socket.recvmsg_into(
                    [self._buffer], _ANCILLARY_BYTES, _RECEIVE_FLAGS
                )
            except BlockingIOError:
                continue
            descriptors = _descriptors_in(ancillary)
            if flags & _TRUNCATED:
                self._truncated += descriptors
                raise RemoteProtocolError(
                    "the peer sent descriptors that this process had no room for"
                )
            # Copied before anything else can run and read into a shared buffer.
            return bytes(self._buffer[:length]), descriptors

    async def send(
        self, data: bytes, descriptors: Sequence[int] = (), seconds: float = math.inf
    ) -> None:
        """Write all of ``data``, with ``descriptors`` beside its first byte.

        Other tasks run meanwhile only if it has to wait. Given up half-way, the stream is of no
        further use.

        Raises:
            OSError: The connection broke.
            trio.TooSlowError: The peer did not read for ``seconds``, or the kernel had no room for
                the descriptors, `DESCRIPTOR_RETRIES` times in a row.
        """
        assert len(descriptors) <= limits.MAX_DESCRIPTORS
        rest = memoryview(data)
        sent = self._send_now(rest, descriptors)
        if sent < len(data):
            with trio.fail_after(seconds):
                await self._send_rest(rest[sent:], () if sent else descriptors)

    async def _send_rest(self, data: memoryview, descriptors: Sequence[int]) -> None:
        tries = 0
        while data:
            if descriptors:
                tries += 1
                if tries > DESCRIPTOR_RETRIES:
                    raise trio.TooSlowError(f"no room for {len(descriptors)} descriptors")
                await trio.sleep(DESCRIPTOR_RETRY_SECONDS)
            await trio.lowlevel.wait_writable(self._socket)
            sent = self._send_now(data, descriptors)
            if sent:
                data, descriptors = data[sent:], ()

    def _send_now(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """Write what the kernel takes at once; 0 if nothing, and then no descriptor went either."""
        try:
            if not descriptors:
                return self._socket.send(data)
            rights = array.array("i", descriptors)
            return self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except BlockingIOError:
            return 0
        except OSError as error:
            if descriptors and error.errno in _WANT_OF_ROOM:
                return 0
            raise

    def detach(self) -> tuple[socket.socket, list[int]]:
        """Give up the socket, for the caller to close, and the rest of what came truncated.

        A task that waits on it fails with `trio.ClosedResourceError`, and the peer reads the end of
        the stream.
        """
        trio.lowlevel.notify_closing(self._socket)
        with contextlib.suppress(OSError):  # the peer is gone already
            self._socket.shutdown(socket.SHUT_WR)
        truncated, self._truncated = self._truncated, []
        return self._socket, truncated

    def close(self) -> None:
        """Close the socket at once, as `detach`: for a peer that is trusted (see `closing`).

        A second call does nothing.
        """
        if self._socket.fileno() < 0:
            return
        sock, truncated = self.detach()
        sock.close()
        for descriptor in truncated:
            os.close(descriptor)


def peer_credentials(sock: socket.socket) -> tuple[int, int | None]:
    """Return (user id, process id) of the peer as the kernel knows them.

    The process id is for display: on macOS it is None once the peer is gone.

    Raises:
        OSError: The kernel has no credentials for this socket.
    """
    if sys.platform == "darwin":
        return _peer_credentials_darwin(sock)
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return uid, pid


_SOL_LOCAL: Final = 0
_LOCAL_PEERCRED: Final = 1
_LOCAL_PEERPID: Final = 2
_XUCRED_BYTES: Final = 76
"""struct xucred: u32 version, u32 uid, i16 number of groups, padding, 16 groups."""


def _peer_credentials_darwin(sock: socket.socket) -> tuple[int, int | None]:
    """LOCAL_PEERCRED and LOCAL_PEERPID, whose names Python does not have (PLATFORM 3.2)."""
    raw = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES)
    if len(raw) < 8:
        raise OSError(errno.EINVAL, f"LOCAL_PEERCRED gave {len(raw)} bytes")
    version, uid = struct.unpack_from("=II", raw)
    if version != 0:
        raise OSError(errno.EINVAL, f"LOCAL_PEERCRED gave xucred version {version}, not 0")
    try:
        pid = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
    except OSError:
        return uid, None
    return uid, pid


def _descriptors_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors of one received message, close-on-exec."""
    descriptors = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            # A truncated message may end within a number, which then names no descriptor.
            descriptors.frombytes(raw[: len(raw) - len(raw) % _INT_BYTES])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return list(descriptors)
