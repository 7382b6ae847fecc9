"""`prefixcached serve`: the daemon, in the foreground."""

import os
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog
import trio

from prefixcached.daemon import app, config, logs, options
from prefixcached.daemon.commands.common import EXIT_FAILED, socket_option
from prefixcached.daemon.commands.option_flags import OTHERS, option_flags, settings
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.stall_watch import StallWatch
from prefixcached.daemon.storage import Storage

if TYPE_CHECKING:
    # Only a daemon that traces needs it.
    from prefixcached.daemon.trace.tracer import Tracer

log = structlog.get_logger()


@click.command(
    epilog=f"{OTHERS}\n\nExample: prefixcached serve --ram-bytes 8GiB --ssd-bytes 200GiB"
)
@socket_option
@option_flags
@click.option(
    "--log-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Log there, rotated [standard error]",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Record what the actors say; see `trace`",
)
@click.option(
    "--follow",
    "followed_file",
    type=click.Path(path_type=Path, dir_okay=False),
    hidden=True,
    help="Decide as the daemon of this trace did; what `replay` starts.",
)
@click.option(
    "--follow-bytes",
    "followed_bytes",
    type=click.IntRange(min=0),
    hidden=True,
    help="So much of it, as it may still grow.",
)
@click.option("--trace-tokens", is_flag=True, help="Record tokens and names in the clear")
def serve(
    socket: Path,
    config_file: Path | None,
    log_file: Path | None,
    trace_file: Path | None,
    trace_tokens: bool,
    followed_file: Path | None,
    followed_bytes: int | None,
    **flags: Any,
) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C.

    Prints READY and the socket's path when it serves. Logs to standard error: for people on a
    terminal, else a JSON object a line. With --log-file it prints FAILED and why if it cannot.
    """
    # Whatever this process creates is its user's alone (rules C1, D9).
    os.umask(0o077)
    if trace_tokens and trace_file is None:
        raise click.UsageError("--trace-tokens without --trace FILE records nothing")
    chosen = options.options_of(settings(flags, config_file))
    try:
        limiter = logs.configure(None if log_file is None else log_file.absolute())
    except StartError as error:
        raise click.ClickException(str(error)) from error
    effective = config.load(chosen, socket=socket)
    # What an except* clause raises comes out as a group again, so both act after it.
    refusal: BaseException | None = None
    failed = False
    try:
        with ExitStack() as stack:
            tracer = None
            if trace_file is not None:
                tracer = _tracer(
                    trace_file.absolute(), effective, trace_tokens, followed_file, followed_bytes
                )
                stack.callback(tracer.close)
            watch = stack.enter_context(StallWatch())
            storage = Storage(effective, tracer)
            storage.statistics_sources.update(event_loop=watch.statistics, log=limiter.statistics)
            announce = partial(_print, f"READY {effective.socket}")
            clock = None if tracer is None else tracer.clock
            trio.run(
                app.serve, effective, storage, announce, tracer, clock=clock, instruments=[watch]
            )
    except* StartError as group:
        refusal = _first(group)
    except* Exception:
        log.exception("the daemon failed")
        failed = True
    if failed:
        refusal = StartError("it failed unexpectedly; its log has the error")
    # Standard error is the log then: whoever started this process hears it from standard output.
    if log_file is not None and refusal is not None:
        _print(f"FAILED {refusal}")
    if failed:
        sys.exit(EXIT_FAILED)
    if refusal is not None:
        raise click.ClickException(str(refusal))


def _tracer(
    path: Path,
    effective: config.Config,
    keep_tokens: bool,
    followed: Path | None,
    followed_bytes: int | None,
) -> "Tracer":
    if followed is not None:
        from prefixcached.daemon.trace.following import FollowingTracer

        return FollowingTracer(path, effective, followed, followed_bytes)
    from prefixcached.daemon.trace.tracer import Tracer

    return Tracer(path, effective, keep_tokens=keep_tokens)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, however deep the nurseries were."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _print(line: str) -> None:
    # Whoever started the daemon may have stopped listening.
    with suppress(OSError):
        click.echo(os.fsencode(line))  # a path need not be UTF-8
