"""Prefetcher: reads and verifies files for RamTier, one read per image however many ask (rule F2).

Owner of the reads in flight and of what was verified, by identity. Reads go before promotions;
both are bounded in number and bytes, whatever RamTier asks for. A file is lent only after every
byte of it was checked since it last changed (rules D3, T7). Damage moves the file into quarantine;
any other error leaves it where it is (rule D4), also that the whole directory is not there (D7).
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
import trio

from prefixcached.actors.filesystem import ImageMemory
from prefixcached.actors.mailbox import UNBOUNDED, Inbox, Outbox
from prefixcached.actors.reading import DirectoryGoneError, Identity, VerifiedFile
from prefixcached.actors.storage_format import DamagedFile
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import StoreUnusableError
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import (
    ActorMessage,
    CancelRead,
    Envelope,
    FileEntry,
    ImageRead,
    Promoted,
    PromoteImage,
    ReadImage,
    TouchFile,
)

PARALLEL_READS: Final = 4
"""Images read at once: enough to keep an SSD's queue filled while others are hashed."""

IN_FLIGHT_BYTES: Final = 512 * limits.MEBIBYTE
"""File bytes being read at once: four full segments. A larger file is read alone."""

VERIFIED_FILES: Final = 1 << 16
"""Identities remembered, about 200 bytes each; the oldest is verified again."""

_log = structlog.get_logger(__name__)


class PrefetcherConfig(msgspec.Struct, frozen=True):
    """Bounds of the prefetcher."""

    parallel_reads: int = PARALLEL_READS
    in_flight_bytes: int = IN_FLIGHT_BYTES


class PrefetcherStatistics(msgspec.Struct, frozen=True):
    """Counters since the start, and the present state (rule C5)."""

    reads: int
    reads_joined: int
    reads_still_verified: int
    reads_cancelled: int
    read_bytes: int
    read_seconds: float
    damaged: int
    missing: int
    transient: int
    promotions: int
    promotions_failed: int
    touches: int
    touches_failed: int
    reads_waiting: int
    reads_in_flight: int
    bytes_in_flight: int
    verified_files: int


_COUNTERS: Final = (
    "reads", "reads_joined", "reads_still_verified", "reads_cancelled", "read_bytes", "damaged",
    "missing", "transient", "promotions", "promotions_failed", "touches", "touches_failed",
)  # fmt: skip


class _Read:
    """One verification and who waits for it."""

    def __init__(self, entry: FileEntry, asker: int) -> None:
        self.entry = entry
        self.askers = [asker]
        self.scope = trio.CancelScope()
        self.is_running = False


class _Promotion:
    def __init__(self, entry: FileEntry, image: ImageMemory) -> None:
        self.entry = entry
        self.image = image


class _Outcome(msgspec.Struct, frozen=True):
    """What a read or a promotion found; fields as `ImageRead`."""

    error: str = ""
    damaged: bool = False
    missing: bool = False


