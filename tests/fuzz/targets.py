"""The targets by name: what each runs, and its share of the fuzzing."""

import importlib
from collections.abc import Callable
from typing import Final, NamedTuple, cast


class Target(NamedTuple):
    """``share`` of all seconds in percent, ``most_bytes`` of one input."""

    share: int
    most_bytes: int
    is_linux_only: bool = False


TARGETS: Final = {
    "wire": Target(15, 1024),
    "layout": Target(8, 512),
    "files": Target(18, 512),
    "trace": Target(7, 512),
    "options": Target(2, 512),
    "session": Target(50, 500, is_linux_only=True),
}
"""The session has most of the code below it and is the slowest: it gets half. Its clients
try what Linux's sealed memory must stand."""


def load(name: str) -> Callable[[bytes], None]:
    """Import a target and return what runs one input; it raises where something is wrong."""
    module = importlib.import_module(f"tests.fuzz.{name}_target")
    return cast("Callable[[bytes], None]", module.run)
