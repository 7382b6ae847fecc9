"""The daemon as a whole, in the test's own event loop, with a fake storage side."""

import errno
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from prefixcached.actors.store import Store
from prefixcached.daemon import app
from prefixcached.daemon.config import Config
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.socket_file import InstanceLock, SocketFile
from prefixcached.daemon.storage import Storage
from prefixcached.daemon.trace.trace_file import TraceWriter
from prefixcached.daemon.trace.tracer import FLUSH_SECONDS, Tracer
from prefixcached.protocol import messages as m
from tests.daemon.clients import connected
from tests.daemon.fakes import FakeRamTier

TAKE = m.Take(namespace="n", tokens=bytes(8))


@pytest.fixture
def settings(directory: Path) -> Config:
    return Config(
        socket=directory / "s",
        state_dir=directory / "state",
        ram_bytes=1,
        ssd_bytes=0,
        max_images=1,
        max_connections=10,
    )


class RecordingStorage(FakeRamTier):
    """Notes what was still there when it was stopped."""

    def __init__(self, settings: Config) -> None:
        super().__init__()
        self._settings = settings
        self.stops: list[tuple[int, bool]] = []

    def stop(self) -> None:
        sessions = self.statistics_sources["listener"]().current
        self.stops.append((sessions, self._settings.socket.exists()))
        super().stop()


class StuckStorage(FakeRamTier):
    """Never finishes by itself."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()


class SlowStorage(FakeRamTier):
    """Finishes when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = trio.Event()
        self.stopping = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await super().run(task_status=task_status)
        self.stopping.set()
        await self.go.wait()


class FailingStorage(FakeRamTier):
    """Fails as soon as it hears anything."""

    async def _receive(self) -> None:
        await self._inbox.receive()
        raise ZeroDivisionError("a bug in an actor")


@pytest.fixture
def ready() -> trio.Event:
    return trio.Event()


@pytest.fixture
def hang_up() -> Iterator[None]:
    """SIGHUP as in a terminal, whatever started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_front_before_storage(
    settings: Config, ready: trio.Event, number: signal.Signals
) -> None:
    """DESIGN 4: no socket and no session are left when storage is asked to finish."""
    storage = RecordingStorage(settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, storage, ready.set)
        await ready.wait()
        async with connected(settings.socket) as client, connected(settings.socket):
            await client.ask(TAKE)
            signal.raise_signal(number)
            await client.ended()
    assert storage.stops == [(0, False)]
    assert sorted(storage.gone) == [1, 2]
    assert not settings.socket.exists()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the daemon would have ended at once."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.mark.usefixtures("hang_up")
async def test_a_terminal_that_closes_is_no_second_signal(
    settings: Config, ready: trio.Event, exits: list[int]
) -> None:
    """DESIGN 4: what is queued is written, although shell and kernel both say SIGHUP."""
    storage = SlowStorage()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, storage, ready.set)
        await ready.wait()
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert exits == []
        signal.raise_signal(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert exits == [1]
        storage.go.set()


@pytest.mark.usefixtures("hang_up")
async def test_nohup_keeps_the_daemon_from_ending_with_its_terminal(
    settings: Config, ready: trio.Event
) -> None:
    """A SIGHUP that was ignored stays so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, FakeRamTier(), ready.set)
        await ready.wait()
        signal.raise_signal(signal.SIGHUP)
        await trio.testing.wait_all_tasks_blocked(0.01)
        async with connected(settings.socket) as client:
            assert isinstance(await client.ask(TAKE), m.Miss)
        signal.raise_signal(signal.SIGTERM)


async def test_the_first_signal_is_the_first_also_while_the_daemon_stops_by_itself(
    autojump_clock: trio.testing.MockClock,
    settings: Config,
    ready: trio.Event,
    exits: list[int],
    directory: Path,
) -> None:
    """DESIGN 4: a supervisor's SIGTERM does not cost the writes that are under way."""
    own = replace(settings, socket=directory / "below" / "s")
    storage = SlowStorage()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, own, storage, ready.set)
        await ready.wait()
        shutil.rmtree(own.socket.parent)
        await storage.stopping.wait()
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep(1)
        storage.go.set()
    assert exits == []


