"""The daemon as a whole: what starts in which order, and how it ends.

    lock -> socket -> storage (RamTier and what it works with) -> listener -> READY

Two levels. The front (listener and sessions) runs inside the storage's nursery: when it ends, by a
signal or a failure, the socket is gone at once and every session has told RamTier `ClientGone`;
only then does storage get a deadline to finish its writes. An unexpected failure of a storage actor
ends the front and the process: whoever supervises it starts it again, and clients see a miss.
A second signal ends the process where it stands, which is safe at any instant.
"""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from prefixcached import __version__
from prefixcached.actors.holdings import Holdings
from prefixcached.actors.mailbox import Outbox
from prefixcached.daemon.closing import STOP_SECONDS, Closer
from prefixcached.daemon.config import Config
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.exporter import Exporter
from prefixcached.daemon.historian import Historian
from prefixcached.daemon.latency import Latencies
from prefixcached.daemon.listener import EXHAUSTED, Listener
from prefixcached.daemon.session import SessionSettings
from prefixcached.daemon.socket_file import (
    InstanceLock,
    SocketFile,
    check_directory,
    check_path,
    prepare_directory,
)
from prefixcached.daemon.watch import Watch
from prefixcached.protocol.messages import ClientActivity

if TYPE_CHECKING:
    # Only a daemon that traces needs it.
    from prefixcached.daemon.trace.tracer import Tracer

DRAIN_SECONDS: Final = 15.0
"""For storage to finish after the front is gone: launchd and Homebrew wait 30 s at most."""

_TRACED_STATISTICS: Final[tuple[str, ...]] = ("ram_tier", "ssd_tier", "prefetcher")
"""What a trace holds of the statistics: evictions and bytes, which no message tells."""

LOADED_SECONDS: Final = 0.5
"""For a small directory's index, before READY: so that what is stored then is not `loading`."""

LOOK_SECONDS: Final = 2.0
"""Between two looks at the socket's file: so long clients find nobody after it was removed."""

log = structlog.get_logger()


class StorageSide(Protocol):
    """What the front needs of storage; `daemon.storage.Storage` is the real one."""

    @property
    def mailbox(self) -> Outbox:
        """Where sessions send requests."""
        ...

    @property
    def boot(self) -> str:
        """Names this run of the daemon (rule L3)."""
        ...

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Start the actors, report that, and work until `stop`."""
        ...

    async def wait_loaded(self) -> None:
        """Return once the index is complete and puts are taken."""
        ...

    def stop(self) -> None:
        """Finish what was begun; `run` then returns. Called when no session is left."""
        ...

    def sample(self) -> Sequence[float]:
        """RamTier's row of the history (`ram_samples.COLUMNS`)."""
        ...

    def holdings(self) -> Holdings:
        """What connections hold of RamTier."""
        ...

    @property
    def statistics_sources(self) -> dict[str, Callable[[], Any]]:
        """By section, what RamTier puts into the reply to `Status`; the front adds its own."""
        ...


async def serve(
    config: Config,
    storage: StorageSide,
    announce: Callable[[], None],
    tracer: "Tracer | None" = None,
) -> None:
    """Run the daemon until SIGTERM, SIGINT or the end of its terminal.

    Args:
        config: What it is told.
        storage: The actors behind the front, not yet started.
        announce: Called once connections are served.
        tracer: Records what sessions answer themselves, as it does for ``storage``.

    Raises:
        StartError: It cannot start; nothing was changed.
    """
    check_path(config.socket)
    prepare_directory(config.socket.parent)
    with (
        InstanceLock(config.lock_file) as lock,
        SocketFile(config.socket) as socket_file,
        trio.open_signal_receiver(*_stop_signals()) as signals,
    ):
        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            nursery.start_soon(_or_stop, stop, _watch_signals, signals, stop)
            if tracer is not None:
                sources = storage.statistics_sources
                traced = {n: sources[n] for n in _TRACED_STATISTICS if n in sources}
                sources["trace"] = tracer.statistics
                nursery.start_soon(_or_stop, stop, tracer.run, traced)
            await _run_storage(config, storage, lock, socket_file, stop, announce, tracer)
            nursery.cancel_scope.cancel()
        # While the lock is held: who gets it next may be about to remove the log.
        log.info("stopped", socket=str(config.socket))


async def _or_stop(
    stop: trio.Event, function: Callable[..., Awaitable[object]], *arguments: object
) -> None:
    """Run a task whose failure stops the daemon: the front is shielded, and sees no cancellation.

    One that returns has done its part, as a trace whose disk is full.
    """
    try:
        await function(*arguments)
    except BaseException:
        stop.set()
        raise


