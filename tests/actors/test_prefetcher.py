"""The prefetcher: one read per image, bounded, cancelled by the last asker, nothing unverified."""

import errno
import os
import random
import shutil
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from prefixcached.actors import memory
from prefixcached.actors.filesystem import FileSystem
from prefixcached.actors.prefetcher import Prefetcher, PrefetcherConfig
from prefixcached.actors.reading import READ_BYTES, VerifiedFile
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import QUARANTINE, SEGMENTS
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
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor
from tests.support.filesystems import FaultyFs, QuickFs
from tests.support.store_samples import Sample, every_kind, sample, segment


class GatedFs(QuickFs):
    """Lets one read through for each `release` of the gate; counts bytes and open files."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)
        self.read_bytes = 0
        self.reads_of_data = 0

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if not self.is_open:
            self.waiting.release()
            assert self.gate.acquire(timeout=20)
        count = super().read(descriptor, buffer, offset)
        self.read_bytes += count
        return count

    def open_gate(self) -> None:
        self.is_open = True
        self.gate.release(10_000)


class Desk:
    """Stands for RamTier."""

    def __init__(
        self, prefetcher: Prefetcher, store: Store, heard: trio.MemoryReceiveChannel[Envelope]
    ) -> None:
        self.prefetcher = prefetcher
        self.store = store
        self.quarantined = 0
        self.directory_missed = 0
        self._heard = heard

    async def tell(self, message: ActorMessage, handle: object = None) -> None:
        await self.prefetcher.mailbox.send(Envelope(message, handle))

    async def hear(self) -> tuple[ActorMessage, VerifiedFile | None]:
        with trio.fail_after(20):
            envelope = await self._heard.receive()
        return envelope.message, envelope.handle

    async def read(self, asker: int, entry: FileEntry) -> tuple[ImageRead, VerifiedFile | None]:
        await self.tell(ReadImage(asker, entry))
        return await self.heard_read()

    async def heard_read(self) -> tuple[ImageRead, VerifiedFile | None]:
        message, file = await self.hear()
        assert isinstance(message, ImageRead)
        return message, file

    def hears_nothing(self) -> bool:
        return self._heard.statistics().current_buffer_used == 0


@asynccontextmanager
async def running(
    path: Path, system: FileSystem | None = None, config: PrefetcherConfig | None = None
) -> AsyncIterator[Desk]:
    store = Store(path, system or QuickFs(), min_free_bytes=0)
    store.prepare()
    outbox, inbox = trio.open_memory_channel[Envelope](1000)
    desk: Desk
    prefetcher = Prefetcher(
        store, outbox, config or PrefetcherConfig(), lambda: setattr(desk, "quarantined", 1),
        lambda: setattr(desk, "directory_missed", desk.directory_missed + 1),
    )  # fmt: skip
    desk = Desk(prefetcher, store, inbox)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(prefetcher.run)
            try:
                yield desk
            finally:
                if isinstance(system, GatedFs):
                    system.open_gate()
                nursery.cancel_scope.cancel()
    finally:
        outbox.close()
        inbox.close()
        prefetcher.mailbox.close()
        store.close()


def stored(path: Path, *samples: Sample) -> list[FileEntry]:
    """Write samples with the real file system and return their entries."""
    store = Store(path, QuickFs(), min_free_bytes=0)
    store.prepare()
    entries = []
    for one in samples:
        image = one.image()
        entries.append(store.write(one.header, one.tokens, one.schema, image))
        image.free()
    store.close()
    return entries


def large(seed: int, nbytes: int = 3 * READ_BYTES) -> Sample:
    """An object that takes several reads."""
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("x", "U8", (nbytes,)),))
    return sample(spec, None, seed=seed)


def data_of(file: VerifiedFile | None, entry: FileEntry) -> bytes:
    assert file is not None
    data = os.pread(file.descriptor, entry.data_bytes, file.data_offset)
    file.close()
    return data


def path_of(path: Path, entry: FileEntry) -> Path:
    return path / SEGMENTS / entry.path


# -- reading ---------------------------------------------------------------------------------------


async def test_every_kind_is_read(tmp_path: Path) -> None:
    """D3, F1: a read answers with the verified file and how much was read."""
    samples = every_kind()
    entries = stored(tmp_path, *samples)
    async with running(tmp_path) as desk:
        for number, (one, entry) in enumerate(zip(samples, entries, strict=True)):
            outcome, file = await desk.read(number, entry)
            assert (outcome.read, outcome.id, outcome.error) == (number, one.header.id, "")
            assert outcome.read_bytes == path_of(tmp_path, entry).stat().st_size
            assert data_of(file, entry) == one.data


async def test_what_was_verified_is_not_read_again(tmp_path: Path) -> None:
    """D3, T7: a second read of an unchanged file reads nothing; a changed file is read again."""
    (entry,) = stored(tmp_path, segment())
    async with running(tmp_path) as desk:
        outcomes = []
        for number in range(2):
            outcome, file = await desk.read(number, entry)
            assert data_of(file, entry) == segment().data
            outcomes.append(outcome.read_bytes)
        assert outcomes[0] > 0
        assert outcomes[1] == 0
        os.utime(path_of(tmp_path, entry))
        outcome, file = await desk.read(2, entry)
        assert data_of(file, entry) == segment().data
        assert outcome.read_bytes == outcomes[0]
        assert desk.prefetcher.statistics().reads_still_verified == 1


async def test_twenty_askers_make_one_read(tmp_path: Path) -> None:
    """F2: identical reads are made once, and each asker has a descriptor of its own."""
    system = GatedFs(is_open=False)
    (entry,) = stored(tmp_path, large(1))
    async with running(tmp_path, system) as desk:
        for asker in range(20):
            await desk.tell(ReadImage(asker, entry))
        await trio.testing.wait_all_tasks_blocked()
        system.open_gate()
        heard = [await desk.heard_read() for _ in range(20)]
        assert {outcome.read for outcome, _ in heard} == set(range(20))
        assert sum(outcome.read_bytes for outcome, _ in heard) == system.read_bytes
        assert system.read_bytes == path_of(tmp_path, entry).stat().st_size
        files = [file for _, file in heard]
        assert len({file.descriptor for file in files if file is not None}) == 20
        for file in files:
            assert data_of(file, entry) == large(1).data
        statistics = desk.prefetcher.statistics()
        assert (statistics.reads, statistics.reads_joined) == (1, 19)
        assert (statistics.reads_in_flight, statistics.bytes_in_flight) == (0, 0)


async def test_nineteen_of_twenty_give_up(tmp_path: Path) -> None:
    """F2: cancelling all askers but one changes nothing for the last; they hear nothing."""
    system = GatedFs(is_open=False)
    (entry,) = stored(tmp_path, large(1))
    async with running(tmp_path, system) as desk:
        for asker in range(20):
            await desk.tell(ReadImage(asker, entry))
        await trio.to_thread.run_sync(system.waiting.acquire)
        for asker in range(20):
            if asker != 7:
                await desk.tell(CancelRead(asker, entry.header.id))
        await trio.testing.wait_all_tasks_blocked()
        system.open_gate()
        outcome, file = await desk.heard_read()
        assert outcome.read == 7
        assert data_of(file, entry) == large(1).data
        await trio.testing.wait_all_tasks_blocked()
        assert desk.hears_nothing()
        assert desk.prefetcher.statistics().reads_cancelled == 0


async def test_the_last_asker_gone_ends_the_read(tmp_path: Path) -> None:
    """F2: a read that nobody waits for ends at its next chunk and closes its file."""
    system = GatedFs(is_open=False)
    (entry,) = stored(tmp_path, large(1, 50 * READ_BYTES))
    descriptors = len(os.listdir("/dev/fd"))
    async with running(tmp_path, system) as desk:
        descriptors = len(os.listdir("/dev/fd"))
        await desk.tell(ReadImage(1, entry))
        await trio.to_thread.run_sync(system.waiting.acquire)
        await desk.tell(CancelRead(1, entry.header.id))
        await trio.testing.wait_all_tasks_blocked()
        assert desk.prefetcher.statistics().reads_in_flight == 1
        system.open_gate()
        with trio.fail_after(20):
            while desk.prefetcher.statistics().reads_in_flight:
                await trio.lowlevel.checkpoint()
        assert desk.hears_nothing()
        assert system.read_bytes < 5 * READ_BYTES
        assert len(os.listdir("/dev/fd")) == descriptors
        outcome, file = await desk.read(2, entry)
        assert outcome.read_bytes == path_of(tmp_path, entry).stat().st_size
        assert file is not None
        file.close()


async def test_a_new_asker_does_not_join_a_cancelled_read(tmp_path: Path) -> None:
    """F2: who asks after the last one gave up gets a read of its own, and an answer."""
    system = GatedFs(is_open=False)
    (entry,) = stored(tmp_path, large(1))
    async with running(tmp_path, system) as desk:
        await desk.tell(ReadImage(1, entry))
        await trio.to_thread.run_sync(system.waiting.acquire)
        await desk.tell(CancelRead(1, entry.header.id))
        await desk.tell(ReadImage(2, entry))
        await trio.testing.wait_all_tasks_blocked()
        system.open_gate()
        outcome, file = await desk.heard_read()
        assert outcome.read == 2
        assert data_of(file, entry) == large(1).data
        await trio.testing.wait_all_tasks_blocked()
        assert desk.hears_nothing()


async def test_reads_are_bounded(tmp_path: Path) -> None:
    """F2: images are read several at once, within bounds of number and bytes; none is forgotten."""
    system = GatedFs(is_open=False)
    entries = stored(tmp_path, *(large(seed) for seed in range(6)))
    size = path_of(tmp_path, entries[0]).stat().st_size
    for config, expected in (
        (PrefetcherConfig(parallel_reads=3), 3),
        (PrefetcherConfig(parallel_reads=6, in_flight_bytes=2 * size), 2),
        (PrefetcherConfig(parallel_reads=6, in_flight_bytes=1), 1),
    ):
        system.is_open = False
        system.gate = threading.Semaphore(0)
        async with running(tmp_path, system, config) as desk:
            for asker, entry in enumerate(entries):
                await desk.tell(ReadImage(asker, entry))
            await trio.testing.wait_all_tasks_blocked()
            statistics = desk.prefetcher.statistics()
            assert statistics.reads_in_flight == expected
            assert statistics.bytes_in_flight == expected * size
            assert statistics.reads_waiting == 6 - expected
            await desk.tell(CancelRead(5, entries[5].header.id))
            system.open_gate()
            for _ in range(5):
                _, file = await desk.heard_read()
                assert file is not None
                file.close()
            await trio.testing.wait_all_tasks_blocked()
            assert desk.hears_nothing()
            assert desk.prefetcher.statistics().reads_waiting == 0


# -- damage and failures ---------------------------------------------------------------------------


async def test_damage_is_quarantined(tmp_path: Path) -> None:
    """D3: a damaged file is moved aside, every asker is told, and it is gone from then on."""
    (entry,) = stored(tmp_path, segment())
    path = path_of(tmp_path, entry)
    whole = bytearray(path.read_bytes())
    whole[random.Random(1).randrange(entry.data_offset, len(whole))] ^= 4
    async with running(tmp_path) as desk:
        outcome, file = await desk.read(0, entry)
        assert data_of(file, entry) == segment().data
        path.write_bytes(whole)
        for asker in (1, 2):
            await desk.tell(ReadImage(asker, entry))
        for _ in range(2):
            outcome, file = await desk.heard_read()
            assert file is None
            assert outcome.damaged or outcome.missing
            assert outcome.error
        assert not path.exists()
        assert len([n for n in os.listdir(tmp_path / QUARANTINE) if n[0] != "."]) == 1
        assert desk.quarantined == 1
        outcome, file = await desk.read(3, entry)
        assert (outcome.missing, outcome.damaged, file) == (True, False, None)
        assert desk.prefetcher.statistics().damaged == 1


async def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    """D1: a deleted file is reported as missing, not as damage."""
    (entry,) = stored(tmp_path, segment())
    path_of(tmp_path, entry).unlink()
    async with running(tmp_path) as desk:
        outcome, file = await desk.read(1, entry)
        assert (outcome.missing, outcome.damaged, file) == (True, False, None)
        assert desk.quarantined == 0


@pytest.mark.parametrize("away", [".", SEGMENTS])
async def test_a_directory_that_is_away_says_nothing_of_its_files(
    tmp_path: Path, away: str
) -> None:
    """D4, D7: a volume that is unplugged has lost none of them; the disk is looked at instead."""
    state = tmp_path / "state"
    (entry,) = stored(state, large(1))
    async with running(state) as desk:
        (state / away).resolve().rename(tmp_path / "away")
        outcome, file = await desk.read(1, entry)
        assert (outcome.missing, outcome.damaged, file) == (False, False, None)
        assert outcome.error
        image = memory.create(entry.data_bytes)
        await desk.tell(PromoteImage(entry), image)
        message, _ = await desk.hear()
        assert isinstance(message, Promoted)
        assert (message.missing, message.damaged) == (False, False)
        assert message.error
        assert desk.directory_missed == 2
        (tmp_path / "away").rename((state / away).resolve())
        await desk.tell(PromoteImage(entry), image)
        message, _ = await desk.hear()
        assert message == Promoted(entry.header.id)
        image.free()
        statistics = desk.prefetcher.statistics()
        assert (statistics.transient, statistics.missing) == (2, 0)


@pytest.mark.parametrize("is_damaged", [True, False])
async def test_a_directory_that_goes_away_in_a_read_has_lost_nothing(
    tmp_path: Path, *, is_damaged: bool
) -> None:
    """D4: neither a file that cannot be put aside is gone, nor one without schema damaged."""
    state = tmp_path / "state"
    (entry,) = stored(state, segment())

    class Unplugged(QuickFs):
        def status(self, descriptor: int) -> os.stat_result:
            if state.exists() and not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                state.rename(tmp_path / "away")
            return super().status(descriptor)

    async with running(state, Unplugged()) as desk:
        with (state / SEGMENTS / entry.path).open("ab") as damaged:
            damaged.write(b"!" * is_damaged)
        outcome, _ = await desk.read(1, entry)
        assert (outcome.missing, outcome.damaged) == (False, False)
        assert desk.directory_missed == 1
        assert desk.prefetcher.statistics().damaged == is_damaged


@pytest.mark.parametrize(
    "error", [errno.EMFILE, errno.EINTR, errno.EACCES, errno.ENOMEM, errno.EIO]
)
async def test_a_transient_error_leaves_the_file(tmp_path: Path, error: int) -> None:
    """D4: whatever call of a read fails, the file stays and the next read may succeed."""
    (entry,) = stored(tmp_path, segment())
    whole = path_of(tmp_path, entry).read_bytes()
    failures = fail_at = 0
    for fail_at in range(1, 40):
        system = FaultyFs(0, error)
        async with running(tmp_path, system) as desk:
            system.fail_at = system.calls + fail_at
            outcome, file = await desk.read(1, entry)
            if file is None:
                failures += 1
                assert os.strerror(error) in outcome.error
                assert not outcome.damaged
                assert not outcome.missing
                outcome, file = await desk.read(2, entry)
            assert data_of(file, entry) == segment().data
            assert path_of(tmp_path, entry).read_bytes() == whole
        if not system.failed:
            break
    assert failures == fail_at - 1 > 5


async def test_a_descriptor_that_cannot_be_duplicated(tmp_path: Path) -> None:
    """D4: an asker for whom no descriptor is left misses; the others are answered."""

    class NoDuplicates(GatedFs):
        def duplicate(self, descriptor: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    system = NoDuplicates(is_open=False)
    (entry,) = stored(tmp_path, segment())
    async with running(tmp_path, system) as desk:
        for asker in range(2):
            await desk.tell(ReadImage(asker, entry))
        await trio.testing.wait_all_tasks_blocked()
        system.open_gate()
        heard = [await desk.heard_read() for _ in range(2)]
        by_asker = {outcome.read: (outcome, file) for outcome, file in heard}
        assert by_asker[1][0].error
        assert data_of(by_asker[0][1], entry) == segment().data


async def test_damage_that_cannot_be_moved_is_not_called_quarantined(tmp_path: Path) -> None:
    """D3: `damaged` promises that the file was moved aside."""

    class NoRename(QuickFs):
        def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (entry,) = stored(tmp_path, segment())
    path_of(tmp_path, entry).write_bytes(b"short")
    async with running(tmp_path, NoRename()) as desk:
        outcome, file = await desk.read(1, entry)
        assert file is None
        assert not outcome.damaged
        assert "could not be moved" in outcome.error
        assert path_of(tmp_path, entry).exists()


async def test_damage_that_vanishes_before_it_is_moved_is_missing(tmp_path: Path) -> None:
    """D1: whoever deleted the damaged file first was quicker, and nothing was quarantined."""

    class Gone(QuickFs):
        def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
            self.unlink(name, within)
            super().rename(name, within, new_name, new_within)

    (entry,) = stored(tmp_path, segment())
    path_of(tmp_path, entry).write_bytes(b"short")
    async with running(tmp_path, Gone()) as desk:
        outcome, file = await desk.read(1, entry)
        assert (outcome.missing, outcome.damaged, file) == (True, False, None)
        assert desk.quarantined == 0


async def test_damage_without_a_quarantine_is_not_missing(tmp_path: Path) -> None:
    """D3: where only the quarantine is gone the file stands and counts; the disk is looked at."""
    (entry,) = stored(tmp_path, segment())
    path_of(tmp_path, entry).write_bytes(b"short")
    async with running(tmp_path) as desk:
        shutil.rmtree(tmp_path / QUARANTINE)
        outcome, file = await desk.read(1, entry)
        assert (outcome.missing, outcome.damaged, file) == (False, False, None)
        assert desk.directory_missed == 1
        assert path_of(tmp_path, entry).exists()


async def test_only_so_many_verifications_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was forgotten is read whole again; memory does not grow with the files."""
    monkeypatch.setattr("prefixcached.actors.prefetcher.VERIFIED_FILES", 1)
    first, second = stored(tmp_path, large(1), large(2))
    async with running(tmp_path) as desk:
        for entry, reads in ((first, True), (first, False), (second, True), (first, True)):
            outcome, file = await desk.read(1, entry)
            assert bool(outcome.read_bytes) == reads
            assert file is not None
            file.close()


