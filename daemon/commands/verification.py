"""Checking every file of a state directory, read-only, whether or not a daemon works on it.

Nothing here takes the store's lock, removes what a write has not finished, or changes a time: a
daemon beside it notices nothing. A file that vanishes meanwhile was evicted and is no finding.
`Survey` is owned by whoever iterates it.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

from prefixcached.actors.filesystem import FileSystem, allocated_bytes
from prefixcached.actors.reading import Reader
from prefixcached.actors.storage_format import (
    DamagedFile,
    ForeignFile,
    decode_description,
    namespace_directory,
    parse_file_name,
    parse_schema_name,
)
from prefixcached.actors.store_directory import (
    NO_INDEX_NAME,
    QUARANTINE,
    SEGMENTS,
    TEMPORARY_PREFIX,
    Directory,
    entry_path,
    is_namespace_directory,
)
from prefixcached.actors.waste import QuarantineLimits, Waste
from prefixcached.protocol.actor_messages import FileEntry

_NOT_A_FILE: Final = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
"""What opening a link, a socket or the like says."""

Kind = Literal["good", "damaged", "foreign", "unreadable", "gone"]


class Finding(NamedTuple):
    """What one file turned out to be.

    ``path`` is relative to the segments' directory. ``reason`` is empty for a good one. ``nbytes``
    are those of the file, read or not.
    """

    path: str
    kind: Kind
    reason: str = ""
    nbytes: int = 0


class Candidate(NamedTuple):
    """A file with an image's or a schema's name, not read yet."""

    directory: str
    name: str
    nbytes: int


class Survey:
    """One look at the directory ``path``.

    Args:
        path: A state directory. It is not created.
    """

    def __init__(self, path: Path) -> None:
        self.directory = Directory(path, FileSystem())
        self._reader = Reader(self.directory)
        self._schemas: dict[tuple[str, str], bool] = {}
        self.foreign: list[Finding] = []
        self.temporary = 0

    def candidates(self) -> list[Candidate]:
        """Return what there is to check; fill ``foreign`` and ``temporary`` on the way.

        Raises:
            OSError: The directory cannot be listed. FileNotFoundError: nothing is stored there.
        """
        system = self.directory.filesystem
        found: list[Candidate] = []
        with self.directory.opened(SEGMENTS) as segments:
            for directory in sorted(system.names(segments)):
                if directory == NO_INDEX_NAME:
                    continue
                if not is_namespace_directory(directory):
                    self.foreign.append(Finding(directory, "foreign", "not a namespace"))
                    continue
                try:
                    within = system.open_directory(directory, segments)
                except OSError as error:
                    if error.errno != errno.ENOENT:
                        self.foreign.append(Finding(directory, "foreign", _text(error)))
                    continue
                try:
                    found.extend(self._candidates_in(directory, within))
                finally:
                    system.close(within)
        return found

    def _candidates_in(self, directory: str, within: int) -> Iterator[Candidate]:
        system = self.directory.filesystem
        for name in sorted(system.names(within)):
            if name.startswith(TEMPORARY_PREFIX):
                self.temporary += 1
                continue
            try:
                status = system.status_of(name, within)
            except FileNotFoundError:
                continue
            if parse_file_name(name) is None and parse_schema_name(name) is None:
                path = entry_path(directory, name)
                self.foreign.append(Finding(path, "foreign", "not a name of ours", status.st_size))
                continue
            yield Candidate(directory, name, status.st_size)

    def check(self, candidate: Candidate, step: Callable[[], None]) -> Finding:
        """Read one file whole and compare everything that it says of itself.

        Args:
            candidate: One of `candidates`.
            step: Called before each MiB.
        """
        path = entry_path(candidate.directory, candidate.name)
        try:
            self._check(candidate, step)
        except FileNotFoundError:
            return Finding(path, "gone")
        except ForeignFile as error:
            return Finding(path, "foreign", str(error), candidate.nbytes)
        except DamagedFile as error:
            return Finding(path, "damaged", str(error), candidate.nbytes)
        except OSError as error:
            kind: Kind = "foreign" if error.errno in _NOT_A_FILE else "unreadable"
            return Finding(path, kind, _text(error), candidate.nbytes)
        return Finding(path, "good", nbytes=candidate.nbytes)

    def _check(self, candidate: Candidate, step: Callable[[], None]) -> None:
        digest = parse_schema_name(candidate.name)
        with self.directory.opened(SEGMENTS, candidate.directory) as within:
            if digest is not None:
                self._reader.read_schema(digest, within)
                return
            entry = self._entry(candidate, within)
            self._require_schema(candidate.directory, entry.header.schema_digest, within)
        self._reader.verify(entry, step=step).close()

    def _entry(self, candidate: Candidate, within: int) -> FileEntry:
        """Return what the file says of itself, as the index would know it."""
        system = self.directory.filesystem
        descriptor = system.open_file(candidate.name, within)
        try:
            status = system.status(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ForeignFile("not a file of this user")
            start = self._reader.read_start(descriptor, status.st_size)
            description = decode_description(start, status.st_size)
            header = description.header
            if (header.id, header.kind) != parse_file_name(candidate.name):
                raise DamagedFile(f"{header.kind} {header.id} under another name")
            if namespace_directory(header.namespace) != candidate.directory:
                raise DamagedFile("a file of another namespace")
            tokens = self._reader.read_range(
                descriptor,
                description.data_offset + description.data_bytes,
                4 * description.tokens_count,
            )
        finally:
            system.close(descriptor)
        return FileEntry(
            header=header,
            path=entry_path(candidate.directory, candidate.name),
            tokens=tokens,
            data_offset=description.data_offset,
            data_bytes=description.data_bytes,
            allocated_bytes=allocated_bytes(status),
            used_seconds=status.st_mtime,
        )

    def _require_schema(self, directory: str, digest: str, within: int) -> None:
        """Raise ForeignFile where an image's schema is gone: it is unattached, not damaged (D1)."""
        if not digest:
            return
        key = directory, digest
        if key not in self._schemas:
            try:
                _, schema = self._reader.read_schema(digest, within)
            except (FileNotFoundError, DamagedFile):
                self._schemas[key] = False
            else:
                self._reader.remember_schema(digest, schema)
                self._schemas[key] = True
        if not self._schemas[key]:
            raise ForeignFile("its schema is gone or damaged, so it cannot be used")


def repair(directory: Directory, damaged: list[Finding]) -> list[str]:
    """Move damaged files into the quarantine, the oldest beyond its bounds go (rule D3).

    Safe at any time, also beside a daemon: to it, the file was deleted (rule D1).

    Returns:
        For each that could not be moved, what stood in the way.
    """
    system = directory.filesystem
    with directory.opened() as root:
        system.make_directory(QUARANTINE, root)
    waste = Waste(directory, QuarantineLimits())
    failures: list[str] = []
    for finding in damaged:
        namespace, _, name = finding.path.partition("/")
        try:
            waste.quarantine(namespace, name, finding.reason)
        except FileNotFoundError:
            continue
        except OSError as error:
            failures.append(f"{finding.path} stays: {_text(error)}")
    return failures


def _text(error: OSError) -> str:
    return error.strerror or str(error)
