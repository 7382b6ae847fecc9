"""Building the index from the files alone (rules D1, D10): headers and tokens, no tensor data.

A `Scan` runs once, in a thread, before the first write: whoever iterates it owns it. Five system
calls a file, so that 10,000 files take about a second.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar

import msgspec
import structlog
import xxhash

from prefixcached.actors.filesystem import allocated_bytes
from prefixcached.actors.reading import Reader
from prefixcached.actors.storage_format import (
    DamagedFile,
    ForeignFile,
    ImageSizes,
    decode_description,
    namespace_directory,
    parse_file_name,
    parse_schema_name,
)
from prefixcached.actors.store_directory import (
    NO_INDEX_NAME,
    SEGMENTS,
    TEMPORARY_PREFIX,
    Directory,
    entry_path,
    is_namespace_directory,
)
from prefixcached.actors.waste import Waste
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import FileEntry
from prefixcached.protocol.errors import SchemaError

BATCH_FILES: Final = 256
"""Entries reported together: RamTier indexes a batch in a few milliseconds."""

BATCH_TOKEN_BYTES: Final = 4 * limits.MEBIBYTE
"""Tokens reported together; checkpoints of long prompts carry 4 bytes for every token."""

_FOREIGN_KINDS: Final = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""What opening a link, a socket or the like says."""

_log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")


class ScanBatch(msgspec.Struct, frozen=True):
    """Files found, and the encoded schemas that they name, by digest."""

    entries: tuple[FileEntry, ...]
    schemas: dict[str, bytes]


class _Schemas:
    """The whole schemas of one namespace's directory."""

    def __init__(self) -> None:
        self.encoded: dict[str, bytes] = {}
        self.unreadable: dict[str, OSError] = {}
        self.sizes: dict[str, ImageSizes] = {"": ImageSizes(None)}


