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
    "ssd_daily_write_bytes": "Most written in 24 h; 0: no bound",
    "retention": "Which entries leave first",
    "namespace_quota": "Share of RAM one namespace keeps",
    "promote": "When an SSD hit enters RAM",
    "write_policy": "What is written to SSD",
    "idle_seconds": "Unused for so long leaves RAM",
    "label_ttl_seconds": "Unused sessions protect so long",
    "claim_min_tokens": "Least left for which others wait",
    "put_min_tokens": "Shorter prompts are not stored",
    "checkpoint_min_tokens": "Least between two snapshots",
    "pressure_target": "Share of RAM cap under pressure",
    "metrics_port": "Prometheus on 127.0.0.1; 0: none",
}
"""Of the help alone, which is to fit a screen; the whole text is in docs/operations.md."""


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
    """Add ``--config`` and one flag for each option; a flag that is not given is None."""
    for name in reversed(options.names()):
        default = options.default_text(name)
        is_path = name == "state_dir"
        brief = _BRIEF.get(name) or options.text_of(name).split(";")[0].split(". ")[0].rstrip(".")
        function = click.option(
            options.flag_of(name),
            name,
            type=click.Path(path_type=Path, file_okay=False) if is_path else str,
            metavar=options.kind_of(name).metavar,
            help=brief + (f" [{default}]" if default else ""),
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
