"""Log lines: for people on a terminal, else one JSON object a line; bounded in number and size.

`configure` sets structlog up for this process. It returns the `Limiter`, which owns the counts: one
event, a bad client's for example, gets `LINES_A_WINDOW` lines a minute and the rest are counted. A
`LogFile` rotates itself, where neither a journal nor a person's own redirection keeps the lines.
"""

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from prefixcached.daemon.errors import StartError
from prefixcached.daemon.sizes import bytes_text

LEVEL: Final = 20
"""INFO, by the numbers of the standard library."""

WINDOW_SECONDS: Final = 60.0
LINES_A_WINDOW: Final = 20
"""Of one event: enough to see a pattern, few enough for a client that fails in a loop."""

MAX_EVENTS: Final = 256
"""Events that are told apart: they are constants of the source, of which there are fewer."""

MAX_LOG_BYTES: Final = 5 << 20
"""Of one log file: weeks of a quiet daemon; it and the one before it are kept."""

_STANDARD_ERROR: Final = 2


class Stream(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> object:
        """Take a line and its end."""
        ...

    def flush(self) -> object:
        """Let it be seen."""
        ...


class StandardError:
    """Standard error, whoever reads it: a log that nobody hears must not end or hold the daemon."""

    def write(self, text: str, /) -> None:
        """Write a line, or lose it where the reader is gone or the disk behind it is full."""
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Let it be seen."""
        with suppress(OSError):
            sys.stderr.flush()


class Limiter:
    """Drops lines of an event that comes too often; a processor of structlog.

    Its counts are bare integers: the thread of `StallWatch` logs too, and a count that is one
    short in a race of two threads misleads nobody.

    Args:
        clock: Seconds that never go back.
        file: Where the lines go, for who asks; None: to standard error.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, file: Path | None = None
    ) -> None:
        self._clock = clock
        self._file = file
        self._windows: dict[str, tuple[float, int]] = {}
        self.lines = 0
        self.suppressed = 0

    def statistics(self) -> dict[str, Any]:
        """Return how many lines were written and how many were not, and the file if there is one.

        ``file`` is None where the lines go to standard error.
        """
        file = None if self._file is None else str(self._file)
        return {"lines": self.lines, "suppressed": self.suppressed, "file": file}

    def __call__(
        self, logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Pass a line on, or raise `structlog.DropEvent`."""
        name, now = str(event.get("event")), self._clock()
        since, count = self._windows.get(name, (now, 0))
        if now - since >= WINDOW_SECONDS:
            if count > LINES_A_WINDOW:
                event["suppressed"] = count - LINES_A_WINDOW
            since, count = now, 0
        if name not in self._windows and len(self._windows) >= MAX_EVENTS:
            self._windows.clear()
        self._windows[name] = since, count + 1
        if count >= LINES_A_WINDOW:
            self.suppressed += 1
            raise structlog.DropEvent
        self.lines += 1
        return event


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
        self._bytes = 0
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise StartError(f"cannot log to {path}: {error.strerror}") from error

    def write(self, text: str, /) -> None:
        """Write a line, into a new file where the old one is full."""
        data = text.encode(errors="replace")
        if self._bytes and self._bytes + len(data) > self._max_bytes:
            # The disk's trouble is not worth the daemon: the next line tries again.
            with suppress(OSError):  # gone already, or a directory in the way
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            with suppress(OSError):
                self._open()
                if self._bytes + len(data) > self._max_bytes:
                    os.ftruncate(_STANDARD_ERROR, 0)  # it could not be put aside
                    self._bytes = 0
        with suppress(OSError):  # a full disk; `status` says so
            self._bytes += os.write(_STANDARD_ERROR, data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def _open(self) -> None:
        # Without waiting for a pipe's reader: the daemon must start, or say why it does not.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            self._bytes = os.fstat(descriptor).st_size
            os.dup2(descriptor, _STANDARD_ERROR, inheritable=False)
        finally:
            os.close(descriptor)


def configure(file: Path | None = None) -> Limiter:
    """Set structlog up for this process; called once, before anything logs.

    Args:
        file: Log there and rotate it by size; by default to standard error.

    Raises:
        StartError: The file cannot be opened.
    """
    stream: Stream = StandardError() if file is None else LogFile(file)
    is_terminal = file is None and sys.stderr.isatty()
    limiter = Limiter(file=file)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            limiter,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            *_renderers(is_terminal=is_terminal),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVEL),
        logger_factory=lambda *_: _LineLogger(stream),
    )
    return limiter


def _renderers(*, is_terminal: bool) -> list[Any]:
    # Tracebacks without the values of variables: these would be prompts.
    if is_terminal:
        return [
            _human_sizes,
            structlog.dev.ConsoleRenderer(
                pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    return [
        structlog.processors.format_exc_info,
        _leading,
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]


def _human_sizes(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Write what a field says in bytes as people do; for programs it stays a number."""
    for name, value in event.items():
        if name.endswith("_bytes") and isinstance(value, int):
            event[name] = bytes_text(value)
    return event


def _leading(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Put first what every line has, for whoever reads them one below the other."""
    first = {name: event.pop(name) for name in ("timestamp", "level", "event") if name in event}
    return {**first, **event}


class _LineLogger:
    """Writes whole lines, whatever their level."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()

    debug = info = warning = warn = error = critical = exception = fatal = failure = log = msg
