"""`prefixcached clear`: forget what is cached."""

from pathlib import Path

import click

from prefixcached.daemon.commands.common import (
    COMMAND_SECONDS,
    reported_failures,
    socket_option,
)


@click.command()
@socket_option
@click.option("--namespace", help="Forget only this namespace.")
def clear(socket: Path, namespace: str | None) -> None:
    """Forget everything, or one namespace. What clients have borrowed stays valid for them."""
    from prefixcached.client import connect

    with (
        reported_failures(socket),
        connect(socket=socket, timeout=COMMAND_SECONDS, fail_open=False) as cache,
    ):
        cache.clear(namespace)
    click.echo("cleared" if namespace is None else f"cleared {namespace}")
