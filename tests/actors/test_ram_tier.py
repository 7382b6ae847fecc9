"""The RamTier actor itself: its loop, its threads, real shared memory."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from prefixcached.actors.mailbox import MAILBOX_MESSAGES, Inbox, ReplySlot
from prefixcached.actors.ram_tier import RamTier
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import (
    Call,
    ClientGone,
    Deleted,
    DeleteFile,
    Envelope,
    FileEntry,
    Loaded,
    ScanDirectory,
    WriteImage,
    Written,
)
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import small_config
from tests.support.core_client import sequence
from tests.support.core_payload import SCHEMAS, Tokens, encoded, image_bytes, verify_hit
from tests.support.descriptors import open_descriptors


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[RamTier]:
    """The actor alone, without a disk; everything it holds is freed at the end."""
    ram_tier = RamTier(small_config(**changes))
    async with trio.open_nursery() as nursery:
        await nursery.start(ram_tier.run)
        yield ram_tier
        nursery.cancel_scope.cancel()
    ram_tier.close()


def with_disk(**changes: Any) -> tuple[RamTier, Inbox]:
    """The actor, and what it says to SsdTier."""
    settings: dict[str, Any] = {"ssd_bytes": 1 << 30, "write_delay_seconds": 0.0, **changes}
    ram_tier = RamTier(small_config(**settings))
    to_ssd, from_ram_tier = trio.open_memory_channel[Envelope](float("inf"))
    to_prefetcher, _ = trio.open_memory_channel[Envelope](float("inf"))
    ram_tier.connect(ssd=to_ssd, prefetcher=to_prefetcher)
    return ram_tier, from_ram_tier


async def ask(ram_tier: RamTier, session: int, request: wire.AnyRequest) -> tuple[Any, list[int]]:
    slot = ReplySlot()
    await ram_tier.mailbox.send(Envelope(Call(session, request), slot))
    with trio.fail_after(20):
        reply, descriptors = await slot.wait()
    return reply, list(descriptors)


async def put(ram_tier: RamTier, session: int, tokens: Tokens) -> Any:
    """Offer, fill the memory through its descriptors as another process would, commit."""
    offer = wire.Offer("plain/a", pack_tokens(tokens), encoded("plain"))
    grant, descriptors = await ask(ram_tier, session, offer)
    if not isinstance(grant, wire.Grant):
        return grant
    for spec, descriptor in zip(grant.images, descriptors, strict=True):
        data = image_bytes(SCHEMAS["plain"], spec, "plain/a", tokens)
        assert os.pwrite(descriptor, data, 0) == len(data)
    reply, _ = await ask(ram_tier, session, wire.Commit(grant.put))
    return reply


async def take(ram_tier: RamTier, session: int, tokens: Tokens) -> Any:
    request = wire.Take("plain/a", pack_tokens(tokens))
    hit, descriptors = await ask(ram_tier, session, request)
    if isinstance(hit, wire.Hit):
        read = lambda fd, offset, nbytes: os.pread(fd, nbytes, offset)  # noqa: E731
        verify_hit(SCHEMAS["plain"], "plain/a", tokens, hit, descriptors, read)
    return hit


async def test_put_and_take_through_real_shared_memory() -> None:
    """P4, T12: what one session wrote into the granted memory another reads, byte for byte."""
    before = open_descriptors()
    async with running() as ram_tier:
        assert isinstance(await put(ram_tier, 1, sequence(40)), wire.Stored)
        hit = await take(ram_tier, 2, sequence(41))
        assert hit.length == 40
        await ram_tier.mailbox.send(Envelope(ClientGone(2)))
        report, _ = await ask(ram_tier, 3, wire.Status())
        statistics = report.report["ram_tier"]
        assert statistics.leases == 0
        assert statistics.takes["ram_hits"] == 1
        assert statistics.ram_bytes == statistics.ram_bytes_by_state["resident"] > 0
        cleared, _ = await ask(ram_tier, 3, wire.Clear())
        assert cleared.images == 1
    assert open_descriptors() == before


async def test_a_reader_cannot_write_to_what_is_lent() -> None:
    """T2: a lent descriptor refuses writing, growing and shrinking."""
    async with running() as ram_tier:
        await put(ram_tier, 1, sequence(40))
        request = wire.Take("plain/a", pack_tokens(sequence(41)))
        _, (descriptor,) = await ask(ram_tier, 2, request)
        with pytest.raises(OSError, match=r"."):
            os.pwrite(descriptor, b"x", 0)
        for size in (0, 1 << 20):
            with pytest.raises(OSError, match=r"."):
                os.ftruncate(descriptor, size)


async def test_large_images_are_freed_in_a_thread() -> None:
    """M4: their bytes count until the system has them back, and then no longer."""
    async with running(ram_bytes=8 << 20) as ram_tier:
        tokens = sequence(4000)  # 2.8 MiB
        for salt in range(4):
            assert isinstance(await put(ram_tier, 1, (salt, *tokens)), wire.Stored)
            assert ram_tier.index.ram.bytes <= 8 << 20
        await ask(ram_tier, 1, wire.Clear())
        with trio.fail_after(20):
            while ram_tier.index.ram.bytes:
                await trio.lowlevel.checkpoint()


async def test_a_client_that_dies_before_its_commit_costs_nothing() -> None:
    """P4, L1: its memory and descriptors are gone with its connection."""
    async with running() as ram_tier:
        before = open_descriptors()
        offer = wire.Offer("plain/a", pack_tokens(sequence(40)), encoded("plain"))
        grant, descriptors = await ask(ram_tier, 1, offer)
        assert isinstance(grant, wire.Grant)
        assert len(descriptors) == 1
        assert open_descriptors() > before
        await ram_tier.mailbox.send(Envelope(ClientGone(1)))
        await ask(ram_tier, 2, wire.Status())
        assert open_descriptors() == before
        assert ram_tier.index.ram.bytes == 0


async def test_an_offer_that_waits_is_answered_when_time_passes(
    mock_clock: trio.testing.MockClock,
) -> None:
    """P5: the loop wakes up by itself at the end of an offer's patience."""
    async with running() as ram_tier:
        offer = wire.Offer("plain/a", pack_tokens(sequence(40)), encoded("plain"))
        await ask(ram_tier, 1, offer)
        slot = ReplySlot()
        await ram_tier.mailbox.send(Envelope(Call(2, offer), slot))
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1.9)
        await trio.testing.wait_all_tasks_blocked()
        assert not slot.is_set
        mock_clock.jump(0.2)
        await trio.testing.wait_all_tasks_blocked()
        assert slot.is_set
        assert isinstance((await slot.wait())[0], wire.Grant)


