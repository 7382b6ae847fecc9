"""Closing what clients sent or may have sent, which can take as long as a client likes.

The last descriptor of a TCP socket with SO_LINGER and unsent data holds whoever closes it. So does
a Unix socket that such a descriptor waits in unread, and a file system in user space answers when
it wants to. So threads of their own close them, and hold neither the event loop nor the process.
"""

import fcntl
import math
import os
import socket
import struct
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog
import trio

CLOSING_THREADS: Final = 16
"""At a time. Who keeps them all busy delays other closings alone: those sessions are over."""

STOP_SECONDS: Final = 1.0
"""For a session's descriptors when the daemon stops; what is open then ends with the process, which
lingers for nothing."""

RETRY_SECONDS: Final = 0.25
"""Between two tries to start a thread."""

log = structlog.get_logger()


class Closer:
    """Closes for all sessions."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(CLOSING_THREADS)

    async def close(self, sock: socket.socket, descriptors: Sequence[int] = ()) -> None:
        """Close a client's socket and what came over it; nobody waits on the socket any more.

        Who is cancelled meanwhile leaves it to the thread, and waits for that a moment at most. A
        close that fails has closed all the same (NFS reports lost writes that way).
        """
        if not descriptors and _is_empty(sock):
            _close_all((sock.detach(),))
            return
        await self._close_in_thread((*descriptors, sock.detach()))

    async def close_listener(self, sock: socket.socket) -> None:
        """Close a listening socket, with what those sent whom nobody has accepted.

        Nothing else is done to it: a supervisor may go on listening.
        """
        await self._close_in_thread((sock.detach(),))

    async def _close_in_thread(self, descriptors: Sequence[int]) -> None:
        is_stopping = trio.current_effective_deadline() == -math.inf
        deadline = trio.current_time() + STOP_SECONDS if is_stopping else math.inf
        with trio.CancelScope(shield=is_stopping, deadline=deadline):
            while True:
                try:
                    await trio.to_thread.run_sync(
                        _close_all, descriptors, limiter=self._threads, abandon_on_cancel=True
                    )
                except RuntimeError as error:  # this user has as many threads as he may
                    log.warning("cannot start a thread to close with", error=str(error))
                    await trio.sleep(RETRY_SECONDS)
                else:
                    return


def _is_empty(sock: socket.socket) -> bool:
    """Whether nothing that its peer sent is left in the socket, nor can come."""
    try:
        # XNU would discard what is unread, and that is what takes time.
        if sys.platform != "darwin":
            sock.shutdown(socket.SHUT_RDWR)
        elif sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return False
        (unread,) = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
    except OSError:
        return False
    return not unread


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
