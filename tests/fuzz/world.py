"""A daemon's actors and sessions in this event loop, and what must be true of them at rest.

Everything is the product's: RamTier, SsdTier, Prefetcher, Session, over socket pairs. Only who
accepts connections is left out. `World` owns all of it for one input.

Most inputs run in `made_repeatable`: time jumps to the next deadline, and what a thread would do is
done in the loop, some turns later. Then the same input does the same again, in a tenth of the time.
"""

import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import trio
import trio.testing

from prefixcached.actors import memory
from prefixcached.actors.desk import RamConfig
from prefixcached.actors.entries import entries_below
from prefixcached.actors.memory import SharedImage
from prefixcached.actors.prefetcher import Prefetcher
from prefixcached.actors.ram_tier import RamTier
from prefixcached.actors.ssd_settings import SsdTierConfig
from prefixcached.actors.ssd_tier import SsdTier
from prefixcached.actors.store import Store
from prefixcached.daemon.historian import Historian
from prefixcached.daemon.latency import Latencies
from prefixcached.daemon.session import Ending, Session, SessionSettings
from prefixcached.daemon.sockets import RECEIVE_BYTES, MessageSocket
from prefixcached.daemon.watch import Watch
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import Envelope, RamCapChanged
from tests.support.filesystems import QuickFs

QUIET_SECONDS: Final = 100.0
"""For everything to come to rest; it takes milliseconds unless something hangs."""

_BUFFER: Final = bytearray(RECEIVE_BYTES)
"""Where sessions read; they share one, as those of a listener do."""

_TRANSIENT: Final = ("in_flight", "lingering", "promoting", "freeing")


def config(*, ssd: bool, is_real_time: bool) -> RamConfig:
    """A small machine: 16 or 64 pages, cuts after 8 KiB, no waits of seconds in real time."""
    return RamConfig(
        ram_bytes=(1 << 18) if ssd else (1 << 20), ssd_bytes=(4 << 20) if ssd else 0, max_images=48,
        segment_max_bytes=8192, segment_min_tokens=4, put_min_tokens=1, checkpoint_min_tokens=1,
        claim_min_tokens=8, put_wait_seconds=0.02 if is_real_time else 2.0,
        room_wait_seconds=0.02 if is_real_time else 1.0,
        write_delay_seconds=0.0 if is_real_time else 0.5,
    )  # fmt: skip