async def test_the_directory_is_scanned_first_and_puts_wait_for_it() -> None:
    """D10: with an SSD tier the actor orders a scan, and declines puts until it is done."""
    ram_tier, from_ram_tier = with_disk()
    async with trio.open_nursery() as nursery:
        await nursery.start(ram_tier.run)
        assert isinstance((await from_ram_tier.receive()).message, ScanDirectory)
        assert (await put(ram_tier, 1, sequence(40))).reason == "loading"
        await ram_tier.mailbox.send(Envelope(Loaded((), done=True)))
        assert isinstance(await put(ram_tier, 1, sequence(40)), wire.Stored)
        nursery.cancel_scope.cancel()
    ram_tier.close()


async def test_drain_ends_when_everything_is_written() -> None:
    """DESIGN 4: a graceful stop writes what is queued, without its delay."""
    ram_tier, from_ram_tier = with_disk(write_delay_seconds=1e6)
    drained = trio.Event()

    async def drain() -> None:
        await ram_tier.drain()
        drained.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(ram_tier.run)
        await ram_tier.mailbox.send(Envelope(Loaded((), done=True)))
        await put(ram_tier, 1, sequence(20))
        await put(ram_tier, 1, sequence(40))
        nursery.start_soon(drain)
        written = 0
        while written < 2:
            envelope = await from_ram_tier.receive()
            if isinstance(envelope.message, WriteImage):
                assert not drained.is_set()
                header = envelope.message.header
                entry = FileEntry(header, header.id, envelope.message.tokens, 4096, 1, 16384)
                await ram_tier.mailbox.send(Envelope(Written(header.id, entry)))
                written += 1
        with trio.fail_after(20):
            await drained.wait()
        nursery.cancel_scope.cancel()
    ram_tier.close()


