"""The index's entries: segments, checkpoints, namespaces. Only `Index` changes one.

A segment is a node of its namespace's tree and one image; a checkpoint is one image at a position
of the segment that owns it (DESIGN 3). An entry is in the tree as long as either tier holds it.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np
import xxhash

from prefixcached.protocol.actor_messages import FileEntry
from prefixcached.protocol.image import ImageKind, ImageSpec, allocated_bytes
from prefixcached.protocol.schema import Schema
from prefixcached.protocol.tokens import TokenArray


class Memory(Protocol):
    """The shared memory of one image (actors/memory)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        ...

    @property
    def writable_descriptor(self) -> int:
        """Descriptor to fill, valid until `seal`."""
        ...

    @property
    def descriptor(self) -> int:
        """Read-only descriptor, valid after `seal`."""
        ...

    def seal(self) -> None:
        """Make the bytes immutable. Blocks; for threads."""

    def free(self) -> None:
        """Give the memory back. Blocks for large images; for threads."""


class WriteState(StrEnum):
    """What the writer chain has to do with an entry."""

    IDLE = "idle"
    """Nothing to do: durable, or the SSD tier is off."""
    QUEUED = "queued"
    """Waits for its turn; nothing was written."""
    WRITING = "writing"
    """Handed to SsdTier, outcome outstanding."""
    REFUSED = "refused"
    """Will not be written: cap, budget, policy or failing disk."""


class Entry:
    """One image in either tier. Use `Segment` or `Checkpoint`.

    ``holders`` counts leases, pins and puts in flight that need the bytes to stay.
    ``charged_bytes`` is what its memory costs. ``priority`` orders victims, least first.
    ``is_surplus`` marks a checkpoint that its chain has grown past (rule E11).
    ``superseded`` are the entries that this one absorbed or replaced, whose files must stay until
    it is durable (rule D8); each names it as its ``successor`` until then.
    """

    __slots__ = (
        "attached", "charged_bytes", "file", "holders", "id", "is_labelled", "is_surplus", "memory",
        "namespace", "nbytes", "priority", "spec", "ssd_hits", "successor", "superseded",
        "touched_seconds", "used", "used_seconds", "uses", "write",
    )  # fmt: skip

    def __init__(self, entry_id: str, namespace: "Namespace", spec: ImageSpec, nbytes: int) -> None:
        self.id = entry_id
        self.namespace = namespace
        self.spec = spec
        self.nbytes = nbytes
        self.charged_bytes = allocated_bytes(nbytes)
        self.memory: Memory | None = None
        self.file: FileEntry | None = None
        self.write = WriteState.IDLE
        self.holders = 0
        self.attached = False
        self.uses = 0
        self.used = 0
        self.used_seconds = 0.0
        self.priority = 0.0
        self.is_labelled = False
        self.is_surplus = False
        self.ssd_hits = 0
        self.touched_seconds = 0.0
        self.superseded: list[Entry] = []
        self.successor: Entry | None = None

    @property
    def owner(self) -> "Segment | None":
        """The segment this entry hangs on; None once detached, or at the tree's top."""
        raise NotImplementedError

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The order of victims, least first.

        Those without a live label go before those with (E2), then surplus checkpoints that were
        never hit before all else (E11), then by the retention policy.
        """
        return self.is_labelled, not self.is_surplus or self.uses > 0, self.priority

    @property
    def is_bound_for_disk(self) -> bool:
        """Whether a file names, or will name, this entry's owner as its parent."""
        return self.file is not None or self.is_to_be_written

    @property
    def is_to_be_written(self) -> bool:
        """Whether its bytes have no file yet and will have one."""
        return self.file is None and self.write in (WriteState.QUEUED, WriteState.WRITING)

    def __repr__(self) -> str:
        tiers = ("ram" if self.memory else "") + (" ssd" if self.file else "")
        return f"<{type(self).__name__} {self.id[:8]} {self.spec.start}..{self.spec.end} {tiers}>"