class Prefetcher:
    """The actor. Start it with ``await nursery.start(prefetcher.run)``.

    `ImageRead` carries a `VerifiedFile` in its envelope: RamTier closes it, also when the asker has
    gone meanwhile. A cancelled read is not answered.

    Args:
        store: The files; `Store.reader` and `Store.quarantine` are used.
        ram_tier: Where outcomes go.
        config: Bounds.
        quarantined: Called after a file was moved into quarantine (`SsdTier.others_changed`).
        directory_missed: Called when the directory of all files was not there
            (`SsdTier.directory_missed`).
    """

    def __init__(
        self,
        store: Store,
        ram_tier: Outbox,
        config: PrefetcherConfig = PrefetcherConfig(),  # noqa: B008  (frozen)
        quarantined: Callable[[], None] = lambda: None,
        directory_missed: Callable[[], None] = lambda: None,
    ) -> None:
        self.mailbox: Outbox
        self._inbox: Inbox
        self.mailbox, self._inbox = trio.open_memory_channel[Envelope](UNBOUNDED)
        self._store = store
        self._ram_tier = ram_tier
        self._config = config
        self._quarantined = quarantined
        self._directory_missed = directory_missed
        self._threads = trio.CapacityLimiter(config.parallel_reads)
        self._quarantine_thread = trio.CapacityLimiter(1)
        self._touch_thread = trio.CapacityLimiter(1)
        self._reads: dict[str, _Read] = {}
        self._waiting: deque[_Read] = deque()
        self._promotions: deque[_Promotion] = deque()
        self._running = 0
        self._bytes_in_flight = 0
        self._verified: dict[str, Identity] = {}
        self._touches: dict[str, FileEntry] = {}
        self._is_touching = False
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._read_seconds = 0.0

    def statistics(self) -> PrefetcherStatistics:
        """Return the counters and the present state."""
        return PrefetcherStatistics(
            **self._counters,
            read_seconds=self._read_seconds,
            reads_waiting=len(self._waiting) + len(self._promotions),
            reads_in_flight=self._running,
            bytes_in_flight=self._bytes_in_flight,
            verified_files=len(self._verified),
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until all senders of the mailbox are closed and what they asked for is done."""
        with self._inbox:
            async with trio.open_nursery() as nursery:
                task_status.started()
                async for envelope in self._inbox:
                    self._receive(envelope, nursery)

    def _receive(self, envelope: Envelope, nursery: trio.Nursery) -> None:
        message = envelope.message
        match message:
            case ReadImage(read=asker, entry=entry):
                self._ask(asker, entry)
            case CancelRead(read=asker, id=id_):
                self._cancel(asker, id_)
            case PromoteImage(entry=entry):
                self._promotions.append(_Promotion(entry, envelope.handle))
            case TouchFile(entry=entry):
                self._touches[entry.header.id] = entry
                if not self._is_touching:
                    self._is_touching = True
                    nursery.start_soon(self._touch_all)
            case _:
                raise TypeError(f"RamTier sent Prefetcher a {type(message).__name__}")
        self._start_ready(nursery)

    # -- reads in flight ---------------------------------------------------------------------------

    def _ask(self, asker: int, entry: FileEntry) -> None:
        read = self._reads.get(entry.header.id)
        if read is not None:
            self._counters["reads_joined"] += 1
            read.askers.append(asker)
            return
        read = _Read(entry, asker)
        self._reads[entry.header.id] = read
        self._waiting.append(read)

    def _cancel(self, asker: int, id_: str) -> None:
        read = self._reads.get(id_)
        if read is None or asker not in read.askers:
            return
        read.askers.remove(asker)
        if read.askers:
            return
        # From here on a new asker gets a read of its own: this one ends at its next chunk.
        del self._reads[id_]
        self._counters["reads_cancelled"] += 1
        read.scope.cancel()
        if not read.is_running:
            self._waiting.remove(read)

    def _start_ready(self, nursery: trio.Nursery) -> None:
        """Start what the bounds allow: reads that somebody waits for, then promotions."""
        while self._waiting and self._has_room(self._waiting[0].entry):
            read = self._waiting.popleft()
            read.is_running = True
            self._occupy(read.entry)
            nursery.start_soon(self._read, read, nursery)
        while not self._waiting and self._promotions and self._has_room(self._promotions[0].entry):
            promotion = self._promotions.popleft()
            self._occupy(promotion.entry)
            nursery.start_soon(self._promote, promotion, nursery)

    def _has_room(self, entry: FileEntry) -> bool:
        if self._running == 0:
            return True
        return (
            self._running < self._config.parallel_reads
            and self._bytes_in_flight + _file_bytes(entry) <= self._config.in_flight_bytes
        )

    def _occupy(self, entry: FileEntry) -> None:
        self._running += 1
        self._bytes_in_flight += _file_bytes(entry)

    def _leave(self, entry: FileEntry, nursery: trio.Nursery) -> None:
        self._running -= 1
        self._bytes_in_flight -= _file_bytes(entry)
        self._start_ready(nursery)

    # -- one read ----------------------------------------------------------------------------------

    async def _read(self, read: _Read, nursery: trio.Nursery) -> None:
        entry = read.entry
        self._counters["reads"] += 1
        started = time.perf_counter()
        file: VerifiedFile | None = None
        outcome = _Outcome()
        try:
            with read.scope:
                try:
                    file = await trio.to_thread.run_sync(
                        self._store.reader.verify,
                        entry,
                        self._verified.get(entry.header.id),
                        trio.from_thread.check_cancelled,
                        limiter=self._threads,
                    )
                except (DamagedFile, OSError) as error:
                    outcome = await self._failed(entry, error)
        finally:
            self._leave(entry, nursery)
        if read.scope.cancelled_caught or self._reads.get(entry.header.id) is not read:
            if file is not None:
                file.close()
            return
        del self._reads[entry.header.id]
        seconds = time.perf_counter() - started
        if file is not None:
            self._remember(entry, file.identity)
            self._counters["reads_still_verified"] += not file.read_bytes
            self._counters["read_bytes"] += file.read_bytes
            self._read_seconds += seconds if file.read_bytes else 0.0
        await self._answer(read, file, outcome, seconds)

    async def _answer(
        self, read: _Read, file: VerifiedFile | None, outcome: _Outcome, seconds: float
    ) -> None:
        """Answer every asker, each with a descriptor of its own; the first gets what was read."""
        id_ = read.entry.header.id
        if file is None:
            for asker in read.askers:
                await self._report(
                    ImageRead(asker, id_, outcome.error, outcome.damaged, outcome.missing)
                )
            return
        first, *others = read.askers
        try:
            for asker in others:
                try:
                    handle = file.duplicate(self._store.filesystem)
                except OSError as error:
                    self._counters["transient"] += 1
                    await self._report(ImageRead(asker, id_, error=str(error)))
                else:
                    await self._report(ImageRead(asker, id_, seconds=seconds), handle)
        except BaseException:
            file.close()
            raise
        message = ImageRead(first, id_, read_bytes=file.read_bytes, seconds=seconds)
        await self._report(message, file)

    async def _failed(self, entry: FileEntry, error: DamagedFile | OSError) -> _Outcome:
        """Say what an error means for the file, and put a damaged one aside."""
        self._verified.pop(entry.header.id, None)
        if isinstance(error, OSError):
            is_missing = isinstance(error, FileNotFoundError)
            self._counters["missing" if is_missing else "transient"] += 1
            self._note(error)
            if not is_missing:
                _log.warning("file-unreadable", file=entry.path, error=str(error))
            return _Outcome(str(error), missing=is_missing)
        self._counters["damaged"] += 1
        try:
            await trio.to_thread.run_sync(
                self._put_aside, entry, str(error), limiter=self._quarantine_thread
            )
        except FileNotFoundError:
            return _Outcome(str(error), missing=True)
        except OSError as failure:
            self._note(failure)
            _log.warning("damaged-file-stays", file=entry.path, error=str(failure))
            return _Outcome(f"{error}; it could not be moved aside: {failure}")
        self._quarantined()
        return _Outcome(str(error), damaged=True)

    def _put_aside(self, entry: FileEntry, reason: str) -> None:
        """Quarantine a file; DirectoryGoneError where that fails for want of the directory."""
        try:
            self._store.quarantine(entry, reason)
        except (FileNotFoundError, StoreUnusableError) as error:
            self._store.reader.require_directory()
            if self._store.reader.is_there(entry):  # it is the quarantine that is missing
                raise DirectoryGoneError(error.errno, error.strerror, error.filename) from error
            raise

    def _note(self, error: OSError) -> None:
        """Have the disk looked at where all of it seems to be gone (rule D7)."""
        if isinstance(error, DirectoryGoneError):
            self._directory_missed()

    def _remember(self, entry: FileEntry, identity: Identity) -> None:
        self._verified.pop(entry.header.id, None)
        if len(self._verified) >= VERIFIED_FILES:
            del self._verified[next(iter(self._verified))]
        self._verified[entry.header.id] = identity

    # -- promotions and recency --------------------------------------------------------------------

    async def _promote(self, promotion: _Promotion, nursery: trio.Nursery) -> None:
        entry = promotion.entry

        def load() -> Identity:
            identity = self._store.reader.load(entry, promotion.image)
            promotion.image.seal()
            return identity

        outcome = _Outcome()
        try:
            identity = await trio.to_thread.run_sync(load, limiter=self._threads)
        except (DamagedFile, OSError) as failure:
            self._counters["promotions_failed"] += 1
            outcome = await self._failed(entry, failure)
        else:
            self._counters["promotions"] += 1
            self._remember(entry, identity)
        finally:
            self._leave(entry, nursery)
        await self._report(
            Promoted(entry.header.id, outcome.error, outcome.damaged, outcome.missing)
        )

    async def _touch_all(self) -> None:
        """Record recency (rule D5): one file at a time, the newest wish per file."""
        while self._touches:
            id_ = next(iter(self._touches))
            entry = self._touches.pop(id_)
            known = self._verified.get(id_)
            self._counters["touches"] += 1
            try:
                identity = await trio.to_thread.run_sync(
                    self._store.reader.touch, entry, time.time_ns(), known,
                    limiter=self._touch_thread,
                )  # fmt: skip
            except (DamagedFile, OSError) as error:
                self._counters["touches_failed"] += 1
                _log.debug("recency-not-recorded", file=entry.path, error=str(error))
                continue
            if identity is not None and self._verified.get(id_) == known:
                self._verified[id_] = identity
        self._is_touching = False

    async def _report(self, message: ActorMessage, handle: VerifiedFile | None = None) -> None:
        try:
            await self._ram_tier.send(Envelope(message, handle))
        except BaseException as error:
            if handle is not None:
                handle.close()
            if not isinstance(error, trio.BrokenResourceError | trio.ClosedResourceError):
                raise
            # RamTier is gone: the daemon stops.


def _file_bytes(entry: FileEntry) -> int:
    return entry.data_offset + entry.data_bytes + len(entry.tokens)