async def test_nobody_waits_to_report_to_an_actor_that_has_ended() -> None:
    """DESIGN 4: whoever had no room in its mailbox goes on, and whoever comes later."""
    ram_tier = RamTier(small_config())
    report = Envelope(Deleted("x", 0, error="not permitted"))

    async def reports() -> None:
        with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
            await ram_tier.mailbox.send(report)

    for _ in range(MAILBOX_MESSAGES):
        ram_tier.mailbox.send_nowait(report)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reports)
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as actors:
                actors.cancel_scope.cancel()
                actors.start_soon(ram_tier.run)
        await reports()


async def test_the_loop_hears_of_deletions_that_a_write_waits_for() -> None:
    """DESIGN 4: a write that waits for room on the disk does not keep the loop from receiving."""
    ram_tier, from_ram_tier = with_disk(ssd_bytes=4 * 16384)
    async with trio.open_nursery() as nursery:
        await nursery.start(ram_tier.run)
        await ram_tier.mailbox.send(Envelope(Loaded((), done=True)))
        written = deleted = 0
        for salt in range(4):
            await put(ram_tier, 1, (salt, *sequence(8)))
        with trio.fail_after(20):
            while written < 4:
                envelope = await from_ram_tier.receive()
                message = envelope.message
                if isinstance(message, WriteImage):
                    written += 1
                    header = message.header
                    entry = FileEntry(header, header.id, message.tokens, 4096, 1, 16384)
                    await ram_tier.mailbox.send(Envelope(Written(header.id, entry)))
                elif isinstance(message, DeleteFile):
                    deleted += 1
                    await trio.testing.wait_all_tasks_blocked()
                    reply = Deleted(message.id, message.allocated_bytes)
                    await ram_tier.mailbox.send(Envelope(reply))
        assert deleted > 0
        nursery.cancel_scope.cancel()
    ram_tier.close()


async def test_a_call_that_fails_in_its_callers_turn_ends_the_actor_and_not_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What RamTier owns may be half changed then, whoever's task that was: the daemon must end."""
    ram_tier = RamTier(small_config())
    slots = [ReplySlot(), ReplySlot()]
    asked = 0

    def broken(namespace: str, tokens: bytes) -> int:
        nonlocal asked
        asked += 1
        raise ArithmeticError("half changed")

    monkeypatch.setattr(ram_tier.takes, "peek", broken)
    wanted = pytest.RaisesExc(ArithmeticError, match="half changed")
    with pytest.RaisesGroup(wanted, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(ram_tier.run)
            await trio.testing.wait_all_tasks_blocked()
            for session, slot in enumerate(slots):
                peek = wire.Peek(namespace="n", tokens=b"")
                ram_tier.mailbox.send_nowait(Envelope(Call(session, peek), slot))
    assert asked == 1
    assert not any(slot.is_set for slot in slots)


async def test_an_unknown_message_is_a_bug() -> None:
    """STYLE: an actor that gets what it cannot understand fails loudly, and ends the daemon."""
    ram_tier = RamTier(small_config())
    wanted = pytest.RaisesExc(TypeError, match="does not understand")
    with pytest.RaisesGroup(wanted, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(ram_tier.run)
            await ram_tier.mailbox.send(Envelope(ScanDirectory()))