async def test_who_did_not_ask_cancels_nothing(tmp_path: Path) -> None:
    """F2: a cancel that comes after the answer, or of another asker, leaves the read alone."""
    system = GatedFs(is_open=False)
    (entry,) = stored(tmp_path, segment())
    async with running(tmp_path, system) as desk:
        await desk.tell(ReadImage(1, entry))
        await trio.to_thread.run_sync(system.waiting.acquire)
        await desk.tell(CancelRead(2, entry.header.id))
        await trio.testing.wait_all_tasks_blocked()
        system.open_gate()
        outcome, file = await desk.heard_read()
        assert outcome.read == 1
        assert data_of(file, entry) == segment().data
        await desk.tell(CancelRead(1, entry.header.id))
        outcome, file = await desk.read(3, entry)
        assert data_of(file, entry) == segment().data


async def test_a_message_of_another_actor_ends_it_loudly(tmp_path: Path) -> None:
    """Whoever adds a message and forgets its receiver is told which, and no state is guessed."""
    (entry,) = stored(tmp_path, segment())
    with pytest.RaisesGroup(
        pytest.RaisesExc(TypeError, match="RamTier sent Prefetcher a ImageRead"),
        flatten_subgroups=True,
    ):
        async with running(tmp_path) as desk:
            await desk.tell(ImageRead(1, entry.header.id))
            await trio.sleep_forever()


