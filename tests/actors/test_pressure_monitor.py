"""PressureMonitor: what it tells RamTier, and when (rules M1, M5)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from prefixcached.actors.mailbox import Inbox
from prefixcached.actors.pressure_monitor import (
    LIMIT_SECONDS,
    MIN_PAUSE_SECONDS,
    POLL_SECONDS,
    PRESSURE_FILE,
    PressureMonitor,
    monitor_of_this_machine,
)
from prefixcached.actors.pressure_policy import CALM_SECONDS, Level, Reading
from prefixcached.protocol.actor_messages import (
    ActorMessage,
    Envelope,
    PressureChanged,
    RamCapChanged,
)


class ScriptedSensor:
    """Says what the test last set; None is a sensor that fails."""

    def __init__(self) -> None:
        self.level: Level | None = Level.NORMAL
        self.reads: list[float] = []

    def read(self, now: float) -> Reading:
        self.reads.append(now)
        if self.level is None:
            raise OSError("the sensor is gone")
        return Reading(self.level, f"scripted {self.level}")


class PipeHint:
    """A hint that the test gives by writing into a pipe."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.is_good = True
        self.is_closed = False

    def fileno(self) -> int:
        return self.reader

    def give(self) -> None:
        os.write(self.writer, b"x")

    def drain(self) -> bool:
        os.read(self.reader, 64)
        return self.is_good

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        os.close(self.reader)
        os.close(self.writer)


class Watched:
    """A running monitor and what it has sent."""

    def __init__(self, sensor: ScriptedSensor, monitor: PressureMonitor, inbox: Inbox) -> None:
        self.sensor = sensor
        self.monitor = monitor
        self._inbox = inbox

    def sent(self) -> list[ActorMessage]:
        messages: list[ActorMessage] = []
        while True:
            try:
                messages.append(self._inbox.receive_nowait().message)
            except trio.WouldBlock:
                return messages


async def watch(
    nursery: trio.Nursery, hint: PipeHint | None = None,
    ram_cap: Callable[[int], int] | None = None, memory_limit: Callable[[], int] = lambda: 1000,
) -> Watched:  # fmt: skip
    sensor = ScriptedSensor()
    sender, inbox = trio.open_memory_channel[Envelope](64)
    monitor = PressureMonitor(
        sender, sensor=sensor, hint=hint, ram_cap=ram_cap, memory_limit=memory_limit
    )
    await nursery.start(monitor.run)
    return Watched(sensor, monitor, inbox)


