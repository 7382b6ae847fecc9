"""`prefixcached flush`: wait until everything that is cached now is on SSD."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from prefixcached.daemon.commands.common import (
    COMMAND_SECONDS,
    EXIT_FAILED,
    FiniteRange,
    reported_failures,
    see,
    socket_option,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

FLUSH_SECONDS: Final = 600.0
"""How long it waits by default: 100 GiB at 200 MB/s, a slow disk with all of a large Mac's RAM."""

LOOK_SECONDS: Final = 0.5
"""Between two looks at how many images still wait, while a person watches the bar."""

MOST_SECONDS: Final = 86400.0
"""What a request may ask for at most (`protocol.messages.Seconds`)."""


@click.command(
    epilog="Example: prefixcached flush --timeout 60 && sudo reboot",
)
@socket_option
@click.option(
    "--timeout",
    type=FiniteRange(0, MOST_SECONDS, min_open=True),
    default=FLUSH_SECONDS,
    show_default=True,
    help="Seconds to wait at most.",
)
def flush(socket: Path, timeout: float) -> None:
    """Wait until all that is cached now is on SSD.

    Prints how many images were written, skipped by policy and failed. Ends with 1 if any failed,
    the time was over first, or the drive did not confirm it.
    """
    from prefixcached.client import connect

    with (
        reported_failures(socket),
        connect(socket=socket, timeout=COMMAND_SECONDS, fail_open=False, start=False) as cache,
        # It asks first: a daemon that does not answer is not waited for as long as a slow disk.
        _progress(lambda: int(cache.stats()["ram_tier"]["writes_queued"])),
    ):
        flushed = cache.flush(timeout)
    nothing_left = flushed.complete and not (flushed.written or flushed.skipped or flushed.failed)
    click.echo(
        f"written {flushed.written}  skipped {flushed.skipped}  failed {flushed.failed}"
        + ("  (nothing was left to write)" if nothing_left else "")
    )
    if not flushed.complete:
        click.echo(
            f"not complete: {timeout:g} seconds were over, or the drive did not confirm it; "
            "flush again, or --timeout",
            err=True,
        )
    if flushed.failed:
        click.echo(
            "some could not be written; `prefixcached status` says why the disk fails; "
            f"{see('The disk is full')}",
            err=True,
        )
    if not flushed:
        raise click.exceptions.Exit(EXIT_FAILED)


@contextmanager
def _progress(ask_queued: Callable[[], int]) -> Iterator[None]:
    """Show on a terminal how many images are written; nothing elsewhere."""
    queued = ask_queued()
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    done = threading.Event()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Writing what is in RAM only", total=queued)
        watcher = threading.Thread(target=_watch, args=(ask_queued, progress, task, done))
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _watch(
    ask_queued: Callable[[], int], progress: "Progress", task: "TaskID", done: threading.Event
) -> None:
    from prefixcached.client.errors import PrefixCachedError

    total = progress.tasks[0].total or 0
    while not done.wait(LOOK_SECONDS):
        try:
            progress.update(task, completed=max(0, total - ask_queued()))
        except PrefixCachedError:
            return  # the flush itself says so
