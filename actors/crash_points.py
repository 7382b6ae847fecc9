"""Named points at which a test can have the daemon killed, to prove the write order (rule D2).

`PREFIXCACHED_CRASH_AT=name` kills the process with SIGKILL the first time it gets there, `name:3`
the third time. docs/storage-format.md explains each name.
"""

import os
import signal
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

VARIABLE: Final = "PREFIXCACHED_CRASH_AT"
"""Environment variable that names a point. Read once, when the store is made."""


class CrashPoint(StrEnum):
    """The gaps of the write order, of a deletion and of a clear."""

    BEFORE_CREATE = "before-create"
    AFTER_SCHEMA = "after-schema-before-create"
    AFTER_CREATE = "after-create-before-data"
    AFTER_DATA = "after-data-before-header"
    AFTER_HEADER = "after-data-before-barrier"
    AFTER_BARRIER = "after-barrier-before-rename"
    AFTER_RENAME = "after-rename-before-directory-barrier"
    AFTER_DIRECTORY_BARRIER = "after-directory-barrier"
    BEFORE_DELETE = "before-delete"
    AFTER_DELETE = "after-delete"
    BEFORE_CLEAR = "before-clear-rename"
    AFTER_CLEAR = "after-clear-rename"


def never(_: CrashPoint) -> None:
    """Go on."""


def from_environment(environment: Mapping[str, str]) -> Callable[[CrashPoint], None]:
    """Return what to call at each point; `never` where the environment names none.

    Raises:
        ValueError: The environment names a point that does not exist.
    """
    wanted, _, times = environment.get(VARIABLE, "").partition(":")
    if not wanted:
        return never
    point = CrashPoint(wanted)
    remaining = int(times or "1")

    def reached(found: CrashPoint) -> None:
        nonlocal remaining
        if found is point:
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return reached
