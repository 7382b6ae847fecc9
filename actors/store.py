"""The store: every operation on the directory's files, synchronous (docs/storage-format.md).

A `Store` belongs to two actors, by method: `SsdTier` calls `prepare`, `scan`, `write`, `drain`,
`delete`, `clear`, `empty_trash`, `drop_others`, `probe` and the meter's three, one at a time; the
prefetcher calls `reader` and `quarantine`, from several threads. Every method blocks and belongs in
a thread.

Write order (rule D2): 1 schema, where the namespace has none: 2 temporary file, 3 image and tokens,
4 header, 5 barrier, 6 rename, 7 directory barrier. Step 6 is the commit point: a file that is
visible under its final name is whole, or detectably not. `write` returns after step 7.
"""

import contextlib
import errno
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from prefixcached.actors import crash_points
from prefixcached.actors.crash_points import CrashPoint
from prefixcached.actors.disk_platform import low_priority_io
from prefixcached.actors.filesystem import FileSystem, ImageMemory, allocated_bytes
from prefixcached.actors.reading import Reader
from prefixcached.actors.scanning import Scan
from prefixcached.actors.storage_format import (
    FORMAT,
    encode_header,
    file_name,
    namespace_directory,
    schema_digest,
    schema_name,
    tokens_count,
)
from prefixcached.actors.store_directory import (
    METER_NAME,
    PROBE_NAME,
    QUARANTINE,
    SEGMENTS,
    TRASH,
    Directory,
    entry_path,
    split_path,
    temporary_name,
)
from prefixcached.actors.waste import QuarantineLimits, Waste
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import FileEntry, FileHeader
from prefixcached.protocol.image import Layout, layout
from prefixcached.protocol.schema import decode_schema

MIN_FREE_BYTES: Final = 512 * limits.MEBIBYTE
"""Space on the volume that writes leave to its other users: a full disk hurts more than a miss."""

_PROBE_BYTES: Final = 4096
"""What a probe writes: one block."""

_METER_MAX_BYTES: Final = 4096
"""A meter file is a few hundred bytes; a larger one is not ours."""