class Segment(Entry):
    """A node: ``tokens`` are those of [start, end) of its path.

    ``start`` may lie behind ``spec.start``: the image then has surplus head rows that somebody else
    stored first (rule P6). ``children`` are keyed by (position, first token), ``checkpoints`` by
    their `Checkpoint.key`, with positions in (start, end].
    """

    __slots__ = (
        "checkpoints", "children", "durable_dependents", "end", "minimum", "parent",
        "resident_dependents", "start", "tokens",
    )  # fmt: skip

    def __init__(
        self, entry_id: str, namespace: "Namespace", spec: ImageSpec, nbytes: int,
        tokens: TokenArray, start: int, minimum: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(entry_id, namespace, spec, nbytes)
        self.start = start
        self.end = start + int(tokens.size)
        self.tokens = tokens
        self.minimum = minimum
        self.parent: Segment | None = None
        self.children: dict[tuple[int, int], Segment] = {}
        self.checkpoints: dict[tuple[int, bool], Checkpoint] = {}
        self.resident_dependents = 0
        self.durable_dependents = 0

    @property
    def owner(self) -> "Segment | None":
        """The parent segment; the namespace's root at the top."""
        return self.parent

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs on this segment."""
        return not self.children and not self.checkpoints

    def path_tokens(self) -> TokenArray:
        """The tokens of [0, end), from the root down."""
        pieces: list[TokenArray] = []
        node: Segment | None = self
        end = self.end
        while node is not None:
            pieces.append(node.tokens[: end - node.start])
            end = node.start
            node = node.parent
        return np.concatenate(pieces[::-1])


class Checkpoint(Entry):
    """Snapshots at one position; window rows too where no segment of its put could carry them.

    One position may have two: a snapshot, and rows alone that were missing once it was held.
    """

    __slots__ = ("attachments", "position", "segment")

    def __init__(
        self, entry_id: str, namespace: "Namespace", spec: ImageSpec, nbytes: int,
        attachments: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(entry_id, namespace, spec, nbytes)
        self.position = spec.end
        self.attachments = attachments
        self.segment: Segment | None = None

    @property
    def owner(self) -> Segment | None:
        """The segment whose tokens include this position."""
        return self.segment

    @property
    def has_state(self) -> bool:
        """Whether it holds a snapshot, not window rows alone."""
        return self.spec.is_snapshot

    @property
    def key(self) -> tuple[int, bool]:
        """What it is found by on its segment: the position, and whether it is a snapshot."""
        return self.position, self.has_state


class ObjectEntry(Entry):
    """An immutable tensor object, found by its exact key (rule O1). It hangs on nothing."""

    __slots__ = ("key",)

    def __init__(
        self, entry_id: str, namespace: "Namespace", spec: ImageSpec, nbytes: int, key: str
    ) -> None:
        super().__init__(entry_id, namespace, spec, nbytes)
        self.key = key

    @property
    def owner(self) -> Segment | None:
        """Always None."""
        return None


class Namespace:
    """One namespace: its schema and the root of its tree. A `clear` ends it for good.

    ``root`` is no entry: a segment of no tokens, so that the first segments have a parent.
    ``puts`` counts those in flight, which keep it alive while it holds nothing yet.
    """

    __slots__ = (
        "cleared", "entries", "name", "objects", "puts", "root", "schema", "schema_bytes",
        "schema_digest",
    )  # fmt: skip

    def __init__(self, name: str, schema_bytes: bytes, schema: Schema) -> None:
        self.name = name
        self.adopt(schema_bytes, schema)
        self.objects: dict[str, ObjectEntry] = {}
        self.cleared = False
        self.entries = 0
        self.puts = 0
        self.root = Segment(
            "", self, ImageSpec(ImageKind.SEGMENT), 0, np.empty(0, dtype="<u4"), start=0
        )

    def adopt(self, schema_bytes: bytes, schema: Schema) -> None:
        """Take on a schema, while no segment exists that has another."""
        self.schema_bytes = schema_bytes
        self.schema_digest = xxhash.xxh3_128_hexdigest(schema_bytes) if schema_bytes else ""
        self.schema = schema


def entries_below(segment: Segment) -> Sequence[Entry]:
    """Return ``segment`` and all that hangs on it, parents before children."""
    found: list[Entry] = []
    stack = [segment]
    while stack:
        node = stack.pop()
        found.append(node)
        found.extend(node.checkpoints.values())
        stack.extend(node.children.values())
    return found
