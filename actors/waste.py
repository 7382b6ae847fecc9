"""What the directory holds beside entries: counted, bounded, first to go (rules D3, D5, D10).

Owner of the account of other files: foreign and unattached ones, schemas, leftovers of failed
writes, quarantine and trash. One thread at a time may call it (the writer's, or the scan before
the writer starts), except `quarantine`, which the prefetcher's threads call too: it only renames,
and replaces the one number that it counts.
"""

import contextlib
import stat
import time
from collections.abc import Iterator
from typing import Final

import msgspec
import structlog

from prefixcached.actors.filesystem import FileSystem, allocated_bytes
from prefixcached.actors.storage_format import parse_file_name
from prefixcached.actors.store_directory import NO_INDEX_NAME, QUARANTINE, TRASH, Directory
from prefixcached.protocol import limits

QUARANTINE_FILES: Final = 64
"""Damaged files kept for whoever wants to know why; more say nothing new."""

QUARANTINE_BYTES: Final = 1024 * limits.MEBIBYTE
"""Their bytes count in the cap (rule D5): eight full segments."""

_MAX_DEPTH: Final = 16
"""Directories within directories that are removed; we make two."""

_log = structlog.get_logger(__name__)


class QuarantineLimits(msgspec.Struct, frozen=True):
    """How much is kept aside."""

    files: int = QUARANTINE_FILES
    bytes: int = QUARANTINE_BYTES