class Store:
    """The files at ``path``.

    Args:
        path: The state directory. It is made by `prepare`.
        filesystem: Where every call goes.
        min_free_bytes: Space that writes leave free on the volume.
        quarantine: Bounds of what is kept aside.
        crash_point: Called at the named points of the write order.
    """

    def __init__(
        self,
        path: str | Path,
        filesystem: FileSystem | None = None,
        *,
        min_free_bytes: int = MIN_FREE_BYTES,
        quarantine: QuarantineLimits = QuarantineLimits(),  # noqa: B008  (frozen)
        crash_point: Callable[[CrashPoint], None] = crash_points.never,
    ) -> None:
        self.filesystem = filesystem if filesystem is not None else FileSystem()
        self.directory = Directory(path, self.filesystem)
        self.reader = Reader(self.directory)
        self._waste = Waste(self.directory, quarantine)
        self._min_free_bytes = min_free_bytes
        self._reached = crash_point
        self._may_lose_files = False
        self.has_lost_files = False
        """Set when the directory of all files had to be made again; the owner resets it (D7)."""

    @property
    def waste(self) -> Waste:
        """The account of what is no entry, for reading."""
        return self._waste

    @property
    def other_bytes(self) -> int:
        """Allocated bytes beside entries: foreign, unattached, schemas, quarantine, old trash."""
        return self._waste.other_bytes

    def prepare(self) -> None:
        """Make the directory usable and lock it; errors as `Directory.prepare`."""
        made = self.directory.prepare()
        for part in made:
            self._waste.forget(f"{part}/")
        if SEGMENTS in made and self._may_lose_files:
            self.has_lost_files = True
        self._may_lose_files = True

    def _hold(self) -> None:
        """Have the lock before anything is changed, as `prepare` where it is not held (rule D9).

        A daemon that was refused it must not touch another's files, and neither must one whose
        directory was moved or deleted and is another's by now.
        """
        if not self.directory.holds_lock():
            self.prepare()

    def close(self) -> None:
        """Give up the lock."""
        self.directory.close()

    def scan(self) -> Scan:
        """Return one pass over all files, which needs the lock. Finish it before any write."""
        return Scan(self.directory, self.reader, self._waste)

    def quarantine(self, entry: FileEntry, reason: str) -> None:
        """Move the file of ``entry`` aside; errors as `Waste.quarantine`, and without the lock."""
        self.directory.require_lock()  # Only the writer's thread may take it.
        directory, name = split_path(entry.path)
        self._waste.quarantine(directory, name, reason)

    # -- writing -----------------------------------------------------------------------------------

    def write(
        self,
        header: FileHeader,
        tokens: bytes,
        schema: bytes,
        image: ImageMemory,
    ) -> FileEntry:
        """Make one image durable; only `drain` makes it survive a loss of power on every drive.

        Args:
            header: What the file says of itself; format, schema digest and checksums are filled in.
            tokens: Packed tokens, as many as `tokens_count` says.
            schema: The namespace's encoded schema; empty for an object.
            image: The bytes.

        Raises:
            SchemaError: The description contradicts the schema.
            ValueError: Memory or tokens do not have the size that the description says.
            OSError: The disk, or the lock as by `prepare`. Under the final name stands nothing, or
                the whole file where only the last step failed.
        """
        model = decode_schema(schema) if schema else None
        header = msgspec.structs.replace(
            header, format=FORMAT, schema_digest=schema_digest(schema), checksum="",
            tokens_checksum=xxhash.xxh3_128_hexdigest(tokens),
        )  # fmt: skip
        image_layout = layout(model, header.spec)
        count = tokens_count(header)
        if image_layout.nbytes != image.nbytes or 4 * count != len(tokens):
            raise ValueError(
                f"image {header.id}: {image.nbytes} bytes and {len(tokens)} of tokens do not fit "
                f"its description ({image_layout.nbytes} and {4 * count})"
            )
        if model is not None:
            self.reader.remember_schema(header.schema_digest, model)
        self._reached(CrashPoint.BEFORE_CREATE)
        try:
            self._hold()
            return self._write(header, image_layout, tokens, schema, image)
        except FileNotFoundError:
            self.prepare()
            return self._write(header, image_layout, tokens, schema, image)

    def _write(
        self,
        header: FileHeader,
        image_layout: Layout,
        tokens: bytes,
        schema: bytes,
        image: ImageMemory,
    ) -> FileEntry:
        directory = namespace_directory(header.namespace)
        name = file_name(header.id, header.kind)
        with low_priority_io(), self.directory.opened_namespace(directory, create=True) as within:
            data_offset = len(encode_header(header, image_layout, len(tokens) // 4))
            self._check_space(within, data_offset + image.nbytes + len(tokens))
            if schema:
                self._write_schema(directory, within, header.schema_digest, schema)
            self._reached(CrashPoint.AFTER_SCHEMA)
            temporary = temporary_name()
            descriptor = self.filesystem.create_file(temporary, within)
            try:
                self._reached(CrashPoint.AFTER_CREATE)
                hasher = xxhash.xxh3_128()
                self.filesystem.write_image(descriptor, data_offset, image, hasher)
                hasher.update(tokens)
                self.filesystem.write(descriptor, tokens, data_offset + image.nbytes)
                self._reached(CrashPoint.AFTER_DATA)
                header = msgspec.structs.replace(header, checksum=hasher.hexdigest())
                start = encode_header(header, image_layout, len(tokens) // 4)
                self.filesystem.write(descriptor, start, 0)
                self._reached(CrashPoint.AFTER_HEADER)
                self.filesystem.barrier(descriptor)
                self._reached(CrashPoint.AFTER_BARRIER)
                status = self.filesystem.status(descriptor)
                self.filesystem.rename(temporary, within, name, within)
            except Exception:
                self._remove_leftover(directory, temporary, within)
                raise
            finally:
                self.filesystem.close(descriptor)
            try:
                self._reached(CrashPoint.AFTER_RENAME)
                self.filesystem.barrier_directory(within)
            except Exception:
                # It is whole, and RamTier may send it again; until then its bytes count here.
                self._waste.add(
                    f"{SEGMENTS}/{directory}/{name}", allocated_bytes(status), foreign=True
                )
                raise
        self._reached(CrashPoint.AFTER_DIRECTORY_BARRIER)
        self._waste.remove(f"{SEGMENTS}/{directory}/{name}")
        return FileEntry(
            header=header,
            path=entry_path(directory, name),
            tokens=tokens,
            data_offset=data_offset,
            data_bytes=image.nbytes,
            allocated_bytes=allocated_bytes(status),
            used_seconds=status.st_mtime,
        )

    def _write_schema(self, directory: str, within: int, digest: str, encoded: bytes) -> None:
        """Write a namespace's schema unless it stands there. Its name follows with the barrier."""
        name = schema_name(digest)
        with contextlib.suppress(FileNotFoundError):
            if self.filesystem.status_of(name, within).st_size == len(encoded):
                return
        temporary = temporary_name()
        descriptor = self.filesystem.create_file(temporary, within)
        try:
            self.filesystem.write(descriptor, encoded, 0)
            self.filesystem.barrier(descriptor)
            size = allocated_bytes(self.filesystem.status(descriptor))
            self.filesystem.rename(temporary, within, name, within)
        except Exception:
            self._remove_leftover(directory, temporary, within)
            raise
        finally:
            self.filesystem.close(descriptor)
        self._waste.add(f"{SEGMENTS}/{directory}/{name}", size)

    def _remove_leftover(self, directory: str, name: str, within: int) -> None:
        """Remove a failed write's file; where even that fails, count it until it goes."""
        try:
            self.filesystem.unlink(name, within)
        except FileNotFoundError:
            return
        except OSError:
            with contextlib.suppress(OSError):
                size = self._waste.tree_bytes(name, within)
                self._waste.add(f"{SEGMENTS}/{directory}/{name}", size, foreign=True)

    def drain(self) -> None:
        """Wait until the drive itself has all that was written, not only the order of it (macOS).

        Raises:
            OSError: It has not, or the directory is gone.
        """
        with self.directory.opened(SEGMENTS) as segments:
            self.filesystem.barrier_directory(segments, drain=True)

    def _check_space(self, descriptor: int, file_bytes: int) -> None:
        free = self.filesystem.free_bytes(descriptor)
        if free < file_bytes + self._min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{file_bytes} bytes would leave less than {self._min_free_bytes} of the "
                f"volume's {free} free bytes",
            )

    def probe(self, wanted_bytes: int) -> None:
        """Raise OSError unless the disk can be written again, and has ``wanted_bytes`` to give."""
        self.prepare()
        with self.directory.opened(SEGMENTS) as segments:
            self._check_space(segments, wanted_bytes)
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.unlink(PROBE_NAME, segments)
            descriptor = self.filesystem.create_file(PROBE_NAME, segments)
            try:
                self.filesystem.write(descriptor, bytes(_PROBE_BYTES), 0)
                self.filesystem.barrier(descriptor)
            finally:
                self.filesystem.close(descriptor)
            self.filesystem.unlink(PROBE_NAME, segments)

    # -- removing ----------------------------------------------------------------------------------

    def delete(self, path: str) -> None:
        """Delete an entry's file. One that is gone already is deleted."""
        self._hold()
        directory, name = split_path(path)
        self._reached(CrashPoint.BEFORE_DELETE)
        with (
            contextlib.suppress(FileNotFoundError),
            self.directory.opened_namespace(directory) as within,
        ):
            self.filesystem.unlink(name, within)
        # A write of the same name that failed in its last step left it counted as nobody's.
        self._waste.remove(f"{SEGMENTS}/{path}")
        self._reached(CrashPoint.AFTER_DELETE)

    def clear(self, namespace: str | None) -> None:
        """Put a namespace's files, or all files, out of reach for good with one rename (D11)."""
        self._hold()
        target = secrets.token_hex(16)
        try:
            self._move_to_trash(namespace, target)
        except FileNotFoundError:
            self.prepare()
            self._move_to_trash(namespace, target)
        if namespace is None:
            self.prepare()

    def _move_to_trash(self, namespace: str | None, target: str) -> None:
        above = () if namespace is None else (SEGMENTS,)
        name = SEGMENTS if namespace is None else namespace_directory(namespace)
        with (
            self.directory.opened(*above) as source,
            self.directory.opened(TRASH) as trash,
        ):
            self._reached(CrashPoint.BEFORE_CLEAR)
            # Nothing of that name: never written, or moved by a try whose barrier failed.
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.rename(name, source, target, trash)
                self._waste.move("/".join((*above, name, "")), f"{TRASH}/{target}/")
            if namespace is None:
                self._may_lose_files = False  # What is made again next held what was cleared.
            self._reached(CrashPoint.AFTER_CLEAR)
            self.filesystem.barrier_directory(trash)
            self.filesystem.barrier_directory(source)

    def empty_trash(self, most_files: int) -> tuple[int, bool]:
        """Delete some of what was cleared; see `Waste.empty_trash`."""
        self._hold()
        try:
            return self._waste.empty_trash(most_files)
        except FileNotFoundError:  # somebody deleted the trash
            self.prepare()
            return 0, True

    def drop_others(self, wanted_bytes: int) -> int:
        """Delete what is no entry until so much is free; see `Waste.drop_foreign`. Never raises."""
        with contextlib.suppress(OSError):
            self._hold()
            return self._waste.drop_foreign(wanted_bytes)
        return 0

    # -- the daily write meter ---------------------------------------------------------------------

    def load_meter(self) -> bytes:
        """Return the stored write meter, empty where there is none."""
        with (
            contextlib.suppress(FileNotFoundError),
            self.directory.opened() as root,
        ):
            descriptor = self.filesystem.open_file(METER_NAME, root)
            try:
                buffer = bytearray(_METER_MAX_BYTES)
                count = self.filesystem.read(descriptor, memoryview(buffer), 0)
                return bytes(buffer[:count])
            finally:
                self.filesystem.close(descriptor)
        return b""

    def set_meter_aside(self) -> None:
        """Move into the quarantine what stands in the meter's place and cannot be read."""
        with self.directory.opened() as root, self.directory.opened(QUARANTINE) as quarantine:
            aside = f"{time.time_ns():020d}.{METER_NAME}"
            self.filesystem.rename(METER_NAME, root, aside, quarantine)
        self._waste.trim_quarantine()

    def save_meter(self, data: bytes) -> None:
        """Store the write meter. It survives a crash of the daemon; a power loss may lose hours."""
        self._hold()
        with self.directory.opened() as root:
            temporary = temporary_name()
            descriptor = self.filesystem.create_file(temporary, root)
            try:
                self.filesystem.write(descriptor, data, 0)
                self.filesystem.rename(temporary, root, METER_NAME, root)
            except OSError:
                with contextlib.suppress(OSError):
                    self.filesystem.unlink(temporary, root)
                raise
            finally:
                self.filesystem.close(descriptor)
