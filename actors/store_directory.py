"""The state directory: its parts, its lock, and how anything in it is reached (rule D9).

Owner of the lock. Directories are opened by name each time, every component below the root without
following links, so that a directory deleted while running can simply be made again (rule D7).

    <state>/segments.noindex/<namespace hash>/   images and schemas
    <state>/quarantine/                          damaged files, bounded
    <state>/trash/                               cleared namespaces on their way out
    <state>/lock, written.json                   the lock, the daily write meter
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prefixcached.actors.filesystem import FileSystem, is_private_directory
from prefixcached.actors.storage_format import parse_file_name

SEGMENTS: Final = "segments.noindex"
QUARANTINE: Final = "quarantine"
TRASH: Final = "trash"
_PARTS: Final = (SEGMENTS, QUARANTINE, TRASH)

LOCK_NAME: Final = "lock"
METER_NAME: Final = "written.json"
NO_INDEX_NAME: Final = ".metadata_never_index"
"""Spotlight leaves a directory with such a file alone (it skips `*.noindex` by itself)."""

PROBE_NAME: Final = "tmp-probe"
TEMPORARY_PREFIX: Final = "tmp-"
"""Files that a write has not finished. Whoever holds the lock may remove all it does not write."""

_NAMESPACE_DIRECTORY: Final = re.compile(r"[0-9a-f]{32}")


class StoreUnusableError(OSError):
    """What stands at the path now is not this daemon's to change."""


class StoreInUseError(StoreUnusableError):
    """Another daemon uses the directory."""


