"""Reading and checking files of the store: nothing is lent that was not read whole (rule D3).

`Reader` may be called from several threads at once. It owns the cache of decoded schemas. Looking
one up needs no lock, since a digest names one content for ever. Making room does: another thread
may change the dictionary between the two calls that find its oldest entry.
"""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import xxhash

from prefixcached.actors.filesystem import FileSystem, ImageMemory
from prefixcached.actors.storage_format import (
    DATA_ALIGNMENT,
    DamagedFile,
    ForeignFile,
    decode_header,
    header_bytes,
    schema_digest,
    schema_name,
)
from prefixcached.actors.store_directory import SEGMENTS, Directory, split_path
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import FileEntry
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.schema import Schema, decode_schema

READ_BYTES: Final = 1 << 20
"""One read. Larger ones gain nothing (actors/memory measured it), and a cancelled read ends at the
next one."""

CACHED_SCHEMAS: Final = 256
"""Decoded schemas kept: more models than one machine serves, about 20 KiB each."""

_ATTEMPTS: Final = 3
"""How often a file that changes while it is read is read again (our own `touch` changes it)."""


class DirectoryGoneError(OSError):
    """The directory of all files is not where it was: its volume is unplugged, or it was deleted.

    Which of both, only preparing it again tells (`Store.prepare`); of a file it says nothing.
    """


class Identity(msgspec.Struct, frozen=True):
    """What tells a file that was verified from one that changed since (rule D3)."""

    device: int
    inode: int
    size_bytes: int
    changed_nanoseconds: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        """The identity of a file with that status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


class VerifiedFile:
    """An open file whose every byte was checked. Whoever holds it closes it, once or more often.

    ``descriptor`` is read-only, and the image lies at ``data_offset`` in it. ``read_bytes`` is 0
    where an earlier verification still held.
    """

    def __init__(
        self, descriptor: int, data_offset: int, identity: Identity, read_bytes: int = 0
    ) -> None:
        self.descriptor = descriptor
        self.data_offset = data_offset
        self.identity = identity
        self.read_bytes = read_bytes

    def duplicate(self, filesystem: FileSystem) -> "VerifiedFile":
        """Return a second holder of the same file. Raises OSError (EMFILE)."""
        descriptor = filesystem.duplicate(self.descriptor)
        return VerifiedFile(descriptor, self.data_offset, self.identity)

    def close(self) -> None:
        """Close the descriptor; what a volume that is gone says to that changes nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def no_step() -> None:
    """Between two reads: nothing."""


