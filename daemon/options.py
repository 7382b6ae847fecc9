"""What a user may set: `Options`, read from a TOML file, the environment and flags.

Later ones win: default, file, environment, flag. `Options` is the one list of options: the flags of
`serve`, the variables, the keys of the file and the table in docs/operations.md come from it.
Whoever names an unknown key or a bad value is told key, value and what is allowed.
"""

import difflib
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import platformdirs

from prefixcached.actors.desk import RamConfig
from prefixcached.actors.pressure_monitor import PRESSURE_FILE
from prefixcached.actors.promotions import HITS_TO_PROMOTE
from prefixcached.actors.retention_policy import DEFAULT_POLICY, POLICIES
from prefixcached.actors.write_behind import USES_TO_WRITE
from prefixcached.daemon.option_kinds import ChoiceKind, Kind, NumberKind, PathKind, SizeKind
from prefixcached.protocol.paths import CONFIG_VARIABLE, SOCKET_VARIABLE, START_VARIABLE, expanded

PREFIX: Final = "PREFIXCACHED_"
"""Of the environment variables: PREFIXCACHED_RAM_BYTES sets ram_bytes."""

FILE_VARIABLE: Final = CONFIG_VARIABLE
"""Names the configuration file."""

NOT_OPTIONS: Final = frozenset(
    {SOCKET_VARIABLE, FILE_VARIABLE, START_VARIABLE, PRESSURE_FILE, "PREFIXCACHED_CRASH_AT",
     "PREFIXCACHED_HYPOTHESIS"}
)  # fmt: skip
"""Variables with the prefix that are no options. Clients know the socket by its variable alone, so
the file cannot name it."""

AUTO: Final = "auto"
"""Size of the SSD tier that follows the volume (`config.automatic_ssd_bytes`)."""

MOST_SECONDS: Final = 365 * 86400.0
"""A year: longer than any daemon runs."""

_RAM: Final = RamConfig()


class OptionError(ValueError):
    """An option that does not exist, or a value that it does not admit."""


def _option(default: Any, kind: Kind, text: str) -> Any:
    return field(default=default, metadata={"kind": kind, "text": text})


# ruff: noqa: RUF009  (`_option` is a field)
@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Every option, as the user gave it or by default. Sizes are as written (`config.load`)."""

    state_dir: Path | None = _option(
        None, PathKind(), "Directory of what is on SSD; by default the platform's cache directory."
    )
    ram_bytes: str | int = _option(
        "12%", SizeKind("memory"), "Cap of the RAM tier. A share follows the machine's limit."
    )
    ssd_bytes: str | int = _option(
        AUTO,
        SizeKind("the volume", (AUTO,)),
        "Cap of the SSD tier; 0 turns it off. auto: 10% of what the volume has free at the start "
        "or the tier holds, at most 100GiB.",
    )
    ssd_daily_write_bytes: str | int = _option(
        0,
        SizeKind("", share=False),
        "Most bytes written to SSD in 24 hours, against wear; 0 is no bound.",
    )
    retention: str = _option(
        DEFAULT_POLICY,
        ChoiceKind(tuple(POLICIES)),
        "Which entries leave first when room is needed.",
    )
    namespace_quota: float = _option(
        _RAM.namespace_quota,
        NumberKind("", 0.01, 1.0),
        "Share of RAM that one namespace keeps when others want room; 1 is no quota.",
    )
    promote: str = _option(
        _RAM.promote,
        ChoiceKind((*HITS_TO_PROMOTE, "never")),
        "When a hit on SSD brings an entry into RAM.",
    )
    write_policy: str = _option(
        _RAM.write_policy,
        ChoiceKind(tuple(USES_TO_WRITE)),
        "What is written to SSD: everything, or only what was hit twice.",
    )
    idle_seconds: float = _option(
        _RAM.idle_seconds,
        NumberKind("seconds", 1, MOST_SECONDS),
        "Entries unused for so long leave RAM once they are on SSD.",
    )
    label_ttl_seconds: float = _option(
        _RAM.label_ttl_seconds,
        NumberKind("seconds", 1, MOST_SECONDS),
        "A conversation (session) unused for so long no longer protects its entries.",
    )
    claim_min_tokens: int = _option(
        _RAM.claim_min_tokens,
        NumberKind("tokens", 1, 1 << 21, is_whole=True),
        "Least tokens left to compute for which other processes wait for the one that computes.",
    )
    put_min_tokens: int = _option(
        _RAM.put_min_tokens,
        NumberKind("tokens", 1, 1 << 21, is_whole=True),
        "Shorter prompts are not stored.",
    )
    checkpoint_min_tokens: int = _option(
        _RAM.checkpoint_min_tokens,
        NumberKind("tokens", 1, 1 << 21, is_whole=True),
        "Of models with recurrent state: a snapshot so close behind another is not stored.",
    )
    pressure_target: float = _option(
        _RAM.pressure_target,
        NumberKind("", 0.0, 1.0),
        "Share of the RAM cap that is used while the machine is short of memory.",
    )
    metrics_port: int = _option(
        0,
        NumberKind("", 0, 65535, is_whole=True),
        "Port on 127.0.0.1 that serves metrics to Prometheus; 0 serves none.",
    )


class Setting(NamedTuple):
    """One option's value and where it came from."""

    value: Any
    source: str