class Directory:
    """The state directory at ``path``, reached through ``filesystem``."""

    def __init__(self, path: str | Path, filesystem: FileSystem) -> None:
        self.path = os.path.realpath(path)
        self.filesystem = filesystem
        self._lock = -1
        self._device: int | None = None
        self._segments = os.path.join(self.path, SEGMENTS)
        self._unsynced = {self.path, self._segments}
        """Directories with names that may not last: an earlier daemon may have died before its
        barrier, and ours may fail."""
        self._inodes: dict[str, int] = {}
        self._unsaid: set[str] = set()
        """Parts that are not those of the last time, and were made by a try that failed later."""

    def prepare(self) -> tuple[str, ...]:
        """Create what is missing, check whose it is, and take the lock. May be called again.

        Returns the parts that were missing, now or at a try that failed since, or that another
        daemon made again.

        Raises:
            PermissionError: The directory belongs to somebody else, or others can write to it.
            StoreInUseError: Another daemon holds the lock.
            StoreUnusableError: The volume is gone: the path leads to another one.
            OSError: The volume is full or read-only.
        """
        system = self.filesystem
        self._make_root()
        with self.opened() as root:
            self._check_owner(root, self.path)
            self._take_lock(root)
            for name in _PARTS:
                if self._make(name, root, self.path):
                    self._unsaid.add(name)
                with self._opened_within(name, root) as part:
                    self._check_owner(part, os.path.join(self.path, name))
                    system.restrict(part)
                    self._mark_not_indexed(part)
            self._sync(self.path, root)
            self._compare_parts(root)
        said, self._unsaid = self._unsaid, set()
        return tuple(name for name in _PARTS if name in said)

    def holds_lock(self) -> bool:
        """Whether the lock that is held is that of the directory which is at the path now.

        It is another's where the directory was moved or deleted and another daemon made it again.
        Any thread may ask.
        """
        lock = self._lock
        if lock < 0:
            return False
        found = self._status_of(os.path.join(self.path, LOCK_NAME))
        if found is None:
            return False
        mine = self.filesystem.status(lock)
        return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)

    def require_lock(self) -> None:
        """Raise StoreUnusableError unless `holds_lock`."""
        if not self.holds_lock():
            raise StoreUnusableError(
                errno.ENOLCK, "the lock of the state directory is not held", self.path
            )

    def close(self) -> None:
        """Give up the lock. The store must not be used any more."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            self.filesystem.close(lock)

    @contextlib.contextmanager
    def opened(self, *names: str) -> Iterator[int]:
        """Open a directory below the state directory, following no link, for the block."""
        with contextlib.ExitStack() as stack:
            descriptor = self.filesystem.open_directory(self.path)
            stack.callback(self.filesystem.close, descriptor)
            for name in names:
                descriptor = self.filesystem.open_directory(name, descriptor)
                stack.callback(self.filesystem.close, descriptor)
            yield descriptor

    @contextlib.contextmanager
    def opened_namespace(self, name: str, *, create: bool = False) -> Iterator[int]:
        """Open a namespace's directory, made first where ``create`` says so, for the block."""
        if not create:
            with self.opened(SEGMENTS, name) as descriptor:
                yield descriptor
            return
        with self.opened(SEGMENTS) as segments:
            self._make(name, segments, self._segments)
            self._sync(self._segments, segments)
            with self._opened_within(name, segments) as descriptor:
                yield descriptor

    @contextlib.contextmanager
    def _opened_within(self, name: str, within: int | None) -> Iterator[int]:
        descriptor = self.filesystem.open_directory(name, within)
        try:
            yield descriptor
        finally:
            self.filesystem.close(descriptor)

    def _make_root(self) -> None:
        """Make the state directory, and those above it, where they are missing."""
        missing = []
        path = self.path
        while (found := self._status_of(path)) is None:
            missing.append(path)
            path = os.path.dirname(path)
        self._check_volume(found.st_dev)
        for path in reversed(missing):
            self._make(path, None, os.path.dirname(path))
        for path in sorted(self._unsynced - {self.path, self._segments}):
            with self._opened_within(path, None) as above:
                self._sync(path, above)

    def _check_volume(self, device: int) -> None:
        """Refuse to fill the mount point of a volume that was unplugged (rule D7).

        A volume may come back as another device: then it has all that was made. This is asked
        before anything is made, since what a refused try made would pass for that the next time.
        """
        if self._device not in (None, device) and any(
            self._status_of(os.path.join(self.path, part)) is None for part in _PARTS
        ):
            raise StoreUnusableError(
                errno.ENODEV, "the volume of the state directory is gone", self.path
            )

    def _compare_parts(self, root: int) -> None:
        """Note which parts are others than before; on another device all have other numbers."""
        device = self.filesystem.status(root).st_dev
        inodes = {name: self.filesystem.status_of(name, root).st_ino for name in _PARTS}
        if device == self._device:
            self._unsaid.update(name for name in _PARTS if inodes[name] != self._inodes[name])
        self._device, self._inodes = device, inodes

    def _status_of(self, path: str) -> os.stat_result | None:
        try:
            return self.filesystem.status_of(path)
        except FileNotFoundError:
            return None

    def _make(self, name: str, within: int | None, above: str) -> bool:
        """Make a directory in the one at the path ``above``; its name lasts once that is synced."""
        is_new = self.filesystem.make_directory(name, within)
        if is_new:
            self._unsynced.add(above)
        return is_new

    def _sync(self, path: str, descriptor: int) -> None:
        """Make the names in a directory last, where they may not."""
        if path in self._unsynced:
            self.filesystem.barrier_directory(descriptor)
            self._unsynced.discard(path)

    def _check_owner(self, descriptor: int, path: str) -> None:
        status = self.filesystem.status(descriptor)
        if not is_private_directory(status, os.geteuid()):
            raise PermissionError(
                errno.EACCES,
                f"must belong to user {os.geteuid()} and be writable by nobody else, but belongs "
                f"to {status.st_uid} with mode {status.st_mode & 0o777:o}; "
                "change it or choose another --state-dir",
                path,
            )

    def _take_lock(self, root: int) -> None:
        """Lock the file that has the lock's name now: an earlier one may have been deleted."""
        if self.holds_lock():
            return
        try:
            lock = self.filesystem.lock_file(LOCK_NAME, root)
        except BlockingIOError as error:
            raise StoreInUseError(
                errno.EBUSY, "another prefixcached daemon uses this directory", self.path
            ) from error
        self.close()
        self._lock = lock

    def _mark_not_indexed(self, part: int) -> None:
        with contextlib.suppress(FileExistsError):
            self.filesystem.close(self.filesystem.create_file(NO_INDEX_NAME, part))


def temporary_name() -> str:
    """Return a name for a file that is being written, unique in its directory."""
    return TEMPORARY_PREFIX + secrets.token_hex(16)


def entry_path(directory: str, name: str) -> str:
    """Return the path of an image's file as `FileEntry.path` gives it."""
    return f"{directory}/{name}"


def split_path(path: str) -> tuple[str, str]:
    """Return namespace directory and file name of an entry's path.

    Raises:
        ValueError: Not a path that `entry_path` made: it could lead out of the directory.
    """
    directory, _, name = path.partition("/")
    if not _NAMESPACE_DIRECTORY.fullmatch(directory) or parse_file_name(name) is None:
        raise ValueError(f"{path!r} is not the path of an image's file")
    return directory, name


def is_namespace_directory(name: str) -> bool:
    """Whether a name can be that of a namespace's directory."""
    return _NAMESPACE_DIRECTORY.fullmatch(name) is not None