class Waste:
    """Other files of ``directory`` by path, relative to the state directory."""

    def __init__(self, directory: Directory, quarantine: QuarantineLimits) -> None:
        self._directory = directory
        self._system: FileSystem = directory.filesystem
        self._quarantine_limits = quarantine
        self._files: dict[str, int] = {}
        self._files_bytes = 0
        self._foreign: dict[str, None] = {}
        self._freed_unreported = 0
        self.foreign_bytes = 0
        self.quarantine_bytes = 0
        self.quarantined_files = 0
        self.dropped_files = 0

    @property
    def other_bytes(self) -> int:
        """Allocated bytes of all files that are no entries."""
        return self._files_bytes + self.quarantine_bytes

    @property
    def foreign_files(self) -> int:
        """Number of foreign, unattached and unreadable files."""
        return len(self._foreign)

    def add(self, path: str, nbytes: int, *, foreign: bool = False) -> None:
        """Count a file. A path counts once."""
        self.remove(path)
        self._files[path] = nbytes
        self._files_bytes += nbytes
        if foreign:
            self._foreign[path] = None
            self.foreign_bytes += nbytes

    def remove(self, path: str) -> int | None:
        """Stop counting a file. Returns what it counted, None where it did not."""
        nbytes = self._files.pop(path, None)
        if nbytes is None:
            return None
        self._files_bytes -= nbytes
        if path in self._foreign:
            del self._foreign[path]
            self.foreign_bytes -= nbytes
        return nbytes

    def forget(self, prefix: str) -> None:
        """Stop counting what was below a directory that is gone."""
        for path in [path for path in self._files if path.startswith(prefix)]:
            self.remove(path)

    def move(self, prefix: str, new_prefix: str) -> None:
        """Follow a rename of a directory."""
        for path in [path for path in self._files if path.startswith(prefix)]:
            foreign = path in self._foreign
            nbytes = self.remove(path) or 0
            self.add(new_prefix + path.removeprefix(prefix), nbytes, foreign=foreign)

    # -- quarantine --------------------------------------------------------------------------------

    def quarantine(self, directory: str, name: str, reason: str) -> None:
        """Move a damaged file of a namespace's directory aside; the oldest beyond bounds go.

        Raises:
            OSError: It could not be moved and stays where it is.
        """
        with (
            self._directory.opened_namespace(directory) as source,
            self._directory.opened(QUARANTINE) as target,
        ):
            self._system.rename(name, source, f"{time.time_ns():020d}.{directory}.{name}", target)
        self.quarantined_files += 1
        _log.warning("file-quarantined", file=f"{directory}/{name}", reason=reason)
        with contextlib.suppress(OSError):
            self.trim_quarantine()

    def trim_quarantine(self, most_bytes: int | None = None) -> int:
        """Drop the oldest files of the quarantine until its bounds hold, and count the rest.

        Returns the bytes that became free.
        """
        bound = self._quarantine_limits.bytes if most_bytes is None else most_bytes
        freed = 0
        with self._directory.opened(QUARANTINE) as quarantine:
            names = sorted(n for n in self._system.names(quarantine) if n != NO_INDEX_NAME)
            sizes = {name: self.tree_bytes(name, quarantine) for name in names}
            total = sum(sizes.values())
            for position, name in enumerate(names):
                if len(names) - position <= self._quarantine_limits.files and total <= bound:
                    break
                with contextlib.suppress(FileNotFoundError):
                    self._remove_tree(name, quarantine, QUARANTINE, _Allowance(None))
                total -= sizes[name]
                freed += sizes[name]
                self.dropped_files += 1
                _log.warning("quarantine-dropped", file=name, bytes=sizes[name])
        self.quarantine_bytes = total
        return freed

    # -- foreign files -----------------------------------------------------------------------------

    def drop_foreign(self, wanted_bytes: int) -> int:
        """Delete foreign files, then quarantined ones, until ``wanted_bytes`` are free (rule D10).

        Returns the bytes that became free, which may be fewer.
        """
        freed = 0
        for path in list(self._foreign):
            if freed >= wanted_bytes:
                return freed
            nbytes = self._files[path]
            *above, name = path.split("/")
            try:
                with self._directory.opened(*above) as within:
                    self._remove_tree(name, within, "/".join(above), _Allowance(None))
            except FileNotFoundError:
                self.remove(path)
            except OSError as error:
                _log.warning("foreign-file-stays", file=path, error=str(error))
                continue
            _log.warning("foreign-file-dropped", file=path, bytes=nbytes)
            self.dropped_files += 1
            freed += nbytes
        if freed < wanted_bytes:
            keep = max(0, self.quarantine_bytes - (wanted_bytes - freed))
            with contextlib.suppress(OSError):
                freed += self.trim_quarantine(keep)
        return freed

    # -- trash -------------------------------------------------------------------------------------

    def count_trash(self) -> None:
        """Count what an earlier run left in the trash; it was no entry of this one."""
        with self._directory.opened(TRASH) as trash:
            for name in self._system.names(trash):
                if name != NO_INDEX_NAME:
                    for path, nbytes in self._walk(name, trash, TRASH):
                        self.add(path, nbytes)

    def empty_trash(self, most_files: int) -> tuple[int, bool]:
        """Delete up to ``most_files`` files of the trash.

        Returns the bytes of former entries that became free, and whether the trash is empty.

        Raises:
            OSError: Something cannot be deleted now. What was deleted before is counted next time.
        """
        allowance = _Allowance(most_files)
        done = False
        try:
            with self._directory.opened(TRASH) as trash:
                names = [name for name in self._system.names(trash) if name != NO_INDEX_NAME]
                done = all(self._remove_tree(name, trash, TRASH, allowance) for name in names)
        except OSError:
            self._freed_unreported += allowance.entry_bytes
            raise
        freed, self._freed_unreported = self._freed_unreported + allowance.entry_bytes, 0
        return freed, done

    # -- trees -------------------------------------------------------------------------------------

    def tree_bytes(self, name: str, within: int) -> int:
        """Allocated bytes of a file, or of the files in a directory; links are not followed."""
        return sum(nbytes for _, nbytes in self._walk(name, within, ""))

    def _walk(
        self, name: str, within: int, above: str, depth: int = 0
    ) -> Iterator[tuple[str, int]]:
        path = f"{above}/{name}"
        try:
            status = self._system.status_of(name, within)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            yield path, allocated_bytes(status)
        elif depth < _MAX_DEPTH:
            descriptor = self._system.open_directory(name, within)
            try:
                for child in self._system.names(descriptor):
                    yield from self._walk(child, descriptor, path, depth + 1)
            finally:
                self._system.close(descriptor)

    def _remove_tree(
        self, name: str, within: int, above: str, allowance: "_Allowance", depth: int = 0
    ) -> bool:
        """Remove a file, or a directory and all in it. Returns False once allowance is spent."""
        path = f"{above}/{name}"
        status = self._system.status_of(name, within)
        if not stat.S_ISDIR(status.st_mode):
            if not allowance.take():
                return False
            self._system.unlink(name, within)
            if self.remove(path) is None and parse_file_name(name) is not None:
                allowance.entry_bytes += allocated_bytes(status)
            return True
        if depth < _MAX_DEPTH:
            descriptor = self._system.open_directory(name, within)
            try:
                for child in self._system.names(descriptor):
                    if not self._remove_tree(child, descriptor, path, allowance, depth + 1):
                        return False
            finally:
                self._system.close(descriptor)
        self._system.remove_directory(name, within)
        self.remove(path)
        return True


class _Allowance:
    """How many files one step may still delete, and the bytes of entries that it freed."""

    def __init__(self, files: int | None) -> None:
        self._files = files
        self.entry_bytes = 0

    def take(self) -> bool:
        if self._files is None:
            return True
        self._files -= 1
        return self._files >= 0
