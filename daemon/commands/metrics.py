"""`prefixcached metrics`: the daemon's numbers, as Prometheus reads them."""

from pathlib import Path

import click

from prefixcached.daemon.commands.common import reported_failures, socket_option
from prefixcached.daemon.commands.watching import Watcher
from prefixcached.daemon.exporter import INSTALL


@click.command(epilog="Example: prefixcached metrics | grep tokens_reused")
@socket_option
def metrics(socket: Path) -> None:
    """Print metrics as Prometheus text, once.

    For a scraper that asks by HTTP set metrics_port; for node_exporter, write this to a file of its
    textfile collector. Needs the extra: pip install 'prefixcached[metrics]'.
    """
    try:
        from prefixcached.daemon import prometheus
    except ImportError as error:
        raise click.ClickException(f"metrics needs {error.name}: {INSTALL}") from error
    with reported_failures(socket), Watcher(socket) as watcher:
        report, latency = watcher.status(), watcher.latency()
    click.echo(prometheus.text_of(report, latency).decode(), nl=False)
