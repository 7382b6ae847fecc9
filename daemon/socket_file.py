"""The socket's place in the file system: its directory, the lock beside it, the socket itself.

Whoever holds the lock owns the path, so a socket that lies there is left over from a daemon that
was killed and may be removed. The lock file stays: removing one is a race. These calls block; they
run before and after the event loop has work.
"""

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from prefixcached.daemon.activation import inherited_socket
from prefixcached.daemon.errors import StartError
from prefixcached.protocol import paths

BACKLOG: Final = 128
"""Connections that wait for accept: macOS's own maximum, and a farm's worth of processes."""

_PRIVATE_FILE: Final = 0o600


def prepare_directory(directory: Path) -> None:
    """Create ``directory`` for its user alone, or check that it is so (rules C1, D9).

    Raises:
        StartError: It cannot be created, or others may enter it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=paths.PRIVATE_DIRECTORY, exist_ok=True)
        refusal = paths.directory_refusal(directory)
    except OSError as error:
        raise StartError(f"cannot create the directory {directory}: {error.strerror}") from error
    if refusal:
        raise StartError(refusal)


class InstanceLock:
    """Keeps a second daemon from the same socket; a context manager.

    Args:
        path: The lock file. Its text is the process id of the holder.

    Raises:
        StartError: On entry, when another process holds it or the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self._path, flags, _PRIVATE_FILE)
        except OSError as error:
            raise StartError(f"cannot open the lock file {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise StartError(
                f"another prefixcached (process {holder}) holds {self._path}; stop it first, or "
                "use --socket for a second one"
            ) from error
        # For people alone: a full disk must not keep the daemon from serving out of RAM.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


class SocketFile:
    """A listening socket at a path, 0600; a context manager that removes it at the end.

    The caller holds the path's `InstanceLock`. Attribute ``socket`` is valid inside. A socket that
    launchd or systemd holds for the daemon is taken over, and its file is left alone.

    Raises:
        StartError: On entry, when the path is too long, taken, or cannot be bound.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._identity: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        inherited = inherited_socket(self._path)
        if inherited is not None:
            self.socket.close()
            self.socket = inherited
            return self
        try:
            self._remove_stale()
            self.socket.bind(os.fspath(self._path))
            self._path.chmod(_PRIVATE_FILE)
            self._identity = _identity(self._path)
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            raise StartError(f"cannot listen at {self._path}: {error.strerror}") from error
        except StartError:
            self.socket.close()
            raise
        return self

    def _remove_stale(self) -> None:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise StartError(
                f"{self._path} exists and is no socket; move it away or use another path"
            )
        # launchd and systemd make their socket once: without its file nobody reaches them again.
        if (file := paths.service_of(self._path)) is not None:
            raise StartError(
                f"the service ({file}) listens at {self._path}; run: prefixcached service start, "
                "or give --socket another path. If the service is stopped, remove that socket"
            )
        self._path.unlink()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and remove its file, so that clients see at once that nobody serves.

        A second call does nothing.
        """
        self.socket.close()
        # Somebody may have removed ours and put another there: leave what is not ours.
        if self._identity is not None and _identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        self._identity = None


def check_path(path: Path) -> None:
    """Raise StartError where ``path`` cannot be a socket's on every platform."""
    if refusal := paths.length_refusal(path):
        raise StartError(refusal)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
