"""`prefixcached mlx-lm-server`: mlx_lm.server with the shared cache. Owns nothing."""

from pathlib import Path
from typing import Final

import click

from prefixcached.daemon.commands.common import socket_option
from prefixcached.protocol.paths import SOCKET_VARIABLE

_HELP_FLAGS: Final = frozenset({"-h", "--help"})


@click.command(
    "mlx-lm-server",
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
    try:
        from prefixcached.client import connect
        from prefixcached.client.mlx_lm_server import UnsupportedServerError, run
    except ImportError as error:
        raise click.ClickException(
            f"mlx_lm.server cannot be imported: {error}; "
            "install it with `pip install 'prefixcached[mlx]'`"
        ) from error
    if _HELP_FLAGS.intersection(arguments):
        click.echo(
            "mlx_lm.server with the cache that prefixcached shares between processes.\n"
            f"--socket SOCKET, or {SOCKET_VARIABLE}, names the daemon's socket; all other options\n"
            "are mlx_lm.server's. --prompt-cache-size and --prompt-cache-bytes have no effect:\n"
            "the daemon's caps hold.\n"
        )
    try:
        run(arguments, connect(socket))
    except UnsupportedServerError as error:
        raise click.ClickException(str(error)) from error
