"""StallWatch: logs what holds the event loop, with its stack (rule C6).

It owns one thread, which samples the main thread's stack. While the loop is idle the thread sleeps
on an event, so that an idle daemon does not wake the machine.
"""

import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Final, Self

import structlog
import trio

STALL_SECONDS: Final = 0.1
"""A step that takes longer keeps every client waiting that long."""

IDLE_SECONDS: Final = 1.0
"""Without a turn of the loop for so long, the sampling thread goes to sleep."""

log = structlog.get_logger()


class StallWatch(trio.abc.Instrument):
    """An instrument for `trio.run` and a context manager around it.

    One turn of the loop runs all tasks that are ready; what is measured is that turn, so a stack
    is that of the task which ran when the turn had lasted `STALL_SECONDS`.
    """

    def __init__(self) -> None:
        self.stalls = 0
        self.longest_seconds = 0.0
        self._busy_since: float | None = None
        self._last_turn = time.monotonic()
        self._wake = threading.Event()
        self._is_asleep = False
        self._is_closed = False
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._sample, name="stall-watch", daemon=True)

    def statistics(self) -> dict[str, float]:
        """Return how often the loop was held, and the longest time in seconds."""
        return {"stalls": self.stalls, "longest_seconds": round(self.longest_seconds, 3)}

    def after_io_wait(self, timeout: float) -> None:
        """A turn begins."""
        self._last_turn = self._busy_since = time.monotonic()
        if self._is_asleep:
            self._wake.set()

    def before_io_wait(self, timeout: float) -> None:
        """A turn ended."""
        since, self._busy_since = self._busy_since, None
        if since is not None:
            took = time.monotonic() - since
            self.stalls += took > STALL_SECONDS
            self.longest_seconds = max(self.longest_seconds, took)

    def _sample(self) -> None:
        reported: float | None = None
        while not self._is_closed:
            since = self._busy_since
            now = time.monotonic()
            if since is not None and since != reported and now - since > STALL_SECONDS:
                reported = since
                frame = sys._current_frames().get(self._watched)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                log.warning("event loop held", seconds=round(now - since, 3), stack=stack)
            if since is None and now - self._last_turn > IDLE_SECONDS:
                self._wake.clear()
                self._is_asleep = True
                self._wake.wait()
                self._is_asleep = False
            else:
                time.sleep(STALL_SECONDS / 2)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        self._wake.set()
        self._thread.join()
