"""The messages between actors, all of them. `Envelope` adds the live handles beside a message.

Each message is plain data that msgpack can encode, so that a trace can hold every one of them.
`RamTier` alone decides what exists; the others carry out and report (docs/architecture.md).
"""

from typing import Annotated, Any

import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.messages import AnyRequest


class ActorMessage(msgspec.Struct, frozen=True, tag_field="type"):
    """What one actor tells another."""


class FileHeader(msgspec.Struct, frozen=True):
    """What a file says of itself: the self-description of docs/storage-format.md.

    ``position`` is where the image's node attaches to ``parent`` (0 and "" at the root); the tokens
    of a segment cover [position, spec.end), and its image may start earlier (surplus head). A
    checkpoint stands at ``position == spec.start`` and its tokens cover [0, position). ``format``
    is checked by the reader. ``checksum`` is the XXH3-128 of all data behind the header, as 32 hex
    digits, and ``tokens_checksum`` that of the tokens alone: the index believes them before anybody
    reads the rest. ``replaces`` are the images of the same key that this one is newer than.
    """

    format: int
    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    kind: ImageKind
    namespace: Annotated[str, msgspec.Meta(max_length=limits.MAX_NAMESPACE_BYTES)]
    spec: ImageSpec
    parent: Annotated[str, msgspec.Meta(max_length=32)] = ""
    position: int = 0
    schema_digest: str = ""
    minimum: int = 0
    attachments: bool = False
    key: str = ""
    checksum: str = ""
    tokens_checksum: str = ""
    replaces: Annotated[tuple[str, ...], msgspec.Meta(max_length=limits.MAX_REPLACED)] = ()


class FileEntry(msgspec.Struct, frozen=True):
    """One file of the directory as the index knows it.

    ``path`` is relative to the directory. ``tokens`` are packed. ``allocated_bytes`` is what the
    file occupies on the disk, ``used_seconds`` its recency (its modification time).
    """

    header: FileHeader
    path: str
    tokens: bytes
    data_offset: int
    data_bytes: int
    allocated_bytes: int
    used_seconds: float = 0.0


# -- to RamTier ---------------------------------------------------------------------------------


class Call(ActorMessage, frozen=True, tag="call"):
    """A client's request; the envelope carries its reply slot."""

    session: int
    request: AnyRequest


class CallGivenUp(ActorMessage, frozen=True, tag="call-given-up"):
    """The session no longer waits for the reply to its pending call."""

    session: int


class ClientGone(ActorMessage, frozen=True, tag="client-gone"):
    """A connection ended: its leases, pins, puts, waits and claims end with it (rule L1)."""

    session: int


class Sealed(ActorMessage, frozen=True, tag="sealed"):
    """A put's images are immutable now, or could not be made so (``error`` is not empty)."""

    put: int
    error: str = ""


class Freed(ActorMessage, frozen=True, tag="freed"):
    """Memory went back to the system."""

    allocated_bytes: int
    images: int


class ImageRead(ActorMessage, frozen=True, tag="image-read"):
    """Outcome of `ReadImage`; the envelope carries the open `VerifiedFile` when ``error`` is empty.

    ``damaged`` says that the file was moved into quarantine; otherwise an error is transient and
    the file stays (rules D3, D4). ``missing`` says that the file is gone. ``read_bytes`` is 0 when
    an earlier verification still held.
    """

    read: int
    id: str
    error: str = ""
    damaged: bool = False
    missing: bool = False
    read_bytes: int = 0
    seconds: float = 0.0


class Promoted(ActorMessage, frozen=True, tag="promoted"):
    """Outcome of `PromoteImage`: the image's bytes are in the shared memory that was given.

    Or they are not (``error``); ``damaged`` and ``missing`` as in `ImageRead`.
    """

    id: str
    error: str = ""
    damaged: bool = False
    missing: bool = False


class Written(ActorMessage, frozen=True, tag="written"):
    """Outcome of `WriteImage`: ``entry`` when the image is durable, else the ``error``.

    ``retry`` says that the disk is failing for now and the image was not written; RamTier decides
    what becomes of it.
    """

    id: str
    entry: FileEntry | None = None
    error: str = ""
    retry: bool = False


class Deleted(ActorMessage, frozen=True, tag="deleted"):
    """Outcome of `DeleteFile`: the bytes are free, or could not be freed yet (``error``).

    After an error SsdTier tries again, and tells when it is done.
    """

    id: str
    allocated_bytes: int
    error: str = ""


class Loaded(ActorMessage, frozen=True, tag="loaded"):
    """A batch of files found at start-up; ``done`` with the last one.

    ``schemas`` maps a schema digest of the batch to its encoded bytes. ``foreign_bytes`` and
    ``quarantine_bytes`` count what the directory holds beside entries, in the last batch. ``later``
    says with the last one that the disk fails, and that the scan comes, or goes on, once it works.
    """

    entries: tuple[FileEntry, ...]
    schemas: dict[str, bytes] = {}
    done: bool = False
    foreign_bytes: int = 0
    quarantine_bytes: int = 0
    damaged: int = 0
    later: bool = False


