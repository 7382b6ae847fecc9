"""`prefixcached clear`: forget what is cached."""

from pathlib import Path

import click

from prefixcached.daemon.commands.asking import asking, unknown_namespace
from prefixcached.daemon.commands.common import counted, say, socket_option, waiting_for
from prefixcached.daemon.sizes import bytes_text
from prefixcached.protocol.messages import Clear, Cleared


@click.command(epilog="Example: prefixcached clear --namespace demo")
@socket_option
@click.option(
    "--namespace", metavar="NAME", help="Forget only this namespace (`prefixcached ls` names them)."
)
def clear(socket: Path, namespace: str | None) -> None:
    """Forget everything, or one namespace. What clients have borrowed stays valid for them."""
    with asking(socket) as ask, waiting_for("Clearing"):
        reply = ask(Clear(namespace))
        assert isinstance(reply, Cleared)
        if namespace is not None and not reply.images:
            raise unknown_namespace(ask, namespace)
    where = "" if namespace is None else f" in {namespace}"
    if not reply.images:
        click.echo("nothing is cached")
    else:
        ram = bytes_text(reply.ram_bytes)
        say(f"cleared {counted(reply.images, 'piece')}{where}, {ram} of them in RAM")
    if not reply.durable:
        click.echo(
            "the disk fails (`prefixcached status`); the files go once it works again", err=True
        )
