"""The history: an hour of rows by seconds, a day by minutes, in two ring arrays. Pure.

`daemon.historian.Historian` owns the one `HistoryRings` of a daemon and adds a row a second; all
memory is allocated at the start. A row has its time and one float64 for each column.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcached.protocol.messages import HistoryReport, HistoryStep, Series

Rows = npt.NDArray[np.float64]
"""Shape (rows, 1 + columns): Unix seconds, then the values."""

SECOND_ROWS: Final = 3600
"""An hour."""

MINUTE_ROWS: Final = 1440
"""A day."""

MINUTE_SECONDS: Final = 60


class Column(NamedTuple):
    """What one number of a row is."""

    name: str
    is_counter: bool


class Ring:
    """The newest rows; numbered from 1 on.

    Args:
        rows: How many are kept.
        columns: Numbers in a row, its time included.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._rows: Rows = np.zeros((rows, columns), np.float64)
        self.last = 0
        """Number of the newest row, 0 before the first."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return int(self._rows.nbytes)

    def append(self, row: Sequence[float] | Rows) -> None:
        """Add a row; the oldest leaves."""
        self._rows[self.last % len(self._rows)] = row
        self.last += 1

    def after(self, number: int, most: int) -> tuple[int, Rows]:
        """Return the rows behind row ``number``, the newest ``most``, and the first one's number.

        A copy. Rows that have left are left out; without any the number is the next row's.
        """
        capacity = len(self._rows)
        first = max(number, self.last - most, self.last - capacity, 0)
        places = np.arange(first, max(first, self.last)) % capacity
        return first + 1, self._rows[places]


class HistoryRings:
    """Both rings.

    Args:
        columns: What the numbers of a row are.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self._rings: dict[HistoryStep, Ring] = {
            "second": Ring(SECOND_ROWS, 1 + len(self.columns)),
            "minute": Ring(MINUTE_ROWS, 1 + len(self.columns)),
        }
        self._is_counter = np.array([column.is_counter for column in self.columns])
        self._minute = math.nan
        self._minute_rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory, never more nor less."""
        return sum(ring.nbytes for ring in self._rings.values())

    def add(self, unix_seconds: float, values: Sequence[float]) -> None:
        """Add a row of the present second, and one of a minute when it begins the next minute."""
        minute = unix_seconds // MINUTE_SECONDS
        if minute != self._minute and self._minute_rows:
            self._close_minute()
        self._minute = minute
        self._minute_rows = min(self._minute_rows + 1, SECOND_ROWS)
        self._rings["second"].append((unix_seconds, *values))

    def _close_minute(self) -> None:
        """Of counters the last value, of gauges the mean of those that are there."""
        seconds = self._rings["second"]
        _, rows = seconds.after(seconds.last - self._minute_rows, self._minute_rows)
        row, values = rows[-1].copy(), rows[:, 1:]
        known = np.maximum(np.count_nonzero(~np.isnan(values), axis=0), 1)
        means = np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(values, axis=0) / known)
        row[1:] = np.where(self._is_counter, row[1:], means)
        self._rings["minute"].append(row)
        self._minute_rows = 0

    def report(self, step: HistoryStep, after: int, most: int) -> HistoryReport:
        """Return the rows behind row ``after``, the newest ``most`` of them."""
        first, rows = self._rings[step].after(after, most)
        packed = rows.T.astype("<f8")
        return HistoryReport(
            first=first,
            times=packed[0].tobytes(),
            series=tuple(
                Series(
                    column.name, "counter" if column.is_counter else "gauge", values.tobytes()
                )
                for column, values in zip(self.columns, packed[1:], strict=True)
            ),
        )  # fmt: skip
