"""What a daemon says of itself, made such that it can be sent. Pure.

A report comes from many sources: paths need not be UTF-8, and what clients count up has no bound.
Neither may keep `status` from its reader.
"""

import re
from pathlib import Path
from typing import Any, Final

import msgspec

LARGEST: Final = (1 << 63) - 1
"""Numbers beyond it do not fit msgpack, or not every reader."""

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes in a path that are not UTF-8."""

REPLACEMENT: Final = "\ufffd"
"""Stands for each of them."""


def path_said(said: str, like: Path) -> Path:
    """Return the path that a report names: ``like`` where the report would say that of it."""
    return like if _plain(str(like)) == said else Path(said)


def sendable(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report in plain values, with what cannot be sent replaced."""
    plain: dict[str, Any] = _plain(msgspec.to_builtins(report))
    return plain


def _plain(value: Any) -> Any:
    match value:
        case str():
            return _SURROGATES.sub(REPLACEMENT, value)
        case int() if not -LARGEST <= value <= LARGEST:
            return LARGEST if value > 0 else -LARGEST
        case dict():
            return {_plain(name): _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value
