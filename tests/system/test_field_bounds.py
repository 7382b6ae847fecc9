"""FIELD 3, what it cost users: memory, disk, wear, time, and a server that did not start."""

import contextlib
import os
import random
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.client import Cache
from prefixcached.protocol.paths import socket_path
from tests.support import derived_numpy
from tests.support.census import allocated_bytes
from tests.support.daemon_process import DaemonProcess
from tests.support.disk_fault import failing_disk
from tests.support.until import until, wait_until_loaded
from tests.system.conftest import numpy_cache
from tests.system.soak import shared_bytes

LAYERS = 8
"""512 bytes for each token."""
SMALL_RAM, SMALL_SSD = 2 << 20, 4 << 20


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")


def put(cache: Cache, prompt: list[int], namespace: str = "n") -> bool:
    """Offer the KV of a prompt."""
    kv = derived_numpy.caches(prompt, layers=LAYERS)
    return bool(cache.put(prompt, kv, namespace=namespace))


def reused(cache: Cache, prompt: list[int], namespace: str = "n") -> int:
    """Take; check every byte; return how many tokens hit."""
    found = cache.take(prompt, namespace=namespace)
    found.drop_claim()
    if not found:
        return 0
    derived_numpy.assert_derived(found.kv, prompt[: found.length], layers=LAYERS)
    return found.length


@linux_only
def test_the_caps_hold_whatever_happens() -> None:
    """FIELD 3: byte caps hold: under load, at start, with foreign files, with a failing disk."""
    choose = random.Random(31)
    options = ("--ram-bytes", str(SMALL_RAM), "--ssd-bytes", str(SMALL_SSD))
    with DaemonProcess(*options) as daemon, numpy_cache(daemon.socket) as cache:

        def caps_hold() -> None:
            assert shared_bytes(daemon.pid) <= SMALL_RAM
            assert allocated_bytes(daemon.state_dir) <= SMALL_SSD
            state = cache.stats()["ram_tier"]
            assert state["ram_bytes"] <= SMALL_RAM
            assert state["ssd_bytes"] <= SMALL_SSD

        def load() -> None:
            for _ in range(12):
                put(cache, derived_numpy.tokens(choose.randrange(20, 2000), choose.randrange(20)))
                caps_hold()

        load()
        cache.flush()
        with failing_disk(daemon):
            load()
        until(lambda: cache.stats()["ram_tier"]["disk"]["healthy"])
        daemon.terminate()
        folder = daemon.state_dir / "segments.noindex"
        (folder / "foreign").write_bytes(bytes(SMALL_SSD))
        daemon.start()
        wait_until_loaded(cache)
        until(lambda: allocated_bytes(daemon.state_dir) <= SMALL_SSD)
        assert cache.stats()["ram_tier"]["ssd_bytes"] > 0, "usage counts after a restart"
        load()


def test_fifty_turns_write_what_is_new(both_tiers: DaemonProcess) -> None:
    """FIELD 3: a turn writes only what is new: 50 turns write at most twice their bytes (D6)."""
    conversation = derived_numpy.tokens(2000 + 50 * 200, seed=32)
    with numpy_cache(both_tiers.socket) as cache:
        for turn in range(51):
            assert put(cache, conversation[: 2000 + turn * 200])
            cache.flush()
        written = cache.stats()["ssd_tier"]["written_bytes"]
        distinct = sum(
            array.nbytes
            for layer in derived_numpy.caches(conversation, layers=LAYERS)
            for array in layer.values()
        )
        assert distinct < written <= 2 * distinct
        assert reused(cache, [*conversation, 7]) == len(conversation)


def test_a_sweep_leaves_the_live_conversation() -> None:
    """FIELD 3: a sweep does not evict the live conversation: nor does one model another's (E9)."""
    conversation = derived_numpy.tokens(1000, seed=33)
    with (
        DaemonProcess("--ram-bytes", "4MiB", "--namespace-quota", "0.5") as daemon,
        numpy_cache(daemon.socket) as cache,
    ):
        assert put(cache, conversation, "live")
        for _ in range(3):
            assert reused(cache, [*conversation, 7], "live") == 1000
        for seed in range(60):  # six times the cap
            assert put(cache, derived_numpy.tokens(800, 1000 + seed), "helper")
        assert cache.stats()["ram_tier"]["evictions"]["evictions"] > 20
        assert reused(cache, [*conversation, 7], "live") == 1000
        resident = cache.stats()["ram_tier"]["resident_bytes_by_namespace"]
        assert resident["helper"] + resident["live"] <= 4 << 20


