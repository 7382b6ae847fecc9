"""One row of RamTier's counters and gauges, for the history: read once a second, so it is cheap.

Plain reads of numbers that are kept anyway; nothing here visits entries, queues or leases.
`RamTier` owns what is read.
"""

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from prefixcached.actors.ram_tier import RamTier

Kind = Literal["counter", "gauge"]

MISS_REASONS: Final = (
    "empty", "diverged", "below-minimum", "no-checkpoint", "window-gap", "evicted",
    "restore-failed", "loading", "unsupported-tokens", "pressure",
)  # fmt: skip
"""Rule T9, without those that only a client can give."""

_GAUGES: Final = (
    "ram_bytes", "ram_bytes_cap", "ram_target_bytes", "images", "ssd_bytes", "ssd_bytes_cap",
    "entries", "namespaces", "leases", "pins", "claims", "labels", "takes_waiting",
    "puts_in_flight", "offers_waiting", "write_backlog", "pressure_level",
)  # fmt: skip
_COUNTERS: Final = (
    "takes", "ram_hits", "ram_misses", "ssd_hits", "tokens_requested", "tokens_reused",
    "restores_failed", "waits", "prefills_saved", "offers", "puts_stored", "stored_bytes",
    "puts_declined", "evictions", "demotions", "dropped_unwritten", "ssd_evictions",
    "written", "written_bytes", "writes_failed", "read_bytes", "label_hits", "label_misses",
    *(f"misses_{reason.replace('-', '_')}" for reason in MISS_REASONS),
    "misses_other",
)  # fmt: skip

COLUMNS: Final[tuple[tuple[str, Kind], ...]] = (
    *((name, "gauge") for name in _GAUGES),
    *((name, "counter") for name in _COUNTERS),
)
"""Name and kind of each number of a row; counters count since the daemon's start."""


def sample(ram_tier: "RamTier") -> list[float]:
    """Return the present row, in the order of `COLUMNS`."""
    index, takes, puts = ram_tier.index, ram_tier.takes.counters, ram_tier.puts.counters
    ram, ssd, evictions, writes = index.ram, index.ssd, index.counters, ram_tier.writes
    misses = [takes.misses.get(reason, 0) for reason in MISS_REASONS]
    return [
        ram.bytes, ram.bytes_cap, ram.limit_bytes, ram.images, ssd.bytes, ssd.bytes_cap,
        len(index.entries), len(index.namespaces), len(ram_tier.takes.leases),
        len(ram_tier.pins.pins), len(ram_tier.claims.claims), len(ram_tier.labels.labels),
        ram_tier.takes.waiting, len(ram_tier.puts.puts), ram_tier.puts.waiting, writes.backlog,
        ram_tier.pressure.level.rank,
        takes.takes, takes.ram_hits, takes.ram_misses, takes.ssd_hits, takes.tokens_requested,
        takes.tokens_reused, takes.restores_failed, takes.waits, takes.prefills_saved,
        puts.offers, puts.stored, puts.stored_bytes, sum(puts.declined.values()),
        evictions["evictions"], evictions["demotions"], evictions["dropped_unwritten"],
        evictions["ssd_evictions"], writes.written, writes.written_bytes, writes.failed,
        ram_tier.reads.read_bytes, ram_tier.labels.label_hits, ram_tier.labels.label_misses,
        *misses, sum(takes.misses.values()) - sum(misses),
    ]  # fmt: skip
