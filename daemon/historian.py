"""Historian: the task that keeps the history. It owns the rings and adds one row a second.

RamTier's row is read, not asked for: the numbers are there, and a message would only add work to
the mailbox of the one actor that everybody waits for.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import trio

from prefixcached.actors import ram_samples
from prefixcached.daemon.history_rings import Column, HistoryRings
from prefixcached.daemon.latency import Latencies, percentile
from prefixcached.protocol import messages
from prefixcached.protocol.connection import MessageType
from prefixcached.protocol.messages import HistoryReport

SAMPLE_SECONDS: Final = 1.0
"""Between two rows. The memory-pressure sensors are read as often: no further wake-up."""

MEASURED: Final[tuple[tuple[str, MessageType], ...]] = (
    ("take", messages.Take), ("commit", messages.Commit),
)  # fmt: skip
"""Whose percentiles have columns of their own: the calls that inference waits for."""

SHARES: Final = (("p50", 0.5), ("p99", 0.99))

COLUMNS: Final = (
    *(Column(name, kind == "counter") for name, kind in ram_samples.COLUMNS),
    Column("connections", is_counter=False),
    *(
        Column(f"{request}_{name}_seconds", is_counter=False)
        for request, _ in MEASURED
        for name, _ in SHARES
    ),
)
"""Percentiles are those of the second that ends with the row; NaN without a request."""


class Historian:
    """The task. Run it with ``nursery.start_soon(historian.run)``.

    Args:
        sample: Returns RamTier's row (`ram_samples.COLUMNS`).
        connections: Returns how many clients are connected.
        latencies: The daemon's histograms.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        sample: Callable[[], Sequence[float]],
        connections: Callable[[], int],
        latencies: Latencies,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sample = sample
        self._connections = connections
        self._latencies = latencies
        self._wall_clock = wall_clock
        self._counts = [latencies.counts(kind) for _, kind in MEASURED]
        self._rings = HistoryRings(COLUMNS)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the history takes."""
        return self._rings.nbytes

    def report(self, request: messages.History) -> HistoryReport:
        """Return the rows asked for."""
        return self._rings.report(request.step, request.after, request.most)

    async def run(self) -> None:
        """Add rows until cancelled."""
        due = trio.current_time()
        while True:
            self.add_row()
            # After a machine has slept there is nothing to catch up on.
            due = max(due + SAMPLE_SECONDS, trio.current_time())
            await trio.sleep_until(due)

    def add_row(self) -> None:
        """Add the row of this moment."""
        row = [*self._sample(), self._connections()]
        for index, (_, kind) in enumerate(MEASURED):
            before, now = self._counts[index], self._latencies.counts(kind)
            self._counts[index] = now
            if now == before:
                row += [math.nan] * len(SHARES)
                continue
            new = [after - earlier for after, earlier in zip(now, before, strict=True)]
            row += [percentile(new, share) for _, share in SHARES]
        self._rings.add(self._wall_clock(), row)
