"""`prefixcached config`: the effective options and where each came from."""

import json
import os
from pathlib import Path
from typing import Any

import click

from prefixcached.daemon import config, options
from prefixcached.daemon.commands.common import plain, say, socket_option, terminal
from prefixcached.daemon.commands.option_flags import OTHERS, option_flags, settings
from prefixcached.daemon.sizes import bytes_text
from prefixcached.protocol.paths import SOCKET_VARIABLE


@click.command(
    "config",
    short_help="Show the effective options and where each comes from.",
    epilog=f"{OTHERS}\n\nExample: prefixcached config --ram-bytes 8GiB",
)
@socket_option
@option_flags
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.pass_context
def show_config(
    context: click.Context,
    /,
    socket: Path,
    config_file: Path | None,
    *,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what `serve` with these flags would use, and where each value came from.

    Later ones win: default, configuration file, environment, flag.
    """
    gathered = settings(flags, config_file)
    effective = config.load(options.options_of(gathered), socket=socket)
    resolved: dict[str, Any] = {
        "state_dir": effective.state_dir,
        "ram_bytes": effective.ram_bytes,
        "ssd_bytes": effective.ssd_bytes,
    }
    rows: list[dict[str, Any]] = [
        {
            "key": "socket",
            "value": str(effective.socket),
            "effective": str(effective.socket),
            "source": _socket_source(context),
        }
    ]
    for name, (value, source) in gathered.items():
        used = resolved.get(name, value)
        rows.append(
            {
                "key": name,
                "value": None if value is None else str(value),
                "effective": str(used) if isinstance(used, Path) else used,
                "source": source,
            }
        )
    if as_json:
        click.echo(json.dumps({"file": str(_file(config_file)), "options": rows}))
    else:
        _print(rows, config_file)


def _socket_source(context: click.Context) -> str:
    source = context.get_parameter_source("socket")
    if source is not None and source.name == "COMMANDLINE":
        return "flag --socket"
    return f"environment {SOCKET_VARIABLE}" if os.environ.get(SOCKET_VARIABLE) else "default"


def _file(config_file: Path | None) -> Path:
    return config_file or options.named_file() or options.default_file()


def _print(rows: list[dict[str, Any]], config_file: Path | None) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for column in ("key", "value", "from"):
        table.add_column(column, overflow="fold")
    for row in rows:
        value, used = row["value"], row["effective"]
        if isinstance(used, float):
            shown = f"{used:g}"
        else:
            shown = str(used if value is None else value)
            if row["key"].endswith("_bytes") and not shown.isdigit():
                shown = f"{shown} = {bytes_text(used)}"
        table.add_row(row["key"], Text(plain(shown)), Text(plain(row["source"])))
    terminal().print(table)
    file = _file(config_file)
    say(f"configuration file: {file}{'' if file.exists() else ' (not there)'}")
