"""Connections to one daemon: as many as calls run at the same time, opened when they are needed.

The pool owns all wires of one cache. A wire carries one call at a time, so a call that waits never
blocks another (rule Q3). After a failure calls fail at once, without touching the socket,
until a pause is over that doubles with each further failure (rule C4). A forked child closes its
copies of the parent's sockets, without a word to the daemon, and opens its own.

A garbage collection may end a generator that holds a pin, or puts the KV of its answer, while its
thread is in the pool. So the lock lets its own thread in again, and whatever happens under it keeps
the pool in order at every step. Nothing waits under it, and nothing is logged.
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
        _pools.add(self)

    @property
    def path(self) -> Path:
        """The daemon's socket."""
        return self._path

    def statistics(self) -> PoolStatistics:
        """Return a consistent account of the pool."""
        with self._lock:
            self._sort_returned()
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
        """Return a wire, which is for a `Loan` now, and whether it must be opened.

        Raises:
            NoDaemon, CallTimeout, ProtocolFailure: What failed just before does so without a try.
            UseAfterClose: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise UseAfterClose(f"the cache at {self._path} is closed; connect() a new one")
            self._sort_returned()
            self._check_pause()
            while (wire := _pop(self._idle)) is not None:
                if wire.is_quiet():
                    self._counts["reused"] += 1
                    return wire, False
                wire.close()
            return self._new_wire(), True

    def count_opened(self) -> None:
        """Count a wire that was opened."""
        with self._lock:
            self._counts["opened"] += 1

    def lend(self, wire: W, ticket: object) -> None:
        """Keep ``wire`` alive until it comes back or is abandoned: its loan is complete.

        Until then whoever is interrupted on the way loses it, and that closes it.

        Args:
            wire: From `reserve`.
            ticket: Of this loan alone.
        """
        self._lent[wire] = ticket

    def give_back(self, wire: W, *, may_block: bool = True) -> None:
        """Take ``wire`` back after a call, whatever became of it.

        Args:
            wire: Whoever gives it back does not use it again.
            may_block: False in a garbage collection: the next call sees to the rest then.
        """
        self._returned.append(wire)
        if not may_block:
            if self._closed:
                wire.close()
            return
        # Never `acquire`: Ctrl-C between that and a `try` would leave it locked.
        with self._lock:
            pause_seconds = self._sort_returned()
        # A handler of the log may use this very cache.
        if pause_seconds:
            error = self._last_error
            level = logging.WARNING if isinstance(error, ProtocolFailure) else logging.INFO
            _logger.log(level, "%s; next attempt in %.1f s", error, pause_seconds)

    def abandon(self, wire: W, ticket: object) -> None:
        """Close a wire that nobody will give back; one that has come back may be another's by now.

        Takes no lock: for garbage collections.
        """
        if self._lent.get(wire) is ticket:
            wire.close()
            self._lent.pop(wire, None)

    def close(self) -> None:
        """Close all idle wires; those in use are closed as they come back. Idempotent."""
        with self._lock:
            self._closed = True
            self._sort_returned()
            while (wire := _pop(self._idle)) is not None:
                wire.close()

    def forget(self) -> None:
        """Close this process's copies of all sockets and begin anew: for a forked child only."""
        inherited = list(self._wires)
        # The parent's lock may have been held at the fork, by a thread that is not here.
        self._start_empty()
        for wire in inherited:
            wire.close()

    def _start_empty(self) -> None:
        self._lock = threading.RLock()
        self._idle: list[W] = []
        self._returned: list[W] = []
        """Came back, and nobody looked at them yet."""
        # Not weak: a socket in a collected cycle might be finalised before whoever closes it.
        self._lent: dict[W, object] = {}
        # All that exist: a fork may come while another thread has one that is in no other place.
        self._wires: weakref.WeakSet[W] = weakref.WeakSet()
        self._consecutive_failures = 0
        self._paused_until = -math.inf
        self._failed_at = -math.inf
        """When a wire failed last, on the clock of `BaseWire.answered_at`."""
        self._last_error: PrefixCachedError = NoDaemon("never tried")

    def _new_wire(self) -> W:
        try:
            wire = self._make(self._path)
        except OSError as error:
            raise NoDaemon(f"this process can open no socket: {error}") from error
        self._wires.add(wire)
        return wire

    def _sort_returned(self) -> float:
        """Keep or close what came back; return the seconds of the pause that begins now, or 0."""
        pause_seconds = 0.0
        while (wire := _pop(self._returned)) is not None:
            self._lent.pop(wire, None)
            if wire.error is not None:
                pause_seconds += self._note_failure(wire.error)
            elif wire.answered_at > self._failed_at:
                # What has no reply, the end of a pin for example, says nothing about the daemon.
                self._consecutive_failures = 0
                self._paused_until = -math.inf
            keep = wire in self._wires and wire.is_open and not wire.holds_descriptors
            if keep and len(self._idle) < MAX_IDLE_WIRES and not self._closed:
                self._idle.append(wire)
            else:
                wire.close()
        return pause_seconds

    def _check_pause(self) -> None:
        left_seconds = self._paused_until - self._clock()
        if left_seconds > 0:
            self._counts["backed_off"] += 1
            raise type(self._last_error)(
                f"not tried again for another {left_seconds:.1f} s: {self._last_error}"
            )

    def _note_failure(self, error: PrefixCachedError) -> float:
        self._failures[error.reason] += 1
        self._failed_at = time.monotonic()
        now = self._clock()
        # Calls that failed side by side are one failure of the daemon.
        if now < self._paused_until:
            return 0.0
        pause_seconds: float = min(
            FIRST_PAUSE_SECONDS * 2**self._consecutive_failures, LONGEST_PAUSE_SECONDS
        )
        self._consecutive_failures = min(self._consecutive_failures + 1, 16)
        self._paused_until = now + pause_seconds
        self._last_error = error
        return pause_seconds


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
        """Return a greeted wire, for a `Loan`.

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


def _pop(wires: list[W]) -> W | None:
    """Remove and return one: what a collection ended may have taken the last just now."""
    try:
        return wires.pop()
    except IndexError:
        return None


_pools: "weakref.WeakSet[BasePool[Any]]" = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


# Once for all pools: what is registered here stays until the process ends.
os.register_at_fork(after_in_child=_forget_all)
