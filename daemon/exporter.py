"""Exporter: serves the daemon's metrics to Prometheus, where `metrics_port` asks for it.

It needs the extra `metrics` and is never in the way: without it, or where the port is taken, the
daemon says so in its log and in `status`, and serves its clients.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import trio

from prefixcached.daemon.latency import Latencies

if TYPE_CHECKING:
    from prefixcached.daemon.loopback_http import Answer, LoopbackServer

PATH: Final = "/metrics"

INSTALL: Final = "pip install 'prefixcached[metrics]'"

log = structlog.get_logger()


class ExporterStatistics(msgspec.Struct, frozen=True):
    """Counts since the start. ``port`` is 0 where nothing is served, ``failure`` says why not."""

    port: int
    scrapes: int
    refused: int
    failure: str


class Exporter:
    """The task. It owns the server.

    Args:
        port: The port of `metrics_port`; 0 serves nothing.
        sources: By section, what `status` shows.
        latencies: The sessions' histograms.
    """

    def __init__(
        self, port: int, sources: Mapping[str, Callable[[], Any]], latencies: Latencies
    ) -> None:
        self._port = port
        self._sources = sources
        self._latencies = latencies
        self._server: LoopbackServer | None = None
        self._failure = ""

    def statistics(self) -> ExporterStatistics:
        """Return what was served so far."""
        server = self._server
        if server is None:
            return ExporterStatistics(0, 0, 0, self._failure)
        return ExporterStatistics(
            0 if self._failure else server.port, server.served, server.refused.total(),
            self._failure,
        )  # fmt: skip

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; return where there is nothing to serve."""
        self._server = await self._open()
        task_status.started()
        if self._server is None:
            return
        try:
            await self._server.run()
        except* OSError as group:
            self._fail(f"port {self._port}: {group.exceptions[0]}")

    async def _open(self) -> "LoopbackServer | None":
        if not self._port:
            return None
        try:
            from prefixcached.daemon import prometheus  # noqa: F401, it must be there later
            from prefixcached.daemon.loopback_http import LoopbackServer
        except ImportError as error:
            self._fail(f"metrics_port needs {error.name}: {INSTALL}")
            return None
        server = LoopbackServer(self._port, self._respond)
        try:
            await server.open()
        except OSError as error:
            self._fail(f"port {self._port}: {error}")
            return None
        return server

    def _fail(self, reason: str) -> None:
        self._failure = reason
        log.error("no metrics are served", reason=reason)

    async def _respond(self, target: str) -> "Answer | None":
        from prefixcached.daemon import prometheus
        from prefixcached.daemon.loopback_http import Answer

        if target.partition("?")[0] != PATH:
            return None
        report = msgspec.to_builtins({name: source() for name, source in self._sources.items()})
        # The text takes milliseconds, which clients need not wait for.
        text = await trio.to_thread.run_sync(prometheus.text_of, report, self._latencies.report())
        return Answer(prometheus.CONTENT_TYPE, text)
