"""Looking at a running daemon again and again: what `top` and `metrics` share.

A `Watcher` owns one connection, made anew where the daemon was restarted, and the history that it
has seen so far: each look asks for the new rows only.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import click
import numpy as np

from prefixcached.daemon.history_rings import MINUTE_ROWS, Rows
from prefixcached.protocol.messages import (
    Activity,
    ActivityReport,
    AnyRequest,
    History,
    HistoryReport,
    HistoryStep,
    Latency,
    LatencyReport,
    Reply,
    Status,
    StatusReport,
)

ANSWER_SECONDS: Final = 2.0
"""For one answer: a view that hangs longer than this cannot be told from one that broke."""

RECENT_ROWS: Final = 120
"""Seconds that a view keeps: what it draws of the last two minutes."""

KEPT_ROWS: Final[dict[HistoryStep, int]] = {"second": RECENT_ROWS, "minute": MINUTE_ROWS}

GROUP: Final = "watch"


class SeriesTable:
    """The newest rows of a history, with their times, by column."""

    def __init__(self, step: HistoryStep) -> None:
        self._step: HistoryStep = step
        self._boot = ""
        self._last = 0
        self._names: tuple[str, ...] = ()
        self._rows: Rows = np.zeros((0, 1))

    def request(self) -> History:
        """Return the question for what is new."""
        return History(step=self._step, after=self._last, most=KEPT_ROWS[self._step])

    def take_in(self, report: HistoryReport) -> bool:
        """Append what is new; False where another run of the daemon answered: ask again."""
        if report.boot != self._boot:
            is_first, self._boot = not self._boot, report.boot
            self._last, self._names, self._rows = 0, (), np.zeros((0, 1))
            if not is_first:
                return False
        names = tuple(series.name for series in report.series)
        packed = [report.times, *(series.values for series in report.series)]
        rows = np.stack([np.frombuffer(column, "<f8") for column in packed], axis=1)
        kept = self._rows if names == self._names else rows[:0]
        self._names = names
        self._rows = np.concatenate([kept, rows])[-KEPT_ROWS[self._step] :]
        self._last = report.first + len(rows) - 1
        return True

    def column(self, name: str) -> Rows:
        """Return one column, shape (rows,); empty where the daemon does not have it."""
        if name not in self._names:
            return np.zeros(0)
        return self._rows[:, 1 + self._names.index(name)]

    @property
    def times(self) -> Rows:
        """Unix seconds of the rows, shape (rows,)."""
        return self._rows[:, 0]


@dataclass(frozen=True)
class Look:
    """What was seen at one moment."""

    report: dict[str, Any]
    activity: ActivityReport
    latency: LatencyReport


class Watcher:
    """A connection to the daemon at ``socket``; a context manager."""

    def __init__(self, socket: Path) -> None:
        from prefixcached.client.wire import Wire

        self._socket = socket
        self._wire: Wire | None = None
        self.recent = SeriesTable("second")
        self.day = SeriesTable("minute")

    def look(self) -> Look:
        """Look once, and take in what is new of the history.

        Raises:
            PrefixCachedError: No daemon answers.
            click.ClickException: It is too old.
        """
        status = self._ask(Status())
        activity = self._ask(Activity())
        latency = self.latency()
        for table in (self.recent, self.day):
            for _ in range(2):
                history = self._ask(table.request())
                assert isinstance(history, HistoryReport)
                if table.take_in(history):
                    break
        assert isinstance(status, StatusReport)
        assert isinstance(activity, ActivityReport)
        return Look(status.report, activity, latency)

    def status(self) -> dict[str, Any]:
        """Return the counters of every part of the daemon. Errors as `look`."""
        status = self._ask(Status())
        assert isinstance(status, StatusReport)
        return status.report

    def latency(self) -> LatencyReport:
        """Return how long requests took. Errors as `look`."""
        latency = self._ask(Latency())
        assert isinstance(latency, LatencyReport)
        return latency

    def _ask(self, request: AnyRequest) -> Reply:
        from prefixcached.client.wire import Wire

        deadline = time.monotonic() + ANSWER_SECONDS
        if self._wire is None or not self._wire.is_quiet():
            self.close()
            self._wire = Wire(self._socket)
            self._wire.open(deadline)
            if GROUP not in self._wire.capabilities:
                raise click.ClickException(
                    f"the daemon at {self._socket} is older than this command and cannot be "
                    "watched; restart it: prefixcached service restart"
                )
        return self._wire.request(request, deadline)[0]

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
