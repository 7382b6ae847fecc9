"""The standard streams of a process whose starter closed one (`>&-`), or whose output is full."""

import os
import sys
from contextlib import suppress
from typing import Final

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""By descriptor: name and mode."""


def reopen_closed() -> None:
    """Put the null device in the place of closed streams, before a file gets their descriptor.

    Call it before anything is opened to stay.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest one that is free
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def drop_unwritten() -> None:
    """Forget what standard output could not take, so that it does not fail once more at the end."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
