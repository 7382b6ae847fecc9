"""Groups of commands: imported when they are used; a failure is one line, of wrong usage code 2."""

import errno
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from click.exceptions import NoArgsIsHelpError

from prefixcached.daemon.standard_streams import drop_unwritten, reopen_closed

EXIT_USAGE: Final = 2


class WrongUsage(click.ClickException):
    """One line: what is wrong, and where the help is."""

    exit_code = EXIT_USAGE


class CommandGroup(click.Group):
    """A group whose failures take one line.

    Args:
        places: "module:function" of each command that is imported when it is used, by its name;
            the module is one of `prefixcached.daemon.commands`.
    """

    def __init__(
        self, *arguments: Any, places: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._places = places or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See `click.Group.list_commands`."""
        return sorted({*super().list_commands(ctx), *self._places})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See `click.Group.get_command`."""
        if cmd_name in self._places and cmd_name not in self.commands:
            module, _, function = self._places[cmd_name].partition(":")
            found = importlib.import_module(f"prefixcached.daemon.commands.{module}")
            self.add_command(getattr(found, function))
        return super().get_command(ctx, cmd_name)

    def main(self, *arguments: Any, **options: Any) -> Any:
        """See `click.Command.main`."""
        reopen_closed()
        return super().main(*arguments, **options)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """See `click.Command.make_context`."""
        with _one_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Command.invoke`."""
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (NoArgsIsHelpError, click.exceptions.Exit, click.Abort):
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "prefixcached"
        message = error.format_message().replace("\n", " ").rstrip(".")
        raise WrongUsage(f"{message}; see `{path} --help`") from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever read has enough, which click knows
            raise
        drop_unwritten()
        raise click.ClickException(_reason(error)) from error
    except RuntimeError as error:
        if _has_home():  # then it is a bug, whose traceback is wanted
            raise
        raise click.ClickException(f"{str(error).rstrip('.')}: set HOME") from error


def _has_home() -> bool:
    try:
        Path.home()
    except RuntimeError:
        return False
    return True


def _reason(error: OSError) -> str:
    """What went wrong, and with which file; none is named where standard output is full."""
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename else what
