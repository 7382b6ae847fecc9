"""PressureDesk: what RamTier gives back when the machine is short of memory. Part of RamTier, pure.

It owns the RAM target, which is the cap but for times of pressure:

    unknown, normal   the whole cap, reached again step by step after pressure (rule M4)
    warn              its `RamConfig.pressure_target`: durable victims leave without I/O (M2)
    critical          nothing: the rest is made durable and leaves; what never will be, since
                      there is no SSD tier or the write policy leaves it out, is dropped (M3)

The target bounds what puts and promotions may reserve at any level. Leased, pinned and granted
bytes are never touched (T10); what they hold leaves when they end, since `respond` runs after every
message (E10).
"""

from typing import Any, Final

from prefixcached.actors.desk import Shared
from prefixcached.actors.entries import Entry
from prefixcached.actors.pins import PinDesk
from prefixcached.actors.pressure_policy import Level
from prefixcached.actors.promotions import PromotionDesk
from prefixcached.actors.write_behind import WriteDesk

RETURN_STEP: Final = 0.25
"""Share of the cap by which the target grows at a time once the level has fallen (rule M4)."""

RETURN_SECONDS: Final = 10.0
"""Time between two such steps: long enough for the sensors to see what the last one did."""

RETRY_SECONDS: Final = 30.0
"""How long a critical level must persist after a failed write before the rest is tried again: a
failing disk is not asked in a loop, and one that was full for a moment gets its chance (M3)."""


