"""The writer chain: what RamTier asks is done in order, reported, and survives a bad disk."""

import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import trio
import trio.testing

from prefixcached.actors.filesystem import FileSystem, ImageMemory
from prefixcached.actors.memory import Hasher, SharedImage
from prefixcached.actors.ssd_settings import SsdTierConfig
from prefixcached.actors.ssd_tier import SsdTier
from prefixcached.actors.storage_format import DATA_ALIGNMENT
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import METER_NAME, QUARANTINE, SEGMENTS
from prefixcached.actors.write_policy import BUDGET_SPENT, CANCELLED, CLEARED
from prefixcached.protocol.actor_messages import (
    ActorMessage,
    CancelWrite,
    ClearNamespace,
    Deleted,
    DeleteFile,
    DiskChanged,
    DropOthers,
    Envelope,
    FileEntry,
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
from prefixcached.protocol.image import ImageKind, ImageSpec
from tests.support.filesystems import FaultyFs, FullFs, QuickFs
from tests.support.store_samples import Sample, checkpoint, every_kind, sample, segment, write

QUICK = SsdTierConfig(retry_first_seconds=0.01, retry_most_seconds=0.02)
Message = TypeVar("Message", bound=ActorMessage)


class GatedFs(QuickFs):
    """Holds every image's write until the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.writes = 0

    def write_image(self, descriptor: int, offset: int, image: ImageMemory, hasher: Hasher) -> None:
        self.entered.set()
        assert self.gate.wait(timeout=20)
        self.writes += 1
        super().write_image(descriptor, offset, image, hasher)


class Desk:
    """Stands for RamTier: sends, and collects what it hears."""

    def __init__(self, tier: SsdTier, store: Store, heard: trio.MemoryReceiveChannel[Envelope]):
        self.tier = tier
        self.store = store
        self._heard = heard
        self.all: list[ActorMessage] = []
        self.images: list[SharedImage] = []

    async def tell(self, message: ActorMessage, handle: object = None) -> None:
        await self.tier.mailbox.send(Envelope(message, handle))

    async def write(self, one: Sample, not_before_seconds: float = 0.0) -> None:
        image = one.image()
        self.images.append(image)
        message = WriteImage(one.header, one.tokens, one.schema, not_before_seconds)
        await self.tell(message, image)

    async def hear(self, kind: type[Message]) -> Message:
        """Return the next message of a kind."""
        with trio.fail_after(20):
            while True:
                message = (await self._heard.receive()).message
                self.all.append(message)
                if isinstance(message, kind):
                    return message

    async def written(self, one: Sample) -> FileEntry:
        await self.write(one)
        outcome = await self.hear(Written)
        assert outcome.entry is not None, outcome
        return outcome.entry

    async def prepared(self) -> None:
        """Return once the directory is."""
        await self.tell(SyncAll(1))
        await self.hear(Synced)

    async def stop(self) -> None:
        """Close the mailbox and hear all that is still said."""
        await self.tier.mailbox.aclose()
        with trio.fail_after(20):
            async for envelope in self._heard:
                self.all.append(envelope.message)

    def heard_of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.all if isinstance(message, kind)]


@asynccontextmanager
async def running(
    path: Path, system: FileSystem | None = None, config: SsdTierConfig = QUICK
) -> AsyncIterator[Desk]:
    store = Store(path, system or QuickFs(), min_free_bytes=0)
    outbox, inbox = trio.open_memory_channel[Envelope](1000)
    tier = SsdTier(store, outbox, config)
    desk = Desk(tier, store, inbox)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(tier.run)
            try:
                yield desk
            finally:
                nursery.cancel_scope.cancel()
    finally:
        outbox.close()
        inbox.close()
        tier.mailbox.close()
        store.close()
        for image in desk.images:
            image.free()


def files_below(desk: Desk, pattern: str) -> list[Path]:
    return list(Path(desk.store.directory.path).rglob(pattern))


def file_of(desk: Desk, entry: FileEntry) -> Path:
    return Path(desk.store.directory.path, SEGMENTS, entry.path)


# -- writing ---------------------------------------------------------------------------------------


async def test_every_kind_is_written(tmp_path: Path) -> None:
    """P8: an image is reported as written when its file is whole under its final name."""
    async with running(tmp_path / "state") as desk:
        for one in every_kind():
            entry = await desk.written(one)
            file = desk.store.reader.verify(entry)
            assert os.pread(file.descriptor, entry.data_bytes, file.data_offset) == one.data
            file.close()
        statistics = desk.tier.statistics()
        assert statistics.writes == 4
        assert statistics.is_healthy
        assert statistics.written_today_bytes >= 4 * DATA_ALIGNMENT


async def test_it_receives_while_it_writes(tmp_path: Path) -> None:
    """DESIGN 4: messages are taken in while a write blocks; one write at a time."""
    system = GatedFs()
    async with running(tmp_path / "state", system) as desk:
        await desk.write(segment(seed=1))
        await trio.to_thread.run_sync(system.entered.wait)
        for seed in (2, 3):
            await desk.write(segment(seed=seed))
        await desk.tell(CancelWrite(segment(seed=3).header.id))
        outcome = await desk.hear(Written)
        assert (outcome.id, outcome.error) == (segment(seed=3).header.id, CANCELLED)
        assert desk.tier.statistics().writes_queued == 1
        system.gate.set()
        ids = [(await desk.hear(Written)).id for _ in range(2)]
        assert ids == [segment(seed=seed).header.id for seed in (1, 2)]
        assert system.writes == 2


async def test_a_tail_absorbed_before_its_time_is_never_written(tmp_path: Path) -> None:
    """DESIGN 3: a delayed write that is cancelled leaves no file and no bytes on the meter."""
    async with running(tmp_path / "state") as desk:
        one = segment()
        await desk.write(one, not_before_seconds=trio.current_time() + 1000)
        await trio.testing.wait_all_tasks_blocked()
        await desk.tell(CancelWrite(one.header.id))
        assert (await desk.hear(Written)).error == CANCELLED
        assert desk.tier.statistics().written_today_bytes == 0
        assert files_below(desk, "*.safetensors") == []


async def test_a_started_write_is_not_cancelled(tmp_path: Path) -> None:
    """A cancellation that comes too late is not answered; the write's outcome is."""
    system = GatedFs()
    async with running(tmp_path / "state", system) as desk:
        await desk.write(segment())
        await trio.to_thread.run_sync(system.entered.wait)
        await desk.tell(CancelWrite(segment().header.id))
        await trio.testing.wait_all_tasks_blocked()
        system.gate.set()
        assert (await desk.hear(Written)).entry is not None
        assert desk.tier.statistics().writes_cancelled == 0


async def test_sync_voids_delays(tmp_path: Path) -> None:
    """P8: a flush has delayed writes started at once."""
    async with running(tmp_path / "state") as desk:
        await desk.write(segment(), not_before_seconds=trio.current_time() + 1000)
        await trio.testing.wait_all_tasks_blocked()
        await desk.tell(SyncAll())
        assert (await desk.hear(Written)).entry is not None


class DrainsFs(QuickFs):
    """Notes what gets its final name, and when the drive is drained."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.fails = False

    def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
        super().rename(name, within, new_name, new_within)
        if new_name.endswith(".safetensors"):
            self.steps.append("image")

    def barrier_directory(self, descriptor: int, *, drain: bool = False) -> None:
        if drain:
            self.steps.append("drain")
            if self.fails:
                raise OSError(errno.EIO, "injected")


async def test_the_drive_is_drained_when_that_is_asked_for(tmp_path: Path) -> None:
    """P8: what was written before survives a loss of power then; no write pays for that."""
    system = DrainsFs()
    async with running(tmp_path / "state", system) as desk:
        await desk.tell(SyncAll(1))
        await desk.hear(Synced)
        for seed in (1, 2):
            await desk.written(segment(seed=seed))
        await desk.tell(SyncAll(2, drain=True))
        assert await desk.hear(Synced) == Synced(2)
        assert system.steps == ["image", "image", "drain"]


async def test_one_drain_serves_all_flushes_that_wait_for_one(tmp_path: Path) -> None:
    """P8: what they wait for is written already."""

    class GatedDrains(GatedFs):
        drains = 0

        def barrier_directory(self, descriptor: int, *, drain: bool = False) -> None:
            self.drains += drain

    system = GatedDrains()
    async with running(tmp_path / "state", system) as desk:
        await desk.write(segment())
        await trio.to_thread.run_sync(system.entered.wait)
        for number in (1, 2, 3):
            await desk.tell(SyncAll(number, drain=True))
        await trio.testing.wait_all_tasks_blocked()
        system.gate.set()
        assert [(await desk.hear(Synced)).sync for _ in range(3)] == [1, 2, 3]
        assert system.drains == 1


async def test_a_drive_that_cannot_be_drained_is_reported(tmp_path: Path) -> None:
    """P8, D7: the flush hears why, and the disk counts as failing."""
    system = DrainsFs()
    system.fails = True
    async with running(tmp_path / "state", system) as desk:
        await desk.tell(SyncAll(1, drain=True))
        assert "injected" in (await desk.hear(Synced)).error
        assert not desk.heard_of(DiskChanged)[-1].healthy


async def test_thousands_of_deletions_at_once(tmp_path: Path) -> None:
    """D5: RamTier, which never waits, may have thousands of files deleted in one step."""
    async with running(tmp_path / "state") as desk:
        entry = await desk.written(segment())
        for _ in range(3000):
            desk.tier.mailbox.send_nowait(Envelope(DeleteFile("x", entry.path, 1)))
        for _ in range(3000):
            await desk.hear(Deleted)
        assert desk.tier.statistics().deletions == 3000


async def test_a_delay_ends_by_itself(tmp_path: Path) -> None:
    """A delayed write starts when its time has come."""
    async with running(tmp_path / "state") as desk:
        not_before = trio.current_time() + 0.05
        await desk.write(segment(), not_before)
        assert (await desk.hear(Written)).entry is not None
        assert trio.current_time() >= not_before


async def test_shutdown_writes_what_is_queued(tmp_path: Path) -> None:
    """DESIGN 4: when the mailbox closes, queued writes are finished without their delays."""
    async with running(tmp_path / "state") as desk:
        for seed in range(3):
            await desk.write(segment(seed=seed), not_before_seconds=trio.current_time() + 1000)
        await desk.tier.mailbox.aclose()
        assert [(await desk.hear(Written)).entry is not None for _ in range(3)] == [True] * 3
    store = Store(tmp_path / "state")
    store.prepare()
    assert sum(len(batch.entries) for batch in store.scan()) == 3


async def test_it_survives_the_end_of_ram_tier(tmp_path: Path) -> None:
    """DESIGN 4: at shutdown outcomes that nobody hears do not stop the writing."""
    store = Store(tmp_path / "state", QuickFs(), min_free_bytes=0)
    outbox, inbox = trio.open_memory_channel[Envelope](0)
    tier = SsdTier(store, outbox, QUICK)
    image = segment().image()
    one = segment()
    async with trio.open_nursery() as nursery:
        await nursery.start(tier.run)
        inbox.close()
        await tier.mailbox.send(Envelope(WriteImage(one.header, one.tokens, one.schema), image))
        await tier.mailbox.aclose()
    outbox.close()
    image.free()
    assert sum(len(batch.entries) for batch in store.scan()) == 1
    store.close()


async def test_an_image_that_cannot_be_described_fails_alone(tmp_path: Path) -> None:
    """A write whose parts do not fit fails without retry; the disk stays healthy."""
    async with running(tmp_path / "state") as desk:
        one = segment()
        image = one.image()
        desk.images.append(image)
        await desk.tell(WriteImage(one.header, one.tokens[4:], one.schema), image)
        outcome = await desk.hear(Written)
        assert not outcome.retry
        assert "do not fit" in outcome.error
        await desk.written(one)


# -- the daily budget ------------------------------------------------------------------------------


async def test_the_daily_budget_stops_writes_and_survives_a_restart(tmp_path: Path) -> None:
    """D6: when the budget is spent writes stop, also after a restart, and reads go on."""
    config = SsdTierConfig(daily_write_bytes=6 * DATA_ALIGNMENT)
    async with running(tmp_path / "state", config=config) as desk:
        entry = await desk.written(segment(seed=1))
        await desk.write(segment(seed=2))
        outcome = await desk.hear(Written)
        assert (outcome.error, outcome.retry) == (BUDGET_SPENT, False)
        assert desk.tier.statistics().writes_refused_by_budget == 1
    async with running(tmp_path / "state", config=config) as desk:
        await desk.write(segment(seed=3))
        assert (await desk.hear(Written)).error == BUDGET_SPENT
        desk.store.reader.verify(entry).close()
        assert not desk.heard_of(DiskChanged)


async def test_all_that_a_write_puts_on_the_disk_counts(tmp_path: Path) -> None:
    """D6: what stands in the header and the namespace's schema wear the disk as well."""
    long = ImageSpec(ImageKind.OBJECT, metadata=bytes(1 << 20))
    async with running(tmp_path / "state") as desk:
        files = 0
        for one in (*every_kind(), sample(long, None)):
            files += (await desk.written(one)).allocated_bytes
        schemas = sum(file.stat().st_size for file in files_below(desk, "*.schema"))
        metered = desk.tier.statistics().written_today_bytes
        assert files + schemas <= metered <= files + schemas + 5 * 4 * DATA_ALIGNMENT


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
async def test_a_meter_that_is_no_file_is_set_aside(tmp_path: Path, kind: str) -> None:
    """D6, D7: it counts as empty and turns nothing off, and the next one survives a restart."""
    async with running(tmp_path / "state") as desk:
        await desk.prepared()
    meter = tmp_path / "state" / METER_NAME
    match kind:
        case "directory":
            meter.mkdir()
        case "link":
            meter.symlink_to("/dev/null")
        case _:
            os.mkfifo(meter)
    for seed in range(2):
        async with running(tmp_path / "state") as desk:
            await desk.prepared()
            assert (desk.tier.statistics().written_today_bytes > 0) is (seed > 0)
            await desk.written(segment(seed=seed))
            assert desk.tier.statistics().is_healthy
            assert len(list((tmp_path / "state" / QUARANTINE).glob(f"*.{METER_NAME}"))) == 1


async def test_a_meter_that_cannot_be_set_aside_counts_in_memory(tmp_path: Path) -> None:
    """D6, D7: the budget holds until the next restart, and the tier works."""

    class NoMeterFs(QuickFs):
        def open_file(self, name: str, within: int) -> int:
            if name == METER_NAME:
                raise OSError(errno.EIO, "injected")
            return super().open_file(name, within)

        def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
            if METER_NAME in (name, new_name):
                raise OSError(errno.EIO, "injected")
            super().rename(name, within, new_name, new_within)

    config = SsdTierConfig(daily_write_bytes=6 * DATA_ALIGNMENT)
    async with running(tmp_path / "state") as desk:
        await desk.written(segment())
    async with running(tmp_path / "state", NoMeterFs(), config) as desk:
        await desk.written(segment(seed=1))
        await desk.write(segment(seed=2))
        assert (await desk.hear(Written)).error == BUDGET_SPENT


async def test_a_shortage_does_not_empty_the_meter(tmp_path: Path) -> None:
    """D4, D6: what was written before counts once the meter can be read."""

    class ShortFs(QuickFs):
        refusals = 1

        def open_file(self, name: str, within: int) -> int:
            if name == METER_NAME and self.refusals:
                self.refusals -= 1
                raise OSError(errno.EMFILE, "injected")
            return super().open_file(name, within)

    async with running(tmp_path / "state") as desk:
        await desk.written(segment())
        before = desk.tier.statistics().written_today_bytes
    async with running(tmp_path / "state", ShortFs()) as desk:
        while not (await desk.hear(DiskChanged)).healthy:
            pass
        assert desk.tier.statistics().written_today_bytes == before


async def test_what_exceeds_the_budget_is_not_begun(tmp_path: Path) -> None:
    """D6: the header is asked for before the write, not after it."""
    long = sample(ImageSpec(ImageKind.OBJECT, metadata=bytes(1 << 20)), None)
    config = SsdTierConfig(daily_write_bytes=1 << 20)
    async with running(tmp_path / "state", config=config) as desk:
        await desk.write(long)
        assert (await desk.hear(Written)).error == BUDGET_SPENT
        assert desk.tier.statistics().written_today_bytes == 0
        assert files_below(desk, "*.safetensors") == []


# -- deleting and clearing -------------------------------------------------------------------------


async def test_deletions_follow_writes(tmp_path: Path) -> None:
    """D8: a file is deleted after every write that was asked for before."""
    async with running(tmp_path / "state") as desk:
        old = await desk.written(segment(seed=1))
        await desk.write(segment(seed=2), not_before_seconds=trio.current_time() + 0.05)
        await desk.tell(DeleteFile(old.header.id, old.path, old.allocated_bytes))
        deleted = await desk.hear(Deleted)
        assert (deleted.id, deleted.allocated_bytes) == (old.header.id, old.allocated_bytes)
        assert len(desk.heard_of(Written)) == 2
        assert not file_of(desk, old).exists()


async def test_a_deletion_that_fails_is_tried_until_it_works(tmp_path: Path) -> None:
    """D5: bytes are reported as free only when they are."""

    class StubbornFs(QuickFs):
        refusals = 2

        def unlink(self, name: str, within: int) -> None:
            if name.endswith(".safetensors") and self.refusals:
                self.refusals -= 1
                raise OSError(errno.EACCES, "injected")
            super().unlink(name, within)

    async with running(tmp_path / "state", StubbornFs()) as desk:
        entry = await desk.written(segment())
        await desk.tell(DeleteFile(entry.header.id, entry.path, entry.allocated_bytes))
        assert "injected" in (await desk.hear(Deleted)).error
        statistics = desk.tier.statistics()
        assert statistics.undeletable_files == 1
        assert "injected" in statistics.deletion_failure
        while (await desk.hear(Deleted)).error:
            pass
        assert not file_of(desk, entry).exists()
        statistics = desk.tier.statistics()
        assert (statistics.deletions_failed, statistics.undeletable_files) == (2, 0)
        assert statistics.deletion_failure == ""


async def test_a_file_that_was_written_anew_is_not_deleted_by_an_older_order(
    tmp_path: Path,
) -> None:
    """D5, E5: the write takes the old file's place, so that its bytes are free without a retry."""

    class StubbornFs(QuickFs):
        refuses = True

        def unlink(self, name: str, within: int) -> None:
            if name.endswith(".safetensors") and self.refuses:
                self.refuses = False
                raise OSError(errno.EMFILE, "injected")
            super().unlink(name, within)

    never_again = SsdTierConfig(retry_first_seconds=1000, retry_most_seconds=1000)
    async with running(tmp_path / "state", StubbornFs(), never_again) as desk:
        entry = await desk.written(segment())
        await desk.tell(DeleteFile(entry.header.id, entry.path, entry.allocated_bytes))
        await desk.written(segment())
        assert Deleted(entry.header.id, entry.allocated_bytes) in desk.all
        assert file_of(desk, entry).exists()


class UndeletableFs(QuickFs):
    """Refuses, while it has an ``error``, to delete any image."""

    error = 0

    def unlink(self, name: str, within: int) -> None:
        if name.endswith(".safetensors") and self.error:
            raise OSError(self.error, "injected")
        super().unlink(name, within)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO, errno.ENODEV])
