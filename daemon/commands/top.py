"""`prefixcached top`: a live view of the daemon in the terminal."""

import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from prefixcached.daemon.command_group import WrongUsage
from prefixcached.daemon.commands.common import FiniteRange, reported_failures, socket_option
from prefixcached.daemon.commands.watching import Look, Watcher

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_SECONDS: Final = 1.0
"""As often as the daemon adds to its history."""


@click.command(
    short_help="Watch the daemon live in the terminal.",
    epilog="Keys: q quits, s sorts, r reverses, h changes the span of the history.",
)
@socket_option
@click.option(
    "--interval",
    type=FiniteRange(0.2, 60.0),
    default=DEFAULT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
def top(socket: Path, interval: float) -> None:
    """Watch the daemon live: tiers, hits, clients, sessions, the writer.

    Example: prefixcached top --interval 5
    """
    from rich.console import Console

    console = Console(highlight=False)
    if not sys.stdin.isatty() or not console.is_terminal or console.is_dumb_terminal:
        raise WrongUsage(
            "top needs a terminal that can draw; `prefixcached status` prints once, "
            "`prefixcached metrics` is for programs"
        )
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name in another script must not end the view
    with Watcher(socket) as watcher:
        with reported_failures(socket):
            look = watcher.look()
        _watch(console, watcher, look, interval)


def _watch(console: "Console", watcher: Watcher, look: Look, interval: float) -> None:
    from rich.live import Live

    from prefixcached.client.errors import PrefixCachedError
    from prefixcached.daemon.commands.terminal import Terminal
    from prefixcached.daemon.commands.top_screen import View, screen

    view, trouble = View(), ""
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
    with Terminal(live.stop, live.start) as terminal:
        try:
            with live:
                due = time.monotonic() + interval
                while not view.is_over:
                    picture = screen(look, watcher.recent, watcher.day, view, console, trouble)
                    live.update(picture, refresh=True)
                    view.press(terminal.wait(due - time.monotonic()))
                    if time.monotonic() < due:
                        continue
                    try:
                        look, trouble = watcher.look(), ""
                    except (PrefixCachedError, click.ClickException) as error:
                        trouble = str(error)
                    due = time.monotonic() + interval
        except KeyboardInterrupt:
            pass  # Ctrl-C is how many people leave a view
