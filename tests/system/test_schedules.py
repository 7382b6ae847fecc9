"""The actors under many orders of Trio's scheduler: nothing hangs, no byte is wrong, none is left.

The tests drive the storage side of the daemon (RamTier, SsdTier, Prefetcher, PressureMonitor with
their real threads, memory and files) by the messages that sessions send.
"""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from prefixcached.actors.mailbox import ReplySlot
from prefixcached.daemon.config import Config
from prefixcached.daemon.options import Options
from prefixcached.daemon.storage import Storage
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import Call, ClientGone, Envelope, PressureChanged
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens
from tests.support.census import HOLDINGS
from tests.support.core_payload import (
    SCHEMAS,
    STATE,
    Tokens,
    encoded,
    image_bytes,
    offered_rows,
    verify_hit,
)
from tests.support.filesystems import scratch_directory
from tests.support.schedules import Hang, run_in_order

PAGE: Final = 16384
VISITORS: Final = 5
CALLS: Final = 12
HANG_SECONDS: Final = 60.0
QUICK_SEEDS: Final = 8
SLOW_SEEDS: Final = 150


def prompt(choose: random.Random) -> Tokens:
    """One of a few paths that share beginnings."""
    trunk = tuple(position * 31 % 50021 for position in range(choose.choice((20, 60, 90))))
    branch = choose.randrange(3)
    return trunk + tuple(branch * 7919 + position for position in range(choose.choice((0, 25))))


class Visitor:
    """One session after another, each of a few calls; some leave without waiting for the reply."""

    def __init__(self, storage: Storage, number: int, seed: int) -> None:
        self._storage = storage
        self._choose = random.Random(seed * 100 + number)
        self._session = number * 1000
        self._pins: list[int] = []

    async def run(self) -> None:
        """Make all calls and leave."""
        for _ in range(CALLS):
            actions = (self._put, self._take, self._take, self._prefetch, self._ask, self._clear)
            (action,) = self._choose.choices(actions, (6, 4, 4, 3, 2, 1))
            await action(f"{self._choose.choice(('plain', 'ring', 'hybrid'))}/a")
            if self._choose.random() < 0.2:
                await self._leave()
        await self._leave()

    async def _leave(self) -> None:
        await self._storage.mailbox.send(Envelope(ClientGone(self._session)))
        self._session += 1
        self._pins.clear()

    async def call(self, request: wire.AnyRequest) -> tuple[Any, list[int]] | None:
        """Return reply and descriptors; now and then leave instead, while it is pending."""
        slot = ReplySlot()
        await self._storage.mailbox.send(Envelope(Call(self._session, request), slot))
        if self._choose.random() < 0.1:
            await self._leave()
            return None
        reply, descriptors = await slot.wait()
        return reply, list(descriptors)

    async def _put(self, namespace: str) -> None:
        name, tokens = namespace.split("/", maxsplit=1)[0], prompt(self._choose)
        schema, length = SCHEMAS[name], len(tokens)
        state = ImageSpec(ImageKind.CHECKPOINT, length, length, tensors=(STATE,))
        offer = wire.Offer(
            namespace, pack_tokens(tokens), encoded(name),
            windows=tuple(offered_rows(window, length) for window in schema.windows),
            checkpoint=state if schema.has_state else None, seconds_left=1.0,
        )  # fmt: skip
        answer = await self.call(offer)
        if answer is None or not isinstance(answer[0], wire.Grant):
            return
        grant, descriptors = answer
        for spec, descriptor in zip(grant.images, descriptors, strict=True):
            data = image_bytes(schema, spec, namespace, tokens)
            assert os.pwrite(descriptor, data, 0) == len(data)
        if self._choose.random() < 0.2:
            await self._leave()
        else:
            await self.call(wire.Commit(grant.put))

    async def _take(self, namespace: str) -> None:
        tokens = (*prompt(self._choose), 7)
        wait = self._choose.choice((0.0, 0.05))
        answer = await self.call(wire.Take(namespace, pack_tokens(tokens), wait=wait))
        if answer is None or not isinstance(answer[0], wire.Hit):
            return
        hit, descriptors = answer
        verify_hit(
            SCHEMAS[namespace.split("/", maxsplit=1)[0]], namespace, tokens, hit, descriptors,
            lambda fd, offset, nbytes: os.pread(fd, nbytes, offset),
        )  # fmt: skip
        if self._choose.random() < 0.8:
            await self._tell(wire.Release(hit.lease))

    async def _prefetch(self, namespace: str) -> None:
        answer = await self.call(wire.Prefetch(namespace, pack_tokens((*prompt(self._choose), 7))))
        if answer is not None and answer[0].pin is not None:
            self._pins.append(answer[0].pin)
        if len(self._pins) > 1:
            await self._tell(wire.Unpin(self._pins.pop(0)))

    async def _ask(self, namespace: str) -> None:
        await self.call(wire.Peek(namespace, pack_tokens(prompt(self._choose))))
        if self._choose.random() < 0.5:
            await self.call(wire.Flush(seconds_left=1.0))

    async def _clear(self, namespace: str) -> None:
        await self.call(wire.Clear(namespace))

    async def _tell(self, message: wire.OneWay) -> None:
        await self._storage.mailbox.send(Envelope(Call(self._session, message)))