async def test_a_deletion_that_fails_as_all_would_is_the_disks(tmp_path: Path, error: int) -> None:
    """D7: RamTier hears that the disk fails before it could evict another file instead."""
    system = UndeletableFs()
    async with running(tmp_path / "state", system) as desk:
        entry = await desk.written(segment())
        system.error = error
        await desk.tell(DeleteFile(entry.header.id, entry.path, entry.allocated_bytes))
        assert (await desk.hear(Deleted)).error
        assert not desk.heard_of(DiskChanged)[-1].healthy
        while not (await desk.hear(DiskChanged)).healthy:
            pass
        system.error = 0
        while (await desk.hear(Deleted)).error:
            pass
        assert not file_of(desk, entry).exists()


async def test_the_third_file_in_a_row_that_stays_is_the_disks(tmp_path: Path) -> None:
    """D7: two are not, however often they are tried; and the disk is told to fail once."""
    system = UndeletableFs()
    async with running(tmp_path / "state", system) as desk:
        entries = [await desk.written(segment(seed=seed)) for seed in range(5)]

        def reports() -> list[bool]:
            return [m.healthy for m in desk.heard_of(DiskChanged) if not m.healthy]

        async def delete(number: int) -> None:
            entry = entries[number]
            await desk.tell(DeleteFile(entry.header.id, entry.path, entry.allocated_bytes))
            while (await desk.hear(Deleted)).id != entry.header.id:
                pass

        system.error = errno.EPERM
        for number in (0, 1):
            await delete(number)
        for _ in range(6):
            assert (await desk.hear(Deleted)).error
        assert desk.tier.statistics().is_healthy
        await delete(2)
        assert reports() == [False]
        while not (await desk.hear(DiskChanged)).healthy:
            pass
        for number in (3, 4):
            await delete(number)
        assert reports() == [False]


