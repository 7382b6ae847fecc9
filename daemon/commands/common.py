"""What commands share: the socket option, sizes as text, how a failure becomes an exit code."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from prefixcached.protocol.paths import SOCKET_VARIABLE, socket_path

EXIT_FAILED: Final = 1
EXIT_NO_DAEMON: Final = 3

COMMAND_SECONDS: Final = 10.0
"""How long a command waits for the daemon. Nobody's inference waits for it."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class NoDaemonFailure(click.ClickException):
    """No daemon answers at the socket."""

    exit_code = EXIT_NO_DAEMON


def socket_option(function: _Function) -> _Function:
    """Add ``--socket``, which every command honours, and its environment variable."""
    return click.option(
        "--socket",
        type=click.Path(path_type=Path),
        default=socket_path,
        show_default="the platform's place for sockets",
        help=f"The daemon's socket. {SOCKET_VARIABLE} sets it as well.",
    )(function)


@contextmanager
def reported_failures(socket: Path) -> Iterator[None]:
    """Turn what the client raises into a message and an exit code."""
    from prefixcached.client.errors import NoDaemon, PrefixCachedError

    try:
        yield
    except NoDaemon as error:
        raise NoDaemonFailure(str(error)) from error
    except PrefixCachedError as error:
        raise click.ClickException(f"the daemon at {socket} failed: {error}") from error


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Show on a terminal that ``what`` is under way; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def bytes_text(count: int) -> str:
    """Bytes for people: 1.5 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
