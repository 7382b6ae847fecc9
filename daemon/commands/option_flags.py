"""The flags that set options, generated from `options.Options`, and what they resolve to."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from prefixcached.daemon import options
from prefixcached.daemon.options import OptionError, Setting

_Function = TypeVar("_Function", bound=Callable[..., Any])

_BRIEF: Final = {
    "state_dir": "Files on SSD [the platform's place]",
    "ram_bytes": "Cap of the RAM tier",
    "ssd_bytes": "Cap of the SSD tier; 0 turns it off",
}
"""The options in the help, which is to fit a screen; docs/operations.md has the others."""

OTHERS: Final = (
    f'All keys of the table in docs/operations.md, "Configuration", are flags as well, such as '
    f"{options.flag_of('retention')} lru; `prefixcached config` lists them."
)
"""Stands in the help of a command with `option_flags`."""


def config_option(function: _Function) -> _Function:
    """Add ``--config``."""
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=f"TOML file; also {options.FILE_VARIABLE}.",
    )(function)


def option_flags(function: _Function) -> _Function:
    """Add ``--config`` and one flag for each option; a flag that is not given is None.

    The command's help ends with `OTHERS`, which takes the place of most of them.
    """
    for name in reversed(options.names()):
        default = options.default_text(name)
        is_path = name == "state_dir"
        function = click.option(
            options.flag_of(name),
            name,
            type=click.Path(path_type=Path, file_okay=False) if is_path else str,
            metavar=options.kind_of(name).metavar,
            help=_BRIEF.get(name, "") + (f" [{default}]" if default else ""),
            hidden=name not in _BRIEF,
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