async def test_a_cleared_file_that_could_not_be_deleted_is_trash(tmp_path: Path) -> None:
    """D5, D11: its path is gone, and its bytes count in the trash until that is empty."""
    system = UndeletableFs()
    async with running(tmp_path / "state", system) as desk:
        first = await desk.written(segment(seed=1, namespace="a"))
        other = await desk.written(segment(seed=2, namespace="b"))
        system.error = errno.EPERM
        for entry in (first, other):
            await desk.tell(DeleteFile(entry.header.id, entry.path, entry.allocated_bytes))
            await desk.hear(Deleted)
        await desk.tell(ClearNamespace("a", 1))
        await desk.hear(NamespaceCleared)
        moved = desk.heard_of(Deleted)[-1]
        assert moved == Deleted(first.header.id, first.allocated_bytes, error=CLEARED)
        assert desk.tier.statistics().undeletable_files == 1
        assert "injected" in (await desk.hear(TrashEmptied)).error
        system.error = 0
        while not (emptied := await desk.hear(TrashEmptied)).done:
            pass
        assert emptied.allocated_bytes == first.allocated_bytes
        while not any(not one.error for one in desk.heard_of(Deleted)):
            await desk.hear(Deleted)
        assert [one.id for one in desk.heard_of(Deleted) if not one.error] == [other.header.id]


