"""The socket's place in the file system: its directory, the lock beside it, the socket itself.

Whoever holds the lock owns the path, so a socket that lies there is left over from a daemon that
was killed and may be removed. The lock file stays: removing one is a race. These calls block, for
as long as a local file system takes to look a name up.
"""

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import structlog

from prefixcached.daemon.activation import inherited_socket
from prefixcached.daemon.errors import StartError
from prefixcached.protocol import paths

BACKLOG: Final = 128
"""Connections that wait for accept: macOS's own maximum, and a farm's worth of processes."""

_PRIVATE_FILE: Final = 0o600

log = structlog.get_logger()


def prepare_directory(directory: Path) -> None:
    """Create ``directory`` for its user alone, or check that it is so (rules C1, D9).

    Raises:
        StartError: It cannot be created, or others may enter it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=paths.PRIVATE_DIRECTORY, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot create the directory {directory}: {error.strerror}") from error
    check_directory(directory)


def check_directory(directory: Path) -> None:
    """Raise StartError where ``directory`` is not its user's alone, or not there."""
    try:
        refusal = paths.directory_refusal(directory)
    except OSError as error:
        raise StartError(f"cannot look at the directory {directory}: {error.strerror}") from error
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
        self._descriptor = self._taken()
        return self

    def hold(self) -> None:
        """See to it that what lies at the path is what is held, after somebody may have removed it.

        Raises:
            StartError: Another daemon holds the path now, or it cannot be had.
        """
        if _identity(self._path) != _identity_of(os.fstat(self._descriptor)):
            descriptor = self._taken()
            os.close(self._descriptor)
            self._descriptor = descriptor

    def _taken(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self._path, flags, _PRIVATE_FILE)
        except OSError as error:
            raise StartError(f"cannot open the lock file {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StartError(
                f"another prefixcached (process {holder}) holds {self._path}; stop it first, or "
                "use --socket for a second one"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise StartError(
                f"cannot lock {self._path}: {error.strerror}; name a socket on a volume that has "
                "locks with --socket"
            ) from error
        # For people alone: a full disk must not keep the daemon from serving out of RAM.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

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
        self.path = path
        self.socket: socket.socket
        self._identity: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        inherited = inherited_socket(self.path)
        if inherited is None:
            self._remove_stale()
            self.bind()
        else:
            self.socket = inherited
        return self

    def bind(self) -> None:
        """Listen at the path, which is free, with a new `socket`; the caller closes an old one.

        Raises:
            StartError: It cannot be bound.
        """
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise self._refused(error) from error
        try:
            sock.bind(os.fspath(self.path))
            self.path.chmod(_PRIVATE_FILE)
            self._identity = _identity(self.path)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise self._refused(error) from error
        self.socket = sock

    @property
    def is_in_place(self) -> bool:
        """Whether clients find the socket; that of a supervisor is not ours to look after."""
        return self._identity is None or _identity(self.path) == self._identity

    def _remove_stale(self) -> None:
        try:
            is_socket = stat.S_ISSOCK(self.path.lstat().st_mode)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused(error) from error
        if not is_socket:
            raise StartError(
                f"{self.path} exists and is no socket; move it away or use another path"
            )
        # launchd and systemd make their socket once: without its file nobody reaches them again.
        if (file := paths.service_of(self.path)) is not None:
            raise StartError(
                f"the service ({file}) listens at {self.path}; run: prefixcached service start, "
                "or give --socket another path. If the service is stopped, remove that socket"
            )
        try:
            self.path.unlink()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> StartError:
        return StartError(f"cannot listen at {self.path}: {error.strerror}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove().close()

    def remove(self) -> socket.socket:
        """Remove the file, so that clients see at once that nobody serves.

        A second call removes nothing. A file that cannot be removed is left for the next daemon,
        since storage is to be stopped yet.

        Returns:
            The socket, which is to be closed where it may take long: clients may wait in it.
        """
        # Somebody may have removed ours and put another there: leave what is not ours.
        if self._identity is not None and self.is_in_place:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                log.warning(
                    "cannot remove the socket's file",
                    socket=str(self.path),
                    error=error.strerror,
                )
        self._identity = None
        return self.socket


def check_path(path: Path) -> None:
    """Raise StartError where ``path`` cannot be a socket's on every platform."""
    if refusal := paths.length_refusal(path):
        raise StartError(refusal)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        return _identity_of(path.lstat())
    except OSError:
        return None


def _identity_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
