"""The three actors over a disk whose n-th call fails, for every n (rules D4, D7, E1, D5)."""

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import ANY

import pytest
import trio

from prefixcached.actors.filesystem import FileSystem
from prefixcached.actors.mailbox import ReplySlot
from prefixcached.actors.prefetcher import Prefetcher
from prefixcached.actors.ram_statistics import RamStatistics
from prefixcached.actors.ram_tier import RamTier
from prefixcached.actors.ssd_settings import SsdTierConfig
from prefixcached.actors.ssd_tier import SsdTier
from prefixcached.actors.store import Store
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import Call, Envelope
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import PAGE, small_config
from tests.support.core_client import sequence
from tests.support.core_payload import SCHEMAS, Tokens, encoded, image_bytes, verify_hit
from tests.support.filesystems import FaultyFs, QuickFs, scratch_directory

ERRORS: Final = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES)
RAM_PAGES: Final = 12
SSD_PAGES: Final = 40
QUICK: Final = SsdTierConfig(
    cap_bytes=SSD_PAGES * PAGE, retry_first_seconds=0.001, retry_most_seconds=0.002
)
MOST_CALLS: Final = 400
"""More calls than the work below makes."""

KEPT: Final = sequence(40, 1), sequence(40, 2)
NEW: Final = tuple(sequence(40, salt) for salt in range(3, 9))


class Actors:
    """RamTier, SsdTier and Prefetcher, wired as the daemon wires them, and a client of theirs."""

    def __init__(self, ram_tier: RamTier) -> None:
        self._ram_tier = ram_tier

    async def ask(self, request: wire.AnyRequest) -> tuple[Any, list[int]]:
        """Call RamTier, and see that no cap is exceeded by the time of the answer."""
        slot = ReplySlot()
        await self._ram_tier.mailbox.send(Envelope(Call(1, request), slot))
        with trio.fail_after(20):
            reply, descriptors = await slot.wait()
        index = self._ram_tier.index
        assert index.ram.bytes <= RAM_PAGES * PAGE
        assert index.ssd.bytes <= SSD_PAGES * PAGE
        return reply, list(descriptors)

    async def put(self, tokens: Tokens) -> Any:
        """Offer, fill, commit; the last reply."""
        grant, descriptors = await self.ask(
            wire.Offer("plain/a", pack_tokens(tokens), encoded("plain"))
        )
        if not isinstance(grant, wire.Grant):
            return grant
        for spec, descriptor in zip(grant.images, descriptors, strict=True):
            os.pwrite(descriptor, image_bytes(SCHEMAS["plain"], spec, "plain/a", tokens), 0)
        return (await self.ask(wire.Commit(grant.put)))[0]

    async def take(self, tokens: Tokens) -> int:
        """Take, check every byte, release; the tokens reused."""
        hit, descriptors = await self.ask(wire.Take("plain/a", pack_tokens((*tokens, 1))))
        if not isinstance(hit, wire.Hit):
            return 0
        verify_hit(
            SCHEMAS["plain"], "plain/a", (*tokens, 1), hit, descriptors,
            lambda descriptor, offset, nbytes: os.pread(descriptor, nbytes, offset),
        )  # fmt: skip
        await self._ram_tier.mailbox.send(Envelope(Call(1, wire.Release(hit.lease))))
        return int(hit.length)

    async def flush(self) -> wire.Flushed:
        """Wait until everything that can be written is."""
        flushed, _ = await self.ask(wire.Flush(10.0))
        assert isinstance(flushed, wire.Flushed)
        return flushed

    async def report(self) -> RamStatistics:
        """What RamTier says of itself."""
        status, _ = await self.ask(wire.Status())
        report = status.report["ram_tier"]
        assert isinstance(report, RamStatistics)
        return report

    async def until(self, condition: Callable[[RamStatistics], bool]) -> None:
        """Wait until RamTier's report is as ``condition`` says."""
        with trio.fail_after(20):
            while True:
                if condition(await self.report()):
                    return
                await trio.sleep(0.001)  # asking without end would keep the disk's threads waiting

    @property
    def durable(self) -> int:
        """Entries that have a file."""
        return sum(entry.file is not None for entry in self._ram_tier.index.entries.values())

    async def healthy(self) -> None:
        """Wait until the disk is known to work again."""
        await self.until(lambda report: bool(report.disk["healthy"]))

    async def loaded(self) -> None:
        """Wait until the index is complete."""
        with trio.fail_after(20):
            await self._ram_tier.loaded.wait()