class Scan:
    """One pass over the directory. Iterate it to the end, then read the counters."""

    def __init__(self, directory: Directory, reader: Reader, waste: Waste) -> None:
        self._directory = directory
        self._system = directory.filesystem
        self._reader = reader
        self._waste = waste
        self._pending: list[FileEntry] = []
        self._pending_schemas: dict[str, bytes] = {}
        self._pending_token_bytes = 0
        self.entry_bytes = 0
        self.damaged = 0
        self.unreadable = 0
        self.temporary = 0

    def __iter__(self) -> Iterator[ScanBatch]:
        """Yield all entries in batches. Never raises for what is wrong with one file.

        Raises:
            OSError: The directory itself cannot be listed, is not there any more at the end, or its
                lock is not held: what another daemon writes would be removed as a leftover.
        """
        self._directory.require_lock()
        with self._directory.opened(SEGMENTS) as segments:
            for name in self._system.names(segments):
                if name == NO_INDEX_NAME:
                    continue
                if name.startswith(TEMPORARY_PREFIX):
                    self._reap(name, segments, SEGMENTS)
                    continue
                if not is_namespace_directory(name):
                    self._foreign(name, segments, SEGMENTS)
                    continue
                try:
                    yield from self._scan_namespace(name, segments)
                except OSError as error:
                    self._unreadable(name, segments, SEGMENTS, error)
        # What vanished meanwhile may be on a volume that is unplugged: not all was found (rule D7).
        self._reader.require_directory()
        if self._pending:
            yield self._take_batch()
        with contextlib.suppress(OSError), self._directory.opened() as root:
            for name in self._system.names(root):
                if name.startswith(TEMPORARY_PREFIX):
                    self._reap(name, root, ".")
        with contextlib.suppress(OSError):
            self._waste.count_trash()
        with contextlib.suppress(OSError):
            self._waste.trim_quarantine()

    def _scan_namespace(self, name: str, segments: int) -> Iterator[ScanBatch]:
        try:
            within = self._system.open_directory(name, segments)
        except OSError as error:
            if error.errno not in (*_FOREIGN_KINDS, errno.ENOTDIR):
                raise
            self._foreign(name, segments, SEGMENTS)
            return
        try:
            names = self._system.names(within)
            schemas = self._read_schemas(name, names, within)
            kept = 0
            for file in names:
                if parse_schema_name(file) is not None:
                    continue
                if file.startswith(TEMPORARY_PREFIX):
                    self._reap(file, within, f"{SEGMENTS}/{name}")
                    continue
                kept += 1
                self._scan_file(name, file, within, schemas)
                if self._is_full():
                    yield self._take_batch()
            if not kept:
                self._remove_empty(name, within, segments)
        finally:
            self._system.close(within)

    def _scan_file(self, directory: str, name: str, within: int, schemas: _Schemas) -> None:
        """Take in one file, whatever it is. What cannot be read now stays as it is (rule D4)."""
        if parse_file_name(name) is None:
            self._foreign(name, within, f"{SEGMENTS}/{directory}")
            return
        try:
            entry = _twice(lambda: self._read_entry(directory, name, within, schemas))
        except ForeignFile:
            self._foreign(name, within, f"{SEGMENTS}/{directory}")
        except DamagedFile as error:
            self._damaged(directory, name, within, str(error))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in _FOREIGN_KINDS:
                self._foreign(name, within, f"{SEGMENTS}/{directory}")
            else:
                self._unreadable(name, within, f"{SEGMENTS}/{directory}", error)
        else:
            self._waste.remove(f"{SEGMENTS}/{directory}/{name}")  # a scan before this failed on it
            self.entry_bytes += entry.allocated_bytes
            self._pending.append(entry)
            self._pending_token_bytes += len(entry.tokens)
            if digest := entry.header.schema_digest:
                self._pending_schemas[digest] = schemas.encoded[digest]

    def _read_entry(self, directory: str, name: str, within: int, schemas: _Schemas) -> FileEntry:
        descriptor = self._system.open_file(name, within)
        try:
            status = self._system.status(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ForeignFile("not a file of this user")
            start = self._reader.read_start(descriptor, status.st_size)
            description = decode_description(start, status.st_size)
            header = description.header
            if (header.id, header.kind) != parse_file_name(name):
                raise DamagedFile(f"{header.kind} {header.id} under another name")
            if namespace_directory(header.namespace) != directory:
                raise DamagedFile("a file of another namespace")
            sizes = schemas.sizes.get(header.schema_digest)
            if header.schema_digest in schemas.unreadable:
                raise schemas.unreadable[header.schema_digest]
            if sizes is None:
                raise ForeignFile("its schema is gone")
            try:
                expected_bytes = sizes.image_bytes(header.spec)
            except SchemaError as error:
                raise DamagedFile(f"the file contradicts its schema: {error}") from error
            if expected_bytes != description.data_bytes:
                raise DamagedFile(f"{description.data_bytes} bytes, {expected_bytes} expected")
            tokens = self._reader.read_range(
                descriptor,
                description.data_offset + description.data_bytes,
                4 * description.tokens_count,
            )
        finally:
            self._system.close(descriptor)
        # The index goes by them, and a file that lends nothing is never read whole (rule D3).
        if xxhash.xxh3_128_hexdigest(tokens) != header.tokens_checksum:
            raise DamagedFile("the tokens do not match their checksum")
        return FileEntry(
            header=header,
            path=entry_path(directory, name),
            tokens=tokens,
            data_offset=description.data_offset,
            data_bytes=description.data_bytes,
            allocated_bytes=allocated_bytes(status),
            used_seconds=status.st_mtime,
        )

    def _read_schemas(self, directory: str, names: list[str], within: int) -> _Schemas:
        schemas = _Schemas()
        for name in names:
            digest = parse_schema_name(name)
            if digest is None:
                continue
            try:
                encoded, schema = _twice(partial(self._reader.read_schema, digest, within))
                size = allocated_bytes(self._system.status_of(name, within))
            except DamagedFile as error:
                self._damaged(directory, name, within, str(error))
                continue
            except OSError as error:
                schemas.unreadable[digest] = error
                _log.warning("schema-unreadable", file=f"{directory}/{name}", error=str(error))
                continue
            self._waste.add(f"{SEGMENTS}/{directory}/{name}", size)
            self._reader.remember_schema(digest, schema)
            schemas.encoded[digest] = encoded
            schemas.sizes[digest] = ImageSizes(schema)
        return schemas

    def _reap(self, name: str, within: int, above: str) -> None:
        """Remove what a write had not finished when its daemon died."""
        try:
            self._system.unlink(name, within)
        except OSError:
            self._foreign(name, within, above)
        else:
            self.temporary += 1

    def _foreign(self, name: str, within: int, above: str) -> None:
        with contextlib.suppress(OSError):
            self._waste.add(f"{above}/{name}", self._waste.tree_bytes(name, within), foreign=True)

    def _unreadable(self, name: str, within: int, above: str, error: OSError) -> None:
        """Count what cannot be read now: perhaps it is good, so it is no victim (rule D4)."""
        self.unreadable += 1
        _log.warning("file-unreadable", file=f"{above}/{name}", error=str(error))
        with contextlib.suppress(OSError):
            self._waste.add(f"{above}/{name}", self._waste.tree_bytes(name, within))

    def _damaged(self, directory: str, name: str, within: int, reason: str) -> None:
        self.damaged += 1
        try:
            self._waste.quarantine(directory, name, reason)
        except OSError as error:
            _log.warning("damaged-file-stays", file=f"{directory}/{name}", error=str(error))
            self._foreign(name, within, f"{SEGMENTS}/{directory}")

    def _remove_empty(self, directory: str, within: int, segments: int) -> None:
        """Remove a namespace without images; its schema comes again with its next put."""
        with contextlib.suppress(OSError):
            for name in self._system.names(within):
                self._system.unlink(name, within)
                self._waste.remove(f"{SEGMENTS}/{directory}/{name}")
            self._system.remove_directory(directory, segments)

    def _is_full(self) -> bool:
        return len(self._pending) >= BATCH_FILES or self._pending_token_bytes >= BATCH_TOKEN_BYTES

    def _take_batch(self) -> ScanBatch:
        batch = ScanBatch(tuple(self._pending), self._pending_schemas)
        self._pending, self._pending_schemas, self._pending_token_bytes = [], {}, 0
        return batch


def _twice(read: Callable[[], _Result]) -> _Result:
    """Call ``read``, once more where it fails: most of what fails here, fails for a moment."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except OSError:
        return read()
