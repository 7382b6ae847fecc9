"""`prefixcached serve`: the daemon, in the foreground."""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import structlog
import trio

from prefixcached.daemon import app, config, logs
from prefixcached.daemon.commands.common import EXIT_FAILED, socket_option
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.storage import Storage

log = structlog.get_logger()


@click.command()
@socket_option
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of what is kept on SSD.",
)
@click.option(
    "--ram-bytes",
    default=config.DEFAULT_RAM_SIZE,
    show_default=True,
    help="Cap of the RAM tier: 8GiB, or a share of memory.",
)
@click.option(
    "--ssd-bytes",
    default=config.DEFAULT_SSD_SIZE,
    show_default=True,
    help="Cap of the SSD tier: 100GiB, or a share of the volume; 0 turns it off.",
)
def serve(socket: Path, state_dir: Path | None, ram_bytes: str, ssd_bytes: str) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C.

    Prints one line, READY and the socket's path, when it serves; logs to standard error.
    """
    # Whatever this process creates is its user's alone (rules C1, D9).
    os.umask(0o077)
    logs.configure()
    try:
        settings = config.load(
            socket=socket, state_dir=state_dir, ram_size=ram_bytes, ssd_size=ssd_bytes
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # What an except* clause raises comes out as a group again, so both act after it.
    refusal: BaseException | None = None
    failed = False
    try:
        trio.run(app.serve, settings, Storage(settings), partial(_announce, settings.socket))
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
