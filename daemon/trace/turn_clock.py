"""The clock of a daemon that traces: trio's, which also says what time RamTier was given.

RamTier asks for the time once for each message, and once when one of its deadlines wakes it up: all
that it decides follows from its messages and these times. So a trace that holds both can be
followed exactly (`following`).
"""

import time
from collections.abc import Callable

from trio.abc import Clock

Listener = Callable[[float], None]


class TurnClock(Clock):
    """Monotonic seconds; `listen` hears the next one that is asked for."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Let ``listener`` hear the next time that anybody asks for, once."""
        self._listener = listener

    def now(self) -> float:
        """Return the time, which no listener hears."""
        return time.monotonic()

    def start_clock(self) -> None:
        """See `trio.abc.Clock`."""

    def current_time(self) -> float:
        """See `trio.abc.Clock`."""
        now = self.now()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener(now)
        return now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """See `trio.abc.Clock`."""
        return deadline - self.now()


class FollowingClock(TurnClock):
    """Stands at the time of the present turn; goes on from there once nothing is followed."""

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._goes_since: float | None = None

    def stand_at(self, seconds: float) -> None:
        """Let it be so late."""
        self._at = seconds

    def go(self) -> None:
        """Go on from here."""
        self._goes_since = time.monotonic()

    def now(self) -> float:
        """See `TurnClock`."""
        if self._goes_since is None:
            return self._at
        return self._at + time.monotonic() - self._goes_since

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """See `trio.abc.Clock`. What stands reaches no deadline."""
        left = deadline - self.now()
        return left if left <= 0 or self._goes_since is not None else float("inf")