async def test_a_look_at_the_directory_that_nobody_asked_for_is_not_answered(
    tmp_path: Path,
) -> None:
    """D7: RamTier hears what was lost, and no `Synced` that a replay would wait for in vain."""
    async with running(tmp_path / "state") as desk:
        await desk.written(segment())
        shutil.rmtree(tmp_path / "state")
        desk.tier.directory_missed()
        await desk.hear(FilesLost)
        await desk.tell(SyncAll(7))
        assert (await desk.hear(Synced)).sync == 7


async def test_clear_cancels_queued_writes_and_empties_the_trash(tmp_path: Path) -> None:
    """D11: a clear drops what waits, hides the files, then gives their bytes back."""
    async with running(tmp_path / "state") as desk:
        gone = [await desk.written(segment(seed=seed, namespace="a")) for seed in (1, 2)]
        kept = await desk.written(segment(seed=3, namespace="b"))
        later = trio.current_time() + 1000
        await desk.write(segment(seed=4, namespace="a"), later)
        await desk.write(segment(seed=5, namespace="b"), later)
        await desk.tell(ClearNamespace("a", 7))
        cleared = await desk.hear(NamespaceCleared)
        assert (cleared.namespace, cleared.epoch, cleared.error) == ("a", 7, "")
        cancelled = desk.heard_of(Written)[-1]
        assert (cancelled.id, cancelled.error) == (segment(seed=4).header.id, CANCELLED)
        emptied = await desk.hear(TrashEmptied)
        assert emptied.done
        assert emptied.allocated_bytes == sum(e.allocated_bytes for e in gone)
        assert file_of(desk, kept).exists()
        await desk.tell(SyncAll())
        assert (await desk.hear(Written)).id == segment(seed=5).header.id


