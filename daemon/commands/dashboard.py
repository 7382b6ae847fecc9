"""`prefixcached dashboard`: a page of this machine alone that shows the daemon live.

The command is a client of the daemon as any other: it asks when the page asks, and the daemon
serves no page. `Observer` owns the connection and the tree that it saw last.
"""

import os
import secrets
import time
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import trio

from prefixcached.daemon import logs
from prefixcached.daemon.commands.common import reported_failures, socket_option
from prefixcached.daemon.commands.watching import Watcher
from prefixcached.protocol.messages import (
    Activity,
    ActivityReport,
    History,
    HistoryReport,
    HistoryStep,
    Latency,
    LatencyReport,
    List,
    Listing,
    Status,
    StatusReport,
)

if TYPE_CHECKING:
    from prefixcached.daemon.dashboard.site import Since, Site

TOKEN_BYTES: Final = 24
"""192 bits: nobody guesses it, and the address still fits a line."""

TREE_SECONDS: Final = 3.0
"""Between two looks at the tree, however many pages ask: a listing takes the daemon up to 25 ms."""


class Observer(Watcher):
    """What the page is told; one call at a time."""

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self._tree = b""
        self._tree_due = 0.0

    def news(self, since: "Since") -> bytes:
        """Return what is new, as JSON. Errors as `Watcher.look`."""
        from prefixcached.daemon.dashboard.payload import look_json

        report, activity, latency = (
            self._ask(Status()), self._ask(Activity()), self._ask(Latency()),
        )  # fmt: skip
        assert isinstance(report, StatusReport)
        assert isinstance(activity, ActivityReport)
        assert isinstance(latency, LatencyReport)
        history: dict[str, HistoryReport] = {
            "second": self._rows("second", since.second, since.boot),
            "minute": self._rows("minute", since.minute, since.boot),
        }
        return look_json(report.report, activity, latency, history, os.getpid())

    def _rows(self, step: HistoryStep, after: int, boot: str) -> HistoryReport:
        report = self._ask(History(step=step, after=after))
        assert isinstance(report, HistoryReport)
        if after and report.boot != boot:
            # Another run of the daemon, whose rows have other numbers.
            report = self._ask(History(step=step))
            assert isinstance(report, HistoryReport)
        return report

    def tree(self) -> bytes:
        """Return the prefix tree, as JSON. Errors as `Watcher.look`."""
        from prefixcached.daemon.dashboard.icicle import MAX_IMAGES, tree_json

        if time.monotonic() >= self._tree_due:
            listing, activity = self._ask(List(limit=MAX_IMAGES)), self._ask(Activity())
            assert isinstance(listing, Listing)
            assert isinstance(activity, ActivityReport)
            self._tree = tree_json(listing, activity.labels)
            self._tree_due = time.monotonic() + TREE_SECONDS
        return self._tree


@click.command(
    short_help="Show the daemon live on a local page in the browser.",
    epilog="Example: prefixcached dashboard --open",
)
@socket_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="NUMBER",
    help="To listen on, at 127.0.0.1 [any that is free]",
)
@click.option("--open", "is_opened", is_flag=True, help="Open it in the browser.")
def dashboard(socket: Path, port: int, is_opened: bool) -> None:
    """Show the daemon live on a page in the browser, until Ctrl-C.

    Tiers, hits and misses, tokens saved, latency, the prefix tree, clients, the writer, memory
    pressure. Prints the page's address: whoever has it can read the page, which changes nothing.
    Needs the extra: pip install 'prefixcached[dashboard]'.
    """
    try:
        from prefixcached.daemon.dashboard.site import MissingCharts, Site
    except ImportError as error:
        raise click.ClickException(
            f"the dashboard needs {error.name}: pip install 'prefixcached[dashboard]'"
        ) from error
    with Observer(socket) as observer:
        with reported_failures(socket):
            observer.status()
        token = secrets.token_urlsafe(TOKEN_BYTES)
        one_at_a_time = trio.CapacityLimiter(1)
        try:
            site = Site(
                token,
                lambda since: _answer(partial(observer.news, since), one_at_a_time),
                lambda: _answer(observer.tree, one_at_a_time),
            )
        except MissingCharts as error:
            raise click.ClickException(str(error)) from error
        logs.configure()
        try:
            trio.run(_serve, site, token, port, is_opened)
        except* KeyboardInterrupt:
            pass  # the way to end it


async def _answer(ask: Callable[[], bytes], limiter: trio.CapacityLimiter) -> bytes:
    """Ask the daemon in a thread; a daemon that does not answer is told of."""
    from prefixcached.client.errors import PrefixCachedError
    from prefixcached.daemon.dashboard.payload import trouble_json

    try:
        return await trio.to_thread.run_sync(ask, limiter=limiter)
    except (PrefixCachedError, click.ClickException) as error:
        return trouble_json(str(error))


async def _serve(site: "Site", token: str, port: int, is_opened: bool) -> None:
    from prefixcached.daemon.loopback_http import ADDRESS, LoopbackServer

    server = LoopbackServer(port, site.respond)
    try:
        await server.open()
    except OSError as error:
        raise click.ClickException(f"port {port} cannot be had: {error}; try --port 0") from error
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        address = f"http://{ADDRESS}:{server.port}/{token}/"
        click.echo("Whoever has this address can read the page. Ctrl-C ends it.", err=True)
        click.echo(address)
        if is_opened:
            # Some browsers stay in the foreground until they are closed.
            await trio.to_thread.run_sync(webbrowser.open, address, abandon_on_cancel=True)
