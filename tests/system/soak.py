"""The soak: 16 clients, random operations and every kind of trouble, for as long as one likes.

    SOAK_SECONDS=1800 SOAK_SEED=1 python -m tests.system.soak         (make soak)

Four processes of four clients each check every byte that they get (`soak_worker`). Meanwhile this
process kills and freezes clients, kills, stops and freezes the daemon, changes the memory pressure,
breaks the disk, damages and deletes files; several times a second it looks from outside whether the
caps hold. In the last part the daemon is left alone by signals, so that its memory can be compared
over time. At the end all clients leave, and nothing may be left of them.
"""

import contextlib
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec

from prefixcached.client import Cache
from prefixcached.client.errors import PrefixCachedError
from tests.support.census import (
    allocated_bytes,
    private_bytes,
    take_census,
    targets_of,
    thread_count,
)
from tests.support.daemon_process import DaemonProcess
from tests.support.disk_fault import failing_disk
from tests.support.numpy_kv import NumpyAdapter
from tests.support.soak_worker import SoakWorker
from tests.support.until import until

PROCESSES: Final = 4
RAM_BYTES: Final = 24 << 20
SSD_BYTES: Final = 64 << 20
"""Far less than what the clients store: both tiers evict all the time."""
SAMPLE_SECONDS: Final = 0.25
QUIET_SHARE: Final = 0.5
"""The last part of the run, without an end of the daemon."""
DESCRIPTORS_MOST: Final = 64
"""Beside images, connections and lent files."""
THREADS_MOST: Final = 12
GROWTH_MOST_BYTES: Final = 8 << 20
"""Of the daemon's memory from one part of the quiet time to a later one: what an allocator keeps
differs by a few MiB from minute to minute."""
MEMORY_MOST_BYTES: Final = 90 << 20
"""DESIGN 7: the daemon's own memory beside images."""


class Report(msgspec.Struct):
    """What happened. Bytes are the most that was seen from outside."""

    seconds: float = 0.0
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    troubles: Counter[str] = msgspec.field(default_factory=Counter)
    samples: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    memory_bytes: list[int] = msgspec.field(default_factory=list)
    """Of the daemon, private, over the quiet time."""