async def test_a_full_disk_ends_the_trace_and_not_the_daemon(
    settings: Config, ready: trio.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong with a trace costs nobody his cache."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tracer = Tracer(tmp_path / "t", settings, keep_tokens=False)
    monkeypatch.setattr(TraceWriter, "append", full)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, FakeRamTier(), ready.set, tracer)
        await ready.wait()
        while tracer.statistics().is_recording:
            await trio.lowlevel.checkpoint()
        await trio.sleep(2 * FLUSH_SECONDS)  # so often its task looks
        async with connected(settings.socket) as client:
            assert isinstance(await client.ask(TAKE), m.Miss)
        signal.raise_signal(signal.SIGTERM)
    tracer.close()


async def test_a_disk_that_takes_long_to_start_holds_neither_ram_nor_a_stop(
    settings: Config, ready: trio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D7, D10: clients are served meanwhile, and the first signal ends the daemon."""
    spins = threading.Event()
    monkeypatch.setattr(Store, "prepare", lambda _: spins.wait(20))
    own = replace(settings, ram_bytes=1 << 20, ssd_bytes=1 << 20)
    try:
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(app.serve, own, Storage(own), ready.set)
                await ready.wait()
                async with connected(own.socket) as client:
                    reply = await client.ask(TAKE)
                    assert isinstance(reply, m.Miss)
                    assert reply.reason == "loading"
                signal.raise_signal(signal.SIGTERM)
    finally:
        spins.set()


async def test_ready_waits_for_a_short_index(settings: Config, ready: trio.Event) -> None:
    """D10: whoever waits for READY can store at once; connections are served meanwhile."""
    storage = FakeRamTier()
    storage.loaded = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, storage, ready.set)
        while not settings.socket.exists():
            await trio.lowlevel.checkpoint()
        async with connected(settings.socket) as client:
            await client.ask(TAKE)
            assert not ready.is_set()
            storage.loaded.set()
            await ready.wait()
        signal.raise_signal(signal.SIGTERM)


async def test_ready_does_not_wait_for_a_long_index(
    autojump_clock: trio.testing.MockClock, settings: Config, ready: trio.Event
) -> None:
    """D10: a large directory is read on in the background."""
    storage = FakeRamTier()
    storage.loaded = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, storage, ready.set)
        await ready.wait()
        assert trio.current_time() < 2 * app.LOADED_SECONDS
        signal.raise_signal(signal.SIGTERM)


async def test_status_shows_the_front_beside_storage(settings: Config, ready: trio.Event) -> None:
    """C5: the listener's counters are merged into the report."""
    storage = FakeRamTier()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, storage, ready.set)
        await ready.wait()
        async with connected(settings.socket) as client:
            reply = await client.ask(m.Status())
            assert isinstance(reply, m.StatusReport)
            assert reply.report["listener"]["current"] == 1
            assert reply.report["daemon"]["socket"] == str(settings.socket)
        signal.raise_signal(signal.SIGTERM)


