"""PressureMonitor: the actor that watches how short the machine is of memory (rules M1, M5).

It polls the sensors, lets the ladder decide, and tells RamTier what changed. It owns the sensors,
the ladder and the last known limit of the machine, and nobody sends to it: its only input is the
clock, which a hint of the kernel may run ahead of.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import trio

from prefixcached.actors.mailbox import Outbox
from prefixcached.actors.pressure_hints import Hint, open_hint
from prefixcached.actors.pressure_policy import UNREADABLE, Ladder, Reading
from prefixcached.actors.pressure_sensors import (
    FileSensor,
    Sensor,
    SensorSet,
    memory_limit_bytes,
    platform_sensors,
)
from prefixcached.protocol.actor_messages import Envelope, PressureChanged, RamCapChanged

POLL_SECONDS: Final = 1.0
"""How often the sensors are read; memory can run out within a few seconds."""

MIN_PAUSE_SECONDS: Final = 0.5
"""Least time between two readings, however often the kernel hints."""

LIMIT_SECONDS: Final = 10.0
"""How often the machine's memory limit is looked at (rule M5); it changes by a person's hand."""

PRESSURE_FILE: Final = "PREFIXCACHED_PRESSURE_FILE"
"""Test seam: an environment variable that names a file whose content is the level."""


class PressureMonitorStatistics(msgspec.Struct, frozen=True):
    """What the monitor sees. ``signal`` is the sensors' level, ``level`` the one in force."""

    level: str
    signal: str
    reason: str
    sensors: tuple[str, ...]
    has_hint: bool
    readings: int
    hints: int
    changes: int
    memory_limit_bytes: int


class PressureMonitor:
    """The actor. Run it with ``nursery.start(monitor.run)``; it sends to RamTier's mailbox.

    Args:
        ram_tier: Where `PressureChanged` and `RamCapChanged` go.
        sensor: What is polled.
        hint: What may wake the poll earlier; closed when `run` ends.
        ladder: Its hysteresis.
        poll_seconds: Time between two readings.
        ram_cap: The RAM cap in bytes for a machine of so many bytes of memory, where the cap is a
            share of memory; None where it is a fixed size (rule M5).
        memory_limit: What the machine gives, in bytes.
    """

    def __init__(
        self,
        ram_tier: Outbox,
        *,
        sensor: Sensor,
        hint: Hint | None = None,
        ladder: Ladder | None = None,
        poll_seconds: float = POLL_SECONDS,
        ram_cap: Callable[[int], int] | None = None,
        memory_limit: Callable[[], int] = memory_limit_bytes,
    ) -> None:
        self._ram_tier = ram_tier
        self._sensor = sensor
        self._hint = hint
        self._ladder = ladder or Ladder()
        self._poll_seconds = poll_seconds
        self._ram_cap = ram_cap
        self._memory_limit = memory_limit
        self._limit_bytes = 0
        self._next_limit = 0.0
        self._reading: Reading = UNREADABLE
        self._readings = 0
        self._hints = 0
        self._changes = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. The first reading is sent before this reports to be started."""
        try:
            await self._look(trio.current_time())
            task_status.started()
            while True:
                await self._pause()
                await self._look(trio.current_time())
        finally:
            self._close_hint()

    async def _look(self, now: float) -> None:
        self._reading = self._read(now)
        self._readings += 1
        before = self._ladder.level
        level = self._ladder.observe(self._reading.level, now)
        if level is not before:
            self._changes += 1
            await self._tell(PressureChanged(level, self._reading.reason))
        if now >= self._next_limit:
            self._next_limit = now + LIMIT_SECONDS
            await self._look_at_limit()

    def _read(self, now: float) -> Reading:
        try:
            return self._sensor.read(now)
        except (OSError, ValueError) as error:
            return Reading(UNREADABLE.level, str(error))

    async def _look_at_limit(self) -> None:
        try:
            limit = self._memory_limit()
        except OSError:
            return
        before, self._limit_bytes = self._limit_bytes, limit
        if before and limit != before and self._ram_cap is not None:
            await self._tell(RamCapChanged(self._ram_cap(limit)))

    async def _tell(self, message: PressureChanged | RamCapChanged) -> None:
        # Where RamTier has ended, the daemon does.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._ram_tier.send(Envelope(message))

    async def _pause(self) -> None:
        """Wait for the next reading's time, or for a hint that comes before."""
        least = min(MIN_PAUSE_SECONDS, self._poll_seconds)
        await trio.sleep(least)
        with trio.move_on_after(self._poll_seconds - least):
            if self._hint is None:
                await trio.sleep_forever()
            await trio.lowlevel.wait_readable(self._hint.fileno())
            self._hints += 1
            if not self._hint.drain():
                self._close_hint()

    def _close_hint(self) -> None:
        hint, self._hint = self._hint, None
        if hint is not None:
            hint.close()

    def statistics(self) -> PressureMonitorStatistics:
        """A frozen copy of what the monitor sees (rule C5)."""
        sensors: tuple[str, ...] = (type(self._sensor).__name__,)
        if isinstance(self._sensor, SensorSet):
            sensors = self._sensor.working
        return PressureMonitorStatistics(
            level=self._ladder.level,
            signal=self._reading.level,
            reason=self._reading.reason,
            sensors=sensors,
            has_hint=self._hint is not None,
            readings=self._readings,
            hints=self._hints,
            changes=self._changes,
            memory_limit_bytes=self._limit_bytes,
        )


def monitor_of_this_machine(
    ram_tier: Outbox, ram_cap: Callable[[int], int] | None = None
) -> PressureMonitor:
    """Return a monitor with this platform's sensors, or with the test seam where it is set.

    Args:
        ram_tier: RamTier's mailbox.
        ram_cap: As for `PressureMonitor`.
    """
    seam = os.environ.get(PRESSURE_FILE)
    if seam:
        return PressureMonitor(ram_tier, sensor=FileSensor(Path(seam)), ram_cap=ram_cap)
    return PressureMonitor(ram_tier, sensor=platform_sensors(), hint=open_hint(), ram_cap=ram_cap)