async def test_deleted_files_are_not_counted_in_the_trash(tmp_path: Path) -> None:
    """D5: a file that was to be deleted before a clear is reported as deleted, once."""
    async with running(tmp_path / "state") as desk:
        first, second = [await desk.written(segment(seed=s, namespace="a")) for s in (1, 2)]
        await desk.write(segment(seed=3, namespace="b"), trio.current_time() + 1000)
        await desk.tell(DeleteFile(first.header.id, first.path, first.allocated_bytes))
        await desk.tell(ClearNamespace("a", 1))
        emptied = await desk.hear(TrashEmptied)
        assert emptied.allocated_bytes == second.allocated_bytes
        assert len(desk.heard_of(Deleted)) == 1


async def test_trash_that_cannot_be_emptied_is_reported_and_tried_again(tmp_path: Path) -> None:
    """D5, D11: its bytes count as long as it is there, and `status` says why."""

    class StubbornFs(QuickFs):
        refuses = True

        def unlink(self, name: str, within: int) -> None:
            if name.endswith(".safetensors") and self.refuses:
                raise OSError(errno.EPERM, "injected")
            super().unlink(name, within)

    system = StubbornFs()
    async with running(tmp_path / "state", system) as desk:
        entry = await desk.written(segment())
        await desk.tell(ClearNamespace(None, 1))
        assert "injected" in (await desk.hear(TrashEmptied)).error
        assert "injected" in desk.tier.statistics().deletion_failure
        system.refuses = False
        while not (emptied := await desk.hear(TrashEmptied)).done:
            assert "injected" in emptied.error
        assert emptied.allocated_bytes == entry.allocated_bytes
        assert desk.tier.statistics().deletion_failure == ""


async def test_a_clear_that_fails_happens_before_the_next_write(tmp_path: Path) -> None:
    """D11: a clear that the disk refused is reported, and done before anything is written."""

    class RenameFails(QuickFs):
        fails = False

        def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
            if self.fails:
                raise OSError(errno.EIO, "injected")
            super().rename(name, within, new_name, new_within)

    system = RenameFails()
    async with running(tmp_path / "state", system) as desk:
        entry = await desk.written(segment(seed=1))
        system.fails = True
        await desk.tell(ClearNamespace("demo", 1))
        assert (await desk.hear(NamespaceCleared)).error != ""
        assert file_of(desk, entry).exists()
        await desk.write(segment(seed=2))
        assert (await desk.hear(Written)).retry
        system.fails = False
        assert (await desk.hear(NamespaceCleared)).error == ""
        assert not file_of(desk, entry).exists()
        await desk.written(segment(seed=3))


