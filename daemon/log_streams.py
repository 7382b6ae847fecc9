"""Where log lines go: standard error, whoever reads it, or a file that rotates itself.

Neither may end or hold the daemon; both count the lines that they could not write.
"""

import atexit
import errno
import os
import select
import stat
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from prefixcached.daemon.errors import StartError

MAX_LOG_BYTES: Final = 5 << 20
"""Of one log file: weeks of a quiet daemon; it and the one before it are kept."""

MAX_WAITING_LINES: Final = 256
"""That wait for a slow reader: more than a daemon says in an hour, and a few megabytes at most."""

HANDOVER_SECONDS: Final = 0.05
"""For a line to be out before its writer goes on, if nobody reads: below a stall (rule C6)."""

EXIT_SECONDS: Final = 0.5
"""For what still waits when the process ends."""

STANDARD_ERROR: Final = 2


class Stream(Protocol):
    """What lines are written to."""

    @property
    def lost(self) -> int:
        """Lines that were not written, or not whole."""
        ...

    def write(self, text: str, /) -> None:
        """Take a line and its end. Never raises, and returns soon."""
        ...


class _Lines:
    """Lines to the descriptor of standard error; one that was cut short ends before the next."""

    def __init__(self) -> None:
        self.bytes = 0
        self.lost = 0
        self.is_torn = False

    def write(self, line: bytes) -> None:
        """Write as much of a line as can be written."""
        data = b"\n" + line if self.is_torn else line
        written = 0
        try:
            while written < len(data):
                try:
                    written += os.write(STANDARD_ERROR, data[written:])
                except BlockingIOError:  # another process has made the terminal so
                    select.select([], [STANDARD_ERROR], [])
        except OSError:  # the reader is gone, or the disk full
            self.lost += 1
        if written:
            self.bytes += written
            self.is_torn = not data[:written].endswith(b"\n")


class StandardError:
    """Standard error: a pipe that nobody empties and a stopped terminal hold whoever writes.

    So a thread of its own writes. Mostly a line is out before `write` returns, so that none is
    missing however the process ends; where one took too long, those behind it wait here.
    """

    def __init__(self) -> None:
        self._lines = _Lines()
        self._dropped = 0
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._is_behind = False
        threading.Thread(target=self._work, name="log", daemon=True).start()
        atexit.register(self._wait_written, EXIT_SECONDS)

    @property
    def lost(self) -> int:
        """See `Stream`."""
        return self._dropped + self._lines.lost

    def write(self, text: str, /) -> None:
        """See `Stream`."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING_LINES:
                self._dropped += 1
                return
            self._waiting.append(text.encode(errors="backslashreplace"))
            self._changed.notify_all()
            if not self._is_behind:
                self._is_behind = not self._wait_written(HANDOVER_SECONDS)

    def _wait_written(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                line = self._waiting[0]
            self._lines.write(line)
            with self._changed:
                self._waiting.popleft()
                if not self._waiting:
                    self._is_behind = False
                    self._changed.notify_all()


class LogFile:
    """A log that keeps at most `MAX_LOG_BYTES` in its file and as much in the one before.

    It becomes this process's standard error as well, so that what the interpreter says in its last
    moment is found there.

    Args:
        path: The file; ``path`` with ``.1`` behind is the one before.
        max_bytes: At which it is put aside.

    Raises:
        StartError: It cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines = _Lines()
        self._in_use = threading.Lock()  # the watch of stalls logs from a thread of its own
        try:
            self._open()
        except OSError as error:
            raise StartError(f"cannot log to {path}: {error.strerror}") from error

    @property
    def lost(self) -> int:
        """See `Stream`."""
        return self._lines.lost

    def write(self, text: str, /) -> None:
        """Write a line, into a new file where the old one is full or gone from its place."""
        with self._in_use:
            self._write(text.encode(errors="replace"))

    def _write(self, data: bytes) -> None:
        if self._lines.bytes and self._is_too_much(data):
            # The disk's trouble is not worth the daemon: the next line tries again.
            with suppress(OSError):  # gone already, or a directory in the way
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            with suppress(OSError):
                self._open()
                if self._is_too_much(data):
                    os.ftruncate(STANDARD_ERROR, 0)  # it could not be put aside
                    self._lines.bytes, self._lines.is_torn = 0, False
        elif not self._is_in_place():
            with suppress(OSError):
                self._open()
        self._lines.write(data)

    def _is_in_place(self) -> bool:
        """Whether who looks for the log finds what is written to; lines are few enough to ask."""
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(STANDARD_ERROR))
        except OSError:
            return False

    def _is_too_much(self, data: bytes) -> bool:
        return self._lines.bytes + len(data) > self._max_bytes

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without waiting for a pipe's reader: the daemon must start, or say why it does not.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            size = os.fstat(descriptor).st_size
            # A daemon that met a full disk, or its end, left half a line there.
            self._lines.is_torn = bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
            self._lines.bytes = size
            os.dup2(descriptor, STANDARD_ERROR, inheritable=False)
        finally:
            os.close(descriptor)
