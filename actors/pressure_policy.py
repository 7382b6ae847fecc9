"""Levels of memory pressure and the ladder between a sensor's signal and what acts on it. Pure.

Rule M1. A signal jitters around its thresholds; releasing gigabytes and computing them again costs
seconds. So the ladder rises at once and comes down one step at a time, each step only after the
signal has stayed below for a constant time. Owned by PressureMonitor.
"""

from enum import StrEnum
from typing import Final, NamedTuple

CALM_SECONDS: Final = 10.0
"""How long the signal must stay below a level before it is left: twice the smoothing that xnu gives
its own falling edge (PLATFORM 2), and the window of Linux's shortest average (avg10)."""


class Level(StrEnum):
    """How short the machine is of memory (rule M1)."""

    UNKNOWN = "unknown"
    """No sensor works. A level of its own: nobody knows, so nothing is released."""
    NORMAL = "normal"
    WARN = "warn"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Order of the levels; `UNKNOWN` is the least, because it asks for nothing."""
        return _ORDER.index(self)

    @property
    def is_raised(self) -> bool:
        """Whether memory is short."""
        return self in (Level.WARN, Level.CRITICAL)


_ORDER: Final = (Level.UNKNOWN, Level.NORMAL, Level.WARN, Level.CRITICAL)


class Reading(NamedTuple):
    """What a sensor says now, and the figures that made it say so."""

    level: Level
    reason: str


UNREADABLE: Final = Reading(Level.UNKNOWN, "no pressure sensor works here")


def highest(readings: list[Reading]) -> Reading:
    """Return the reading of the highest level, the first of those; `UNREADABLE` if there is none.

    Any working sensor that sees pressure is right: each looks at another limit.
    """
    return max(readings, key=lambda reading: reading.level.rank, default=UNREADABLE)


class Ladder:
    """The level in force. Seconds are of any one monotonic clock.

    Args:
        calm_seconds: How long the signal must stay below the level before one step down.
    """

    def __init__(self, calm_seconds: float = CALM_SECONDS) -> None:
        self._calm_seconds = calm_seconds
        self._below_since: float | None = None
        self.level = Level.UNKNOWN

    def observe(self, signal: Level, now: float) -> Level:
        """Take a sensor's signal at time ``now`` and return the level that is in force with it.

        A signal that is lost counts as below; after the calm time the level is `UNKNOWN`, not one
        step lower, which nobody has measured.
        """
        if signal.rank >= self.level.rank:
            self.level = signal
            self._below_since = None
            return self.level
        if self._below_since is None:
            self._below_since = now
        elif now - self._below_since >= self._calm_seconds:
            self._below_since = now
            self.level = signal if signal is Level.UNKNOWN else _ORDER[self.level.rank - 1]
            if self.level is signal:
                self._below_since = None
        return self.level