# -- promotion and recency -------------------------------------------------------------------------


async def test_promotion_fills_and_seals_memory(tmp_path: Path) -> None:
    """T7: the image is in the given memory, sealed, and the file counts as verified."""
    one = large(1)
    (entry,) = stored(tmp_path, one)
    async with running(tmp_path) as desk:
        image = memory.create(entry.data_bytes)
        await desk.tell(PromoteImage(entry), image)
        message, _ = await desk.hear()
        assert message == Promoted(entry.header.id)
        assert image.is_sealed
        back = bytearray(entry.data_bytes)
        image.read_into(0, memoryview(back))
        image.free()
        assert bytes(back) == one.data
        outcome, file = await desk.read(1, entry)
        assert outcome.read_bytes == 0
        assert data_of(file, entry) == one.data


async def test_promotion_of_damage_fails(tmp_path: Path) -> None:
    """D3: damaged bytes never become resident, and RamTier is told that the file is gone."""
    (entry,) = stored(tmp_path, large(1))
    with path_of(tmp_path, entry).open("r+b") as damaged:
        damaged.seek(-100, os.SEEK_END)
        damaged.write(b"!")
    async with running(tmp_path) as desk:
        image = memory.create(entry.data_bytes)
        await desk.tell(PromoteImage(entry), image)
        message, _ = await desk.hear()
        assert isinstance(message, Promoted)
        assert "checksum" in message.error
        assert (message.damaged, message.missing) == (True, False)
        assert not image.is_sealed
        assert not path_of(tmp_path, entry).exists()
        assert desk.quarantined == 1
        await desk.tell(PromoteImage(entry), image)
        message, _ = await desk.hear()
        assert isinstance(message, Promoted)
        assert (message.damaged, message.missing) == (False, True)
        image.free()


