"""What SsdTier and Prefetcher would do, one step at a time, each with the outcome a test chooses.

Work of the writer is done in order, reads and promotions in any order; identical reads are joined.
Files survive the core: `FakeDisk.restart` feeds what is left of them to a new one.
"""

import random
from dataclasses import dataclass, field

import msgspec
import xxhash

from prefixcached.actors.write_policy import CLEARED
from prefixcached.protocol.actor_messages import (
    CancelRead,
    ClearNamespace,
    Deleted,
    DeleteFile,
    DiskChanged,
    DropOthers,
    Envelope,
    FileEntry,
    ImageRead,
    Loaded,
    NamespaceCleared,
    Promoted,
    PromoteImage,
    ReadImage,
    TrashEmptied,
    WriteImage,
    Written,
)
from prefixcached.protocol.image import allocated_bytes
from tests.support.core import Core, FakeFile, FakeMemory


@dataclass(slots=True)
class StoredFile:
    """A file under its final name."""

    entry: FileEntry
    schema: bytes
    data: bytes


@dataclass(slots=True)
class Read:
    """A verification in flight and who asked for it."""

    entry: FileEntry
    numbers: list[int] = field(default_factory=list)


class FakeDisk:
    """The files, and the work that the core has ordered."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.files: dict[str, StoredFile] = {}
        self.trash: list[int] = []
        self.trash_is_due = False
        self.writer: list[Envelope] = []
        self.reads: dict[str, Read] = {}
        self.promotions: dict[str, Envelope] = {}
        self.has_losses = False
        """Whether a file was lost or damaged: children may then outlive their parents' files."""
        self.refuses_deletions = False
        self.undeletable: dict[str, DeleteFile] = {}
        """Orders that failed, by path."""
        self.other_bytes = 0
        self.kept_other_bytes = 0
        """Of the other bytes those that cannot be dropped, as schemas."""
        self.wall_clock = 1e9
        self.written_segment_bytes = 0
        self.read_orders = 0
        self.touched: list[str] = []

    # -- orders ---------------------------------------------------------------------------------

    def accept(self) -> None:
        """Take over what the core has ordered since the last time."""
        orders, self.core.to_ssd = self.core.to_ssd, []
        for envelope in orders:
            message = envelope.message
            if isinstance(message, ClearNamespace):
                self._cancel_writes(message.namespace)
            if isinstance(message, WriteImage | DeleteFile | ClearNamespace | DropOthers):
                self.writer.append(envelope)
        reads, self.core.to_prefetcher = self.core.to_prefetcher, []
        for envelope in reads:
            match envelope.message:
                case ReadImage(read=number, entry=entry):
                    self.read_orders += 1
                    key = entry.header.id
                    self.reads.setdefault(key, Read(entry)).numbers.append(number)
                case CancelRead(read=number, id=key):
                    joined = self.reads.get(key)
                    if joined is not None and number in joined.numbers:
                        joined.numbers.remove(number)
                        if not joined.numbers:
                            del self.reads[key]
                case PromoteImage(entry=entry):
                    self.promotions[entry.header.id] = envelope
                case _:
                    self.touched.append(type(envelope.message).__name__)

    def _cancel_writes(self, namespace: str | None) -> None:
        kept: list[Envelope] = []
        cancelled: list[str] = []
        for envelope in self.writer:
            message = envelope.message
            if isinstance(message, WriteImage) and namespace in (None, message.header.namespace):
                cancelled.append(message.header.id)
            else:
                kept.append(envelope)
        self.writer = kept
        for image_id in cancelled:
            self.core.send(Written(image_id, error="cancelled"))

    # -- the writer -----------------------------------------------------------------------------

    def step(self, *, fails: bool = False, retry: bool = False) -> bool:
        """Carry out the writer's next order; a failure concerns writes only."""
        self.accept()
        if not self.writer:
            return False
        envelope = self.writer.pop(0)
        match envelope.message:
            case WriteImage():
                self._write(envelope, fails=fails, retry=retry)
            case DeleteFile():
                self._delete(envelope.message)
            case DropOthers(wanted_bytes=wanted):
                before, left = self.other_bytes, self.other_bytes - wanted
                self.other_bytes = max(left, min(self.other_bytes, self.kept_other_bytes))
                self.core.send(DiskChanged(True, "", self.other_bytes, before - self.other_bytes))
            case ClearNamespace(namespace=namespace, epoch=epoch):
                for path, file in list(self.files.items()):
                    if namespace in (None, file.entry.header.namespace):
                        self.trash.append(self.files.pop(path).entry.allocated_bytes)
                        if (order := self.undeletable.pop(path, None)) is not None:
                            self.core.send(Deleted(order.id, order.allocated_bytes, error=CLEARED))
                self.trash_is_due = True
                self.core.send(NamespaceCleared(namespace, epoch))
        self.accept()
        return True

    def _delete(self, order: DeleteFile) -> None:
        if self.refuses_deletions and order.path in self.files:
            self.undeletable[order.path] = order
            self.core.send(Deleted(order.id, order.allocated_bytes, error="not permitted"))
        else:
            self.files.pop(order.path, None)
            self.core.send(Deleted(order.id, order.allocated_bytes))

    def retry_deletions(self) -> None:
        """Try again what could not be deleted."""
        orders, self.undeletable = list(self.undeletable.values()), {}
        for order in orders:
            self._delete(order)
        self.accept()

    def _write(self, envelope: Envelope, *, fails: bool, retry: bool) -> None:
        message, memory = envelope.message, envelope.handle
        assert isinstance(message, WriteImage)
        assert isinstance(memory, FakeMemory)
        assert memory.is_sealed
        header = message.header
        if header.parent and header.kind == "segment":
            parents = {file.entry.header.id for file in self.files.values()}
            assert header.parent in parents or self.has_losses, "a child before its parent"
        if fails:
            self.core.send(Written(header.id, error="the disk fails", retry=retry))
            return
        self.wall_clock += 1
        data = memory.read(0, memory.nbytes)
        header = msgspec.structs.replace(header, checksum=xxhash.xxh3_128_hexdigest(data))
        path = f"{xxhash.xxh3_64_hexdigest(header.namespace.encode())}/{header.id}"
        entry = FileEntry(
            header, path, message.tokens, 4096, memory.nbytes,
            allocated_bytes(memory.nbytes + len(message.tokens) + 4096), self.wall_clock,
        )  # fmt: skip
        self.files[path] = StoredFile(entry, message.schema, data)
        if (replaced := self.undeletable.pop(path, None)) is not None:
            self.core.send(Deleted(replaced.id, replaced.allocated_bytes))
        if header.kind == "segment":
            self.written_segment_bytes += memory.nbytes
        self.core.send(Written(header.id, entry))

    def empty_trash(self) -> None:
        """Delete one cleared file."""
        if self.trash_is_due:
            nbytes = self.trash.pop(0) if self.trash else 0
            self.trash_is_due = bool(self.trash)
            self.core.send(TrashEmptied(nbytes, done=not self.trash))
            self.accept()

    def set_healthy(self, healthy: bool) -> None:
        """The disk begins or ceases to fail."""
        self.core.send(DiskChanged(healthy, "" if healthy else "full", self.other_bytes))
        self.accept()

    def lose(self, path: str) -> None:
        """Somebody deletes a file behind the daemon's back."""
        del self.files[path]
        self.has_losses = True

    # -- the prefetcher -------------------------------------------------------------------------

    def finish_read(self, image_id: str, outcome: str = "good") -> None:
        """End a verification: "good", "transient" or "damaged". A file that is gone is missing."""
        read = self.reads.pop(image_id)
        stored = self.files.get(read.entry.path)
        if outcome == "damaged" and stored is not None:
            del self.files[read.entry.path]
            self.has_losses = True
        for number in read.numbers:
            if outcome == "good" and stored is not None:
                assert stored.entry == read.entry
                file = FakeFile(self.core.descriptors, stored.data)
                self.core.send(ImageRead(number, image_id, read_bytes=1), file)
            else:
                missing = stored is None and outcome != "transient"
                damaged = outcome == "damaged" and stored is not None
                error = "missing" if missing else outcome
                self.core.send(
                    ImageRead(number, image_id, error=error, damaged=damaged, missing=missing)
                )
        self.accept()

    def finish_promotion(self, image_id: str, outcome: str = "good") -> None:
        """End a promotion, as `finish_read` ends a verification."""
        envelope = self.promotions.pop(image_id)
        message, memory = envelope.message, envelope.handle
        assert isinstance(message, PromoteImage)
        assert isinstance(memory, FakeMemory)
        stored = self.files.get(message.entry.path)
        if outcome == "damaged" and stored is not None:
            self.lose(message.entry.path)
        if outcome != "good" or stored is None:
            missing = stored is None and outcome != "transient"
            damaged = outcome == "damaged" and stored is not None
            self.core.send(Promoted(image_id, error="not read", damaged=damaged, missing=missing))
        else:
            memory.write(stored.data)
            memory.seal()
            self.core.send(Promoted(image_id))
        self.accept()

    # -- all of it ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out everything, successfully, until nothing is left to do."""
        self.accept()
        while self.writer or self.reads or self.promotions or self.trash_is_due:
            while self.step():
                pass
            for image_id in list(self.reads):
                self.finish_read(image_id)
            for image_id in list(self.promotions):
                self.finish_promotion(image_id)
            self.empty_trash()

    @property
    def bytes(self) -> int:
        """What the files occupy, trash included."""
        return sum(f.entry.allocated_bytes for f in self.files.values()) + sum(self.trash)

    def restart(self, core: Core, order: random.Random, batch_files: int = 3) -> None:
        """The daemon dies and starts again: a new core finds the files that are there."""
        self.core = core
        self.writer, self.reads, self.promotions, self.trash = [], {}, {}, []
        self.undeletable = {}
        files = list(self.files.values())
        order.shuffle(files)
        for first in range(0, len(files), batch_files):
            batch = files[first : first + batch_files]
            schemas = {f.entry.header.schema_digest: f.schema for f in batch if f.schema}
            core.send(Loaded(tuple(f.entry for f in batch), schemas))
        core.send(Loaded((), done=True, foreign_bytes=self.other_bytes))
        self.accept()
