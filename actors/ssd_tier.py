"""SsdTier, the writer chain: carries out writes, deletions and clears in order, and reports.

Owner of the files, their order, the daily write meter and the disk's health. RamTier decides what
is written; nothing here does. One task receives, always; one task works, one step at a time, each
step in a thread. A step that fails says what became of its image, and good files stay.

It is longer than other modules, because what each step's failure means stands beside the step.
"""

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar, assert_never

import structlog
import trio

from prefixcached.actors.filesystem import ImageMemory
from prefixcached.actors.mailbox import UNBOUNDED, Inbox, Outbox
from prefixcached.actors.scanning import ScanBatch
from prefixcached.actors.ssd_settings import COUNTERS, SsdTierConfig, SsdTierStatistics
from prefixcached.actors.storage_format import file_bytes_bound, namespace_directory
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import StoreUnusableError
from prefixcached.actors.write_policy import (
    BUDGET_SPENT,
    CANCELLED,
    CLEARED,
    MOST_FAILED_DELETIONS,
    BackOff,
    FailedDeletions,
    WriteMeter,
    WriteQueue,
)
from prefixcached.protocol.actor_messages import (
    ActorMessage,
    CancelWrite,
    ClearNamespace,
    Deleted,
    DeleteFile,
    DiskChanged,
    DropOthers,
    Envelope,
    FilesLost,
    Loaded,
    NamespaceCleared,
    ScanDirectory,
    SyncAll,
    Synced,
    TrashEmptied,
    WriteImage,
    Written,
)
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import allocated_bytes
from prefixcached.protocol.schema import decode_schema

TRASH_SLICE_FILES: Final = 32
"""Files of the trash deleted in one step: the next write waits no longer than that takes."""

