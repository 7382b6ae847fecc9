"""Sensors against files as Linux writes them, and against the sysctl's values (rules M1, M5)."""

import os
import sys
from pathlib import Path

import pytest

from prefixcached.actors import pressure_sensors
from prefixcached.actors.pressure_cgroups import CgroupOne, CgroupTwo
from prefixcached.actors.pressure_hints import open_hint
from prefixcached.actors.pressure_policy import Level
from prefixcached.actors.pressure_sensors import (
    AvailableSensor,
    DarwinSensor,
    FileSensor,
    SensorSet,
    StallSensor,
    memory_limit_bytes,
)

GIBIBYTE = 1 << 30

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")


class Machine:
    """A directory that stands for / of a Linux machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def stalls(self, some: int, full: int, average: float = 0.0) -> Path:
        """Totals in microseconds."""
        line = "{} avg10={:.2f} avg60=0.00 avg300=0.00 total={}\n"
        return self.write(
            "proc/pressure/memory",
            line.format("some", average, some) + line.format("full", average, full),
        )

    def meminfo(self, total_kib: int, available_kib: int) -> Path:
        return self.write(
            "proc/meminfo",
            f"MemTotal: {total_kib:>12} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"
            "HugePages_Total: 0\n",
        )

    def group_two(
        self, path: str, current: int, limit: str, *, high: str = "max", unused_files: int = 0,
        events: str = "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
    ) -> None:  # fmt: skip
        folder = f"sys/fs/cgroup/{path}"
        self.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
        self.write(f"{folder}/memory.current", f"{current}\n")
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {unused_files}\n")
        self.write(f"{folder}/memory.events", events)

    def group_one(self, path: str, usage: int, limit: int, unused_files: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.stat", f"cache 1\ntotal_inactive_file {unused_files}\n")

    def own_groups(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# -- macOS -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "level"), [(1, Level.NORMAL), (2, Level.WARN), (4, Level.CRITICAL)]
)
def test_the_kernels_level_is_the_level(value: int, level: Level) -> None:
    """M1: on macOS the sysctl's value is the truth, and the reason names it."""
    asked: list[bytes] = []

    def sysctl(name: bytes) -> int:
        asked.append(name)
        return value

    reading = DarwinSensor(sysctl).read(0.0)
    assert reading.level is level
    assert asked == [b"kern.memorystatus_vm_pressure_level"]
    assert f"is {value}" in reading.reason


def test_an_unknown_value_of_the_sysctl_is_no_reading() -> None:
    """M1: a value that nobody has documented says nothing."""
    assert SensorSet([DarwinSensor(lambda _: 3)]).read(0.0).level is Level.UNKNOWN


@pytest.mark.skipif(sys.platform == "darwin", reason="there the sysctl exists")
def test_without_the_sysctl_there_is_no_level() -> None:
    """M1: where the kernel has no such value the level is unknown."""
    assert SensorSet([DarwinSensor()]).read(0.0).level is Level.UNKNOWN


# -- PSI ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("some", "full", "level"),
    [
        (74_000, 0, Level.NORMAL),
        (76_000, 0, Level.WARN),
        (500_000, 99_000, Level.WARN),
        (500_000, 101_000, Level.CRITICAL),
    ],
)
def test_stalls_since_the_last_reading_count(
    machine: Machine, some: int, full: int, level: Level
) -> None:
    """M1: the share of the time since the last reading decides, whatever was before it."""
    sensor = StallSensor(machine.stalls(5_000_000_000, 4_000_000_000))
    assert sensor.read(100.0).level is Level.NORMAL
    machine.stalls(5_000_000_000 + some, 4_000_000_000 + full)
    assert sensor.read(101.0).level is level


def test_the_first_reading_takes_the_kernels_average(machine: Machine) -> None:
    """M1: a daemon that starts on a machine under pressure knows it at once."""
    assert StallSensor(machine.stalls(0, 0, average=12.0)).read(0.0).level is Level.CRITICAL


def test_readings_close_together_keep_the_last_share(machine: Machine) -> None:
    """M1: a hint cannot make a few milliseconds of stall look like a share of the time."""
    sensor = StallSensor(machine.stalls(0, 0))
    sensor.read(100.0)
    machine.stalls(20_000, 20_000)
    assert sensor.read(100.1).level is Level.NORMAL
    machine.stalls(200_000, 0)
    assert sensor.read(101.0).level is Level.WARN


def test_a_file_that_is_no_stall_information_is_no_reading(machine: Machine) -> None:
    """M1: whatever a file says instead, the sensor does not work."""
    for text in ("", "some\n", "some avg10=x total=1\n", "full avg10=1.0 total=1\n"):
        sensor = StallSensor(machine.write("proc/pressure/memory", text))
        assert SensorSet([sensor]).read(0.0).level is Level.UNKNOWN