class Reader:
    """Opens, checks and touches the files of ``directory``.

    Every method blocks. `DamagedFile` is a permanent finding; OSError is transient and says
    nothing about the file's bytes (rule D4); FileNotFoundError means that the file is gone, and
    never that the whole directory is: that is a `DirectoryGoneError`.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._system = directory.filesystem
        self._schemas: dict[str, Schema] = {}
        self._making_room = threading.Lock()

    def remember_schema(self, digest: str, schema: Schema) -> None:
        """Spare reading a schema's file."""
        with self._making_room:
            if len(self._schemas) >= CACHED_SCHEMAS:
                del self._schemas[next(iter(self._schemas))]
            self._schemas[digest] = schema

    def require_directory(self) -> None:
        """Raise DirectoryGoneError unless the directory of all files can be opened.

        Whoever did not find a file asks before he calls it gone.
        """
        try:
            with self._directory.opened(SEGMENTS):
                return
        except FileNotFoundError as error:
            raise DirectoryGoneError(
                errno.ENOENT, "the directory is not where it was", self._directory.path
            ) from error

    def is_there(self, entry: FileEntry) -> bool:
        """Whether the entry's file can be opened where it should lie; errors as `verify`."""
        with contextlib.suppress(FileNotFoundError), self._opened(entry):
            return True
        return False

    def verify(
        self, entry: FileEntry, known: Identity | None = None, step: Callable[[], None] = no_step
    ) -> VerifiedFile:
        """Open the file of ``entry`` and read all of it, unless it is still the ``known`` one.

        Args:
            entry: What the index says of the file; everything is compared with it.
            known: Identity at an earlier verification.
            step: Called before each read; what it raises ends the verification.
        """
        with self._opened(entry) as (descriptor, close):
            for _ in range(_ATTEMPTS):
                status = self._system.status(descriptor)
                identity = Identity.of(status)
                if identity == known:
                    close.pop_all()
                    return VerifiedFile(descriptor, entry.data_offset, identity)
                self._check(descriptor, entry, status, step)
                if Identity.of(self._system.status(descriptor)) == identity:
                    close.pop_all()
                    return VerifiedFile(descriptor, entry.data_offset, identity, status.st_size)
        raise OSError(errno.EAGAIN, "the file changes while it is read", entry.path)

    def load(self, entry: FileEntry, image: ImageMemory) -> Identity:
        """Fill ``image`` from the file of ``entry``, checking every byte on the way.

        Returns the file's identity. After an error the image's bytes are undefined.
        """
        with self._opened(entry) as (descriptor, _):
            status = self._system.status(descriptor)
            self._check_header(descriptor, entry, status)
            if image.nbytes != entry.data_bytes:
                raise ValueError(f"{image.nbytes} bytes of memory for {entry.data_bytes} of data")
            hasher = xxhash.xxh3_128()
            self._system.advise_read(descriptor, 0, status.st_size)
            try:
                self._system.load_image(descriptor, entry.data_offset, image, hasher)
            except EOFError as error:
                raise DamagedFile(str(error)) from error
            self._check_tokens(descriptor, entry, hasher)
            return Identity.of(status)

    def touch(self, entry: FileEntry, nanoseconds: int, known: Identity | None) -> Identity | None:
        """Set the file's modification time: its recency, which survives a restart (rule D5).

        Returns the identity that the file has now if it was the ``known`` one before, so that our
        own change does not cost a verification; else None.
        """
        with self._opened(entry) as (descriptor, _):
            before = Identity.of(self._system.status(descriptor))
            self._system.touch(descriptor, nanoseconds)
            after = Identity.of(self._system.status(descriptor))
        return after if before == known and before.size_bytes == after.size_bytes else None

    @contextlib.contextmanager
    def _opened(self, entry: FileEntry) -> Iterator[tuple[int, contextlib.ExitStack]]:
        """Open an entry's file for the block; whoever empties the stack keeps the descriptor."""
        directory, name = split_path(entry.path)
        with contextlib.ExitStack() as close:
            try:
                with self._directory.opened_namespace(directory) as within:
                    descriptor = self._open_regular(name, within)
            except FileNotFoundError:
                self.require_directory()
                raise
            close.callback(self._system.close, descriptor)
            yield descriptor, close

    def _open_regular(self, name: str, within: int) -> int:
        try:
            return self._system.open_file(name, within)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise DamagedFile("a link or a device stands in its place") from error
            raise

    def _check(
        self, descriptor: int, entry: FileEntry, status: os.stat_result, step: Callable[[], None]
    ) -> None:
        """Compare header, checksum, sizes and tokens of an open file with its entry."""
        self._check_header(descriptor, entry, status)
        self._system.advise_read(descriptor, 0, status.st_size)
        hasher = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(READ_BYTES, entry.data_bytes)))
        offset, end = entry.data_offset, entry.data_offset + entry.data_bytes
        while offset < end:
            step()
            piece = buffer[: end - offset]
            self.read_fully(descriptor, piece, offset)
            hasher.update(piece)
            offset += piece.nbytes
        self._check_tokens(descriptor, entry, hasher)

    def _check_header(self, descriptor: int, entry: FileEntry, status: os.stat_result) -> None:
        expected_bytes = entry.data_offset + entry.data_bytes + len(entry.tokens)
        if not stat.S_ISREG(status.st_mode) or status.st_size != expected_bytes:
            raise DamagedFile(f"{status.st_size} bytes, {expected_bytes} expected")
        data = self.read_start(descriptor, status.st_size)
        try:
            description, _ = decode_header(data, self._schema_of(entry), status.st_size)
        except ForeignFile as error:
            raise DamagedFile(f"another file stands in its place: {error}") from error
        if description.header != entry.header or description.data_offset != entry.data_offset:
            raise DamagedFile("the header is not the one that the index knows")

    def _check_tokens(self, descriptor: int, entry: FileEntry, hasher: "xxhash.xxh3_128") -> None:
        tokens = bytearray(len(entry.tokens))
        self.read_fully(descriptor, memoryview(tokens), entry.data_offset + entry.data_bytes)
        hasher.update(tokens)
        if hasher.hexdigest() != entry.header.checksum:
            raise DamagedFile("the data does not match its checksum")
        if tokens != entry.tokens:
            raise DamagedFile("the tokens are not those that the index knows")

    def read_start(self, descriptor: int, file_bytes: int) -> bytes:
        """Return all bytes before a file's data; DamagedFile where there is no such start."""
        start = self.read_range(descriptor, 0, min(DATA_ALIGNMENT, file_bytes))
        length = header_bytes(start, file_bytes)
        if length > len(start):
            start += self.read_range(descriptor, len(start), length - len(start))
        return start[:length]

    def read_range(self, descriptor: int, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset``. Raises DamagedFile where the file ends before."""
        data = bytearray(count)
        self.read_fully(descriptor, memoryview(data), offset)
        return bytes(data)

    def read_fully(self, descriptor: int, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``. Raises DamagedFile where the file ends before."""
        done = 0
        while done < buffer.nbytes:
            count = self._system.read(descriptor, buffer[done:], offset + done)
            if count == 0:
                raise DamagedFile(f"the file ends at byte {offset + done}")
            done += count

    def read_schema(self, digest: str, within: int) -> tuple[bytes, Schema]:
        """Return a schema from its file in the namespace directory ``within``, encoded and decoded.

        Raises:
            DamagedFile: The content does not match its name.
        """
        descriptor = self._system.open_file(schema_name(digest), within)
        try:
            size = self._system.status(descriptor).st_size
            if size > limits.MAX_SCHEMA_BYTES:
                raise DamagedFile(f"a schema of {size} bytes")
            encoded = self.read_range(descriptor, 0, size)
        finally:
            self._system.close(descriptor)
        if schema_digest(encoded) != digest:
            raise DamagedFile("a schema's content does not match its name")
        try:
            return encoded, decode_schema(encoded)
        except SchemaError as error:
            raise DamagedFile(str(error)) from error

    def _schema_of(self, entry: FileEntry) -> Schema | None:
        digest = entry.header.schema_digest
        if not digest:
            return None
        schema = self._schemas.get(digest)
        if schema is None:
            directory, _ = split_path(entry.path)
            try:
                with self._directory.opened_namespace(directory) as within:
                    _, schema = self.read_schema(digest, within)
            except FileNotFoundError as error:
                self.require_directory()
                # Not transient: without its schema the file can never be checked (rule D1).
                raise DamagedFile("the schema's file is gone") from error
            self.remember_schema(digest, schema)
        return schema
