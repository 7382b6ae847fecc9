"""`prefixcached flush`: wait until everything that is cached now is on SSD."""

from pathlib import Path
from typing import Final

import click

from prefixcached.daemon.commands.common import (
    COMMAND_SECONDS,
    EXIT_FAILED,
    reported_failures,
    socket_option,
    waiting_for,
)

FLUSH_SECONDS: Final = 600.0
"""How long it waits by default: 100 GiB at 200 MB/s, a slow disk with all of a large Mac's RAM."""

MOST_SECONDS: Final = 86400.0
"""What a request may ask for at most (`protocol.messages.Seconds`)."""


@click.command(
    epilog="Example: prefixcached flush --timeout 60 && sudo reboot",
)
@socket_option
@click.option(
    "--timeout",
    type=click.FloatRange(0, MOST_SECONDS, min_open=True),
    default=FLUSH_SECONDS,
    show_default=True,
    help="Seconds to wait at most.",
)
def flush(socket: Path, timeout: float) -> None:
    """Wait until all that is cached now is on SSD.

    Prints how many images were written, skipped by policy and failed. Ends with 1 if any failed
    or the time was over first.
    """
    from prefixcached.client import connect

    with (
        reported_failures(socket),
        connect(socket=socket, timeout=COMMAND_SECONDS, fail_open=False) as cache,
        waiting_for("Writing what is in RAM only"),
    ):
        cache.stats()  # a daemon that does not answer is not waited for as long as a slow disk
        flushed = cache.flush(timeout)
    click.echo(f"written {flushed.written}  skipped {flushed.skipped}  failed {flushed.failed}")
    if not flushed.complete:
        click.echo(f"not complete after {timeout:g} seconds; flush again, or --timeout", err=True)
    if flushed.failed:
        click.echo(
            "some could not be written; `prefixcached status` says why the disk fails", err=True
        )
    if not flushed:
        raise click.exceptions.Exit(EXIT_FAILED)
