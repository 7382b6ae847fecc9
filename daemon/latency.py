"""How long requests take: histograms on a logarithmic scale, and percentiles from them. Pure.

One `Latencies` belongs to the listener's sessions, which record into it: a bisection and an
addition for each request. It never grows: so many kinds times so many buckets.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from prefixcached.protocol import messages
from prefixcached.protocol.connection import REPLIES, WATCH, MessageType
from prefixcached.protocol.framing import tag_of
from prefixcached.protocol.messages import LatencyReport, RequestLatency

STEPS: Final = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)
"""Within a decade: the preferred numbers R10, so that a percentile is at most a quarter off."""

BOUNDS_SECONDS: Final = (
    *(float(f"{step}e{decade}") for decade in range(-5, 2) for step in STEPS),
    100.0,
)
"""From 10 µs, which no request takes less than, to 100 s, the longest wait for a prefill."""

KINDS: Final = tuple(kind for kind in REPLIES if kind not in WATCH and kind is not messages.Hello)
"""Requests that are measured: those of inference processes and of commands, not of watchers."""


class Histogram:
    """Times of one kind of request: ``counts[i]`` took at most ``BOUNDS_SECONDS[i]``."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.seconds = 0.0


class Latencies:
    """The histograms of one daemon, by kind of request."""

    def __init__(self) -> None:
        self._histograms = {kind: Histogram() for kind in KINDS}

    def record(self, kind: MessageType, seconds: float) -> None:
        """Count one request; kinds that are not measured are ignored."""
        histogram = self._histograms.get(kind)
        if histogram is not None:
            histogram.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
            histogram.seconds += seconds

    def counts(self, kind: MessageType) -> list[int]:
        """Return a copy of one kind's counts."""
        return list(self._histograms[kind].counts)

    def report(self) -> LatencyReport:
        """Return a frozen copy."""
        return LatencyReport(
            bounds_seconds=BOUNDS_SECONDS,
            requests=tuple(
                RequestLatency(tag_of(kind), histogram.seconds, tuple(histogram.counts))
                for kind, histogram in self._histograms.items()
            ),
        )


def percentile(
    counts: Sequence[int], share: float, bounds_seconds: Sequence[float] = BOUNDS_SECONDS
) -> float:
    """Return the seconds within which ``share`` (0 to 1) of the requests ended, NaN without any.

    Interpolated on the logarithmic scale within a bucket; what took longer than the last bound
    counts as that bound.
    """
    wanted = share * sum(counts)
    if not wanted:
        return math.nan
    below = 0
    for index, count in enumerate(counts[: len(bounds_seconds)]):
        if below + count >= wanted:
            upper = bounds_seconds[index]
            lower = bounds_seconds[index - 1] if index else upper * STEPS[0] / STEPS[1]
            return float(lower * (upper / lower) ** ((wanted - below) / count))
        below += count
    return float(bounds_seconds[-1])
