"""`prefixcached clear`: forget what is cached."""

from pathlib import Path

import click

from prefixcached.daemon.commands.asking import asking
from prefixcached.daemon.commands.common import bytes_text, counted, socket_option, waiting_for
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
    where = "" if namespace is None else f" in {namespace}"
    if not reply.images:
        hint = "" if namespace is None else "; `prefixcached ls` names the namespaces"
        click.echo(f"nothing is cached{where}{hint}")
    else:
        ram = bytes_text(reply.ram_bytes)
        click.echo(f"cleared {counted(reply.images, 'piece')}{where}, {ram} of them in RAM")
    if not reply.durable:
        click.echo(
            "the disk fails (`prefixcached status`); the files go once it works again", err=True
        )