async def test_a_clear_that_the_lock_forbids_is_done_once_it_is_held(tmp_path: Path) -> None:
    """D9, D11: a daemon that is refused the directory clears nothing, says so, and remembers."""
    owner = Store(tmp_path / "state", QuickFs(), min_free_bytes=0)
    owner.prepare()
    entry = write(owner, segment())
    async with running(tmp_path / "state") as desk:
        await desk.tell(ClearNamespace("demo", 1))
        assert "another prefixcached daemon" in (await desk.hear(NamespaceCleared)).error
        assert file_of(desk, entry).exists()
        owner.close()
        assert (await desk.hear(NamespaceCleared)).error == ""
        assert not file_of(desk, entry).exists()


async def test_a_deletion_that_the_lock_forbids_shows_that_the_disk_fails(tmp_path: Path) -> None:
    """D5, D7: a daemon that lost its directory, and would wait for its room, goes on with RAM."""
    async with running(tmp_path / "state") as desk:
        entry = await desk.written(segment())
        (tmp_path / "state").rename(tmp_path / "moved")
        owner = Store(tmp_path / "state", QuickFs(), min_free_bytes=0)
        owner.prepare()
        await desk.tell(DeleteFile(entry.header.id, entry.path, entry.allocated_bytes))
        assert (await desk.hear(Deleted)).error
        assert not desk.heard_of(DiskChanged)[-1].healthy
        owner.close()
        while (done := await desk.hear(Deleted)).error:
            pass
        assert done.id == entry.header.id
        assert len(desk.heard_of(FilesLost)) == 1, "they are in the directory that was moved"


# -- the index at start ----------------------------------------------------------------------------


async def test_the_index_is_loaded(tmp_path: Path) -> None:
    """D10: all entries with their schemas, then one last batch with what else there is."""
    async with running(tmp_path / "state") as desk:
        written = {(await desk.written(one)).path for one in every_kind()}
        (file_of(desk, await desk.written(checkpoint(seed=9))).parent / "junk").write_bytes(b"x")
        damaged = await desk.written(segment(seed=8))
        file_of(desk, damaged).write_bytes(b"y" * 100)
        written.add((await desk.written(checkpoint(seed=9))).path)
    async with running(tmp_path / "state") as desk:
        await desk.tell(ScanDirectory())
        while not (last := await desk.hear(Loaded)).done:
            pass
        batches = desk.heard_of(Loaded)
        entries = [entry for batch in batches for entry in batch.entries]
        assert {entry.path for entry in entries} == written
        schemas = {digest for batch in batches for digest in batch.schemas}
        assert {e.header.schema_digest for e in entries} - {""} == schemas
        assert last.damaged == 1
        assert last.quarantine_bytes == 4096
        assert last.foreign_bytes + last.quarantine_bytes == desk.store.other_bytes
        assert desk.tier.statistics().loaded_files == len(written)
        assert not desk.tier.statistics().is_loading


async def test_a_directory_over_its_cap_loses_foreign_files_first(tmp_path: Path) -> None:
    """D5, D10: at start, what is no entry goes before any entry does."""
    async with running(tmp_path / "state") as desk:
        entry = await desk.written(segment())
        (file_of(desk, entry).parent / "junk").write_bytes(b"x" * 100_000)
    config = SsdTierConfig(cap_bytes=entry.allocated_bytes + 50_000)
    async with running(tmp_path / "state", config=config) as desk:
        await desk.tell(ScanDirectory())
        while not (last := await desk.hear(Loaded)).done:
            pass
        assert not (file_of(desk, entry).parent / "junk").exists()
        assert last.foreign_bytes == 4096  # the schema
        assert file_of(desk, entry).exists()


async def test_foreign_files_are_dropped_when_room_is_wanted(tmp_path: Path) -> None:
    """D10: RamTier may have the first victims deleted, and hears what is left."""
    async with running(tmp_path / "state") as desk:
        entry = await desk.written(segment())
        (file_of(desk, entry).parent / "junk").write_bytes(b"x" * 100_000)
        await desk.tell(ScanDirectory())
        while not (await desk.hear(Loaded)).done:
            pass
        await desk.tell(DropOthers(1))
        assert (await desk.hear(DiskChanged)).other_bytes == 4096
        assert file_of(desk, entry).exists()


async def test_quarantined_bytes_are_reported(tmp_path: Path) -> None:
    """D5: what the prefetcher moves aside counts at once."""
    async with running(tmp_path / "state") as desk:
        entry = await desk.written(segment())
        other_bytes = (await desk.hear(DiskChanged)).other_bytes
        desk.store.quarantine(entry, "test")
        desk.tier.others_changed()
        changed = await desk.hear(DiskChanged)
        assert changed.healthy
        assert changed.other_bytes == other_bytes + entry.allocated_bytes


# -- a bad disk ------------------------------------------------------------------------------------


async def test_a_full_disk_is_reported_and_tried_again(tmp_path: Path) -> None:
    """D7: writes go back with retry, the disk is probed, and writing goes on when it works."""
    system = FullFs()
    system.full = False
    async with running(tmp_path / "state", system) as desk:
        system.full = True
        await desk.write(segment(seed=1), not_before_seconds=0.0)
        changed = await desk.hear(DiskChanged)
        assert not changed.healthy
        assert "No space left" in changed.reason
        outcome = await desk.hear(Written)
        assert outcome.retry
        await desk.write(segment(seed=2))
        assert (await desk.hear(Written)).retry
        assert not desk.tier.statistics().is_healthy
        system.full = False
        changed = await desk.hear(DiskChanged)
        assert (changed.healthy, changed.reason) == (True, "")
        await desk.written(segment(seed=3))
        assert files_below(desk, "tmp-*") == []