async def test_reads_go_before_promotions(tmp_path: Path) -> None:
    """T7: promotion is off the critical path: a read that somebody waits for goes first."""
    system = GatedFs(is_open=False)
    first, second, third = stored(tmp_path, *(large(seed) for seed in range(3)))
    async with running(tmp_path, system, PrefetcherConfig(parallel_reads=1)) as desk:
        await desk.tell(ReadImage(1, first))
        image = memory.create(second.data_bytes)
        await desk.tell(PromoteImage(second), image)
        await desk.tell(ReadImage(2, third))
        await trio.testing.wait_all_tasks_blocked()
        system.open_gate()
        kinds = []
        for _ in range(3):
            message, file = await desk.hear()
            kinds.append(type(message))
            if file is not None:
                file.close()
        assert kinds == [ImageRead, ImageRead, Promoted]
        image.free()


async def test_recency_is_recorded_without_a_new_verification(tmp_path: Path) -> None:
    """D3, D5: a touch renews the file's time, and the next read still reads nothing."""
    (entry,) = stored(tmp_path, segment())
    os.utime(path_of(tmp_path, entry), (1, 1))
    async with running(tmp_path) as desk:
        _, file = await desk.read(1, entry)
        assert file is not None
        file.close()
        for _ in range(3):
            await desk.tell(TouchFile(entry))
        with trio.fail_after(20):
            while path_of(tmp_path, entry).stat().st_mtime < 1000:
                await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.05)
        outcome, file = await desk.read(2, entry)
        assert data_of(file, entry) == segment().data
        assert outcome.read_bytes == 0


