"""Which descriptors this process has open, to see that none leaks."""

import contextlib
import os
import sys
from collections.abc import Iterator


def open_descriptors() -> set[int]:
    """Return the numbers of all open descriptors of this process."""
    with os.scandir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd") as entries:
        numbers = {int(entry.name) for entry in entries}
    # The scan's own descriptor was among them and is closed by now.
    return {number for number in numbers if is_open(number)}


def is_open(fd: int) -> bool:
    """Whether ``fd`` is an open descriptor."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def none_leaked() -> Iterator[None]:
    """Fail unless as many descriptors are open after the block as before, the same ones."""
    before = open_descriptors()
    yield
    assert open_descriptors() == before
