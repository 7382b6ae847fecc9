"""A Unix stream socket under Trio that carries bytes and descriptors (docs/protocol.md).

`trio.SocketStream` knows no descriptors, and on macOS a plain `recv` of a message that carries some
installs them in this process where nobody can name or close them. So every read here is a `recvmsg`
with room for as many as the kernel can deliver. A `MessageSocket` owns its socket; it is used by
one task at a time in each direction.
"""

import array
import errno
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
"""One read. A prompt of 50,000 tokens is 200 KB: it should not take ten turns of the event loop."""

KERNEL_MAX_DESCRIPTORS: Final = 254
"""Most descriptors that one message can carry: 254 on macOS, 253 on Linux."""

DESCRIPTOR_RETRIES: Final = 200
"""How often a send of descriptors is repeated while the kernel refuses for want of room."""

DESCRIPTOR_RETRY_SECONDS: Final = 0.005
"""Pause between them. No event announces the room: the socket is writable all the while."""

_WANT_OF_ROOM: Final = frozenset({errno.EMSGSIZE, errno.ETOOMANYREFS, errno.ENOBUFS})
_INT_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(KERNEL_MAX_DESCRIPTORS * _INT_BYTES)


class MessageSocket:
    """One connected socket.

    Args:
        sock: A connected Unix stream socket; it is made non-blocking and belongs to this object.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            if sock.getsockopt(socket.SOL_SOCKET, option) < SOCKET_BUFFER_BYTES:
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._socket = sock

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
                data, ancillary, flags, _ = self._socket.recvmsg(
                    RECEIVE_BYTES, _ANCILLARY_BYTES, _receive_flags()
                )
            except BlockingIOError:
                continue
            descriptors = _descriptors_in(ancillary)
            if flags & socket.MSG_CTRUNC:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise RemoteProtocolError(
                    "the peer sent descriptors that this process had no room for"
                )
            return data, descriptors

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Write all of ``data``, with ``descriptors`` beside its first byte.

        Cancelled half-way, the stream is of no further use.

        Raises:
            OSError: The connection broke.
            trio.TooSlowError: The kernel had no room for the descriptors, `DESCRIPTOR_RETRIES`
                times in a row.
        """
        assert len(descriptors) <= limits.MAX_DESCRIPTORS
        assert data
        rest = memoryview(data)
        if descriptors:
            rest = rest[await self._send_with(rest, descriptors) :]
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        waited = False
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
                waited = True
        if not waited:
            # The caller always yields here, as with any of Trio's own calls.
            await trio.lowlevel.cancel_shielded_checkpoint()

    async def _send_with(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """One `sendmsg` that carries the descriptors; how many bytes it took."""
        rights = array.array("i", descriptors)
        refusals = 0
        while True:
            try:
                return self._socket.sendmsg(
                    [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
            except OSError as error:
                if error.errno not in _WANT_OF_ROOM:
                    raise
                refusals += 1
                if refusals > DESCRIPTOR_RETRIES:
                    raise trio.TooSlowError(
                        f"no room for {len(descriptors)} descriptors: {error}"
                    ) from error
                await trio.sleep(DESCRIPTOR_RETRY_SECONDS)

    def close(self) -> None:
        """Close the socket; a task that waits on it fails with `trio.ClosedResourceError`.

        A second call does nothing.
        """
        if self._socket.fileno() < 0:
            return
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


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


def _receive_flags() -> int:
    """Linux sets close-on-exec as it delivers; elsewhere it is set just after."""
    if sys.platform == "linux":
        return socket.MSG_CMSG_CLOEXEC
    return 0


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