def names() -> tuple[str, ...]:
    """The options, in the order of `Options`."""
    return tuple(one.name for one in fields(Options))


def kind_of(name: str) -> Kind:
    """What values the option admits."""
    kind: Kind = _field(name).metadata["kind"]
    return kind


def text_of(name: str) -> str:
    """What the option does."""
    text: str = _field(name).metadata["text"]
    return text


def flag_of(name: str) -> str:
    """The option's flag."""
    return f"--{name.replace('_', '-')}"


def default_text(name: str) -> str:
    """The option's default, for people."""
    default = _field(name).default
    return "" if default is None else f"{default:g}" if isinstance(default, float) else f"{default}"


def _field(name: str) -> "Field[Any]":
    return next(one for one in fields(Options) if one.name == name)


def default_file() -> Path:
    """Where the configuration file is unless it is named.

    On macOS ``~/Library/Application Support/prefixcached/config.toml``, on Linux
    ``~/.config/prefixcached/config.toml``.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "prefixcached" / "config.toml"
    return platformdirs.user_config_path("prefixcached") / "config.toml"


def named_file(variables: Mapping[str, str] | None = None) -> Path | None:
    """Return the configuration file that the environment names, None where it names none."""
    named = (os.environ if variables is None else variables).get(FILE_VARIABLE)
    return expanded(named) if named else None


def gather(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Setting]:
    """Return every option's value and source.

    Args:
        flags: By option name; None where the flag was not given.
        file: The configuration file, which then must exist; by default what the environment names,
            else the platform's if it is there.
        environment: By default this process's.

    Raises:
        OptionError: An unknown key or variable, a bad value, an unreadable file.
    """
    variables = os.environ if environment is None else environment
    settings = {one.name: Setting(one.default, "default") for one in fields(Options)}
    path = file if file is not None else named_file(variables)
    for name, value in read_file(path).items():
        source = f"file {path or default_file()}"
        settings[name] = Setting(_parse(name, name, value, source), source)
    for variable, text in sorted(variables.items()):
        if not variable.startswith(PREFIX) or variable in NOT_OPTIONS:
            continue
        name = variable.removeprefix(PREFIX).lower()
        source = "environment"
        if name not in settings:
            raise OptionError(
                f"{variable} in the environment is no option; {_known('variables', variable)}"
            )
        settings[name] = Setting(_parse(name, variable, text, source), f"{source} {variable}")
    for name, value in flags.items():
        if value is not None:
            flag = flag_of(name)
            settings[name] = Setting(_parse(name, flag, value, "flag"), f"flag {flag}")
    return settings


def read_file(path: Path | None) -> dict[str, Any]:
    """Return the keys of a configuration file, or of the platform's if there is one.

    Raises:
        OptionError: It is no TOML, cannot be read, is missing although named, or has unknown keys.
    """
    file = path if path is not None else default_file()
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        if path is None:
            return {}
        raise OptionError(f"the configuration file {file} does not exist") from error
    except OSError as error:
        raise OptionError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise OptionError(f"{file} is no TOML: {error}") from error
    for name in content:
        if name == "socket":
            raise OptionError(
                f"socket in {file}: clients do not read this file; set {SOCKET_VARIABLE} for both"
            )
        if name not in names():
            raise OptionError(f"{name} in {file} is no option; {_known('keys', name)}")
    return content


def options_of(settings: Mapping[str, Setting]) -> Options:
    """Return the values alone."""
    return Options(**{name: setting.value for name, setting in settings.items()})


def _parse(name: str, shown: str, value: object, source: str) -> object:
    kind = kind_of(name)
    try:
        return kind.parse(value)
    except (ValueError, OverflowError) as error:
        where = "" if source == "flag" else f" in the {source}"
        raise OptionError(
            f"{shown} = {_written(value)}{where} is not allowed; allowed: {kind.allowed}"
        ) from error


def _written(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # hexadecimal ones are read however long they are
        return "a number of too many digits"


def _known(what: str, wrong: str) -> str:
    """Say which of them is most like ``wrong``, and name all."""
    known = names() if what == "keys" else [f"{PREFIX}{name.upper()}" for name in names()]
    like = difflib.get_close_matches(wrong, known, 1)
    nearest = f"did you mean {like[0]}? " if like else ""
    return f"{nearest}{what} are {', '.join(known)}"


def table() -> str:
    """Return the table of options of docs/operations.md."""
    lines = ["| key | default | allowed | what it does |", "|---|---|---|---|"]
    for name in names():
        default = f"`{text}`" if (text := default_text(name)) else ""
        lines.append(f"| `{name}` | {default} | {kind_of(name).allowed} | {text_of(name)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