async def test_touching_a_missing_file_is_harmless(tmp_path: Path) -> None:
    """D1: recency of a file that is gone is not recorded, and nothing else happens."""
    gone, kept = stored(tmp_path, segment(seed=1), segment(seed=2))
    path_of(tmp_path, gone).unlink()
    async with running(tmp_path) as desk:
        await desk.tell(TouchFile(gone))
        _, file = await desk.read(1, kept)
        assert data_of(file, kept) == segment(seed=2).data
        with trio.fail_after(20):
            while not desk.prefetcher.statistics().touches_failed:
                await trio.lowlevel.checkpoint()


# -- the end ---------------------------------------------------------------------------------------


async def test_what_nobody_hears_is_closed(tmp_path: Path) -> None:
    """C3: when RamTier is gone, verified files are closed and the prefetcher ends quietly."""
    (entry,) = stored(tmp_path, segment())
    store = Store(tmp_path, QuickFs())
    outbox, inbox = trio.open_memory_channel[Envelope](0)
    prefetcher = Prefetcher(store, outbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(prefetcher.run)
        inbox.close()
        before = len(os.listdir("/dev/fd"))
        await prefetcher.mailbox.send(Envelope(ReadImage(1, entry)))
        await prefetcher.mailbox.send(Envelope(ReadImage(2, entry)))
        await prefetcher.mailbox.aclose()
    assert prefetcher.statistics().reads_in_flight == 0
    assert len(os.listdir("/dev/fd")) <= before
    outbox.close()