async def test_queued_writes_go_back_when_the_disk_fails(tmp_path: Path) -> None:
    """D7, E5: no image waits unanswered for a disk that does not work."""
    system = FullFs()
    async with running(tmp_path / "state", system) as desk:
        later = trio.current_time() + 1000
        for seed in (1, 2):
            await desk.write(segment(seed=seed), later)
        await desk.write(segment(seed=3))
        outcomes = [await desk.hear(Written) for _ in range(3)]
        assert all(outcome.retry for outcome in outcomes)
        assert desk.tier.statistics().writes_queued == 0


async def test_deletions_go_on_while_the_disk_is_full(tmp_path: Path) -> None:
    """D7: deleting is what makes room on a full disk."""
    system = FullFs()
    system.full = False
    async with running(tmp_path / "state", system) as desk:
        entry = await desk.written(segment(seed=1))
        system.full = True
        await desk.write(segment(seed=2))
        assert (await desk.hear(Written)).retry
        await desk.tell(DeleteFile(entry.header.id, entry.path, entry.allocated_bytes))
        await desk.hear(Deleted)
        assert not file_of(desk, entry).exists()


async def test_a_directory_deleted_while_running(tmp_path: Path) -> None:
    """D7: the directory is made again and the image is written."""
    async with running(tmp_path / "state") as desk:
        await desk.written(segment(seed=1))
        shutil.rmtree(tmp_path / "state")
        entry = await desk.written(segment(seed=2))
        assert file_of(desk, entry).exists()
        heard = [type(message) for message in desk.all]
        assert heard.index(FilesLost) == len(heard) - 1 - heard[::-1].index(Written) - 1


async def test_a_flush_finds_that_the_directory_was_deleted(tmp_path: Path) -> None:
    """D7, P8: all files are told to be lost before the flush goes on; a clear loses none."""
    async with running(tmp_path / "state") as desk:
        await desk.written(segment(seed=1))
        await desk.tell(SyncAll(1))
        assert (await desk.hear(Synced)).sync == 1
        await desk.tell(ClearNamespace(None, 1))
        await desk.hear(NamespaceCleared)
        await desk.tell(SyncAll(2))
        await desk.hear(Synced)
        assert not desk.heard_of(FilesLost)
        shutil.rmtree(tmp_path / "state")
        await desk.tell(SyncAll(3))
        await desk.hear(Synced)
        assert len(desk.heard_of(FilesLost)) == 1
        assert desk.tier.statistics().directories_lost == 1


async def test_lost_files_are_told_before_the_disk_works_again(tmp_path: Path) -> None:
    """D7: who hears that it works queues what RAM has, and must know what is no longer durable."""
    system = FullFs()
    system.full = False
    async with running(tmp_path / "state", system) as desk:
        await desk.written(segment(seed=1))
        system.full = True
        await desk.write(segment(seed=2))
        assert (await desk.hear(Written)).retry
        desk.all.clear()
        shutil.rmtree(tmp_path / "state")
        system.full = False
        while not (await desk.hear(DiskChanged)).healthy:
            pass
        assert len(desk.heard_of(FilesLost)) == 1


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_trash_that_waits_for_the_scan_does_not_keep_the_loop_busy(tmp_path: Path) -> None:
    """D7, M1: a clear that works while the disk counts as failing leaves its trash until then."""
    other = Store(tmp_path / "state", QuickFs(), min_free_bytes=0)
    other.prepare()
    config = SsdTierConfig(retry_first_seconds=1000.0, retry_most_seconds=1000.0)
    async with running(tmp_path / "state", config=config) as desk:
        await desk.tell(ScanDirectory())
        assert (await desk.hear(Loaded)).later
        other.close()
        await desk.tell(ClearNamespace(None, 1))
        assert not (await desk.hear(NamespaceCleared)).error
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(0.1)
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 20


async def test_a_start_without_a_directory(tmp_path: Path) -> None:
    """D7: a daemon whose directory cannot be made runs, says so, and loads it when it comes."""
    async with running(tmp_path / "state") as desk:
        await desk.written(segment())
    (tmp_path / "state").rename(tmp_path / "unplugged")
    (tmp_path / "state").write_bytes(b"in the way")
    async with running(tmp_path / "state") as desk:
        assert not (await desk.hear(DiskChanged)).healthy
        await desk.tell(ScanDirectory())
        first = await desk.hear(Loaded)
        # Nobody waits for the disk, and RamTier knows that more may come.
        assert (first.done, first.later, first.entries) == (True, True, ())
        (tmp_path / "state").unlink()
        (tmp_path / "unplugged").rename(tmp_path / "state")
        while not (last := await desk.hear(Loaded)).done:
            pass
        assert not last.later
        assert (await desk.hear(DiskChanged)).healthy
        assert sum(len(batch.entries) for batch in desk.heard_of(Loaded)) == 1
        assert desk.tier.statistics().is_healthy


