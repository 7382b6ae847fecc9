"""What every benchmark shares: interleaved timing, rows with a verdict, the machine, the results.

A figure is a ratio of two things measured in turn within one run: noise of the machine hits both.
Every round runs each case once, in an order that rotates; the figure is the median over the rounds
of the ratio within a round, its spread the quartiles. A case verifies the bytes it moved after the
clock has stopped.
"""

import contextlib
import ctypes
import datetime as dt
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, Protocol

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
PACKAGES: Final = ("prefixcached", "mlx", "mlx-lm", "numpy", "trio", "msgspec", "msgpack", "redis")

Direction = Literal["at least", "at most"]


class WrongBytes(Exception):  # noqa: N818, it is a finding
    """A benchmark moved other bytes than it should have: no figure counts then."""


def require(truth: bool, what: str) -> None:
    """Raise `WrongBytes` with ``what`` unless ``truth``."""
    if not truth:
        raise WrongBytes(what)


@dataclass(frozen=True)
class Case:
    """One thing to time. ``before`` and ``check`` run outside the clock.

    ``check`` gets what ``run`` returned; the result is dropped before the next case.
    """

    name: str
    run: Callable[[], Any]
    before: Callable[[], None] = lambda: None
    check: Callable[[Any], None] = lambda _: None

    def measure(self) -> float:
        """Run it once; return its seconds."""
        self.before()
        settle()
        started = time.perf_counter()
        result = self.run()
        seconds = time.perf_counter() - started
        self.check(result)
        return seconds


class Measured(Protocol):
    """Whatever can be timed in turn with others."""

    @property
    def name(self) -> str:
        """Names its times."""

    def measure(self) -> float:
        """Run it once; return its seconds."""


class Worker:
    """A `Case` in a process of its own, where nothing of another case has prepared the memory.

    The process runs ``cases(role, options)`` of a benchmark's module, a context manager that gives
    the case. ``environment`` is added to its environment. It is ready after `wait_until_ready`.
    """

    def __init__(
        self, module: str, role: str, options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", module, role, json.dumps(dict(options))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Return when it has prepared its case."""
        self._answer()

    def measure(self) -> float:
        """Run the case once; return its seconds."""
        return float(self.ask()["seconds"])

    def ask(self) -> dict[str, Any]:
        """Run the case once; return all that it reports."""
        self.begin()
        return self.end()

    def begin(self, what: str = "") -> None:
        """Let the case run, with ``what`` as its argument if it is given; `end` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Wait for the case that `begin` started."""
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker {self.name} ended with {self._process.wait()}")
        told: dict[str, Any] = json.loads(answer)
        require("wrong" not in told, str(told.get("wrong")))
        return told

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def workers(
    module: str, roles: Sequence[str], options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Worker]]:  # fmt: skip
    """Run one worker for each role, ready when they are given, and end them."""
    with contextlib.ExitStack() as stack:
        running = []
        for role in roles:
            running.append(Worker(module, role, options, environment))
            stack.callback(running[-1].close)
        # Only now: they import and prepare side by side.
        for worker in running:
            worker.wait_until_ready()
        yield running


@dataclass(frozen=True)
class Goal:
    """What DESIGN 7 asks of a figure."""

    value: float
    direction: Direction = "at least"

    def met(self, figure: float) -> bool:
        """Whether ``figure`` reaches the goal."""
        return figure >= self.value if self.direction == "at least" else figure <= self.value

    def within_half(self, figure: float) -> bool:
        """Whether ``figure`` is no worse than half the goal: what CI asks for."""
        if self.direction == "at least":
            return figure >= self.value / 2
        return figure <= self.value * 2

    def __str__(self) -> str:
        return f"{'>=' if self.direction == 'at least' else '<='} {self.value:g}"


@dataclass(frozen=True)
class Row:
    """One figure: ``figure`` is what the goal judges, ``spread`` its quartiles over the rounds.

    ``ours`` and ``peer`` are in ``unit``, medians. Without a goal the row is for information.
    """

    benchmark: str
    name: str
    figure: float
    unit: str = "x"
    goal: Goal | None = None
    spread: tuple[float, float] | None = None
    ours: str = ""
    peer: str = ""
    peer_name: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Whether the goal is met or missed; empty where there is none."""
        if self.goal is None:
            return ""
        return "met" if self.goal.met(self.figure) else "missed"


# -- timing ---------------------------------------------------------------------------------------


def interleave(cases: Sequence[Measured], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run every case once a round, in rotating order; return seconds by name, round by round."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(-warm_up, rounds):
        shift = number % len(cases)
        for case in (*cases[shift:], *cases[:shift]):
            taken = case.measure()
            if number >= 0:
                seconds[case.name].append(taken)
    return seconds


def keep_descriptors() -> None:
    """Keep mlx-lm from lowering this process's limit of descriptors, the hard one included.

    It does so on import (to 2,048 and 4,096), and daemons started by this process would inherit it.
    """
    import resource

    lower = resource.setrlimit

    def guarded(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE or limits[0] >= resource.getrlimit(kind)[0]:
            lower(kind, limits)

    resource.setrlimit = guarded


keep_descriptors()


def settle() -> None:
    """Let no case live on pages that the one before it has left warm."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of ``over / under`` round by round, and its quartiles."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = quartiles(each)
    return middle, (low, high)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def faster_than(
    benchmark: str, name: str, seconds: Mapping[str, list[float]], ours: str, peer: str,
    goal: Goal | None, **details: Any,
) -> Row:  # fmt: skip
    """Return the row of "ours is so many times as fast as the peer"."""
    figure, spread = ratios(seconds[peer], seconds[ours])
    return _timed_row(benchmark, name, seconds, ours, peer, goal, figure, spread, details)