async def test_storage_that_does_not_finish_is_given_up(
    autojump_clock: trio.testing.MockClock, settings: Config, ready: trio.Event
) -> None:
    """DESIGN 4: the stop is bounded, since launchd kills after its own deadline."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, StuckStorage(), ready.set)
        await ready.wait()
        start = trio.current_time()
        signal.raise_signal(signal.SIGTERM)
    assert trio.current_time() - start == pytest.approx(app.DRAIN_SECONDS, abs=0.1)


async def test_a_failing_actor_ends_the_daemon(settings: Config, ready: trio.Event) -> None:
    """DESIGN 4: a supervisor starts it again; its clients see the end of the stream."""
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.serve, settings, FailingStorage(), ready.set)
            await ready.wait()
            async with connected(settings.socket) as client:
                await client.say(TAKE)
                await client.ended()
    assert not settings.socket.exists()


async def test_a_second_daemon_does_not_disturb_the_first(
    settings: Config, ready: trio.Event
) -> None:
    """The lock is taken before anything is changed, so the first one's socket stays."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, FakeRamTier(), ready.set)
        await ready.wait()
        with pytest.raises(StartError, match="another prefixcached"):
            await app.serve(settings, FakeRamTier(), ready.set)
        async with connected(settings.socket) as client:
            assert isinstance(await client.ask(TAKE), m.Miss)
        signal.raise_signal(signal.SIGTERM)


async def test_a_socket_whose_file_is_removed_is_made_again(
    autojump_clock: trio.testing.MockClock, settings: Config, ready: trio.Event
) -> None:
    """C4: nobody could reach the daemon without it; who is connected notices nothing."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, FakeRamTier(), ready.set)
        await ready.wait()
        async with connected(settings.socket) as client:
            settings.socket.unlink()
            await trio.sleep(app.LOOK_SECONDS + 1)
            async with connected(settings.socket) as newcomer:
                assert isinstance(await newcomer.ask(TAKE), m.Miss)
            assert isinstance(await client.ask(TAKE), m.Miss)
        signal.raise_signal(signal.SIGTERM)
    assert not settings.socket.exists()


async def test_a_socket_that_cannot_be_made_for_want_of_descriptors_is_made_later(
    autojump_clock: trio.testing.MockClock,
    settings: Config,
    ready: trio.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C3: to stop would cost all who are connected their cache."""
    refusals: list[int] = []

    def refusing(*_: Any) -> socket.socket:
        refusals.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, FakeRamTier(), ready.set)
        await ready.wait()
        settings.socket.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", refusing)
            await trio.sleep(app.LOOK_SECONDS + 1)
        assert refusals
        await trio.sleep(app.LOOK_SECONDS)
        async with connected(settings.socket) as client:
            assert isinstance(await client.ask(TAKE), m.Miss)
        signal.raise_signal(signal.SIGTERM)


async def test_a_daemon_whose_directory_is_removed_stops(
    autojump_clock: trio.testing.MockClock, settings: Config, ready: trio.Event, directory: Path
) -> None:
    """C4: nobody can reach or end it, and it would keep the state directory from the next."""
    own = replace(settings, socket=directory / "below" / "s")
    storage = RecordingStorage(own)
    with structlog.testing.capture_logs() as logged:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.serve, own, storage, ready.set)
            await ready.wait()
            shutil.rmtree(own.socket.parent)
    assert storage.stops == [(0, False)]
    assert "clients cannot reach this daemon any more; stopping" in [x["event"] for x in logged]
    assert not own.socket.parent.exists()


async def test_a_daemon_whose_place_another_took_stops(
    autojump_clock: trio.testing.MockClock, settings: Config, ready: trio.Event
) -> None:
    """D9: one daemon for one socket, which is whoever holds the lock at the path."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, FakeRamTier(), ready.set)
        await ready.wait()
        settings.lock_file.unlink()
        with InstanceLock(settings.lock_file), SocketFile(settings.socket):
            await trio.sleep(app.LOOK_SECONDS + 1)
            assert settings.socket.exists()


async def test_a_socket_that_cannot_be_removed_keeps_no_storage_from_finishing(
    monkeypatch: pytest.MonkeyPatch, settings: Config, ready: trio.Event
) -> None:
    """DESIGN 4: what is queued is written, also where the socket's file system is read-only."""

    def refused(_path: Path, *, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    storage = RecordingStorage(settings)
    monkeypatch.setattr(Path, "unlink", refused)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.serve, settings, storage, ready.set)
        await ready.wait()
        signal.raise_signal(signal.SIGTERM)
    assert storage.stops == [(0, True)]
