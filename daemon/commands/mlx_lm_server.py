"""`prefixcached mlx-lm-server`: mlx_lm.server with the shared cache. Owns nothing."""

from pathlib import Path
from typing import Final

import click

from prefixcached.daemon.commands.common import socket_option
from prefixcached.protocol.paths import SOCKET_VARIABLE

_HELP_FLAGS: Final = frozenset({"-h", "--help"})


@click.command(
    "mlx-lm-server",
    short_help="Run mlx_lm.server with the shared cache.",
    context_settings={"ignore_unknown_options": True},
    # Its help is mlx_lm.server's.
    add_help_option=False,
)
@socket_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def mlx_lm_server(socket: Path, arguments: tuple[str, ...]) -> None:
    """Run mlx_lm.server with the shared cache; same flags, and --socket.

    Without a daemon it serves as mlx_lm.server does, recomputing every prompt, and shares again
    once a daemon is there.
    """
    is_help = not _HELP_FLAGS.isdisjoint(arguments)
    # Before mlx_lm is imported: that lowers the limit of open files, also of a daemon started here.
    note = "" if is_help else f"prefixcached: {_whether_shared(socket)}"
    try:
        from prefixcached.client import connect
        from prefixcached.client.mlx_lm_server import UnsupportedServerError, check, run
    except ImportError as error:
        raise click.ClickException(
            f"mlx_lm.server cannot be imported: {error}; "
            "install it with `pip install 'prefixcached[mlx]'`"
        ) from error
    if is_help:
        click.echo(
            "mlx_lm.server with the cache that prefixcached shares between processes.\n"
            f"--socket PATH, or {SOCKET_VARIABLE}, is the daemon's; all other options are\n"
            "mlx_lm.server's. --prompt-cache-size and --prompt-cache-bytes have no effect:\n"
            "the daemon's caps hold.\n\n"
            "Example: prefixcached mlx-lm-server --model ./model --port 8081\n"
        )
    try:
        check()
        if note:
            click.echo(note, err=True)
        run(arguments, connect(socket))
    except UnsupportedServerError as error:
        raise click.ClickException(str(error)) from error


def _whether_shared(socket: Path) -> str:
    """Say in one line whether a daemon is there, or why not; it is started where that is wanted."""
    from prefixcached.client import connect
    from prefixcached.client.errors import PrefixCachedError

    try:
        with connect(socket, fail_open=False) as cache:
            about = cache.stats()["daemon"]
    except PrefixCachedError as error:
        return f"the cache is not used until a daemon is there: {error}"
    except ValueError as error:
        # PREFIXCACHED_START says neither yes nor no.
        raise click.UsageError(str(error)) from error
    return f"the cache is used: process {about['pid']} serves {about['socket']}"
