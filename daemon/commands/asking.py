"""Asking the daemon what no inference process asks: requests of the group `inspect`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixcached.daemon.commands.common import COMMAND_SECONDS, reported_failures
from prefixcached.protocol.messages import AnyRequest, Reply

Ask = Callable[[AnyRequest], Reply]


@contextmanager
def asking(socket: Path) -> Iterator[Ask]:
    """Connect to the daemon for the block; its function sends a request and returns the reply.

    Raises:
        NoDaemonFailure: Nobody answers.
        click.ClickException: The daemon refused, or is of another version.
    """
    from prefixcached.client.wire import Wire

    with reported_failures(socket):
        wire = Wire(socket)
        try:
            wire.open(time.monotonic() + COMMAND_SECONDS)
            yield lambda request: wire.request(request, time.monotonic() + COMMAND_SECONDS)[0]
        finally:
            wire.close()
