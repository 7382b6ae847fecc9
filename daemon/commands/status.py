"""`prefixcached status`: what the daemon holds and what it did."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from prefixcached.daemon.commands.common import (
    COMMAND_SECONDS,
    reported_failures,
    socket_option,
)


@click.command()
@socket_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def status(socket: Path, as_json: bool) -> None:
    """Show the counters of every part of the daemon."""
    from prefixcached.client import connect

    with (
        reported_failures(socket),
        connect(socket=socket, timeout=COMMAND_SECONDS, fail_open=False) as cache,
    ):
        report = cache.stats()
    if as_json:
        click.echo(json.dumps(report, indent=2, sort_keys=True, default=str))
    else:
        _print_table(report)


def _print_table(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="prefixcached", title_justify="left")
    table.add_column("part")
    table.add_column("what")
    table.add_column("value", justify="right")
    for section in sorted(report):
        shown = section
        for name, value in _rows(report[section]):
            table.add_row(shown, name, _text(name, value))
            shown = ""
        table.add_section()
    Console().print(table)


def _rows(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested sections to dotted names."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _rows(inner, f"{prefix}.{name}" if prefix else str(name))


def _text(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if "bytes" in name:
            return _size(value)
        # A process id is a name made of digits.
        return str(value) if name == "pid" else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)


def _size(count: int) -> str:
    """Bytes for people: 1.5 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
