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
        self._stuck: dict[str, OSError] = {}
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
            left = len(names)
            for name in names:
                if left <= self._quarantine_limits.files and total <= bound:
                    break
                removal = _Removal()
                if self._remove_tree(name, quarantine, QUARANTINE, removal):
                    nbytes = sizes[name]
                    left -= 1
                    self.dropped_files += 1
                    _log.warning("quarantine-dropped", file=name, bytes=nbytes)
                else:
                    nbytes = sizes[name] - self.tree_bytes(name, quarantine)
                    _log.warning("quarantined-file-stays", file=name, error=removal.first_error)
                total -= nbytes
                freed += nbytes
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
            removal = _Removal()
            try:
                with self._directory.opened(*above) as within:
                    if not self._remove_tree(name, within, "/".join(above), removal):
                        left = self.tree_bytes(name, within)
                        self.add(path, left, foreign=True)
                        freed += nbytes - left
                        _log.warning("foreign-file-stays", file=path, error=removal.first_error)
                        continue
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

        What cannot be deleted is passed over until nothing else is left.

        Returns the bytes of former entries that became free, and whether the trash is empty.

        Raises:
            OSError: Nothing was left but what cannot be deleted now; the next call tries it again.
        """
        removal = _Removal(most_files, self._stuck)
        done = True
        with self._directory.opened(TRASH) as trash:
            for name in self._system.names(trash):
                if name != NO_INDEX_NAME and not removal.is_spent:
                    done = self._remove_tree(name, trash, TRASH, removal) and done
        if not done and (removal.is_spent or removal.entry_bytes):
            return removal.entry_bytes, False
        self._stuck = {}
        if done:
            return removal.entry_bytes, True
        raise next(iter(removal.stuck.values()))

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
        self, name: str, within: int, above: str, removal: "_Removal", depth: int = 0
    ) -> bool:
        """Remove a file, or a directory and all in it, past whatever cannot be removed.

        Returns whether it is gone.
        """
        path = f"{above}/{name}"
        if path in removal.stuck:
            return False
        try:
            status = self._system.status_of(name, within)
            if not stat.S_ISDIR(status.st_mode):
                if not removal.may_try():
                    return False
                self._system.unlink(name, within)
                if self.remove(path) is None and parse_file_name(name) is not None:
                    removal.entry_bytes += allocated_bytes(status)
                return True
            if not self._empty_directory(name, within, path, removal, depth):
                return False
            self._system.remove_directory(name, within)
        except FileNotFoundError:
            pass  # Somebody else removed it (rule D1).
        except OSError as error:
            removal.stuck[path] = error
            return False
        self.remove(path)
        return True

    def _empty_directory(
        self, name: str, within: int, path: str, removal: "_Removal", depth: int
    ) -> bool:
        if depth >= _MAX_DEPTH:
            return True  # Where it is not empty, its removal fails.
        descriptor = self._system.open_directory(name, within)
        try:
            is_empty = True
            for child in self._system.names(descriptor):
                if removal.is_spent:
                    return False
                is_empty = (
                    self._remove_tree(child, descriptor, path, removal, depth + 1) and is_empty
                )
        finally:
            self._system.close(descriptor)
        return is_empty


class _Removal:
    """One step of removing: how many files it may still try, and what came of it.

    Args:
        files: How many files it may try; None for all.
        stuck: What could not be removed by an earlier step and is passed over, by path. What this
            one cannot remove is added.
    """

    def __init__(self, files: int | None = None, stuck: dict[str, OSError] | None = None) -> None:
        self._files = files
        self.stuck = {} if stuck is None else stuck
        self.is_spent = False
        self.entry_bytes = 0

    @property
    def first_error(self) -> str:
        return str(next(iter(self.stuck.values()), ""))

    def may_try(self) -> bool:
        if self._files is not None:
            self.is_spent = self._files <= 0
            self._files -= 1
        return not self.is_spent