async def test_tells_the_first_level_before_it_is_started(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M1: RamTier knows the level before anybody is served."""
    watched = await watch(nursery)
    assert watched.sent() == [PressureChanged("normal", "scripted normal")]


async def test_polls_and_tells_changes_only(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M1: the sensor is polled all the time, and only a change of the level is a message."""
    watched = await watch(nursery)
    watched.sent()
    await trio.sleep(5.5 * POLL_SECONDS)
    assert len(watched.sensor.reads) == 6
    assert watched.sent() == []
    watched.sensor.level = Level.WARN
    await trio.sleep(POLL_SECONDS)
    assert watched.sent() == [PressureChanged("warn", "scripted warn")]


async def test_the_level_falls_by_steps_of_the_ladder(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M1: after the signal is gone the level comes down step by step."""
    watched = await watch(nursery)
    watched.sensor.level = Level.CRITICAL
    await trio.sleep(1.5 * POLL_SECONDS)
    watched.sensor.level = Level.NORMAL
    watched.sent()
    await trio.sleep(CALM_SECONDS + 1.5 * POLL_SECONDS)
    assert watched.sent() == [PressureChanged("warn", "scripted normal")]
    await trio.sleep(CALM_SECONDS + 1.5 * POLL_SECONDS)
    assert watched.sent() == [PressureChanged("normal", "scripted normal")]
    assert watched.monitor.statistics().changes == 4


async def test_a_sensor_that_fails_ends_in_unknown(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M1: a sensor that breaks down does not end the daemon; the level becomes unknown."""
    watched = await watch(nursery)
    watched.sent()
    watched.sensor.level = None
    await trio.sleep(CALM_SECONDS + 3 * POLL_SECONDS)
    assert watched.sent() == [PressureChanged("unknown", "the sensor is gone")]
    assert watched.monitor.statistics().signal == "unknown"


async def test_a_hint_makes_it_read_at_once(
    mock_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M1: a hint shortens the wait, but no two readings come closer than the least pause."""
    hint = PipeHint()
    watched = await watch(nursery, hint)
    watched.sensor.level = Level.WARN
    hint.give()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(watched.sensor.reads) == 1
    mock_clock.jump(MIN_PAUSE_SECONDS)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(watched.sensor.reads) == 2
    assert watched.monitor.statistics().hints == 1
    assert watched.sent()[-1] == PressureChanged("warn", "scripted warn")


async def test_a_dead_hint_is_closed_and_polling_goes_on(
    mock_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M1: a hint that will never be of use again is given up; the poll remains."""
    hint = PipeHint()
    hint.is_good = False
    watched = await watch(nursery, hint)
    assert watched.monitor.statistics().has_hint
    hint.give()
    await trio.testing.wait_all_tasks_blocked(0.01)
    mock_clock.jump(MIN_PAUSE_SECONDS)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert hint.is_closed
    assert not watched.monitor.statistics().has_hint
    assert len(watched.sensor.reads) == 2
    for _ in range(2):
        mock_clock.jump(POLL_SECONDS)
        await trio.testing.wait_all_tasks_blocked(0.01)
    # A jump ends one of the two waits of a pause at a time.
    assert len(watched.sensor.reads) >= 3


async def test_the_hint_is_closed_at_the_end(autojump_clock: trio.testing.MockClock) -> None:
    """M1: a monitor that ends leaves no descriptor."""
    hint = PipeHint()
    async with trio.open_nursery() as nursery:
        await watch(nursery, hint)
        nursery.cancel_scope.cancel()
    assert hint.is_closed


async def test_a_new_memory_limit_changes_the_cap(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M5: a cap that is a share follows the machine's limit; an unreadable one changes nothing."""
    limit = [1000]

    def memory_limit() -> int:
        if not limit[0]:
            raise OSError("cannot tell")
        return limit[0]

    watched = await watch(nursery, ram_cap=lambda whole: whole // 10, memory_limit=memory_limit)
    await trio.sleep(2 * LIMIT_SECONDS)
    limit[0] = 0
    await trio.sleep(2 * LIMIT_SECONDS)
    limit[0] = 400
    await trio.sleep(2 * LIMIT_SECONDS)
    assert watched.sent()[1:] == [RamCapChanged(40)]
    assert watched.monitor.statistics().memory_limit_bytes == 400


async def test_a_fixed_cap_does_not_follow_the_limit(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """M5: a cap given in bytes is the user's word, whatever the machine has."""
    limits = iter(range(1000, 2000))
    watched = await watch(nursery, memory_limit=lambda: next(limits))
    await trio.sleep(3 * LIMIT_SECONDS)
    assert watched.sent()[1:] == []


async def test_the_seam_of_tests_replaces_the_sensors(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """M1: with the environment's file set, the level is what the file says and nothing else."""
    file = tmp_path / "level"
    file.write_text("critical")
    monkeypatch.setenv(PRESSURE_FILE, str(file))
    sender, inbox = trio.open_memory_channel[Envelope](8)
    monitor = monitor_of_this_machine(sender)
    await nursery.start(monitor.run)
    message = inbox.receive_nowait().message
    assert isinstance(message, PressureChanged)
    assert message.level == "critical"
    assert monitor.statistics().sensors == ("FileSensor",)
    assert not monitor.statistics().has_hint


async def test_the_real_machine_has_a_level(nursery: trio.Nursery) -> None:
    """M1: this machine's own sensors can be read and give one of the levels."""
    sender, _ = trio.open_memory_channel[Envelope](8)
    monitor = monitor_of_this_machine(sender)
    await nursery.start(monitor.run)
    statistics = monitor.statistics()
    assert statistics.readings >= 1
    assert statistics.level in set(Level)
    assert statistics.memory_limit_bytes > 0