# -- control groups ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_percent", "level"), [(89, Level.NORMAL), (90, Level.WARN), (97, Level.CRITICAL)]
)
def test_version_two_compares_with_the_limit(
    machine: Machine, used_percent: int, level: Level
) -> None:
    """M1: what a group uses of its limit decides; clean unused file pages do not count."""
    machine.own_groups("0::/user/app")
    machine.group_two("user/app", used_percent * 1000 + 500_000, "100000", unused_files=500_000)
    assert CgroupTwo(machine.root).read(0.0).level is level


@pytest.mark.parametrize("version", [1, 2])
def test_without_statistics_all_that_is_used_counts(machine: Machine, version: int) -> None:
    """M1: a kernel that does not say which pages are clean is believed the worse figure."""
    machine.own_groups("4:memory:/app", "0::/app")
    sensor: CgroupOne | CgroupTwo
    if version == 1:
        machine.group_one("app", 95, 100, unused_files=50)
        folder, sensor = "memory/app", CgroupOne(machine.root)
    else:
        machine.group_two("app", 95, "100", unused_files=50)
        folder, sensor = "app", CgroupTwo(machine.root)
    assert sensor.read(0.0).level is Level.NORMAL
    (machine.root / "sys/fs/cgroup" / folder / "memory.stat").unlink()
    assert sensor.read(1.0).level is Level.WARN


def test_more_clean_pages_than_are_used_is_no_use_at_all(machine: Machine) -> None:
    """M1: the two figures are read one after the other and need not agree."""
    machine.own_groups("0::/app")
    machine.group_two("app", 10, "100", unused_files=50)
    reading = CgroupTwo(machine.root).read(0.0)
    assert reading.level is Level.NORMAL
    assert "uses 0.0%" in reading.reason


def test_the_group_above_may_be_the_short_one(machine: Machine) -> None:
    """M1: every group from the process's own to the top is looked at."""
    machine.own_groups("0::/pod/app")
    machine.group_two("pod", 95, "100")
    machine.group_two("pod/app", 10, "100")
    reading = CgroupTwo(machine.root).read(0.0)
    assert reading.level is Level.WARN
    assert "pod uses 95.0%" in reading.reason


def test_the_lower_of_high_and_max_is_the_limit(machine: Machine) -> None:
    """M1: a group that is slowed down at memory.high is short of memory there already."""
    machine.own_groups("0::/app")
    machine.group_two("app", 46, "100", high="50")
    assert CgroupTwo(machine.root).read(0.0).level is Level.WARN
    assert CgroupTwo(machine.root).limits() == [50]


def test_without_a_limit_there_is_nothing_to_tell(machine: Machine) -> None:
    """M1: "max" is no limit, and a process outside all groups has none."""
    machine.own_groups("0::/app")
    machine.group_two("app", 100, "max")
    assert CgroupTwo(machine.root).limits() == []
    assert SensorSet([CgroupTwo(machine.root)]).read(0.0).level is Level.UNKNOWN
    assert SensorSet([CgroupTwo(machine.root / "nowhere")]).read(0.0).level is Level.UNKNOWN


def test_events_count_from_the_second_reading(machine: Machine) -> None:
    """M1: the kernel's complaints are news only where they are more than before."""
    machine.own_groups("0::/app")
    machine.group_two("app", 80, "100", events="high 7\nmax 7\noom 1\noom_kill 1\n")
    sensor = CgroupTwo(machine.root)
    assert sensor.read(0.0).level is Level.NORMAL
    machine.group_two("app", 80, "100", events="high 8\nmax 7\noom 1\noom_kill 1\n")
    assert sensor.read(1.0).level is Level.WARN
    assert sensor.read(2.0).level is Level.NORMAL
    machine.group_two("app", 80, "100", events="high 8\nmax 7\noom 2\noom_kill 1\n")
    assert sensor.read(3.0).level is Level.CRITICAL


def test_reclaiming_clean_pages_is_no_pressure(machine: Machine) -> None:
    """M1: a group that reads many files meets its limit all the time and is not short."""
    machine.own_groups("0::/app")
    machine.group_two("app", 100, "100", unused_files=60, events="max 1\n")
    sensor = CgroupTwo(machine.root)
    sensor.read(0.0)
    machine.group_two("app", 100, "100", unused_files=60, events="max 900\n")
    assert sensor.read(1.0).level is Level.NORMAL


def test_a_group_seen_from_inside_a_container(machine: Machine) -> None:
    """M1: where the path of the process does not exist, the mount's top is its group."""
    machine.own_groups("0::/machine/outside/container")
    machine.group_two("", 99, "100")
    assert CgroupTwo(machine.root).read(0.0).level is Level.CRITICAL
    machine.own_groups("0::/../sibling")
    assert CgroupTwo(machine.root).read(0.0).level is Level.CRITICAL