@linux_only
def test_memory_is_given_back_under_pressure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD 3: memory is given back: caps are shares by default, pressure frees real bytes (M)."""
    pressure = tmp_path / "pressure"
    pressure.write_text("normal")
    monkeypatch.setenv("PREFIXCACHED_PRESSURE_FILE", str(pressure))
    with (
        DaemonProcess("--ssd-bytes", "64MiB") as daemon,
        numpy_cache(daemon.socket) as cache,
    ):
        machine = cache.stats()["pressure_monitor"]["memory_limit_bytes"]
        share = cache.stats()["ram_tier"]["ram_bytes_cap"] / machine
        assert 0.1 < share < 0.13
        prompts = [derived_numpy.tokens(2000, seed) for seed in range(5)]
        for prompt in prompts:
            assert put(cache, prompt)
        assert cache.flush().failed == 0
        assert shared_bytes(daemon.pid) > 4 << 20
        pressure.write_text("critical")
        until(lambda: shared_bytes(daemon.pid) == 0)
        assert cache.stats()["ram_tier"]["pressure"]["released_bytes"] > 4 << 20
        assert reused(cache, [*prompts[0], 7]) == 2000, "what left RAM is on SSD"


def test_a_slow_restore_shows(both_tiers: DaemonProcess) -> None:
    """FIELD 3: a slow restore is noticed: counted in `status`, and left out if a client says so."""
    prompt = derived_numpy.tokens(4000, seed=34)
    with (
        numpy_cache(both_tiers.socket) as cache,
        numpy_cache(both_tiers.socket, minimum_gain=1.0) as choosy,
    ):
        assert put(cache, prompt)
        cache.note_prefill(100_000, 1e-6, namespace="n")
        assert reused(cache, [*prompt, 7]) == 4000
        until(lambda: cache.stats()["restores"]["slow"] == 1)
        assert cache.statistics().slow_restores == 1
        choosy.note_prefill(100_000, 1e-6, namespace="n")
        assert reused(choosy, [*prompt, 7]) == 4000  # the first one measures
        found = choosy.take([*prompt, 7], namespace="n")
        assert not found
        assert (found.reason, found.matched) == ("no-gain", 4000)


@contextlib.contextmanager
def _file_in_the_way(daemon: DaemonProcess) -> Iterator[None]:
    daemon.state_dir.mkdir(mode=0o700)
    in_the_way = daemon.state_dir / "segments.noindex"
    in_the_way.write_text("no directory")
    yield
    in_the_way.unlink()


def test_a_disk_that_fails_from_the_start_on_stops_nothing() -> None:
    """FIELD 3: a failing disk stops nothing: it starts, RAM serves, and writing begins later (D7).

    The fault matrix has disks that fail later; `tests/actors/test_failing_disk.py` those that are
    full, read-only or unplugged.
    """
    prompt = derived_numpy.tokens(500, seed=35)
    daemon = DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "64MiB")
    with contextlib.closing(daemon), numpy_cache(daemon.socket) as cache:
        with _file_in_the_way(daemon):
            daemon.start()
            until(lambda: put(cache, prompt))  # the index is soon known to be unreadable
            assert reused(cache, [*prompt, 7]) == 500
            disk = cache.stats()["ram_tier"]["disk"]
            assert not disk["healthy"]
            assert disk["reason"]
        until(lambda: cache.stats()["ram_tier"]["disk"]["healthy"])
        flushed = cache.flush()
        assert (flushed.written, flushed.failed) == (1, 0)


def test_start_and_stop_are_quick_with_many_files() -> None:
    """FIELD 3: start and stop wait for nothing: it answers while the index loads (D10, P8)."""
    prompt, late = derived_numpy.tokens(500, seed=36), derived_numpy.tokens(500, seed=37)
    options = ("--ram-bytes", "64MiB", "--ssd-bytes", "1GiB")
    with DaemonProcess(*options) as daemon, numpy_cache(daemon.socket) as cache:
        assert put(cache, prompt)
        # Not flushed: the stop itself writes what is queued.
        assert daemon.terminate() == 0
        (file,) = daemon.state_dir.glob("segments.noindex/*/*.segment.safetensors")
        for number in range(5000):
            os.link(file, file.with_name(f"{number:032x}.segment.safetensors"))
        daemon.start()
        state = cache.stats()["ram_tier"]
        assert state["loading"], "the first answer comes before the index is complete"
        found = cache.take([*late, 7], namespace="other")
        assert not found
        assert found.reason in ("loading", "empty")
        wait_until_loaded(cache)
        assert reused(cache, [*prompt, 7]) == 500
        assert put(cache, late)
        began = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - began < 15.0, "within the time that launchd gives"
        daemon.start()
        wait_until_loaded(cache)
        assert reused(cache, [*late, 7]) == 500


def test_nobody_else_can_read_or_remove_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD 3: nobody else can read or remove it: modes, and no place in /tmp (C1, D9).

    `tests/system/test_security.py` tries to connect as another user.
    """
    before = os.umask(0)
    try:
        with (
            DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "64MiB") as daemon,
            numpy_cache(daemon.socket) as cache,
        ):
            assert put(cache, derived_numpy.tokens(100, seed=38))
            assert cache.flush().failed == 0
            assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
            for path in (daemon.state_dir, *daemon.state_dir.rglob("*")):
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(before)
    monkeypatch.delenv("PREFIXCACHED_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Path("/tmp") not in socket_path().parents
