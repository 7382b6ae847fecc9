"""What the machine gives: memory, disk, descriptors. One small function for each."""

import os
import resource
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from prefixcached.actors.pressure_sensors import memory_limit_bytes

RESERVED_DESCRIPTORS: Final = 128
"""For the process itself, files in flight, and replies on their way."""

DESCRIPTORS_PER_IMAGE: Final = 2
"""An image that is being filled has a writable and a read-only descriptor (macOS); one later."""

MAX_CONNECTIONS: Final = 512
"""Sessions at a time: far beyond a machine's inference processes, a bound for a runaway one."""

MAX_IMAGES: Final = 100_000
"""Where descriptors are plenty (Linux): more images than this are slivers, and cost index."""

COUNT_SECONDS: Final = 0.5
"""For the size of tens of thousands of files; a slow disk must not keep RAM from serving."""

_PLENTY: Final = 1 << 20
"""Descriptors where the system sets no limit."""

_DARWIN_OPEN_MAX: Final = 10240
"""OPEN_MAX: what macOS grants, also where the hard limit says infinity (PLATFORM 1.1)."""


def memory_bytes() -> int:
    """Memory that this process can have: the machine's, or its control group's limit (M5)."""
    return memory_limit_bytes()


def volume_bytes(directory: Path) -> int:
    """Size of the volume on which ``directory`` lies or will be created."""
    return _usage(directory)[0]


def free_bytes(directory: Path) -> int:
    """Free space of that volume, for this user."""
    return _usage(directory)[1]


def held_bytes(directory: Path) -> int:
    """Disk space of the files below ``directory``, as far as `COUNT_SECONDS` suffice to count."""
    deadline = time.monotonic() + COUNT_SECONDS
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            if time.monotonic() > deadline:
                return total
            with suppress(OSError):  # a daemon that runs may have removed it
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def _usage(directory: Path) -> tuple[int, int]:
    """Return total and free bytes where ``directory`` lies, or the nearest above that can be asked.

    It may be missing, closed to this user, or beyond what the system takes as a path: whoever uses
    it says so, and tries again later (rule D7). Its cap is no reason not to start.
    """
    while True:
        try:
            usage = shutil.disk_usage(directory)
        except OSError:
            if directory == directory.parent:
                raise
            directory = directory.parent
        else:
            return usage.total, usage.free


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of descriptors to the hard one and return the result.

    launchd starts jobs with 256, which would be the number of cached images.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _PLENTY if hard == resource.RLIM_INFINITY else hard
    if sys.platform == "darwin":
        wanted = min(wanted, _DARWIN_OPEN_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def connection_limit(descriptors: int) -> int:
    """Sessions at a time under a limit of ``descriptors``: one each, at most a quarter."""
    return max(1, min(MAX_CONNECTIONS, descriptors // 4))


def image_limit(descriptors: int) -> int:
    """Images in RAM under a limit of ``descriptors`` (rule E1)."""
    left = descriptors - connection_limit(descriptors) - RESERVED_DESCRIPTORS
    return max(1, min(MAX_IMAGES, left // DESCRIPTORS_PER_IMAGE))
