"""The storage side of the daemon: RamTier and the actors that work for it. It owns their wiring."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio

from prefixcached.actors import crash_points
from prefixcached.actors.desk import RamConfig
from prefixcached.actors.holdings import Holdings
from prefixcached.actors.mailbox import MAILBOX_MESSAGES, Outbox
from prefixcached.actors.prefetcher import Prefetcher
from prefixcached.actors.pressure_monitor import monitor_of_this_machine
from prefixcached.actors.ram_tier import RamTier, random_id
from prefixcached.actors.ssd_settings import SsdTierConfig
from prefixcached.actors.ssd_tier import SsdTier
from prefixcached.actors.store import Store
from prefixcached.daemon.config import Config
from prefixcached.daemon.sizes import parse_size, share_of

if TYPE_CHECKING:
    # Only a daemon that traces needs it.
    from prefixcached.daemon.trace.tracer import Tracer


class Storage:
    """The actors behind the front (`app.StorageSide`). One object serves one run.

    Args:
        config: What the daemon is told.
        tracer: Records what the actors tell each other; without it nothing is in between.
    """

    def __init__(self, config: Config, tracer: "Tracer | None" = None) -> None:
        options = config.options
        self._tracer = tracer
        self._ram_tier = RamTier(
            RamConfig(
                ram_bytes=config.ram_bytes,
                ssd_bytes=config.ssd_bytes,
                max_images=config.max_images,
                segment_max_bytes=config.segment_max_bytes,
                segment_min_tokens=config.segment_min_tokens,
                put_min_tokens=options.put_min_tokens,
                checkpoint_min_tokens=options.checkpoint_min_tokens,
                idle_seconds=options.idle_seconds,
                promote=options.promote,
                write_policy=options.write_policy,
                retention=options.retention,
                namespace_quota=options.namespace_quota,
                pressure_target=options.pressure_target,
                claim_min_tokens=options.claim_min_tokens,
                label_ttl_seconds=options.label_ttl_seconds,
            ),
            mailbox=None if tracer is None else tracer.mailbox(MAILBOX_MESSAGES),
            new_id=random_id if tracer is None else tracer.new_id(random_id),
        )
        self._ssd_tier: SsdTier | None = None
        self._prefetcher: Prefetcher | None = None
        if config.ssd_bytes:
            store = Store(config.state_dir, crash_point=crash_points.from_environment(os.environ))
            daily_bytes = parse_size(options.ssd_daily_write_bytes, 0)
            self._ssd_tier = SsdTier(
                store,
                self._from("ssd_tier"),
                SsdTierConfig(cap_bytes=config.ssd_bytes, daily_write_bytes=daily_bytes or None),
            )
            self._prefetcher = Prefetcher(
                store,
                self._from("prefetcher"),
                quarantined=self._ssd_tier.others_changed,
                directory_missed=self._ssd_tier.directory_missed,
            )
            self._ram_tier.connect(
                ssd=self._traced(self._ssd_tier.mailbox, "ram_tier->ssd_tier"),
                prefetcher=self._traced(self._prefetcher.mailbox, "ram_tier->prefetcher"),
            )
            self._ram_tier.statistics_sources.update(
                ssd_tier=self._ssd_tier.statistics, prefetcher=self._prefetcher.statistics
            )
        share = config.ram_share
        self._monitor = monitor_of_this_machine(
            self._from("pressure_monitor"),
            ram_cap=None if share is None else lambda whole_bytes: share_of(whole_bytes, share),
        )
        self._ram_tier.statistics_sources["pressure_monitor"] = self._monitor.statistics
        self._mailbox = self._from("session")
        self._stop = trio.Event()

    @property
    def mailbox(self) -> Outbox:
        """RamTier's mailbox, for sessions."""
        return self._mailbox

    def _from(self, sender: str) -> Outbox:
        """RamTier's mailbox, for ``sender``."""
        return self._traced(self._ram_tier.mailbox, f"{sender}->ram_tier")

    def _traced(self, outbox: Outbox, channel: str) -> Outbox:
        return outbox if self._tracer is None else self._tracer.traced(outbox, channel)

    @property
    def boot(self) -> str:
        """This run's name (rule L3)."""
        return self._ram_tier.boot

    async def wait_loaded(self) -> None:
        """Return once the index of the files is complete."""
        await self._ram_tier.loaded.wait()

    def sample(self) -> list[float]:
        """RamTier's row of the history (`ram_samples.COLUMNS`)."""
        return self._ram_tier.sample()

    def holdings(self) -> Holdings:
        """What connections hold of RamTier."""
        return self._ram_tier.holdings()

    @property
    def statistics_sources(self) -> dict[str, Callable[[], Any]]:
        """What the reply to `Status` is merged from."""
        return self._ram_tier.statistics_sources

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the actors until `stop`, then until what is queued has been written.

        The writers end when RamTier has nothing more for them and their mailboxes are closed.
        """
        async with trio.open_nursery() as writers:
            if self._ssd_tier is not None:
                await writers.start(self._ssd_tier.run)
            async with trio.open_nursery() as nursery:
                if self._prefetcher is not None:
                    await nursery.start(self._prefetcher.run)
                await nursery.start(self._ram_tier.run)
                await nursery.start(self._monitor.run)
                task_status.started()
                await self._stop.wait()
                await self._ram_tier.drain()
                nursery.cancel_scope.cancel()
            if self._ssd_tier is not None:
                await self._ssd_tier.mailbox.aclose()

    def stop(self) -> None:
        """Let `run` finish."""
        self._stop.set()
