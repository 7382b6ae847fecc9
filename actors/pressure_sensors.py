"""Sensors of memory pressure: one small class for each source, each with an injected root.

A sensor's `read` gives a level with its figures, or raises OSError or ValueError where the source
is missing or unlike what is documented; `SensorSet` takes the highest of those that work. The files
read here lie in kernel memory (procfs, sysfs, cgroupfs): a read takes microseconds and cannot wait
for a disk, so it needs no thread. Sources of the facts: PLATFORM 2. Each sensor owns the counters
it compares with the next reading.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from prefixcached.actors.pressure_cgroups import CgroupOne, CgroupTwo
from prefixcached.actors.pressure_policy import Level, Reading, highest

STALL_WARN: Final = 0.075
"""Share of time in which some task waited for memory: 150 ms of every 2 s. Beyond it people notice;
the same figure arms the kernel's trigger (pressure_hints.py)."""

STALL_CRITICAL: Final = 0.10
"""Share of time in which all tasks waited for memory: nothing useful ran for a tenth of it."""

AVAILABLE_WARN: Final = 0.10
AVAILABLE_CRITICAL: Final = 0.05
"""Shares of the machine's memory that are available, below which it is short. Only where nothing
better exists: availability says how much there is, not who waits for it."""

MIN_STALL_SECONDS: Final = 0.5
"""Shortest time over which a stall share is computed; a hint may make readings come closer."""

DARWIN_LEVELS: Final = {1: Level.NORMAL, 2: Level.WARN, 4: Level.CRITICAL}
"""Values of the sysctl; others do not exist today."""


class Sensor(Protocol):
    """Something that says how short the machine is of memory."""

    def read(self, now: float) -> Reading:
        """Return the present level. Raises OSError or ValueError where it cannot be told."""
        ...


class DarwinSensor:
    """macOS: the kernel's own level, which is the truth there."""

    NAME: Final = b"kern.memorystatus_vm_pressure_level"

    def __init__(self, sysctl: Callable[[bytes], int] | None = None) -> None:
        self._sysctl = sysctl or sysctl_unsigned

    def read(self, now: float) -> Reading:
        """Return the kernel's level."""
        value = self._sysctl(self.NAME)
        if value not in DARWIN_LEVELS:
            raise ValueError(f"{self.NAME.decode()} is {value}; 1, 2 and 4 are known")
        return Reading(DARWIN_LEVELS[value], f"{self.NAME.decode()} is {value}")


class StallSensor:
    """Linux PSI: the share of time in which tasks waited for memory.

    The share is that of the time since the last reading, from the ``total`` counters; for the first
    reading the kernel's own average over 10 s.
    """

    def __init__(self, file: Path = Path("/proc/pressure/memory")) -> None:
        self._file = file
        self._last: tuple[float, dict[str, int]] | None = None
        self._shares: dict[str, float] = {}

    def read(self, now: float) -> Reading:
        """Return the level by the two shares."""
        averages, totals = _parse_stalls(self._file.read_text())
        if self._last is None:
            self._shares, self._last = averages, (now, totals)
        elif now - self._last[0] >= MIN_STALL_SECONDS:
            seconds = now - self._last[0]
            self._shares = {
                kind: (total - self._last[1].get(kind, total)) / 1e6 / seconds
                for kind, total in totals.items()
            }
            self._last = now, totals
        some, full = self._shares.get("some", 0.0), self._shares.get("full", 0.0)
        if full >= STALL_CRITICAL:
            level = Level.CRITICAL
        else:
            level = Level.WARN if some >= STALL_WARN else Level.NORMAL
        return Reading(level, f"tasks wait for memory: some {some:.1%}, all {full:.1%} of the time")


class AvailableSensor:
    """Linux: how much memory could be had, the last resort."""

    def __init__(self, file: Path = Path("/proc/meminfo")) -> None:
        self._file = file

    def read(self, now: float) -> Reading:
        """Return the level by the share that is available."""
        values = parse_meminfo(self._file.read_text())
        share = values["MemAvailable"] / values["MemTotal"]
        if share < AVAILABLE_CRITICAL:
            level = Level.CRITICAL
        else:
            level = Level.WARN if share < AVAILABLE_WARN else Level.NORMAL
        return Reading(level, f"{share:.1%} of memory is available")


class FileSensor:
    """A test seam: the level is the content of a file (environment PREFIXCACHED_PRESSURE_FILE)."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self, now: float) -> Reading:
        """Return the level that the file names."""
        return Reading(Level(self._file.read_text().strip()), f"{self._file} says so")


class SensorSet:
    """Several sensors as one: the highest level of those that work, `UNKNOWN` where none does.

    Args:
        sensors: Asked at every reading; each looks at another limit.
        last_resort: Asked where the first of ``sensors`` does not work.
    """

    def __init__(self, sensors: Sequence[Sensor], last_resort: Sensor | None = None) -> None:
        self._sensors = sensors
        self._last_resort = last_resort
        self.working: tuple[str, ...] = ()
        """Names of the sensors that gave the last reading."""

    def read(self, now: float) -> Reading:
        """Return the highest of the sensors' readings."""
        found = {type(s).__name__: self._read(s, now) for s in self._sensors}
        if self._last_resort is not None and next(iter(found.values()), None) is None:
            found[type(self._last_resort).__name__] = self._read(self._last_resort, now)
        readings = {name: reading for name, reading in found.items() if reading is not None}
        self.working = tuple(readings)
        return highest(list(readings.values()))

    def _read(self, sensor: Sensor, now: float) -> Reading | None:
        # A source that is missing, or unlike its documentation, is no source: rule M1.
        with suppress(OSError, ValueError, KeyError, ZeroDivisionError):
            return sensor.read(now)
        return None


def platform_sensors(root: Path = Path("/")) -> SensorSet:
    """Return this platform's sensors; ``root`` stands for / in tests."""
    if sys.platform == "darwin":
        return SensorSet([DarwinSensor()])
    return SensorSet(
        [StallSensor(root / "proc/pressure/memory"), CgroupTwo(root), CgroupOne(root)],
        AvailableSensor(root / "proc/meminfo"),
    )


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can have: the machine's, or its control group's limit.

    Raises:
        OSError: The machine does not say.
    """
    if sys.platform == "darwin":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limits = [parse_meminfo((root / "proc/meminfo").read_text())["MemTotal"]]
    except (KeyError, ValueError) as error:
        raise OSError(f"{root}proc/meminfo does not say how much memory there is") from error
    for group in (CgroupTwo(root), CgroupOne(root)):
        limits += group.limits()
    return min(limits)


def sysctl_unsigned(name: bytes) -> int:
    """Return a 32-bit sysctl of macOS.

    Raises:
        OSError: There is no such value, or no sysctl at all.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).sysctlbyname
    except AttributeError as error:
        raise OSError("this system has no sysctlbyname") from error
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p, ctypes.c_size_t,
    ]  # fmt: skip
    value, size = ctypes.c_uint32(0), ctypes.c_size_t(4)
    if function(name, ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name.decode())
    return value.value


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes.

    Raises:
        ValueError: It is not in the form that proc(5) gives.
    """
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        values[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return values


def _parse_stalls(text: str) -> tuple[dict[str, float], dict[str, int]]:
    """Return, for "some" and "full", the share over 10 s and the total in microseconds."""
    averages: dict[str, float] = {}
    totals: dict[str, int] = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields)
        averages[kind] = float(values["avg10"]) / 100
        totals[kind] = int(values["total"])
    if "some" not in totals:
        raise ValueError(f"not pressure stall information: {text[:80]!r}")
    return averages, totals