class SpinningUpFs(QuickFs):
    """Answers once the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def status_of(self, name: str, within: int | None = None) -> os.stat_result:
        assert self.gate.wait(timeout=20)
        return super().status_of(name, within)


async def test_ram_goes_on_alone_while_the_disk_spins_up(tmp_path: Path) -> None:
    """D7: a disk that is slow to start counts as failing, and is loaded once it is there."""
    async with running(tmp_path / "state") as desk:
        await desk.written(segment(seed=1))
    system = SpinningUpFs()
    impatient = msgspec.structs.replace(QUICK, patience_seconds=0.01)
    async with running(tmp_path / "state", system, impatient) as desk:
        await desk.tell(ScanDirectory())
        assert desk.tier.statistics().is_healthy
        change = await desk.hear(DiskChanged)
        assert not change.healthy
        assert "no answer from the disk for 0.01 s" in change.reason
        first = await desk.hear(Loaded)
        assert (first.done, first.later, first.entries) == (True, True, ())
        await desk.write(segment(seed=2))
        assert (await desk.hear(Written)).retry
        system.gate.set()
        assert (await desk.hear(DiskChanged)).healthy
        while not (last := await desk.hear(Loaded)).done:
            pass
        assert not last.later
        assert sum(len(batch.entries) for batch in desk.heard_of(Loaded)) == 1


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
async def test_who_waits_for_a_disk_that_does_not_answer_is_told(
    tmp_path: Path, *, is_early: bool
) -> None:
    """D7, D11, C4: also what was asked before patience ran out; the clear happens once it works."""
    async with running(tmp_path / "state") as desk:
        entry = await desk.written(segment(seed=1))
    system = SpinningUpFs()
    impatient = msgspec.structs.replace(QUICK, patience_seconds=0.05)
    try:
        async with running(tmp_path / "state", system, impatient) as desk:
            await desk.tell(ScanDirectory())
            if not is_early:
                assert not (await desk.hear(DiskChanged)).healthy
            await desk.tell(ClearNamespace(None, 1))
            await desk.tell(SyncAll(1))
            await desk.tell(SyncAll(2, drain=True))
            assert "no answer" in (await desk.hear(NamespaceCleared)).error
            assert not (await desk.hear(Synced)).error
            assert "no answer" in (await desk.hear(Synced)).error
            system.gate.set()
            assert not (await desk.hear(NamespaceCleared)).error
            assert not file_of(desk, entry).exists()
    finally:
        system.gate.set()


async def test_nothing_is_said_of_a_disk_that_is_ready_soon(tmp_path: Path) -> None:
    """D10: RamTier hears what the files are, and nothing else."""
    async with running(tmp_path / "state") as desk:
        await desk.tell(ScanDirectory())
        loaded = await desk.hear(Loaded)
        assert (loaded.done, loaded.later) == (True, False)
        assert desk.store.directory.holds_lock()
        assert not desk.tier.statistics().is_loading
        assert desk.all == [loaded]


async def test_shutdown_does_not_wait_for_a_disk_that_spins_up(tmp_path: Path) -> None:
    """DESIGN 4: nothing can be queued for it."""
    system = SpinningUpFs()
    try:
        with trio.fail_after(5):
            async with running(tmp_path / "state", system) as desk:
                await desk.tell(ScanDirectory())
                await trio.testing.wait_all_tasks_blocked()
                assert desk.tier.statistics().is_loading
                await desk.tier.mailbox.aclose()
                while desk.tier._inbox.statistics().open_receive_channels:
                    await trio.lowlevel.checkpoint()
    finally:
        system.gate.set()


async def test_shutdown_does_not_wait_for_a_failing_disk(tmp_path: Path) -> None:
    """DESIGN 4: a drain ends although nothing can be written."""
    system = FullFs()
    config = SsdTierConfig(retry_first_seconds=1000, retry_most_seconds=1000)
    async with running(tmp_path / "state", system, config) as desk:
        await desk.write(segment(seed=1))
        assert (await desk.hear(Written)).retry
        await desk.write(segment(seed=2))
        await desk.tier.mailbox.aclose()
        assert (await desk.hear(Written)).retry


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES])
async def test_every_call_may_fail(tmp_path: Path, error: int, *, persistent: bool) -> None:
    """D4, D7: whichever call fails, the actor lives, answers all, and deletes nothing good."""
    async with running(tmp_path / "template") as desk:
        kept = await desk.written(segment(seed=1))
        old = await desk.written(segment(seed=2))
    fail_at = 0
    for fail_at in range(1, 400, 7):
        path = tmp_path / str(fail_at)
        shutil.copytree(tmp_path / "template", path)
        system = FaultyFs(fail_at, error, persistent=persistent)
        async with running(path, system) as desk:
            await desk.tell(ScanDirectory())
            await desk.write(segment(seed=3))
            await desk.tell(DeleteFile(old.header.id, old.path, old.allocated_bytes))
            await desk.hear(Written)
            while not any(batch.done for batch in desk.heard_of(Loaded)):
                await desk.hear(Loaded)
            failed = bool(system.failed)
            system.heal()
            while not any(not deleted.error for deleted in desk.heard_of(Deleted)):
                await desk.hear(Deleted)
            assert file_of(desk, kept).exists()
            assert not file_of(desk, old).exists()
            assert len(desk.heard_of(Written)) == 1
        names = os.listdir(path / QUARANTINE) if (path / QUARANTINE).exists() else []
        assert [name for name in names if name[0] != "."] == []
        shutil.rmtree(path)
        if not failed:
            break
    assert fail_at > 50