async def weather(storage: Storage, seed: int) -> None:
    """The memory pressure comes and goes, as often as the visitors let it."""
    choose = random.Random(seed)
    while True:
        level = choose.choice(("normal", "normal", "warn", "critical"))
        await storage.mailbox.send(Envelope(PressureChanged(level)))
        await trio.sleep(choose.uniform(0.0, 0.05))


async def one_life(directory: Path, seed: int) -> None:
    """Start the actors, let everybody visit, and see that nothing is left of them."""
    config = Config(
        socket=directory / "s", state_dir=directory / "state", ram_bytes=12 * PAGE,
        ssd_bytes=60 * PAGE, max_images=64, max_connections=16, segment_max_bytes=2 * PAGE,
        segment_min_tokens=10,
        options=Options(put_min_tokens=1, claim_min_tokens=10, checkpoint_min_tokens=1),
    )  # fmt: skip
    storage = Storage(config)
    async with trio.open_nursery() as actors:
        await actors.start(storage.run)
        async with trio.open_nursery() as visits:
            visits.start_soon(weather, storage, seed)
            async with trio.open_nursery() as visitors:
                for number in range(1, VISITORS + 1):
                    visitors.start_soon(Visitor(storage, number, seed).run)
            visits.cancel_scope.cancel()
        await nothing_is_left(storage)
        storage.stop()


async def nothing_is_left(storage: Storage) -> None:
    """Wait until the holdings of all are gone; then clear, and wait for the bytes."""
    await storage.mailbox.send(Envelope(PressureChanged("normal")))
    await until(storage, lambda status: not any(status[name] for name in HOLDINGS))
    slot = ReplySlot()
    await storage.mailbox.send(Envelope(Call(1, wire.Clear()), slot))
    await slot.wait()
    status = await until(storage, lambda s: not s["ram_bytes"] and not s["entries"])
    assert status["ram_bytes_peak"] <= status["ram_bytes_cap"]
    assert status["images"] == 0


async def until(storage: Storage, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for RamTier's statistics until ``condition`` is true of them; return them."""
    while True:
        slot = ReplySlot()
        await storage.mailbox.send(Envelope(Call(1, wire.Status()), slot))
        reply, _ = await slot.wait()
        assert isinstance(reply, wire.StatusReport)
        statistics = reply.report["ram_tier"]
        found = {name: getattr(statistics, name) for name in statistics.__struct_fields__}
        if condition(found):
            return found


def live(seeds: range) -> None:
    for seed in seeds:
        with scratch_directory() as directory:
            try:
                run_in_order(seed, HANG_SECONDS, partial(one_life, directory, seed))
            except BaseException as error:
                error.add_note(f"schedule {seed}")
                raise


def test_the_actors_work_in_some_orders() -> None:
    """C3, E1, L1: whatever the order, no call hangs, no byte is wrong and nothing is left."""
    live(range(QUICK_SEEDS))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_actors_work_in_many_orders() -> None:
    """C3, E1, L1: the same, for as many orders as a few minutes allow."""
    live(range(1000, 1000 + SLOW_SEEDS))


def order_of(seed: int) -> list[int]:
    """The order in which one schedule runs tasks that are all ready."""
    order: list[int] = []

    async def note(number: int) -> None:
        await trio.lowlevel.checkpoint()
        order.append(number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(note, number)

    run_in_order(seed, HANG_SECONDS, main)
    return order


def test_a_schedule_is_repeatable_and_differs_by_its_seed() -> None:
    """What failed in one order can be run in that order again."""
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(5)}) > 1


def test_a_deadlock_ends_with_the_tree_of_tasks() -> None:
    """Two tasks that send to each other over channels without room are found and named."""

    async def deadlock() -> None:
        here, from_there = trio.open_memory_channel[int](0)
        there, from_here = trio.open_memory_channel[int](0)

        async def first() -> None:
            await here.send(1)
            await from_here.receive()

        async def second() -> None:
            await there.send(2)
            await from_there.receive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            nursery.start_soon(second)

    with pytest.raises(Hang) as caught:
        run_in_order(1, 0.05, deadlock)
    for task, line in (("first", "here.send(1)"), ("second", "there.send(2)")):
        assert f"deadlock.<locals>.{task}" in str(caught.value)
        assert line in str(caught.value)