@pytest.mark.parametrize(
    ("used_percent", "level"), [(89, Level.NORMAL), (90, Level.WARN), (97, Level.CRITICAL)]
)
def test_version_one_compares_with_the_limit(
    machine: Machine, used_percent: int, level: Level
) -> None:
    """M1: version 1 has limits of its own, found through its own line and mount."""
    machine.own_groups("5:cpu:/elsewhere", "4:memory:/app", "0::/")
    machine.group_one("app", used_percent * 10 + 50, 1000, unused_files=50)
    machine.group_one("", 1, (1 << 63) - 4096)
    assert CgroupOne(machine.root).read(0.0).level is level
    assert CgroupOne(machine.root).limits() == [1000]


def test_version_one_without_a_limit(machine: Machine) -> None:
    """M1: the largest page count is no limit."""
    machine.own_groups("4:memory:/app")
    machine.group_one("app", 5, (1 << 63) - 4096)
    assert CgroupOne(machine.root).limits() == []
    assert SensorSet([CgroupOne(machine.root)]).read(0.0).level is Level.UNKNOWN


# -- the set and the rest ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "level"), [(11, Level.NORMAL), (9, Level.WARN), (4, Level.CRITICAL)]
)
def test_availability_is_the_last_resort(machine: Machine, available: int, level: Level) -> None:
    """M1: MemAvailable decides where the kernel has no stall information, and only there."""
    sensors = SensorSet(
        [StallSensor(machine.root / "proc/pressure/memory")],
        AvailableSensor(machine.meminfo(100, available)),
    )
    assert sensors.read(0.0).level is level
    assert sensors.working == ("AvailableSensor",)
    machine.stalls(0, 0)
    assert sensors.read(1.0).level is Level.NORMAL
    assert sensors.working == ("StallSensor",)


@linux_only
def test_a_containers_limit_counts_beside_the_machines_stalls(machine: Machine) -> None:
    """M1: the machine is at ease and the container is not: the container is right."""
    machine.stalls(0, 0)
    machine.own_groups("0::/app")
    machine.group_two("app", 98, "100")
    sensors = pressure_sensors.platform_sensors(machine.root)
    assert sensors.read(0.0).level is Level.CRITICAL
    assert sensors.working == ("StallSensor", "CgroupTwo")


@linux_only
def test_an_empty_machine_has_no_level(machine: Machine) -> None:
    """M1: where nothing can be read the level is unknown."""
    sensors = pressure_sensors.platform_sensors(machine.root)
    assert sensors.read(0.0).level is Level.UNKNOWN
    assert sensors.working == ()


@linux_only
def test_the_memory_limit_is_the_least_of_all(machine: Machine) -> None:
    """M5: the machine's memory, or the tightest of the groups' limits."""
    machine.meminfo(8 * GIBIBYTE // 1024, 1)
    assert memory_limit_bytes(machine.root) == 8 * GIBIBYTE
    machine.own_groups("0::/pod/app", "4:memory:/old")
    machine.group_two("pod", 1, str(4 * GIBIBYTE))
    machine.group_two("pod/app", 1, str(6 * GIBIBYTE))
    assert memory_limit_bytes(machine.root) == 4 * GIBIBYTE
    machine.group_one("old", 1, 3 * GIBIBYTE)
    assert memory_limit_bytes(machine.root) == 3 * GIBIBYTE


@linux_only
def test_a_machine_that_does_not_say_how_much_it_has(machine: Machine) -> None:
    """M5: an OSError, not a guess."""
    machine.write("proc/meminfo", "nothing\n")
    with pytest.raises(OSError, match="does not say"):
        memory_limit_bytes(machine.root)


def test_this_machine_has_a_limit() -> None:
    """M5: the real machine says how much memory there is, at most what is built in."""
    built_in = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory_limit_bytes() <= built_in


def test_the_seams_level_is_the_files_content(tmp_path: Path) -> None:
    """M1: the test seam reads the level from a file, and anything else is no reading."""
    file = tmp_path / "level"
    sensors = SensorSet([FileSensor(file)])
    assert sensors.read(0.0).level is Level.UNKNOWN
    file.write_text("warn\n")
    assert sensors.read(0.0).level is Level.WARN
    file.write_text("loud\n")
    assert sensors.read(0.0).level is Level.UNKNOWN


def test_a_machine_without_triggers_gives_no_hint(tmp_path: Path) -> None:
    """M1: without a trigger there is no hint, and no error; a plain file is none."""
    if sys.platform == "linux":
        assert open_hint(tmp_path) is None
        (tmp_path / "proc/pressure").mkdir(parents=True)
        (tmp_path / "proc/pressure/memory").write_text("")
        assert open_hint(tmp_path) is None
    hint = open_hint()  # whatever this machine permits
    if hint is not None:
        assert hint.fileno() >= 0
        assert hint.drain()
        hint.close()
