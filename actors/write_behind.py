"""WriteDesk: which image is written next, and what became of it. Part of RamTier, pure.

RamTier hands SsdTier one image at a time, parents before children, so that a visible file's chain
is durable before it (rule P8). Rules E4, E5, D5, D6, D8.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from prefixcached.actors.desk import Answer, Shared
from prefixcached.actors.entries import Checkpoint, Entry, ObjectEntry, Segment, WriteState
from prefixcached.actors.storage_format import FORMAT, file_bytes_bound
from prefixcached.actors.write_policy import BUDGET_SPENT, CANCELLED
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import FileHeader, SyncAll, WriteImage, Written
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import allocated_bytes
from prefixcached.protocol.messages import Flush, Flushed

MARGIN: Final = 0.9
"""Share of a flush's remaining seconds after which it is answered as incomplete."""


USES_TO_WRITE: Final = {"always": 0, "second-hit": 2}
"""Hits that an image must have had before it is written, by the `write_policy` setting (D6)."""


class FlushStage(Enum):
    """What a flush waits for (rule P8)."""

    LOOKS = auto()
    """SsdTier says whether what was written before is still there (rule D7)."""
    WRITES = auto()
    """The remaining images are written."""
    DRAINS = auto()
    """The drive has it all."""


@dataclass(slots=True, eq=False)
class FlushWait:
    """A flush that waits for ``remaining`` images to be written; ``sync`` is its number."""

    session: int
    answer: Answer
    sync: int
    remaining: set[str]
    deadline: float
    stage: FlushStage = FlushStage.LOOKS
    written: int = 0
    skipped: int = 0
    failed: int = 0

    def count(self, outcome: str) -> None:
        """Count an image that became ``outcome``: written, skipped or failed."""
        setattr(self, outcome, getattr(self, outcome) + 1)

    def begin_again(self, number: int) -> None:
        """Forget what was done; answers to its former number are late."""
        self.sync, self.stage = number, FlushStage.LOOKS
        self.written = self.skipped = self.failed = 0
        self.remaining.clear()

    def end(self, *, complete: bool) -> None:
        """Answer it."""
        self.answer.set(
            Flushed(
                written=self.written, skipped=self.skipped, failed=self.failed, complete=complete
            )
        )


