"""`prefixcached serve`: the daemon, in the foreground."""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import structlog
import trio

from prefixcached.daemon import app, config, logs, options
from prefixcached.daemon.commands.common import EXIT_FAILED, socket_option
from prefixcached.daemon.commands.option_flags import option_flags, settings
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.stall_watch import StallWatch
from prefixcached.daemon.storage import Storage

log = structlog.get_logger()


@click.command(epilog="Example: prefixcached serve --ram-bytes 8GiB --ssd-bytes 200GiB")
@socket_option
@option_flags
def serve(socket: Path, config_file: Path | None, **flags: Any) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C.

    Prints one line, READY and the socket's path, when it serves; logs to standard error.
    """
    # Whatever this process creates is its user's alone (rules C1, D9).
    os.umask(0o077)
    logs.configure()
    chosen = options.options_of(settings(flags, config_file))
    effective = config.load(chosen, socket=socket)
    # What an except* clause raises comes out as a group again, so both act after it.
    refusal: BaseException | None = None
    failed = False
    try:
        with StallWatch() as watch:
            storage = Storage(effective)
            storage.statistics_sources["event_loop"] = watch.statistics
            announce = partial(_announce, effective.socket)
            trio.run(app.serve, effective, storage, announce, instruments=[watch])
    except* StartError as group:
        refusal = _first(group)
    except* Exception:
        log.exception("the daemon failed")
        failed = True
    if failed:
        sys.exit(EXIT_FAILED)
    if refusal is not None:
        raise click.ClickException(str(refusal))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, however deep the nurseries were."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _announce(socket: Path) -> None:
    # Whoever started the daemon may have stopped listening.
    with suppress(OSError):
        click.echo(f"READY {socket}")
        sys.stdout.flush()
