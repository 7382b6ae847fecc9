"""Taking over the listening socket that launchd or systemd holds for this daemon.

Each gives at most one socket, once in a process's life; nothing here binds or removes a path. The
supervisor owns the file, so a daemon that was handed its socket never unlinks it (PLATFORM 1.3).
"""

import ctypes
import errno
import os
import socket
import stat
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from prefixcached.daemon.errors import StartError

LAUNCHD_NAME: Final = "Listener"
"""Key of the socket in the LaunchAgent's `Sockets`."""

_FIRST_DESCRIPTOR: Final = 3
"""SD_LISTEN_FDS_START of systemd's sd_listen_fds(3)."""

_SYSTEMD_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited_socket(expected: Path) -> socket.socket | None:
    """Return the listening socket that the supervisor holds at ``expected``, None if none does.

    Raises:
        StartError: It handed over something else; the service file and the configuration differ.
    """
    numbers = _from_launchd() if sys.platform == "darwin" else from_systemd(os.environ)
    if not numbers:
        return None
    if len(numbers) > 1:
        raise StartError(
            f"the service hands over {len(numbers)} sockets and one is wanted; "
            "run: prefixcached service install"
        )
    return _checked(numbers[0], expected)


def from_systemd(variables: MutableMapping[str, str]) -> list[int]:
    """Return the descriptors of systemd's protocol, and take its variables away from children."""
    pid, count = variables.get("LISTEN_PID", ""), variables.get("LISTEN_FDS", "")
    for name in _SYSTEMD_VARIABLES:
        variables.pop(name, None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    return list(range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)))


def _checked(descriptor: int, expected: Path) -> socket.socket:
    os.set_inheritable(descriptor, False)
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise StartError("the service hands over a descriptor that is no socket")
    sock = socket.socket(fileno=descriptor)
    path = sock.getsockname()
    is_stream = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
    if not is_stream or not isinstance(path, str) or Path(path) != expected:
        sock.close()
        raise StartError(
            f"the service listens at {path!r} and this daemon is told {expected}; "
            "run: prefixcached service install"
        )
    return sock


def _from_launchd() -> list[int]:
    """Return the descriptors of `launch_activate_socket`; none where launchd did not start us."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        activate = library.launch_activate_socket
    except AttributeError:  # not macOS
        return []
    activate.restype = ctypes.c_int
    activate.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
        ctypes.POINTER(ctypes.c_size_t),
    ]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    found, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t(0)
    # It returns the error itself and leaves errno alone.
    code = activate(LAUNCHD_NAME.encode(), ctypes.byref(found), ctypes.byref(count))
    if code in (errno.ESRCH, errno.ENOENT):  # not a job of launchd; a job without sockets (brew)
        return []
    if code:
        raise StartError(f"launchd does not hand over its socket: {os.strerror(code)}")
    try:
        return [found[index] for index in range(count.value)]
    finally:
        library.free(ctypes.cast(found, ctypes.c_void_p))
