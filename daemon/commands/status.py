"""`prefixcached status`: what the daemon holds and what it did."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from prefixcached.daemon.commands.common import (
    COMMAND_SECONDS,
    plain,
    reported_failures,
    say,
    socket_option,
    terminal,
)
from prefixcached.daemon.commands.status_page import page

if TYPE_CHECKING:
    from rich.table import Table

NAME_COLUMNS: Final = 11
"""Of a line's name and the blanks behind it, where it is not for a terminal."""

SCHEMA: Final = 1
"""Of ``--json``. It grows when a counter goes or changes its meaning, not when one is added."""


@click.command(
    short_help="Show what the daemon holds and did, on one page.",
    epilog="Example: prefixcached status --json | jq .ram_tier.takes",
)
@socket_option
@click.option("--all", "is_all", is_flag=True, help="Every counter, one a line.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def status(socket: Path, *, is_all: bool, as_json: bool) -> None:
    """Show what the daemon holds and did: tiers, hits, pressure, writer, clients.

    docs/operations.md says what each counter means and what to do about it.
    """
    from prefixcached.client import connect

    with (
        reported_failures(socket),
        connect(socket=socket, timeout=COMMAND_SECONDS, fail_open=False, start=False) as cache,
    ):
        report = cache.stats()
    if as_json:
        # What a program looks at first stands first.
        said = {"schema": SCHEMA, "daemon": report["daemon"], **report}
        click.echo(json.dumps(said, indent=2, default=str))
    elif is_all:
        for name, value in counters(report):
            say(f"{name}  {value}")
    else:
        show(report)


def show(report: Mapping[str, Any]) -> None:
    """Print the page: in columns on a terminal, and without blanks at the ends elsewhere."""
    if sys.stdout.isatty():
        terminal().print(table(report))
        return
    for name, text, _ in page(report):
        say(f"{name:{NAME_COLUMNS}}{text}")


def table(report: Mapping[str, Any]) -> "Table":
    """Return the page as something that rich prints."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, text, is_alarm in page(report):
        grid.add_row(name, Text(plain(text), style="yellow" if is_alarm else ""))
    return grid


def counters(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested sections to dotted names."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, inner in sorted(value.items()):
        yield from counters(inner, f"{prefix}.{name}" if prefix else str(name))
