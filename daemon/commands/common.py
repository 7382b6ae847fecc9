"""What commands share: the socket option, values as text, how a failure becomes an exit code."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from prefixcached.protocol.paths import CONFIG_VARIABLE, SOCKET_VARIABLE, socket_path

if TYPE_CHECKING:
    # `serve` imports this module as well, and stays small without rich.
    from rich.console import Console

EXIT_FAILED: Final = 1
EXIT_NO_DAEMON: Final = 3

COMMAND_SECONDS: Final = 10.0
"""How long a command waits for the daemon. Nobody's inference waits for it."""

UNBOUNDED_COLUMNS: Final = 10_000
"""Where no terminal is: whatever reads it wants whole lines."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A range of numbers: to click, nan lies in every one."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See `click.ParamType.convert`."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class NoDaemonFailure(click.ClickException):
    """No daemon answers at the socket."""

    exit_code = EXIT_NO_DAEMON


def socket_option(function: _Function) -> _Function:
    """Add ``--socket``, which every command honours, and its environment variable."""
    return click.option(
        "--socket",
        type=click.Path(path_type=Path),
        default=socket_path,
        metavar="PATH",
        help=f"The daemon's; also {SOCKET_VARIABLE}.",
    )(function)


@contextmanager
def reported_failures(socket: Path) -> Iterator[None]:
    """Turn what the client raises into a message and an exit code."""
    from prefixcached.client.errors import CallTimeout, NoDaemon, PrefixCachedError

    try:
        yield
    except NoDaemon as error:
        raise NoDaemonFailure(f"{error}\n{_where_it_was_sought()}") from error
    except CallTimeout as error:
        raise click.ClickException(
            f"{error}: it is there and does not answer. See `prefixcached service logs`, then "
            "`prefixcached service restart`; one that hangs may be killed, nothing that matters "
            f"is lost; {see('The daemon does not answer')}"
        ) from error
    except PrefixCachedError as error:
        raise click.ClickException(f"the daemon at {socket} failed: {error}") from error


def see(section: str) -> str:
    """Point to a section of the manual."""
    return f'see "{section}" in docs/operations.md'


def _where_it_was_sought() -> str:
    variables = ", ".join(
        f"{name} is {os.environ[name]}" if os.environ.get(name) else f"{name} is not set"
        for name in (SOCKET_VARIABLE, CONFIG_VARIABLE)
    )
    return (
        f"{variables}. As a service: `prefixcached service install`; what is wrong: "
        f"`prefixcached doctor`; {see('No daemon')}"
    )


def terminal() -> "Console":
    """Standard output, with lines folded to the terminal where there is one and never elsewhere."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else UNBOUNDED_COLUMNS
    return Console(highlight=False, width=width)


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Show on a terminal that ``what`` is under way; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def plain(text: str) -> str:
    """Return ``text`` without what a terminal would obey: names are whatever clients chose."""
    return "".join(character if character.isprintable() else "?" for character in text)


def say(line: str, *, err: bool = False) -> None:
    """Print one line in which nothing moves the cursor or begins another line."""
    click.echo(plain(line), err=err)


def counted(count: int, what: str) -> str:
    """A number of things, in the singular where it is one."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def age_text(seconds: float) -> str:
    """Seconds for people: 12 s, 3 min, 5 h, 2 d."""
    for unit, size, below in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < below:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