class PressureDesk:
    """Owns the RAM target and what is done to reach it."""

    def __init__(
        self, shared: Shared, writes: WriteDesk, promotions: PromotionDesk, pins: PinDesk
    ) -> None:
        self._config = shared.config
        self._index = shared.index
        self._eviction = shared.eviction
        self._ram = shared.index.ram
        self._writes = writes
        self._promotions = promotions
        self._pins = pins
        self.level = Level.UNKNOWN
        self.reason = ""
        self._next_step: float | None = None
        self._next_attempt: float | None = None
        self._failures_before = 0
        self._bytes_before = 0
        self._bytes_after: int | None = None
        self._counters = dict.fromkeys(
            ("changes", "released_bytes", "released_images", "dropped_images", "failed_attempts"), 0
        )

    # -- what happens ---------------------------------------------------------------------------

    def changed(self, level: Level, reason: str, now: float) -> None:
        """The machine's level is another one; `respond` does what it asks for."""
        before, self.level, self.reason = self.level, level, reason
        self._counters["changes"] += 1
        if level.is_raised and level.rank > before.rank:
            self._bytes_before, self._bytes_after = self._ram.bytes, None
        elif before.is_raised and not level.is_raised:
            self._bytes_after = self._ram.bytes
        # Optional work goes first (rule M2); nothing of it is in anybody's way at other levels.
        self._promotions.is_suspended = level.is_raised
        self._pins.is_suspended = level.is_raised
        if level.is_raised:
            self._pins.give_up_pending()
        self._set_goal(now)
        self._writes.is_hurried = False
        writes = level is Level.CRITICAL and self._index.ssd_on
        self._next_attempt = now if writes else None

    def cap_changed(self, ram_bytes: int, now: float) -> None:
        """The cap itself is another one (rule M5): whatever no longer fits goes by rule E4."""
        was_reduced = self._ram.is_reduced
        self._ram.bytes_cap = ram_bytes
        if not was_reduced:
            self._ram.target_bytes = ram_bytes
        self._set_goal(now)

    def respond(self, now: float) -> None:
        """Bring RAM towards its target; to be called after whatever may have made that possible."""
        if self._next_step is not None and now >= self._next_step:
            self._step_towards_goal(now)
        if self._excess(self._ram.bytes_cap) > 0:
            self._keep_cap()
        if not self._ram.is_reduced:
            self._next_attempt = None  # a cap of 0 has nothing to release
            return
        is_critical = self.level is Level.CRITICAL
        if is_critical:
            self._drop_unwanted()  # the durable beginnings of what it drops can leave then
        self._release_durable()
        if is_critical and self._index.ssd_on:
            self._make_durable(now)

    @property
    def next_deadline(self) -> float | None:
        """When `respond` must be called at the latest."""
        step, attempt = self._next_step, self._next_attempt
        if step is None or attempt is None:
            return attempt if step is None else step
        return min(step, attempt)

    def statistics(self) -> dict[str, Any]:
        """Level, reason, bytes before and after (rule M4), and counters.

        ``bytes_before`` is what RAM held when the level last rose, ``bytes_after`` what it holds
        since, or held when that pressure ended.
        """
        after = self._ram.bytes if self._bytes_after is None else self._bytes_after
        return {
            "level": self.level.value,
            "reason": self.reason,
            "target_bytes": self._ram.limit_bytes,
            "bytes_before": self._bytes_before,
            "bytes_after": after if self._bytes_before else 0,
            **self._counters,
        }

    # -- the target -----------------------------------------------------------------------------

    @property
    def _goal_bytes(self) -> int:
        """The target that the present level leads to."""
        cap = self._ram.bytes_cap
        if self.level is Level.CRITICAL:
            return 0
        return int(cap * self._config.pressure_target) if self.level is Level.WARN else cap

    def _set_goal(self, now: float) -> None:
        """Go down at once, and up by one step now and the others later."""
        self._next_step = None
        if self._ram.target_bytes >= self._goal_bytes:
            self._ram.target_bytes = self._goal_bytes
        else:
            self._step_towards_goal(now)

    def _step_towards_goal(self, now: float) -> None:
        goal = self._goal_bytes
        # At least one byte, or a cap of a few bytes would never be reached.
        step = max(1, int(self._ram.bytes_cap * RETURN_STEP))
        self._ram.target_bytes = min(goal, self._ram.target_bytes + step)
        self._next_step = now + RETURN_SECONDS if self._ram.target_bytes < goal else None

    def _excess(self, limit_bytes: int) -> int:
        """Bytes beyond ``limit_bytes`` that are not on their way back to the system already."""
        return self._ram.bytes - self._ram.bytes_by_state["freeing"] - limit_bytes

    # -- the victims ----------------------------------------------------------------------------

    def _release_durable(self) -> None:
        if self._excess(self._ram.target_bytes) <= 0:
            return
        for victim in self._index.durable_victims.in_order():
            self._release(victim)
            if self._excess(self._ram.target_bytes) <= 0:
                break

    def _drop_unwanted(self) -> None:
        """Drop what is not durable and never will be (rules E4, M3)."""
        if self._writes.wants_all:
            return  # not after every message through all that waits for the disk
        for victim in self._index.ram_victims.in_order():
            if victim.is_bound_for_disk or not self._writes.is_unwanted(victim):
                continue
            self._counters["dropped_images"] += 1
            self._index.evicted_memory.remember(victim, "pressure")
            self._release(victim)

    def _keep_cap(self) -> None:
        self._eviction.evict_beyond(self._ram.bytes_cap)

    def _release(self, victim: Entry) -> None:
        self._counters["released_images"] += 1
        self._counters["released_bytes"] += victim.charged_bytes
        self._index.drop_memory(victim)

    def _make_durable(self, now: float) -> None:
        """Run the attempt to write what is in RAM alone; each leaves once it is durable.

        A failed write ends the attempt: its entry stays, and what is queued behind it is written in
        its usual time. While the level persists there is another attempt later.
        """
        failures = self._writes.unsuccessful
        if self._writes.is_hurried and failures != self._failures_before:
            self._counters["failed_attempts"] += 1
            self._writes.is_hurried = False
            self._next_attempt = now + RETRY_SECONDS
        elif self._next_attempt is not None and now >= self._next_attempt:
            self._next_attempt = None
            self._failures_before = failures
            self._writes.is_hurried = True
            unwritten = [e for e in self._index.entries.values() if e.file is None and e.memory]
            self._writes.enqueue(unwritten, now)
            if self._writes.unsuccessful != self._failures_before:
                self._make_durable(now)
