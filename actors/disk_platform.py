"""What macOS and Linux do differently with files (PLATFORM 4).

Every function is best effort, except the two barriers: they raise when nothing of the kind works.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import platform
import plistlib
import struct
import sys
from collections.abc import Iterator
from typing import Final

_F_RDADVISE: Final = 44
_F_NOCACHE: Final = 48
_F_FULLFSYNC: Final = 51
_F_BARRIERFSYNC: Final = 85
"""Numbers of fcntl.h; several of them are missing from Python's `fcntl` (PLATFORM 4)."""

_IOPOL_TYPE_DISK: Final = 0
_IOPOL_SCOPE_THREAD: Final = 1
_IOPOL_DEFAULT: Final = 0
_IOPOL_UTILITY: Final = 4

_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_LOWEST_BEST_EFFORT: Final = (2 << 13) | 7
"""Best effort, level 7. The idle class could starve a writer that a flush waits for."""
_IOPRIO_NONE: Final = 0
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
"""System call number of ioprio_set, for which libc has no function."""

_BACKUP_EXCLUSION: Final = b"com.apple.metadata:com_apple_backup_excludeItem"
"""Extended attribute that Time Machine honours; what `tmutil addexclusion` sets."""


def data_barrier(descriptor: int) -> None:
    """Order all earlier writes to this file before anything written later.

    Raises:
        OSError: The data could not be written.
    """
    if sys.platform == "darwin":
        for command in (_F_BARRIERFSYNC, _F_FULLFSYNC):
            # ENOTSUP, EINVAL or ENOTTY on volumes without it (SMB, exFAT).
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, command)
                return
        os.fsync(descriptor)
    else:
        os.fdatasync(descriptor)


def drain_device(descriptor: int) -> None:
    """Make all that was written to the file's volume survive a loss of power.

    Raises:
        OSError: The data could not be written.
    """
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _F_FULLFSYNC)
            return
    os.fsync(descriptor)


def bypass_cache(descriptor: int) -> None:
    """Keep what is written from displacing other pages; the image is still in RAM.

    On Linux nothing: pages of a new file are what makes its first read warm.
    """
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _F_NOCACHE, 1)


def advise_read(descriptor: int, offset: int, count: int) -> None:
    """Start reading ``count`` bytes from ``offset`` ahead of their use."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            request = struct.pack("qi4x", offset, min(count, 2**31 - 1))
            fcntl.fcntl(descriptor, _F_RDADVISE, request)
        else:
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)


def exclude_from_backup(descriptor: int) -> None:
    """Keep a directory out of Time Machine; nothing elsewhere."""
    if sys.platform == "darwin":
        value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
        with contextlib.suppress(OSError, AttributeError):
            setxattr = ctypes.CDLL(None, use_errno=True).fsetxattr
            setxattr.argtypes = [
                ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p,
                ctypes.c_size_t, ctypes.c_uint32, ctypes.c_int,
            ]  # fmt: skip
            setxattr.restype = ctypes.c_int
            setxattr(descriptor, _BACKUP_EXCLUSION, value, len(value), 0, 0)


@contextlib.contextmanager
def low_priority_io() -> Iterator[None]:
    """Let other I/O go first within the block. Undone after it, since threads are reused."""
    _set_thread_priority(low=True)
    try:
        yield
    finally:
        _set_thread_priority(low=False)


def _set_thread_priority(*, low: bool) -> None:
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform == "darwin":
            policy = _IOPOL_UTILITY if low else _IOPOL_DEFAULT
            _libc().setiopolicy_np(_IOPOL_TYPE_DISK, _IOPOL_SCOPE_THREAD, policy)
        elif (number := _IOPRIO_SET.get(platform.machine())) is not None:
            priority = _IOPRIO_LOWEST_BEST_EFFORT if low else _IOPRIO_NONE
            _libc().syscall(number, _IOPRIO_WHO_PROCESS, 0, priority)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
