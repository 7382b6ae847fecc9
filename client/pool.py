"""Connections to one daemon: as many as calls run at the same time, opened when they are needed.

The pool owns all wires of one cache. A wire carries one call at a time, so a call that waits never
blocks another (rule Q3). After a failure calls fail at once, without touching the socket,
until a pause is over that doubles with each further failure (rule C4). A forked child closes its
copies of the parent's sockets, without a word to the daemon, and opens its own.
"""

import functools
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from prefixcached.client.errors import (
    NoDaemon,
    PrefixCachedError,
    ProtocolFailure,
    UseAfterClose,
)
from prefixcached.client.starting import Starter
from prefixcached.client.wire import BaseWire, Wire

MAX_IDLE_WIRES: Final = 8
"""Connections kept between calls: enough for the threads of one server, few for the daemon."""

FIRST_PAUSE_SECONDS: Final = 0.1
"""Pause after a first failure: a restarted daemon is back within it, a loop of calls is not."""

LONGEST_PAUSE_SECONDS: Final = 5.0
"""Upper bound of the pause: how long a client may take to notice that the daemon is back."""

_logger = logging.getLogger(__name__)

W = TypeVar("W", bound=BaseWire)


class PoolStatistics(msgspec.Struct, frozen=True):
    """What the pool did so far.

    Attributes:
        opened: Connections made.
        reused: Calls that found an idle connection.
        backed_off: Calls refused during a pause, without touching the socket.
        failures: Connections that the daemon failed, by reason.
        refusals: Calls that this client answered itself, or that failed, by reason.
        lent: Connections in use now, or kept out of the pool by a claim or a pin.
        idle: Connections kept for the next call.
    """

    opened: int
    reused: int
    backed_off: int
    failures: dict[str, int]
    refusals: dict[str, int]
    lent: int
    idle: int


class BasePool(Generic[W]):
    """Which wire serves the next call, and whether any may be opened. Safe to use from any thread.

    Args:
        path: The daemon's socket.
        clock: Seconds that never go back; measures the pauses only.
        make: Makes a wire that is not connected.
    """

    def __init__(self, path: Path, clock: Callable[[], float], make: Callable[[Path], W]) -> None:
        self._path = path
        self._clock = clock
        self._make = make
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._start_empty()
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))

    @property
    def path(self) -> Path:
        """The daemon's socket."""
        return self._path

    def statistics(self) -> PoolStatistics:
        """Return a consistent account of the pool."""
        with self._lock:
            return PoolStatistics(
                opened=self._counts["opened"],
                reused=self._counts["reused"],
                backed_off=self._counts["backed_off"],
                failures=dict(self._failures),
                refusals=dict(self._refusals),
                lent=len(self._lent),
                idle=len(self._idle),
            )

    def count_refusal(self, reason: str) -> None:
        """Count a call that ended without the daemon's answer."""
        with self._lock:
            self._refusals[reason] += 1

    def reserve(self) -> tuple[W, bool]:
        """Return a wire, which is the caller's until `give_back`, and whether it must be opened.

        Raises:
            NoDaemon, CallTimeout, ProtocolFailure: What failed just before does so without a try.
            UseAfterClose: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise UseAfterClose(f"the cache at {self._path} is closed; connect() a new one")
            self._check_pause()
            while self._idle:
                wire = self._idle.pop()
                if wire.is_quiet():
                    self._counts["reused"] += 1
                    self._lent.add(wire)
                    return wire, False
                wire.close()
            wire = self._new_wire()
            self._lent.add(wire)
            return wire, True

    def count_opened(self) -> None:
        """Count a wire that was opened."""
        with self._lock:
            self._counts["opened"] += 1

    def give_back(self, wire: W, *, may_block: bool = True) -> bool:
        """Take ``wire`` back after a call, whatever became of it.

        With ``may_block=False`` False where other code is in the pool right now, this thread's own
        perhaps: nothing has happened then.
        """
        if not self._lock.acquire(blocking=may_block):
            return False
        try:
            known = wire in self._lent
            self._lent.discard(wire)
            if wire.error is not None:
                self._note_failure(wire.error)
            elif wire.is_open:
                self._consecutive_failures = 0
                self._paused_until = -math.inf
            keep = known and not self._closed and len(self._idle) < MAX_IDLE_WIRES
            if keep and wire.is_open and not wire.holds_descriptors:
                self._idle.append(wire)
            else:
                wire.close()
        finally:
            self._lock.release()
        return True

    def abandon(self, wire: W) -> None:
        """Close a wire that nobody will give back. Takes no lock: for garbage collections."""
        wire.close()
        self._lent.discard(wire)

    def close(self) -> None:
        """Close all idle wires; those in use are closed as they come back. Idempotent."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def forget(self) -> None:
        """Close this process's copies of all sockets and begin anew: for a forked child only."""
        inherited = [*self._idle, *self._lent]
        # The parent's lock may have been held at the fork, by a thread that is not here.
        self._start_empty()
        for wire in inherited:
            wire.close()

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[W] = []
        # Not weak: a socket in a collected cycle might be finalised before whoever closes it.
        self._lent: set[W] = set()
        self._consecutive_failures = 0
        self._paused_until = -math.inf
        self._last_error: PrefixCachedError = NoDaemon("never tried")

    def _new_wire(self) -> W:
        try:
            return self._make(self._path)
        except OSError as error:
            raise NoDaemon(f"this process can open no socket: {error}") from error

    def _check_pause(self) -> None:
        left_seconds = self._paused_until - self._clock()
        if left_seconds > 0:
            self._counts["backed_off"] += 1
            raise type(self._last_error)(
                f"not tried again for another {left_seconds:.1f} s: {self._last_error}"
            )

    def _note_failure(self, error: PrefixCachedError) -> None:
        self._failures[error.reason] += 1
        now = self._clock()
        # Calls that failed side by side are one failure of the daemon.
        if now < self._paused_until:
            return
        pause_seconds = min(
            FIRST_PAUSE_SECONDS * 2**self._consecutive_failures, LONGEST_PAUSE_SECONDS
        )
        self._consecutive_failures = min(self._consecutive_failures + 1, 16)
        self._paused_until = now + pause_seconds
        self._last_error = error
        level = logging.WARNING if isinstance(error, ProtocolFailure) else logging.INFO
        _logger.log(level, "%s; next attempt in %.1f s", error, pause_seconds)


class Pool(BasePool[Wire]):
    """Lends wires to threads."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        starter: Starter | None = None,
    ) -> None:
        super().__init__(path, clock, functools.partial(Wire, starter=starter))

    def take_out(self, deadline: float) -> Wire:
        """Return a greeted wire, which is the caller's until `give_back`.

        Raises:
            NoDaemon, CallTimeout, ProtocolFailure: As `Wire.open`, or as `reserve`.
            UseAfterClose: The pool is closed.
        """
        wire, is_new = self.reserve()
        if is_new:
            try:
                wire.open(deadline)
            except BaseException:
                wire.close()
                self.give_back(wire)
                raise
            self.count_opened()
        return wire


def _forget(pool: "weakref.ref[BasePool[Any]]") -> None:
    alive = pool()
    if alive is not None:
        alive.forget()
