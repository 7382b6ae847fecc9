"""Log lines: for people on a terminal, else one JSON object a line; bounded in number and size.

`configure` sets structlog up for this process. It returns the `Limiter`, which owns the counts: one
event, a bad client's for example, gets `LINES_A_WINDOW` lines a minute and the rest are counted.
Where the lines go, `log_streams` says: to standard error, where a journal or a person's own
redirection keeps them, or to a file.
"""

import os
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

import structlog

from prefixcached.daemon.log_streams import STANDARD_ERROR, LogFile, StandardError, Stream
from prefixcached.daemon.sizes import bytes_text

LEVEL: Final = 20
"""INFO, by the numbers of the standard library."""

WINDOW_SECONDS: Final = 60.0
LINES_A_WINDOW: Final = 20
"""Of one event: enough to see a pattern, few enough for a client that fails in a loop."""

MAX_EVENTS: Final = 256
"""Events that are told apart: they are constants of the source, of which there are fewer."""

MAX_FIELD_CHARACTERS: Final = 8192
"""Of one field: a deep stack, but not all that a client or a file says of itself."""


class Limiter:
    """Drops lines of an event that comes too often; a processor of structlog.

    Its counts are bare integers: the thread of `StallWatch` logs too, and a count that is one
    short in a race of two threads misleads nobody.

    Args:
        clock: Seconds that never go back.
        file: Where the lines go, for who asks; None: to standard error.
        lost: Returns how many lines could not be written.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        file: Path | None = None,
        lost: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._file = file
        self._lost = lost
        self._lost_before = 0
        self._windows: dict[str, tuple[float, int]] = {}
        self.lines = 0
        self.suppressed = 0

    def statistics(self) -> dict[str, Any]:
        """Return how many lines were written and how many were not, and the file if there is one.

        ``file`` is None where the lines go to standard error; ``lost`` are among ``lines``.
        """
        return {
            "lines": self.lines,
            "suppressed": self.suppressed,
            "lost": self._lost(),
            "file": None if self._file is None else str(self._file),
        }

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
        if (lost := self._lost()) > self._lost_before:
            event["lost"] = self._lost_before = lost  # of all, since this line may be lost too
        self.lines += 1
        return event


def configure(file: Path | None = None) -> Limiter:
    """Set structlog up for this process; called once, before anything logs.

    Args:
        file: Log there and rotate it by size; by default to standard error.

    Raises:
        StartError: The file cannot be opened.
    """
    stream: Stream = StandardError() if file is None else LogFile(file)
    is_terminal = file is None and os.isatty(STANDARD_ERROR)
    limiter = Limiter(file=file, lost=lambda: stream.lost)
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
    common = [structlog.processors.format_exc_info, _bounded]
    if is_terminal:
        return [
            *common,
            _human_sizes,
            structlog.dev.ConsoleRenderer(
                pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    return [
        *common,
        _leading,
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]


def _bounded(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Leave out the middle of what is too long: its end says as much as its beginning."""
    half = MAX_FIELD_CHARACTERS // 2
    for name, value in event.items():
        if isinstance(value, str) and len(value) > MAX_FIELD_CHARACTERS:
            event[name] = f"{value[:half]} [...] {value[-half:]}"
    return event


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

    debug = info = warning = warn = error = critical = exception = fatal = failure = log = msg