@asynccontextmanager
async def running(directory: Path, system: FileSystem) -> AsyncIterator[Actors]:
    """The actors over ``directory``, reached through ``system``."""
    config = small_config(
        ram_bytes=RAM_PAGES * PAGE, ssd_bytes=SSD_PAGES * PAGE, write_delay_seconds=0.0,
        room_wait_seconds=0.05, promote="always",
    )  # fmt: skip
    ram_tier = RamTier(config)
    store = Store(directory, system, min_free_bytes=0)
    ssd_tier = SsdTier(store, ram_tier.mailbox, QUICK)
    prefetcher = Prefetcher(
        store, ram_tier.mailbox, quarantined=ssd_tier.others_changed,
        directory_missed=ssd_tier.directory_missed,
    )  # fmt: skip
    ram_tier.connect(ssd=ssd_tier.mailbox, prefetcher=prefetcher.mailbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(ssd_tier.run)
        await nursery.start(prefetcher.run)
        await nursery.start(ram_tier.run)
        yield Actors(ram_tier)
        nursery.cancel_scope.cancel()
    ram_tier.close()
    store.close()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A quick directory."""
    with scratch_directory() as path:
        yield path


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.exhaustive), 17])
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("error", ERRORS, ids=[errno.errorcode[error] for error in ERRORS])
async def test_whichever_call_fails_ram_serves_and_nothing_good_is_lost(
    scratch: Path, error: int, stride: int, *, persistent: bool
) -> None:
    """D4, D7: put, take and flush answer, caps hold, and healed, every file is there and right."""
    async with running(scratch / "template", QuickFs()) as actors:
        await actors.loaded()
        for tokens in KEPT:
            assert isinstance(await actors.put(tokens), wire.Stored)
        assert (await actors.flush()).failed == 0

    failed = True
    fail_at = 1
    while failed and fail_at < MOST_CALLS:
        directory = scratch / str(fail_at)
        shutil.copytree(scratch / "template", directory)
        system = FaultyFs(fail_at, error, persistent=persistent)
        async with running(directory, system) as actors:
            await actors.loaded()
            assert await actors.take(KEPT[0]) in (0, len(KEPT[0]))
            for tokens in NEW:
                assert isinstance(await actors.put(tokens), wire.Stored)
                assert await actors.take(tokens) == len(tokens)
            await actors.flush()
            failed = bool(system.failed)
            system.heal()
            assert isinstance(await actors.put(sequence(50, 20)), wire.Stored)
            await actors.healthy()
            assert (await actors.flush()) == wire.Flushed(written=ANY, skipped=0, failed=0)
        async with running(directory, QuickFs()) as actors:
            await actors.loaded()
            for tokens in (*KEPT, sequence(50, 20)):
                assert await actors.take(tokens) == len(tokens)
        shutil.rmtree(directory)
        fail_at += stride
    assert MOST_CALLS > fail_at > 2 * stride


class UnpluggedFs(QuickFs):
    """A volume whose mount point cannot be made again while it is away."""

    is_away = False

    def make_directory(self, name: str, within: int | None = None) -> bool:
        if self.is_away:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return super().make_directory(name, within)


async def test_what_is_on_an_unplugged_volume_is_there_when_it_is_back(scratch: Path) -> None:
    """D4, D7: who asks meanwhile misses, the disk fails, and not a file or a byte is forgotten."""
    directory, system = scratch / "state", UnpluggedFs()
    async with running(directory, system) as actors:
        await actors.loaded()
        for tokens in KEPT:
            await actors.put(tokens)
        assert (await actors.flush()).failed == 0
    async with running(directory, system) as actors:
        await actors.loaded()
        held = (await actors.report()).ssd_bytes
        system.is_away = True
        directory.rename(scratch / "away")
        assert await actors.take(KEPT[0]) == 0
        await actors.until(lambda report: not report.disk["healthy"])
        (scratch / "away").rename(directory)
        system.is_away = False
        await actors.healthy()
        for tokens in KEPT:
            assert await actors.take(tokens) == len(tokens)
        report = await actors.report()
        assert report.ssd_bytes == held
        assert report.disk["missing"] == 0


class UndeletableFs(QuickFs):
    """Refuses to delete images while it has an ``error``; with EROFS to write any file as well."""

    error = 0

    def unlink(self, name: str, within: int) -> None:
        if self.error and name.endswith(".safetensors"):
            raise OSError(self.error, os.strerror(self.error))
        super().unlink(name, within)

    def create_file(self, name: str, within: int) -> int:
        if self.error == errno.EROFS:
            raise OSError(self.error, os.strerror(self.error))
        return super().create_file(name, within)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EPERM], ids=["read-only", "no deletions"])
async def test_a_full_tier_that_deletes_nothing_keeps_its_entries(
    scratch: Path, error: int
) -> None:
    """D5, D7: one write's victims and three more go at most, and nothing else once it works."""
    system = UndeletableFs()
    async with running(scratch / "state", system) as actors:
        await actors.loaded()
        for salt in range(100, 140):
            await actors.put(sequence(10, salt))
            await actors.flush()
        before = actors.durable
        system.error = error
        for salt in range(200, 220):
            assert isinstance(await actors.put(sequence(10, salt)), wire.Stored)
            assert await actors.take(sequence(10, salt)) == 10
        await actors.flush()
        assert actors.durable >= before - 6
        system.error = 0
        await actors.until(lambda report: not report.ssd_bytes_by_state["undeletable"])
        await actors.healthy()
        assert isinstance(await actors.put(KEPT[0]), wire.Stored)
        assert (await actors.flush()).failed == 0
        written = actors.durable
        assert written >= before - 3
    async with running(scratch / "state", QuickFs()) as actors:
        await actors.loaded()
        assert actors.durable == written
        assert await actors.take(KEPT[0]) == len(KEPT[0])


async def test_a_deleted_directory_is_noticed_by_whoever_reads_first(scratch: Path) -> None:
    """D7: it is made again then, what it held no longer counts, and can be stored again."""
    async with running(scratch / "state", QuickFs()) as actors:
        await actors.loaded()
        await actors.put(KEPT[0])
        await actors.flush()
    async with running(scratch / "state", QuickFs()) as actors:
        await actors.loaded()
        shutil.rmtree(scratch / "state")
        assert await actors.take(KEPT[0]) == 0
        await actors.until(lambda report: not report.entries)
        assert (await actors.put(KEPT[0])).new_bytes > 0
        assert (await actors.flush()).failed == 0