class WriteDesk:
    """Owns the queue of images to write and the flushes that wait for it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._index = shared.index
        self._least_uses = USES_TO_WRITE[shared.config.write_policy]
        self._queue: deque[tuple[Entry, float]] = deque()
        self._writing: Entry | None = None
        self._reserved_bytes = 0
        self._waits_for_deletions = False
        self._flushes: list[FlushWait] = []
        self.is_draining = False
        self.is_hurried = False
        """Set under critical pressure: no write waits for its delay (rule M3)."""
        self.disk_healthy = True
        self.disk_reason = ""
        self.written = 0
        self.written_bytes = 0
        self.failed = 0
        self.refused = 0

    @property
    def unsuccessful(self) -> int:
        """Images that could not be written, and those that were not tried."""
        return self.failed + self.refused

    @property
    def queued(self) -> int:
        """Images that wait to be written, the one being written included."""
        return sum(e.write is WriteState.QUEUED for e, _ in self._queue) + bool(self._writing)

    @property
    def backlog(self) -> int:
        """As `queued`, without visiting the queue: what has left it in the middle still counts."""
        return len(self._queue) + bool(self._writing)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being written."""
        return self._writing is None and not any(
            entry.write is WriteState.QUEUED for entry, _ in self._queue
        )

    # -- coming in ------------------------------------------------------------------------------

    def enqueue(self, entries: Iterable[Entry], now: float) -> None:
        """Queue ``entries`` that are not durable, behind any of their ancestors that are not."""
        if not self._index.ssd_on:
            return
        for entry in entries:
            if self.is_unwanted(entry):
                self._refuse_for_now(entry)
                continue
            for link in _chain(entry):
                if link.file is None and link.write in (WriteState.IDLE, WriteState.REFUSED):
                    self._enqueue_one(link, now)

    @property
    def wants_all(self) -> bool:
        """Whether no entry is `is_unwanted`."""
        return self._index.ssd_on and not self._least_uses

    def is_unwanted(self, entry: Entry) -> bool:
        """Whether ``entry`` will never be written as it is used now: no tier, or the policy (D6).

        What files hang on is wanted: they would go with it.
        """
        if not self._index.ssd_on:
            return True
        return entry.uses < self._least_uses and not (
            isinstance(entry, Segment) and entry.durable_dependents
        )

    def _refuse_for_now(self, entry: Entry) -> None:
        """Not worth a write yet (rule D6); its next hit brings it here again."""
        if entry.file is None and entry.write is WriteState.IDLE:
            self._refuse(entry)

    def _enqueue_one(self, entry: Entry, now: float) -> None:
        if entry.memory is None or not self.disk_healthy:
            self._refuse(entry)
            return
        self._index.set_write(entry, WriteState.QUEUED)
        self._queue.append((entry, now + self._shared.config.write_delay_seconds))

    def flush(self, session: int, flush: Flush, answer: Answer, now: float) -> None:
        """Answer once everything visible is durable, or cannot be made so (rule P8).

        SsdTier is asked twice: first whether what was written before is still there, and when the
        rest is written, to have the drive drained. Without that a drive may forget, at a loss of
        power, what it was told.
        """
        number = next(self._shared.numbers)
        self._flushes.append(
            FlushWait(session, answer, number, set(), now + flush.seconds_left * MARGIN)
        )
        if self._index.ssd_on:
            self._shared.orders.ssd(SyncAll(number))
        else:
            self.synced(number, "", now)

    def synced(self, number: int, error: str, now: float) -> None:
        """SsdTier has looked at its directory: from here on a flush waits for writes.

        The second time it has had the drive drained, if no ``error`` says otherwise.
        """
        wait = next((wait for wait in self._flushes if wait.sync == number), None)
        if wait is None:  # its client is gone, or its time was over
            return
        if wait.stage is FlushStage.DRAINS:
            self._flushes.remove(wait)
            wait.end(complete=not error)
            return
        wait.stage = FlushStage.WRITES
        unwritten = [e for e in self._index.entries.values() if e.file is None]
        self.enqueue(unwritten, now)
        for entry in unwritten:
            if entry.write in (WriteState.QUEUED, WriteState.WRITING):
                wait.remaining.add(entry.id)
            else:
                wait.count(self._refusal)
        self._answer_flushes(now)

    def files_lost(self) -> None:
        """Flushes begin again: what they saw written has to be written once more (rule D7)."""
        for wait in self._flushes:
            if wait.stage is not FlushStage.LOOKS:
                wait.begin_again(next(self._shared.numbers))
                self._shared.orders.ssd(SyncAll(wait.sync))

    def client_gone(self, session: int) -> None:
        """Forget the flushes of a connection."""
        self._flushes = [wait for wait in self._flushes if wait.session != session]

    # -- going out ------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Hand the next image to SsdTier if it is due and none is being written."""
        self._waits_for_deletions = False
        while self._queue and self._writing is None:
            entry, due = self._queue[0]
            if not entry.attached or entry.memory is None or entry.write is not WriteState.QUEUED:
                self._queue.popleft()  # absorbed, cleared or evicted before it was written
                self._pass_on(entry)
                continue
            if due > now and not (self._flushes or self.is_draining or self.is_hurried):
                break
            owner = entry.owner
            if owner is not None and owner.parent is not None and owner.file is None:
                if owner.write is WriteState.QUEUED:
                    # Its files were lost after this was queued, so it stands behind (rule D7).
                    self._queue.rotate(-1)
                else:
                    self._queue.popleft()
                    self._refuse(entry)
                continue
            header = _header_of(entry)
            try:
                reserve = _bytes_to_reserve(entry, header)
            except SchemaError:  # more tensors or longer names than a file's header can hold
                self._queue.popleft()
                self._refuse(entry)
                continue
            if not self._shared.eviction.make_room_on_disk(reserve):
                self._queue.popleft()
                self._refuse(entry)
                continue
            if not self._shared.eviction.fits_on_disk(reserve):
                self._waits_for_deletions = True  # they are on their way; `Deleted` pumps again
                break
            self._queue.popleft()
            self._hand_over(entry, header, reserve)
        self._answer_flushes(now)

    @property
    def next_deadline(self) -> float | None:
        """When `pump` must be called at the latest."""
        if not self._queue and not self._flushes:
            return None  # asked for in every turn
        deadlines = [wait.deadline for wait in self._flushes]
        if self._queue and self._writing is None and not self._waits_for_deletions:
            deadlines.append(self._queue[0][1])
        return min(deadlines, default=None)

    def _hand_over(self, entry: Entry, header: FileHeader, reserve: int) -> None:
        self._writing, self._reserved_bytes = entry, reserve
        self._index.ssd.add("writing", reserve)
        self._index.set_write(entry, WriteState.WRITING)
        self._index.hold((entry,))
        self._index.writing = entry
        schema = entry.namespace.schema_bytes if header.schema_digest else b""
        self._shared.orders.ssd(WriteImage(header, _tokens_of(entry), schema), entry.memory)

    # -- outcomes -------------------------------------------------------------------------------

    def finished(self, outcome: Written, now: float) -> None:
        """An image is durable, or could not be made so."""
        entry, reserve = self._writing, self._reserved_bytes
        assert entry is not None
        assert entry.id == outcome.id
        self._writing, self._reserved_bytes = None, 0
        self._index.writing = None
        file = outcome.entry
        if file is None:
            is_untried = outcome.error in (BUDGET_SPENT, CANCELLED)
            self.failed += not is_untried
            self.refused += outcome.error == BUDGET_SPENT
            self._index.ssd.remove("writing", reserve)
            self._index.set_write(entry, WriteState.REFUSED)
            self._settle(entry, "skipped" if is_untried else "failed")
            if outcome.retry:
                self.disk_changed(healthy=False, reason=outcome.error, now=now)
        else:
            self.written += 1
            self.written_bytes += file.allocated_bytes
            self._index.set_file(entry, file, reserve)
            self._settle(entry, "written")
        self._index.release((entry,))
        self.pump(now)

    def disk_changed(self, *, healthy: bool, reason: str, now: float) -> None:
        """The disk fails: what is queued will not be written (E4); or it works again: all is."""
        changed = healthy is not self.disk_healthy
        self.disk_healthy, self.disk_reason = healthy, reason
        if not healthy:
            queue, self._queue = self._queue, deque()
            for entry, _ in queue:
                if entry.attached and entry.write is WriteState.QUEUED:
                    self._refuse(entry)
                else:
                    self._settle(entry, "skipped")
        elif changed:
            self.enqueue([e for e in self._index.entries.values() if e.file is None], now)
            self.pump(now)

    def _refuse(self, entry: Entry) -> None:
        self.refused += 1
        self._index.set_write(entry, WriteState.REFUSED)
        self._settle(entry, self._refusal)

    @property
    def _refusal(self) -> str:
        """What a failing disk prevents has failed; what caps, budget and policy prevent has not."""
        return "skipped" if self.disk_healthy else "failed"

    def _pass_on(self, entry: Entry) -> None:
        """``entry`` left before it was written: a flush waits for what has taken its place."""
        heir = entry.successor
        while heir is not None and heir.successor is not None:
            heir = heir.successor
        if heir is None or heir.write not in (WriteState.QUEUED, WriteState.WRITING):
            self._settle(entry, "skipped" if heir is None or heir.file is None else "written")
            return
        for wait in self._flushes:
            if entry.id in wait.remaining:
                wait.remaining.discard(entry.id)
                wait.remaining.add(heir.id)

    def _settle(self, entry: Entry, outcome: str) -> None:
        for wait in self._flushes:
            if entry.id in wait.remaining:
                wait.remaining.discard(entry.id)
                wait.count(outcome)

    def _answer_flushes(self, now: float) -> None:
        waiting: list[FlushWait] = []
        for wait in self._flushes:
            is_written = wait.stage is FlushStage.WRITES and not wait.remaining
            if is_written and not self._index.ssd_on:
                wait.end(complete=True)
            elif now >= wait.deadline:
                wait.end(complete=False)
            else:
                waiting.append(wait)
                if is_written:
                    wait.stage = FlushStage.DRAINS
                    self._shared.orders.ssd(SyncAll(wait.sync, drain=True))
        self._flushes = waiting


