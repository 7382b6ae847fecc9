"""The flags that set options, generated from `options.Options`, and what they resolve to."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from prefixcached.daemon import options
from prefixcached.daemon.options import OptionError, Setting

_Function = TypeVar("_Function", bound=Callable[..., Any])

_METAVARS = {"ram_bytes": "SIZE", "ssd_bytes": "SIZE", "ssd_daily_write_bytes": "SIZE"}


def config_option(function: _Function) -> _Function:
    """Add ``--config``."""
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"Configuration file (TOML). {options.FILE_VARIABLE} sets it as well.",
    )(function)


def option_flags(function: _Function) -> _Function:
    """Add ``--config`` and one flag for each option; a flag that is not given is None."""
    for name in reversed(options.names()):
        default = options.default_text(name)
        is_path = name == "state_dir"
        function = click.option(
            options.flag_of(name),
            name,
            type=click.Path(path_type=Path, file_okay=False) if is_path else str,
            metavar="DIRECTORY" if is_path else _METAVARS.get(name, "VALUE"),
            help=options.text_of(name).split(";")[0].split(". ")[0].rstrip(".")
            + (f" [{default}]" if default else ""),
        )(function)
    return config_option(function)


def settings(flags: Mapping[str, Any], config_file: Path | None) -> dict[str, Setting]:
    """Return every option's value and source.

    Raises:
        click.UsageError: An option or value is wrong.
    """
    try:
        return options.gather(flags, file=config_file)
    except OptionError as error:
        raise click.UsageError(str(error)) from error