def _stop_signals() -> list[signal.Signals]:
    """What ends the daemon; the end of its terminal too, unless `nohup` started it."""
    hears_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hears_hang_up else [])]


async def _watch_signals(signals: AsyncIterator[int], stop: trio.Event) -> None:
    was_asked = False
    async for number in signals:
        name = signal.Signals(number).name
        if was_asked and number != signal.SIGHUP:
            log.warning("second signal: ending at once", signal=name)
            os._exit(1)
        log.info("stopping", signal=name)
        stop.set()
        # A terminal that closes says so more than once, and so does the end of a login.
        was_asked = was_asked or number != signal.SIGHUP


async def _run_storage(
    config: Config,
    storage: StorageSide,
    lock: InstanceLock,
    socket_file: SocketFile,
    stop: trio.Event,
    announce: Callable[[], None],
    tracer: "Tracer | None",
) -> None:
    async with trio.open_nursery() as nursery:
        # Nothing but its own failure or the deadline below interrupts storage.
        nursery.cancel_scope.shield = True
        await nursery.start(storage.run)
        closer = Closer()
        try:
            await _run_front(config, storage, lock, socket_file, stop, announce, tracer, closer)
        finally:
            listening = socket_file.remove()
            nursery.cancel_scope.deadline = trio.current_time() + DRAIN_SECONDS
            storage.stop()
            with trio.move_on_after(STOP_SECONDS, shield=True):
                await closer.close_listener(listening)
    if nursery.cancel_scope.cancelled_caught:
        log.warning("storage did not finish in time", seconds=DRAIN_SECONDS)


async def _run_front(
    config: Config,
    storage: StorageSide,
    lock: InstanceLock,
    socket_file: SocketFile,
    stop: trio.Event,
    announce: Callable[[], None],
    tracer: "Tracer | None",
    closer: Closer,
) -> None:
    started = trio.current_time()

    def about() -> dict[str, Any]:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "socket": str(config.socket),
            "state_dir": str(config.state_dir) if config.ssd_bytes else None,
            "uptime_seconds": round(trio.current_time() - started, 3),
        }

    # Who watches asks the listener, which is made last: its sessions are told whom to ask.
    def connections() -> int:
        return listener.current

    def clients() -> list[ClientActivity]:
        return listener.clients()

    latencies = Latencies()
    historian = Historian(storage.sample, connections, latencies)
    watch = Watch(clients, storage.holdings, latencies, historian)
    settings = SessionSettings(
        boot=storage.boot,
        daemon=f"prefixcached {__version__}",
        watch=watch.answer,
        latencies=latencies,
        closer=closer,
    )
    if tracer is not None:
        settings = replace(settings, answered=tracer.answered)
    listener = Listener(socket_file.socket, storage.mailbox, settings, config.max_connections)
    exporter = Exporter(config.options.metrics_port, storage.statistics_sources, latencies)
    storage.statistics_sources.update(
        daemon=about,
        listener=listener.statistics,
        restores=settings.restores.statistics,
        metrics_exporter=exporter.statistics,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(historian.run)
        await nursery.start(exporter.run)
        await nursery.start(listener.run)
        nursery.start_soon(_stay_reachable, lock, socket_file, listener, stop)
        log.info(
            "ready",
            socket=str(config.socket),
            ram_bytes=config.ram_bytes,
            ssd_bytes=config.ssd_bytes,
            max_images=config.max_images,
        )
        # Connections are served already; only whoever waits for READY to store waits for this.
        with trio.move_on_after(LOADED_SECONDS):
            await storage.wait_loaded()
        announce()
        await stop.wait()
        nursery.cancel_scope.cancel()


async def _stay_reachable(
    lock: InstanceLock, socket_file: SocketFile, listener: Listener, stop: trio.Event
) -> None:
    """Make the socket's file again where somebody removed it; stop where that cannot be.

    Nobody could reach or end a daemon without one, and it would keep the state directory from the
    next. Whoever removed the directory, as the end of a login does, wants none there.
    """
    while True:
        await trio.sleep(LOOK_SECONDS)
        if socket_file.is_in_place:
            continue
        try:
            check_directory(socket_file.path.parent)
            lock.hold()
            socket_file.bind()
        except StartError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in EXHAUSTED:
                continue  # until a client goes: to stop would cost all of them their cache
            log.error("clients cannot reach this daemon any more; stopping", reason=str(error))
            stop.set()
            return
        await listener.move_to(socket_file.socket)
        log.warning("the socket's file was gone; made it again", socket=str(socket_file.path))