class Soak:
    """One run. It owns the daemon and the workers."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds = seconds
        self._choose = random.Random(seed)
        self._seeds = iter(range(seed * 1000, (seed + 1) * 1000))
        self._workers: list[SoakWorker] = []
        self._context = contextlib.ExitStack()
        self.report = Report()

    def run(self) -> Report:
        """Run; AssertionError says what did not hold."""
        with self._context:
            directory = Path(tempfile.mkdtemp(prefix="pfxc-soak-"))
            self._context.callback(shutil.rmtree, directory, ignore_errors=True)
            self._pressure = directory / "pressure"
            self._pressure.write_text("normal")
            self._context.enter_context(
                mock.patch.dict(os.environ, {"PREFIXCACHED_PRESSURE_FILE": str(self._pressure)})
            )
            self._daemon = DaemonProcess(
                "--ram-bytes", str(RAM_BYTES), "--ssd-bytes", str(SSD_BYTES), "--idle-seconds", "20"
            )
            self._context.enter_context(self._daemon)
            self._cache = self._context.enter_context(
                Cache(self._daemon.socket, adapter=NumpyAdapter(), timeout=30.0, fail_open=False)
            )
            self._context.callback(self._end_workers)
            self._workers = [self._new_worker() for _ in range(PROCESSES)]
            self._troubled_time()
            self._leave_nothing()
        return self.report

    # -- the clients ------------------------------------------------------------------------------

    def _new_worker(self) -> SoakWorker:
        worker = SoakWorker(self._daemon.socket, next(self._seeds))
        worker.__enter__()
        return worker

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.__exit__(None, None, None)

    def _hear(self, *, is_end: bool = False) -> None:
        """Add up what the clients did; AssertionError if one of them saw a wrong byte."""
        for worker in self._workers:
            assert worker.is_running or is_end, "a client process ended by itself"
            for said in worker.said():
                assert said["event"] == "progress", said
                self.report.counts.update(said["counts"])

    # -- the trouble ------------------------------------------------------------------------------

    def _troubled_time(self) -> None:
        began = time.monotonic()
        ends = began + self._seconds
        quiet_from = began + self._seconds * (1 - QUIET_SHARE)
        next_trouble = began
        while (now := time.monotonic()) < ends:
            self._sample(is_quiet=now > quiet_from)
            self._hear()
            if now > next_trouble:
                self._make_trouble(may_end_daemon=now < quiet_from)
                next_trouble = time.monotonic() + self._choose.uniform(0.5, 4.0)
            time.sleep(SAMPLE_SECONDS)
        self.report.seconds = time.monotonic() - began

    def _make_trouble(self, *, may_end_daemon: bool) -> None:
        kinds: list[Callable[[], None]] = [
            self._kill_client, self._hang_client, self._press, self._press, self._break_disk,
            self._damage_file, self._delete_file, self._freeze_daemon,
        ]  # fmt: skip
        if may_end_daemon:
            kinds += [self._kill_daemon, self._restart_daemon, self._delete_directory]
        kind = self._choose.choice(kinds)
        kind()
        self.report.troubles[kind.__name__.strip("_").replace("_", " ")] += 1

    def _kill_client(self) -> None:
        self._replace(self._choose.randrange(PROCESSES))

    def _hang_client(self) -> None:
        place = self._choose.randrange(PROCESSES)
        self._workers[place].stop()
        time.sleep(self._choose.uniform(0.1, 1.0))
        self._replace(place)

    def _replace(self, place: int) -> None:
        self._hear()
        self._workers[place].__exit__(None, None, None)
        self._workers[place] = self._new_worker()

    def _press(self) -> None:
        levels = ("normal", "normal", "normal", "normal", "warn", "critical")
        self._pressure.write_text(self._choose.choice(levels))

    def _break_disk(self) -> None:
        if not (self._daemon.state_dir / "segments.noindex").is_dir():
            return
        with failing_disk(self._daemon):
            time.sleep(self._choose.uniform(0.2, 1.5))

    def _damage_file(self) -> None:
        if (path := self._any_file()) is not None:
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                file.seek(self._choose.randrange(max(1, path.stat().st_size)))
                file.write(bytes([self._choose.randrange(256)]))

    def _delete_file(self) -> None:
        if (path := self._any_file()) is not None:
            path.unlink(missing_ok=True)

    def _any_file(self) -> Path | None:
        found = sorted(self._daemon.state_dir.glob("segments.noindex/*/*.safetensors"))
        return self._choose.choice(found) if found else None

    def _delete_directory(self) -> None:
        shutil.rmtree(self._daemon.state_dir, ignore_errors=True)

    def _freeze_daemon(self) -> None:
        self._daemon.stop()
        time.sleep(self._choose.uniform(0.1, 3.0))
        self._daemon.cont()

    def _kill_daemon(self) -> None:
        self._daemon.kill()
        time.sleep(self._choose.uniform(0.0, 1.0))
        self._daemon.start()

    def _restart_daemon(self) -> None:
        assert self._daemon.terminate() == 0, self._daemon.log()
        self._daemon.start()

    # -- what must hold ---------------------------------------------------------------------------

    def _sample(self, *, is_quiet: bool) -> None:
        """Look from outside, and ask: no cap is exceeded, nothing piles up."""
        report, pid = self.report, self._daemon.pid
        assert self._daemon.is_running, self._daemon.log()
        disk_bytes = allocated_bytes(self._daemon.state_dir)
        assert disk_bytes <= SSD_BYTES, f"{disk_bytes} bytes on disk of {SSD_BYTES}"
        targets = targets_of(pid)
        files = sum(target.endswith(".safetensors") for target in targets)
        images = sum("memfd:" in target for target in targets)
        sockets = sum("socket:" in target for target in targets)
        others = len(targets) - files - images - sockets
        assert others <= DESCRIPTORS_MOST, targets
        ram_bytes = shared_bytes(pid)
        assert ram_bytes <= RAM_BYTES, f"{ram_bytes} bytes of shared memory of {RAM_BYTES}"
        threads = thread_count(pid)
        assert threads <= THREADS_MOST
        with contextlib.suppress(PrefixCachedError):
            ram_tier = self._cache.stats()["ram_tier"]
            assert ram_tier["ram_bytes"] <= ram_tier["ram_bytes_cap"]
            assert ram_tier["ssd_bytes"] <= ram_tier["ssd_bytes_cap"]
            assert ram_tier["images"] <= ram_tier["images_cap"]
        report.samples += 1
        report.disk_bytes = max(report.disk_bytes, disk_bytes)
        report.ram_bytes = max(report.ram_bytes, ram_bytes)
        report.descriptors = max(report.descriptors, len(targets))
        report.threads = max(report.threads, threads)
        if is_quiet:
            report.memory_bytes.append(private_bytes(pid))

    def _leave_nothing(self) -> None:
        """All clients go; memory is flat, and what they held, wrote and began is gone."""
        self._pressure.write_text("normal")
        for worker in self._workers:
            worker.tell("end")
        for worker in self._workers:
            status = worker.wait()
            self._hear(is_end=True)
            assert status == 0, "a client process failed"
        until(lambda: self._cache.stats()["ram_tier"]["disk"]["healthy"])
        self._cache.clear()
        until(self._is_empty, lambda: take_census(self._daemon, self._cache))
        memory_bytes = self.report.memory_bytes
        quarter = len(memory_bytes) // 4
        assert quarter, "the run was too short to compare anything"
        early = statistics.median(memory_bytes[quarter : 2 * quarter])
        late = statistics.median(memory_bytes[-quarter:])
        assert late - early <= GROWTH_MOST_BYTES, f"from {early} to {late} bytes"
        assert max(memory_bytes) <= MEMORY_MOST_BYTES, f"{max(memory_bytes)} bytes of its own"

    def _is_empty(self) -> bool:
        census = take_census(self._daemon, self._cache)
        nothing = (census.holdings, census.ram_bytes, census.ssd_bytes)
        return (
            not any(value for held in nothing for value in held.values())
            and (census.images, census.entries, census.strangers, census.shared_memory)
            == (0, 0, 0, 0)
            and not any(name.startswith("tmp-") for name in census.unfinished)
        )


def shared_bytes(pid: int) -> int:
    """Bytes of the memory objects that a process has descriptors of, each once."""
    sizes: dict[int, int] = {}
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if "memfd:" in os.readlink(f"{folder}/{name}"):
                status = os.stat(f"{folder}/{name}")
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def summary(report: Report) -> dict[str, Any]:
    """What a reader wants to know of a run."""
    memory = report.memory_bytes
    return {
        "seconds": round(report.seconds),
        "counts": dict(sorted(report.counts.items())),
        "troubles": dict(sorted(report.troubles.items())),
        "samples": report.samples,
        "most shared memory, MiB": round(report.ram_bytes / 2**20, 1),
        "most on disk, MiB": round(report.disk_bytes / 2**20, 1),
        "most descriptors": report.descriptors,
        "most threads": report.threads,
        "daemon's memory, MiB, first, median, most, last": [
            round(value / 2**20, 1)
            for value in (memory[0], statistics.median(memory), max(memory), memory[-1])
        ],
    }


def main() -> None:
    """Run as the environment says and print what happened."""
    seconds = float(os.environ.get("SOAK_SECONDS", "1800"))
    seed = int(os.environ.get("SOAK_SEED", "1"))
    print(f"{PROCESSES} processes of 4 clients for {seconds:g} s, seed {seed}", flush=True)
    print(msgspec.json.format(msgspec.json.encode(summary(Soak(seconds, seed).run()))).decode())


if __name__ == "__main__":
    main()