def times_longer_than(
    benchmark: str, name: str, seconds: Mapping[str, list[float]], ours: str, peer: str,
    goal: Goal | None, **details: Any,
) -> Row:  # fmt: skip
    """Return the row of "ours takes so many times the floor"."""
    figure, spread = ratios(seconds[ours], seconds[peer])
    return _timed_row(benchmark, name, seconds, ours, peer, goal, figure, spread, details)


def _timed_row(
    benchmark: str, name: str, seconds: Mapping[str, list[float]], ours: str, peer: str,
    goal: Goal | None, figure: float, spread: tuple[float, float], details: Mapping[str, Any],
) -> Row:  # fmt: skip
    return Row(
        benchmark, name, figure, goal=goal, spread=spread,
        ours=duration(statistics.median(seconds[ours])),
        peer=duration(statistics.median(seconds[peer])), peer_name=peer,
        details={
            **details,
            "seconds": {key: [round(v, 9) for v in seconds[key]] for key in (ours, peer)},
        },
    )  # fmt: skip


def duration(seconds: float) -> str:
    """Return seconds as a short text."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size(nbytes: float) -> str:
    """Return bytes as a short text."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            number = nbytes / scale
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{nbytes:.0f} B"


# -- reporting ------------------------------------------------------------------------------------


def report(rows: Sequence[Row], *, quick: bool) -> None:
    """Print ``rows`` and append them to the results as JSON, one line each."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = environment() | {"quick": quick}
    with (RESULTS / "runs.jsonl").open("a", encoding="utf-8") as file:
        for row in rows:
            print(line(row), flush=True)
            record = asdict(row) | {"verdict": row.verdict, "environment": about}
            file.write(json.dumps(record) + "\n")


def line(row: Row) -> str:
    """Return a row as one line for people."""
    spread = f" ({row.spread[0]:.2f}-{row.spread[1]:.2f})" if row.spread else ""
    text = f"  {row.name:<58} {row.figure:8.2f} {row.unit}{spread}"
    if row.goal is not None:
        text += f"  goal {row.goal}: {row.verdict}"
    if row.ours or row.peer:
        text += f"  [{row.ours} vs {row.peer_name} {row.peer}]"
    return text


def environment() -> dict[str, Any]:
    """Return what a figure cannot be read without: machine, versions, date, commit, load."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": _command("git", "rev-parse", "--short", "HEAD"),
        "changed": bool(_command("git", "status", "--porcelain", "--untracked-files=no")),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _processor() -> str:
    if sys.platform == "darwin":
        return _command("sysctl", "-n", "machdep.cpu.brand_string")
    with contextlib.suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor()


# -- places ---------------------------------------------------------------------------------------


def memory_directory() -> Path:
    """A directory whose files are memory: the fair place for a peer that saves files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))


@contextlib.contextmanager
def scratch(where: Path | None = None) -> Iterator[Path]:
    """Give a directory of this run alone, and remove it with what is in it."""
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="pcbench-", dir=where))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Make the next read of these files come from the disk.

    Raises:
        OSError: The system keeps pages, or gives no way to ask: a cold figure would be a lie.
    """
    if sys.platform != "linux":
        raise OSError("cold reads are measured on Linux only: macOS has no posix_fadvise")
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        pages = resident_pages(path)
        if pages:
            raise OSError(f"{pages} pages of {path.name} stay in the page cache")


def resident_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache (mincore)."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    nbytes = path.stat().st_size
    if not nbytes:
        return 0
    page = os.sysconf("SC_PAGE_SIZE")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = library.mmap(None, nbytes, 1, 1, descriptor, 0)  # PROT_READ, MAP_SHARED
    finally:
        os.close(descriptor)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        states = (ctypes.c_ubyte * -(-nbytes // page))()
        if library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), states):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(state & 1 for state in states)
    finally:
        library.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
