"""How the command line says that it was used wrongly: one line, exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
from click.exceptions import NoArgsIsHelpError

EXIT_USAGE: Final = 2


class WrongUsage(click.ClickException):
    """One line: what is wrong, and where the help is."""

    exit_code = EXIT_USAGE


class CommandGroup(click.Group):
    """A group whose usage errors take one line."""

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
    except NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "prefixcached"
        message = error.format_message().replace("\n", " ").rstrip(".")
        raise WrongUsage(f"{message}; see `{path} --help`") from error
