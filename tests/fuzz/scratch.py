"""One directory for all inputs of a process, in memory where that can be."""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

_KEPT: Final[list[tempfile.TemporaryDirectory[str]]] = []
"""Removed when the process ends."""


@cache
def directory() -> Path:
    """Return it; who writes a file there writes it anew for each input."""
    memory = "/dev/shm"
    _KEPT.append(tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None))
    return Path(_KEPT[0].name)
