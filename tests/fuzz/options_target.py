"""Target `options`: the configuration file and the environment, which people write."""

from contextlib import suppress
from typing import Final

from prefixcached.daemon.options import OptionError, gather, names, options_of
from tests.fuzz.choices import Choices
from tests.fuzz.scratch import directory

_VALUES: Final = (
    "8GiB", "12%", "0", "-1", "1e400", "nan", "inf", "1" * 400, "lru", "9" * 30 + "TiB", "0.5",
    "true", "[1]", "1979-05-27", "0x10", "''", "'~nobody-at-all/x'", "'~\\0'", "{a = 1}",
    "[" * 5000 + "]" * 5000,
)  # fmt: skip


def run(data: bytes) -> None:
    """Gather options from a file and a variable: values, or the error that names what is wrong."""
    choices = Choices(data)
    lines = [_line(choices) for _ in range(choices.below(4) + 1)]
    path = directory() / "config.toml"
    path.write_bytes(b"\n".join(lines))
    environment: dict[str, str] = {}
    if choices.one_in(2):
        name = choices.pick(names()) if choices.one_in(2) else choices.text()
        environment[f"PREFIXCACHED_{name.upper()}"] = choices.text()
    with suppress(OptionError):
        options_of(gather({}, file=path, environment=environment))


def _line(choices: Choices) -> bytes:
    if choices.one_in(4):
        return choices.blob(64)
    value = choices.pick(_VALUES) if choices.one_in(2) else choices.text()
    text = f"{choices.pick(names())} = {value if choices.one_in(2) else repr(value)}"
    return choices.damaged(text.encode()) if choices.one_in(4) else text.encode()