class Synced(ActorMessage, frozen=True, tag="synced"):
    """The answer to `SyncAll`: what files were lost without anybody's doing was told before.

    ``error`` says that the drive could not be drained, where that was asked for.
    """

    sync: int
    error: str = ""


class FilesLost(ActorMessage, frozen=True, tag="files-lost"):
    """The directory of all files that RamTier knows was deleted under the daemon (rule D7)."""


class DiskChanged(ActorMessage, frozen=True, tag="disk-changed"):
    """The disk began or ceased to fail, or its other bytes changed (rule D7).

    ``dropped_bytes`` where it answers a `DropOthers`: what that made free.
    """

    healthy: bool
    reason: str = ""
    other_bytes: int = 0
    dropped_bytes: int | None = None


class PressureChanged(ActorMessage, frozen=True, tag="pressure-changed"):
    """The machine's memory pressure: unknown, normal, warn or critical (rule M1)."""

    level: str
    reason: str = ""


class RamCapChanged(ActorMessage, frozen=True, tag="ram-cap-changed"):
    """The machine has another amount of memory, and the RAM cap is a share of it (rule M5)."""

    ram_bytes: int


class NamespaceCleared(ActorMessage, frozen=True, tag="namespace-cleared"):
    """Outcome of `ClearNamespace`: the files are out of reach in trash/, and still count."""

    namespace: str | None
    epoch: int
    error: str = ""


class TrashEmptied(ActorMessage, frozen=True, tag="trash-emptied"):
    """Bytes of cleared files that the disk has back; ``done`` when no cleared file is left.

    ``error`` says that those which are left cannot be deleted yet.
    """

    allocated_bytes: int
    done: bool = False
    error: str = ""


# -- from RamTier to SsdTier --------------------------------------------------------------------


class ScanDirectory(ActorMessage, frozen=True, tag="scan-directory"):
    """Read all file headers in the background and report them by `Loaded`."""


class WriteImage(ActorMessage, frozen=True, tag="write-image"):
    """Make one image durable. The envelope carries its memory. ``schema`` is its encoded schema."""

    header: FileHeader
    tokens: bytes
    schema: bytes
    not_before_seconds: float = 0.0
    """Monotonic clock (trio.current_time) before which the write should not start."""


class CancelWrite(ActorMessage, frozen=True, tag="cancel-write"):
    """Drop a queued write that has not started; it is answered `Written` with error "cancelled"."""

    id: str


class DeleteFile(ActorMessage, frozen=True, tag="delete-file"):
    """Unlink one file, after all earlier writes and deletions."""

    id: str
    path: str
    allocated_bytes: int


class ClearNamespace(ActorMessage, frozen=True, tag="clear-namespace"):
    """Move the files of one namespace (all when None) out of reach with one rename, then delete."""

    namespace: str | None
    epoch: int


class SyncAll(ActorMessage, frozen=True, tag="sync-all"):
    """Start pending writes at once instead of waiting for their delay (a flush waits).

    Once SsdTier has looked whether its directory still stands, it answers `Synced` with ``sync``,
    unless that is 0 and nobody waits.
    With ``drain`` it has the drive drained instead: what was written until then survives a loss of
    power (rule P8).
    """

    sync: int = 0
    drain: bool = False


class DropOthers(ActorMessage, frozen=True, tag="drop-others"):
    """Delete foreign and quarantined files, the first victims (rule D10), until so much is free.

    `DiskChanged` tells what is left of them.
    """

    wanted_bytes: int


# -- from RamTier to Prefetcher -----------------------------------------------------------------


class ReadImage(ActorMessage, frozen=True, tag="read-image"):
    """Open and verify one file; identical reads in flight are joined (rule F2)."""

    read: int
    entry: FileEntry


class CancelRead(ActorMessage, frozen=True, tag="cancel-read"):
    """One asker gave up; the last one gone cancels the read."""

    read: int
    id: str


class PromoteImage(ActorMessage, frozen=True, tag="promote-image"):
    """Copy a verified file's image into the shared memory of the envelope, then seal it."""

    entry: FileEntry


class TouchFile(ActorMessage, frozen=True, tag="touch-file"):
    """Record that an image was used, in its file's modification time."""

    entry: FileEntry


class Envelope(msgspec.Struct):
    """A message between actors with the live handles that msgpack cannot carry.

    ``handle`` is, by message: the reply slot of `Call`, the memory of `WriteImage` and
    `PromoteImage`, the open file of `ImageRead`; None elsewhere.
    """

    message: ActorMessage
    handle: Any = None
