"""Every file-system call of the store, behind one class, so that tests can fail or lose any.

Names are single components relative to an open directory, and no call follows a symbolic link: a
link inside the directory cannot lead out of it (rule D9). All calls block and raise OSError.
"""

import contextlib
import fcntl
import os
import stat
from typing import Final, Protocol

from prefixcached.actors import disk_platform
from prefixcached.actors.memory import Hasher

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""KV is derived from prompts: nobody else may read it (rule D9)."""

_COMMON_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | _COMMON_FLAGS
"""Without O_NONBLOCK, opening a FIFO that somebody put there would hang the daemon."""


class ImageMemory(Protocol):
    """What the store needs of an image's shared memory (actors/memory)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        ...

    def copy_to_file(self, fd: int, file_offset: int, hasher: Hasher | None = None) -> None:
        """Write all bytes to a file, feeding ``hasher`` on the way."""

    def load_from_file(self, fd: int, file_offset: int, hasher: Hasher | None = None) -> None:
        """Fill the image from a file, feeding ``hasher`` on the way."""

    def seal(self) -> None:
        """Make the bytes final."""


class FileSystem:
    """The real file system. Descriptors are plain integers; their opener closes them."""

    def make_directory(self, name: str, within: int | None = None) -> bool:
        """Create one private directory. Returns whether it is new."""
        try:
            os.mkdir(name, DIRECTORY_MODE, dir_fd=within)
        except FileExistsError:
            return False
        return True

    def open_directory(self, name: str, within: int | None = None) -> int:
        """Open a directory; NotADirectoryError or ELOOP where it is something else."""
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | _COMMON_FLAGS, dir_fd=within)

    def open_file(self, name: str, within: int) -> int:
        """Open a file for reading; ELOOP for a symbolic link."""
        return os.open(name, _READ_FLAGS, dir_fd=within)

    def create_file(self, name: str, within: int) -> int:
        """Create a private file that must not exist, for writing past the page cache."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON_FLAGS
        descriptor = os.open(name, flags, FILE_MODE, dir_fd=within)
        disk_platform.bypass_cache(descriptor)
        return descriptor

    def lock_file(self, name: str, within: int) -> int:
        """Open a lock file and lock it; BlockingIOError while another process holds the lock."""
        flags = os.O_RDWR | os.O_CREAT | _COMMON_FLAGS
        descriptor = os.open(name, flags, FILE_MODE, dir_fd=within)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            count = os.pwrite(descriptor, view, offset)
            view = view[count:]
            offset += count

    def write_image(self, descriptor: int, offset: int, image: ImageMemory, hasher: Hasher) -> None:
        """Write an image at ``offset``, feeding ``hasher`` with the same bytes."""
        image.copy_to_file(descriptor, offset, hasher)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Read into ``buffer`` from ``offset``. Returns the bytes read, 0 at the end."""
        return os.preadv(descriptor, [buffer], offset)

    def load_image(self, descriptor: int, offset: int, image: ImageMemory, hasher: Hasher) -> None:
        """Fill an image from ``offset``; EOFError where the file is too short."""
        image.load_from_file(descriptor, offset, hasher)

    def advise_read(self, descriptor: int, offset: int, count: int) -> None:
        """Start reading ahead. Never fails."""
        disk_platform.advise_read(descriptor, offset, count)

    def barrier(self, descriptor: int) -> None:
        """Order what was written to the file before all that follows."""
        disk_platform.data_barrier(descriptor)

    def barrier_directory(self, descriptor: int, *, drain: bool = False) -> None:
        """Make the directory's names durable; ``drain`` makes the volume survive a power loss."""
        if drain:
            disk_platform.drain_device(descriptor)
        else:
            os.fsync(descriptor)

    def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
        """Move a file or directory in one step, over a file of that name."""
        os.rename(name, new_name, src_dir_fd=within, dst_dir_fd=new_within)

    def unlink(self, name: str, within: int) -> None:
        """Remove one name."""
        os.unlink(name, dir_fd=within)

    def remove_directory(self, name: str, within: int) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=within)

    def names(self, descriptor: int) -> list[str]:
        """List a directory."""
        return os.listdir(descriptor)

    def status(self, descriptor: int) -> os.stat_result:
        """Status of an open file or directory."""
        return os.fstat(descriptor)

    def status_of(self, name: str, within: int | None = None) -> os.stat_result:
        """Status of a name, of the link itself where it is one."""
        return os.stat(name, dir_fd=within, follow_symlinks=False)

    def restrict(self, descriptor: int) -> None:
        """Make a directory private and keep it out of backups."""
        os.fchmod(descriptor, DIRECTORY_MODE)
        disk_platform.exclude_from_backup(descriptor)

    def touch(self, descriptor: int, nanoseconds: int) -> None:
        """Set the file's times."""
        os.utime(descriptor, ns=(nanoseconds, nanoseconds))

    def free_bytes(self, descriptor: int) -> int:
        """Bytes that this user may still write to the volume."""
        found = os.fstatvfs(descriptor)
        return found.f_bavail * found.f_frsize

    def duplicate(self, descriptor: int) -> int:
        """Return another descriptor of the same open file, close-on-exec."""
        return os.dup(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor. An error says nothing that the barrier did not say before."""
        with contextlib.suppress(OSError):
            os.close(descriptor)


def is_private_directory(status: os.stat_result, user: int) -> bool:
    """Whether a directory belongs to ``user`` and nobody else can write to it (rule D9)."""
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == user
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def allocated_bytes(status: os.stat_result) -> int:
    """Bytes that a file occupies on the disk; POSIX counts blocks of 512 whatever the volume."""
    return status.st_blocks * 512
