"""Asking the daemon what no inference process asks: requests of the group `inspect`."""

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from prefixcached.daemon.commands.common import COMMAND_SECONDS, plain, reported_failures
from prefixcached.protocol.messages import AnyRequest, List, Listing, Reply

Ask = Callable[[AnyRequest], Reply]

ANSWER_SECONDS: Final = 5.0
"""How long a command waits for a daemon that it can do without."""

NAMED_NAMESPACES: Final = 3
"""Of those that there are, in the message on one that there is not: `ls` has them all."""


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


def unknown_namespace(ask: Ask, name: str) -> click.ClickException:
    """Return the error that says that ``name`` is no namespace, and which there are."""
    listing = ask(List(limit=1))
    assert isinstance(listing, Listing)
    known = [one.namespace for one in listing.namespaces]
    if not known:
        return click.ClickException(
            f"there is no namespace {plain(name)}: nothing is cached at all"
        )
    like = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known)
    shown = ", ".join(plain(one) or "(empty name)" for one in (like or known)[:NAMED_NAMESPACES])
    which = "like it" if like else "used last"
    return click.ClickException(
        f"there is no namespace {plain(name)}; {which}: {shown} (`prefixcached ls` has them all)"
    )


def reported_by(socket: Path) -> dict[str, Any]:
    """Return what the daemon reports, for a command that can do without one.

    Raises:
        PrefixCachedError: None answers, or not in time.
    """
    from prefixcached.client import connect

    with connect(socket=socket, timeout=ANSWER_SECONDS, fail_open=False, start=False) as cache:
        return cache.stats()