_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing of a file and pass: it is read a little later."""

_OF_THE_DISK: Final = (errno.EROFS, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN)
"""Errors of a deletion that every other one would get as well."""

_log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")


class SsdTier:
    """The actor. Start it with ``await nursery.start(ssd_tier.run)``, which waits for no disk.

    `SyncAll` voids the delays of what is queued. When all senders of its mailbox are closed it
    finishes what is queued, without delays, and returns; a cancel scope around it bounds that.

    Args:
        store: The files. Only this actor writes, deletes, clears and scans.
        ram_tier: Where outcomes go.
        config: Settings.
        wall_clock: Seconds since the epoch, for the daily meter.
    """

    def __init__(
        self,
        store: Store,
        ram_tier: Outbox,
        config: SsdTierConfig = SsdTierConfig(),  # noqa: B008  (frozen)
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.mailbox: Outbox
        self._inbox: Inbox
        self.mailbox, self._inbox = trio.open_memory_channel[Envelope](UNBOUNDED)
        self._store = store
        self._ram_tier = ram_tier
        self._config = config
        self._wall_clock = wall_clock
        self._thread = trio.CapacityLimiter(1)
        self._preparing = trio.CancelScope()
        self._prepared = trio.Event()
        self._queue = WriteQueue()
        self._meter = WriteMeter(config.daily_write_bytes)
        self._back_off = BackOff(config.retry_first_seconds, config.retry_most_seconds)
        self._wake = trio.Event()
        self._is_draining = False
        self._failure = ""
        self._retry_at = 0.0
        self._wanted_bytes = 0
        self._failed_clears: list[Envelope] = []
        self._syncs: list[SyncAll] = []
        self._scan_wanted = False
        self._is_loading = False
        self._scanned_paths: set[str] = set()
        self._trash_at: float | None = None
        self._failed_deletes = FailedDeletions(
            BackOff(config.retry_first_seconds, config.retry_most_seconds)
        )
        self._trash_failure = ""
        self._meter_is_loaded = False
        self._others_wanted_bytes = 0
        self._reported_other_bytes = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._write_seconds = 0.0

    def statistics(self) -> SsdTierStatistics:
        """Return the counters and the present state."""
        waste = self._store.waste
        return SsdTierStatistics(
            **self._counters,
            write_seconds=self._write_seconds,
            written_today_bytes=self._meter.written_bytes(self._wall_clock()),
            daily_write_bytes=self._config.daily_write_bytes,
            writes_queued=self._queue.writes,
            undeletable_files=len(self._failed_deletes),
            deletion_failure=self._failed_deletes.error or self._trash_failure,
            foreign_files=waste.foreign_files,
            foreign_bytes=waste.foreign_bytes,
            quarantined_files=waste.quarantined_files,
            quarantine_bytes=waste.quarantine_bytes,
            dropped_files=waste.dropped_files,
            other_bytes=waste.other_bytes,
            is_loading=self._is_loading,
            is_healthy=not self._failure,
            failure=self._failure,
        )

    def others_changed(self) -> None:
        """Report soon what is no entry: the prefetcher moved a file into quarantine."""
        self._wake.set()

    def directory_missed(self) -> None:
        """Look soon whether the directory still stands: the prefetcher missed it (rule D7)."""
        if not self._failure:
            with contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                self.mailbox.send_nowait(Envelope(SyncAll()))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until all senders of the mailbox are closed and the queue is done."""
        with self._inbox:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._work)
                nursery.start_soon(self._lose_patience)
                task_status.started()
                async for envelope in self._inbox:
                    await self._receive(envelope)
                self._is_draining = True
                self._queue.hurry()
                self._wake.set()
                if not len(self._queue):
                    self._preparing.cancel()  # a stop has nothing to wait for

    # -- receiving ---------------------------------------------------------------------------------

    async def _receive(self, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case ScanDirectory():
                self._scan_wanted = self._is_loading = True
            case WriteImage() if self._failure:
                await self._refuse(message)
            case WriteImage():
                self._queue.add_write(envelope, message.not_before_seconds)
            case CancelWrite(id=id):
                if self._queue.cancel(id) is not None:
                    await self._cancelled(id)
            case DeleteFile():
                self._queue.add_delete(envelope)
            case ClearNamespace(namespace=namespace):
                for dropped in self._queue.add_clear(envelope, namespace):
                    await self._cancelled(dropped.header.id)
            case SyncAll():
                self._queue.hurry()
                self._syncs.append(message)
            case DropOthers(wanted_bytes=wanted_bytes):
                self._others_wanted_bytes += wanted_bytes
            case _:
                raise TypeError(f"RamTier sent SsdTier a {type(message).__name__}")
        if self._failure and not self._prepared.is_set():
            await self._answer_alone()
        self._wake.set()

    # -- working -----------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Make the directory usable, before anything else touches it.

        Given up by a stop, it goes on in its thread until the process ends.
        """
        try:
            await trio.to_thread.run_sync(
                self._store.prepare, limiter=self._thread, abandon_on_cancel=True
            )
            await self._load_meter()
        except OSError as error:
            await self._fail(error)
        else:
            if self._failure:
                await self._works_again()

    async def _lose_patience(self) -> None:
        """A disk that takes long to be prepared counts as failing meanwhile (rule D7)."""
        with trio.move_on_after(self._config.patience_seconds):
            await self._prepared.wait()
            return
        if self._prepared.is_set():  # in this very moment
            return
        seconds = self._config.patience_seconds
        await self._fail(OSError(errno.ETIMEDOUT, f"no answer from the disk for {seconds:g} s"))
        if self._is_loading:
            await self._report_loaded(damaged=0)
        await self._answer_alone()
        self._wake.set()

    async def _answer_alone(self) -> None:
        """Say that the disk fails to who waits for it, while whoever works waits for it too."""
        for envelope in self._queue.take_clears():
            await self._clear_later(envelope)
        syncs, self._syncs = self._syncs, []
        for sync in syncs:
            await self._synced(sync, self._failure)

    async def _work(self) -> None:
        with self._preparing:
            await self._prepare()
        self._prepared.set()
        if self._preparing.cancelled_caught:
            return
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            if self._store.has_lost_files:
                await self._report_lost_files()
            elif self._others_differ:
                await self._report_disk()
            elif self._syncs:
                await self._sync()
            elif self._failure and now >= self._retry_at and not self._is_draining:
                await self._probe()
            elif self._scan_wanted and not self._failure and not self._is_draining:
                await self._scan()
            elif self._is_loading and self._failure:
                await self._report_loaded(damaged=0)  # RAM goes on alone; the scan comes later
            elif self._failed_clears and not self._failure:
                await self._clear(self._failed_clears.pop(0))
            elif not self._is_draining and (due := self._failed_deletes.take_due(now)):
                for message in due:
                    await self._delete(message, is_retry=True)
            elif self._others_wanted_bytes:
                wanted, self._others_wanted_bytes = self._others_wanted_bytes, 0
                dropped = await self._in_thread(self._store.drop_others, wanted)
                await self._report_disk(dropped_bytes=dropped)
            elif (envelope := self._queue.next(now)) is not None:
                await self._carry_out(envelope)
                if self._trash_is_due(trio.current_time()):
                    await self._empty_trash()
            elif self._trash_is_due(now) and not self._is_draining:
                await self._empty_trash()
            elif self._is_draining and not len(self._queue):
                return
            else:
                with trio.move_on_at(self._next_deadline()):
                    await self._wake.wait()

    def _next_deadline(self) -> float:
        queue, failed = self._queue, self._failed_deletes
        deadlines = [queue.next_deadline, failed.next_deadline]
        if not self._scan_wanted:  # which comes first
            deadlines.append(self._trash_at)
        if self._failure:
            deadlines.append(self._retry_at)
        return min((d for d in deadlines if d is not None), default=float("inf"))

    def _trash_is_due(self, now: float) -> bool:
        return self._trash_at is not None and now >= self._trash_at and not self._scan_wanted

    async def _carry_out(self, envelope: Envelope) -> None:
        message = envelope.message
        assert isinstance(message, WriteImage | DeleteFile | ClearNamespace)
        match message:
            case WriteImage():
                await self._write(message, envelope.handle)
            case DeleteFile():
                await self._delete(message)
            case ClearNamespace():
                await self._clear(envelope)
            case _:
                assert_never(message)

    async def _write(self, message: WriteImage, image: ImageMemory) -> None:
        id_ = message.header.id
        nbytes = 0
        started = trio.current_time()
        try:
            nbytes = await self._in_thread(_most_bytes, message)
            if not self._meter.allows(nbytes, self._wall_clock()):
                self._counters["writes_refused_by_budget"] += 1
                await self._report(Written(id_, error=BUDGET_SPENT))
                return
            self._meter.record(nbytes, self._wall_clock())
            await self._save_meter()
            entry = await self._in_thread(
                self._store.write, message.header, message.tokens, message.schema, image
            )
        except (SchemaError, ValueError) as error:
            self._counters["writes_failed"] += 1
            _log.error("image-cannot-be-written", id=id_, error=str(error))
            await self._report(Written(id_, error=str(error)))
        except OSError as error:
            self._counters["writes_failed"] += 1
            await self._fail(error, wanted_bytes=nbytes)
            await self._report(Written(id_, error=self._failure, retry=True))
        else:
            self._back_off.succeeded()
            await self._report_lost_files()
            if (replaced := self._failed_deletes.retire(entry.path)) is not None:
                await self._deleted(replaced)
            self._counters["writes"] += 1
            self._counters["written_bytes"] += entry.allocated_bytes
            self._write_seconds += trio.current_time() - started
            await self._report(Written(id_, entry))

    async def _load_meter(self) -> None:
        """What was written before the restart counts too (rule D6), where it can be read."""
        if self._meter_is_loaded:
            return
        stored = b""
        try:
            stored = await self._in_thread(self._store.load_meter)
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise
            _log.warning("write-meter-not-readable", error=str(error))
            with contextlib.suppress(OSError):  # then it counts in memory alone
                await self._in_thread(self._store.set_meter_aside)
        self._meter = WriteMeter(self._config.daily_write_bytes, stored)
        self._meter_is_loaded = True

    async def _save_meter(self) -> None:
        try:
            await self._in_thread(self._store.save_meter, self._meter.encode())
        except OSError as error:
            # Either the write that follows fails as well, or the next one stores it.
            _log.warning("write-meter-not-stored", error=str(error))

    async def _delete(self, message: DeleteFile, *, is_retry: bool = False) -> None:
        try:
            await self._in_thread(self._store.delete, message.path)
        except OSError as error:
            # Its bytes count until it is gone (rule D5); RamTier must not wait for them.
            self._counters["deletions_failed"] += 1
            _log.warning("file-not-deleted", file=message.path, error=str(error))
            self._failed_deletes.add(message, str(error), trio.current_time(), is_retry=is_retry)
            if not self._failure and self._is_of_the_disk(error, is_retry=is_retry):
                await self._fail(error)  # known before RamTier would evict another file instead
            await self._report(Deleted(message.id, message.allocated_bytes, error=str(error)))
            return
        self._failed_deletes.succeeded()
        if self._failure:
            self._retry_at = trio.current_time()  # there may be room now
        await self._deleted(message)

    def _is_of_the_disk(self, error: OSError, *, is_retry: bool) -> bool:
        """Whether a deletion failed as others would. A retry says no more than the first try."""
        if isinstance(error, StoreUnusableError):
            return True
        in_a_row = self._failed_deletes.in_a_row
        return not is_retry and (error.errno in _OF_THE_DISK or in_a_row == MOST_FAILED_DELETIONS)

    async def _deleted(self, message: DeleteFile) -> None:
        self._counters["deletions"] += 1
        await self._report(Deleted(message.id, message.allocated_bytes))

    async def _clear(self, envelope: Envelope) -> None:
        message = envelope.message
        assert isinstance(message, ClearNamespace)
        try:
            await self._in_thread(self._store.clear, message.namespace)
        except OSError as error:
            await self._fail(error)
            await self._clear_later(envelope)
            return
        self._counters["clears"] += 1
        name = message.namespace
        directory = None if name is None else namespace_directory(name)
        for moved in self._failed_deletes.retire_below(directory):
            await self._report(Deleted(moved.id, moved.allocated_bytes, error=CLEARED))
        self._trash_at = trio.current_time()
        await self._report(NamespaceCleared(message.namespace, message.epoch))

    async def _clear_later(self, envelope: Envelope) -> None:
        """Before anything else is written, as soon as the disk works (rule D11)."""
        message = envelope.message
        assert isinstance(message, ClearNamespace)
        self._failed_clears.append(envelope)
        await self._report(NamespaceCleared(message.namespace, message.epoch, error=self._failure))

    async def _sync(self) -> None:
        """Tell RamTier whether the directory still stands; it may have been deleted (rule D7).

        One drain serves all that wait for one: what they wait for is written already.
        """
        syncs, self._syncs = self._syncs, []
        if any(not sync.drain for sync in syncs) and not self._failure:
            try:
                await self._in_thread(self._store.prepare)
            except OSError as error:
                await self._fail(error)
        await self._report_lost_files()
        drained = await self._drain() if any(sync.drain for sync in syncs) else ""
        for sync in syncs:
            await self._synced(sync, drained)

    async def _synced(self, sync: SyncAll, error: str) -> None:
        if sync.sync:  # else it is the prefetcher's, and nobody waits (`directory_missed`)
            await self._report(Synced(sync.sync, error if sync.drain else ""))

    async def _drain(self) -> str:
        """Return why what was written may not survive a loss of power; empty where it does."""
        try:
            await self._in_thread(self._store.drain)
        except OSError as error:
            if not self._failure:
                await self._fail(error)
            return str(error)
        return ""

    async def _report_lost_files(self) -> None:
        """Before any outcome in the directory that was made anew."""
        if self._store.has_lost_files:
            self._store.has_lost_files = False
            self._counters["directories_lost"] += 1
            await self._report(FilesLost())

    async def _empty_trash(self) -> None:
        try:
            freed, done = await self._in_thread(self._store.empty_trash, TRASH_SLICE_FILES)
        except OSError as error:
            self._trash_failure = str(error)
            _log.warning("trash-not-emptied", error=self._trash_failure)
            self._trash_at = trio.current_time() + self._config.retry_most_seconds
            await self._report(TrashEmptied(0, error=self._trash_failure))
            return
        self._trash_failure = ""
        if done:
            self._trash_at = None
        self._counters["trash_emptied_bytes"] += freed
        if freed or done:
            await self._report(TrashEmptied(freed, done=done))

    # -- the index at start ------------------------------------------------------------------------

    async def _scan(self) -> None:
        """Report all files. A directory that cannot be listed is tried again once it works."""
        scan = self._store.scan()
        batches = iter(scan)
        try:
            while (batch := await self._in_thread(_next_batch, batches)) is not None:
                await self._report_batch(batch)
        except OSError as error:
            await self._fail(error)
        else:
            self._scan_wanted = False
            self._trash_at = trio.current_time()
            self._scanned_paths.clear()
            excess = scan.entry_bytes + self._store.other_bytes - (self._config.cap_bytes or 0)
            if self._config.cap_bytes is not None and excess > 0:
                await self._in_thread(self._store.drop_others, excess)
        self._counters["damaged_files"] += scan.damaged
        self._counters["unreadable_files"] += scan.unreadable
        self._counters["temporary_files_reaped"] += scan.temporary
        is_late = not self._is_loading
        await self._report_loaded(damaged=scan.damaged)
        if is_late:
            await self._report_disk()

    async def _report_loaded(self, *, damaged: int) -> None:
        """Say that the index is complete, as far as it can be read now."""
        self._is_loading = False
        waste = self._store.waste
        self._reported_other_bytes = waste.other_bytes
        await self._report(
            Loaded(
                (),
                done=True,
                foreign_bytes=waste.other_bytes - waste.quarantine_bytes,
                quarantine_bytes=waste.quarantine_bytes,
                damaged=damaged,
                later=self._scan_wanted,
            )
        )

    async def _report_batch(self, batch: ScanBatch) -> None:
        entries = tuple(e for e in batch.entries if e.path not in self._scanned_paths)
        self._scanned_paths.update(entry.path for entry in entries)
        self._counters["loaded_files"] += len(entries)
        await self._report(Loaded(entries, batch.schemas))

    # -- health ------------------------------------------------------------------------------------

    async def _fail(self, error: OSError, wanted_bytes: int = 0) -> None:
        """Stop writing for a while (rule D7). What is queued goes back to RamTier."""
        self._failure = str(error)
        self._wanted_bytes = wanted_bytes
        self._retry_at = self._back_off.failed(trio.current_time())
        _log.warning("disk-fails", error=self._failure, errno=error.errno)
        await self._report_disk()
        for message in self._queue.take_all_writes():
            await self._refuse(message)

    async def _probe(self) -> None:
        try:
            await self._in_thread(self._store.probe, self._wanted_bytes)
            await self._load_meter()
        except OSError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                await self._report_disk()
            self._retry_at = self._back_off.failed(trio.current_time())
            return
        await self._works_again()

    async def _works_again(self) -> None:
        _log.warning("disk-works-again", failure=self._failure)
        self._failure = ""
        await self._report_lost_files()  # before RamTier queues what hangs on them
        await self._report_disk()

    async def _refuse(self, message: WriteImage) -> None:
        self._counters["writes_refused_by_disk"] += 1
        await self._report(Written(message.header.id, error=self._failure, retry=True))

    async def _cancelled(self, id_: str) -> None:
        self._counters["writes_cancelled"] += 1
        await self._report(Written(id_, error=CANCELLED))

    # -- reporting ---------------------------------------------------------------------------------

    @property
    def _others_differ(self) -> bool:
        return not self._is_loading and self._store.other_bytes != self._reported_other_bytes

    async def _report_disk(self, *, dropped_bytes: int | None = None) -> None:
        other_bytes = self._reported_other_bytes = self._store.other_bytes
        await self._report(
            DiskChanged(not self._failure, self._failure, other_bytes, dropped_bytes)
        )

    async def _report(self, message: ActorMessage) -> None:
        try:
            await self._ram_tier.send(Envelope(message))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # RamTier is gone: the daemon stops, and only the files count from here on.
            _log.debug("outcome-unheard", outcome=type(message).__name__)

    async def _in_thread(
        self, function: Callable[..., _Result], *arguments: object, **options: object
    ) -> _Result:
        call = functools.partial(function, *arguments, **options)
        return await trio.to_thread.run_sync(call, limiter=self._thread)


def _most_bytes(message: WriteImage) -> int:
    """The most that the write of an image puts on the disk, its namespace's schema included.

    Raises SchemaError as `file_bytes_bound`. It takes time: a header may have 16 MiB.
    """
    schema = decode_schema(message.schema) if message.schema else None
    return file_bytes_bound(message.header, schema) + allocated_bytes(len(message.schema))


def _next_batch(batches: Iterator[ScanBatch]) -> ScanBatch | None:
    return next(batches, None)