class World:
    """The actors of one run. Make it with `running`."""

    def __init__(
        self, nursery: trio.Nursery, state_dir: Path | None, *, is_real_time: bool
    ) -> None:
        self.state_dir = state_dir
        # Between two looks at whether all is at rest: nothing in the loop tells.
        self._pause_seconds = 0.001 if is_real_time else 0.2
        self.prefetcher: Prefetcher | None = None
        self.memories: list[SharedImage] = []
        self.endings: list[Ending] = []
        self.ram_tier = RamTier(
            config(ssd=state_dir is not None, is_real_time=is_real_time),
            create_memory=self._create,
        )
        self._nursery = nursery
        self._sessions: dict[int, Session] = {}
        self._numbers = 0
        latencies = Latencies()
        historian = Historian(self.ram_tier.sample, lambda: len(self._sessions), latencies)
        watch = Watch(
            lambda: [session.activity() for session in self._sessions.values()],
            self.ram_tier.holdings, latencies, historian,
        )  # fmt: skip
        self._settings = SessionSettings(
            boot=self.ram_tier.boot, daemon="prefixcached fuzzed", watch=watch.answer,
            latencies=latencies,
        )  # fmt: skip

    def _create(self, nbytes: int) -> SharedImage:
        self.memories = [image for image in self.memories if not image.is_freed]
        self.memories.append(memory.create(nbytes))
        return self.memories[-1]

    def connect(self) -> socket.socket:
        """Return the client's end of a new connection."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._numbers += 1
        session = Session(
            self._numbers, MessageSocket(theirs, _BUFFER), self.ram_tier.mailbox, self._settings
        )
        self._sessions[self._numbers] = session
        self._nursery.start_soon(self._serve, session)
        return ours

    async def _serve(self, session: Session) -> None:
        self.endings.append(await session.run())
        del self._sessions[session.number]

    async def squeeze(self) -> None:
        """Let RAM be one page for a moment: what is durable is on SSD alone then (rule M5)."""
        await trio.sleep(2 * self.ram_tier.config.write_delay_seconds)
        cap = self.ram_tier.index.ram.bytes_cap
        for ram_bytes in (limits.PAGE_BYTES, cap):
            await self.ram_tier.mailbox.send(Envelope(RamCapChanged(ram_bytes)))
            await trio.testing.wait_all_tasks_blocked()

    # -- at rest --------------------------------------------------------------------------------

    async def quiet(self) -> None:
        """Return once no connection is left and nothing is under way; AssertionError if it stays.

        What must be true then is checked.
        """
        deadline = trio.current_time() + QUIET_SECONDS
        while True:
            await trio.testing.wait_all_tasks_blocked()
            busy = self._busy()
            if not busy:
                break
            assert trio.current_time() < deadline, f"it does not come to rest: {busy}"
            await trio.sleep(self._pause_seconds)
        self._check_ledgers()
        self._check_tree()
        assert Ending.INTERNAL not in self.endings, "a session failed by a bug of the daemon"

    def _busy(self) -> dict[str, Any]:
        """What somebody still holds or what is under way: nothing of it at rest."""
        found = self.ram_tier.statistics()
        states = {
            **{name: found.ram_bytes_by_state[name] for name in _TRANSIENT},
            **{
                name: found.ssd_bytes_by_state[name]
                for name in ("writing", "deleting", "undeletable", "trash")
            },
        }
        holdings = {
            "sessions": len(self._sessions), "leases": found.leases, "pins": found.pins,
            "claims": found.claims, "takes_waiting": found.takes_waiting,
            "puts_in_flight": found.puts_in_flight, "offers_waiting": found.offers_waiting,
            "reads_outstanding": found.reads_outstanding, "loading": found.loading,
            "promotions_in_flight": found.promotions_in_flight,
        }  # fmt: skip
        if self.prefetcher is not None:
            reads = self.prefetcher.statistics()
            holdings["writes_queued"] = found.writes_queued
            holdings["prefetcher"] = reads.reads_waiting + reads.reads_in_flight
        return {name: value for name, value in {**states, **holdings}.items() if value}

    def _check_ledgers(self) -> None:
        index = self.ram_tier.index
        for ledger in (index.ram, index.ssd):
            assert ledger.bytes == sum(ledger.bytes_by_state.values()) <= ledger.bytes_cap
            assert ledger.images == sum(ledger.images_by_state.values()) <= ledger.images_cap
            assert min(ledger.bytes_by_state.values()) >= 0
        entries = index.entries.values()
        resident = [entry for entry in entries if entry.memory is not None]
        assert index.ram.bytes == sum(entry.charged_bytes for entry in resident)
        alive = sum(not image.is_freed for image in self.memories)
        assert index.ram.images == len(resident) == alive, "images charged and memories that exist"
        assert not index.held_bytes
        assert not any(entry.holders for entry in entries)
        durable = sum(entry.file.allocated_bytes for entry in entries if entry.file is not None)
        assert index.ssd.bytes_by_state["durable"] == durable

    def _check_tree(self) -> None:
        index = self.ram_tier.index
        reachable = 0
        for namespace in index.namespaces.values():
            tree = [
                e for top in namespace.root.children.values() for e in entries_below(top)
            ]  # fmt: skip
            below = [*tree, *namespace.objects.values()]
            assert len(below) == namespace.entries > 0, "an empty namespace is forgotten"
            assert all(index.entries[entry.id] is entry for entry in below)
            reachable += len(below)
        assert reachable == len(index.entries), "every entry can be reached"


def _never_cancelled() -> None:
    """What stands in the place of a thread is not interrupted."""


@contextmanager
def made_repeatable(seed: int) -> Iterator[None]:
    """Within the block no thread runs; use it with a clock that jumps."""
    turns = random.Random(seed)

    async def run_sync(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        for _turn in range(1 + turns.randrange(4)):
            await trio.lowlevel.cancel_shielded_checkpoint()
        return function(*arguments)

    with (
        mock.patch.object(trio.to_thread, "run_sync", run_sync),
        mock.patch.object(trio.from_thread, "check_cancelled", _never_cancelled),
    ):
        yield


@asynccontextmanager
async def running(state_dir: Path | None, *, is_real_time: bool) -> AsyncIterator[World]:
    """Run the actors for the block, with an SSD tier in ``state_dir`` unless that is None."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, state_dir, is_real_time=is_real_time)
        store = None
        if state_dir is not None:
            store = Store(state_dir, QuickFs(), min_free_bytes=0)
            ssd_tier = SsdTier(store, world.ram_tier.mailbox, SsdTierConfig())
            prefetcher = Prefetcher(
                store,
                world.ram_tier.mailbox,
                quarantined=ssd_tier.others_changed,
                directory_missed=ssd_tier.directory_missed,
            )
            world.prefetcher = prefetcher
            world.ram_tier.connect(ssd=ssd_tier.mailbox, prefetcher=prefetcher.mailbox)
            await nursery.start(ssd_tier.run)
            await nursery.start(prefetcher.run)
        await nursery.start(world.ram_tier.run)
        try:
            if state_dir is not None:
                await world.ram_tier.loaded.wait()
            yield world
        finally:
            nursery.cancel_scope.cancel()
    world.ram_tier.close()
    if store is not None:
        store.close()