def _chain(entry: Entry) -> list[Entry]:
    """Return ``entry`` behind its ancestors, from the top."""
    chain: list[Entry] = [entry]
    node = entry.owner
    while node is not None and node.parent is not None:
        chain.append(node)
        node = node.parent
    return chain[::-1]


def _header_of(entry: Entry) -> FileHeader:
    """What the file of ``entry`` will say of itself; its checksum is not known yet."""
    owner, is_object = entry.owner, isinstance(entry, ObjectEntry)
    position = 0
    if isinstance(entry, Segment):
        position = entry.start
    elif isinstance(entry, Checkpoint):
        position = entry.position
    return FileHeader(
        format=FORMAT,
        id=entry.id,
        kind=entry.spec.kind,
        namespace=entry.namespace.name,
        spec=entry.spec,
        parent=owner.id if owner is not None else "",
        position=position,
        schema_digest="" if is_object else entry.namespace.schema_digest,
        minimum=entry.minimum if isinstance(entry, Segment) else 0,
        attachments=isinstance(entry, Checkpoint) and entry.attachments,
        key=entry.key if isinstance(entry, ObjectEntry) else "",
        replaces=tuple(old.id for old in entry.superseded[-limits.MAX_REPLACED :]),
    )


def _tokens_of(entry: Entry) -> bytes:
    """The tokens that the file of ``entry`` carries; a checkpoint's are its whole path's."""
    if isinstance(entry, Segment):
        return entry.tokens.tobytes()
    if isinstance(entry, Checkpoint) and entry.segment is not None:
        return entry.segment.path_tokens()[: entry.position].tobytes()
    return b""


def _bytes_to_reserve(entry: Entry, header: FileHeader) -> int:
    """The most that the file of ``entry`` will allocate, and its schema's where it is the first."""
    namespace = entry.namespace
    schema = namespace.schema if header.schema_digest else None
    return file_bytes_bound(header, schema) + allocated_bytes(len(namespace.schema_bytes) + 1)
