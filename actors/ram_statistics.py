"""RamTier's counters as one frozen copy (rule C5)."""

import heapq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from prefixcached.actors.ram_tier import RamTier


MAX_NAMESPACES: Final = 1000
"""Listed with what RAM holds of each, the largest: more than anybody reads, and half a megabyte of
the longest names; `namespaces` counts all."""


class RamStatistics(msgspec.Struct, frozen=True):
    """Bytes are allocated bytes by state; counters count since the daemon's start."""

    ram_bytes: int
    ram_bytes_cap: int
    ram_bytes_peak: int
    ram_bytes_by_state: dict[str, int]
    images: int
    images_cap: int
    ssd_bytes: int
    ssd_bytes_cap: int
    ssd_bytes_by_state: dict[str, int]
    namespaces: int
    entries: int
    loading: bool
    leases: int
    pins: int
    claims: int
    labels: int
    takes_waiting: int
    puts_in_flight: int
    offers_waiting: int
    reads_outstanding: int
    promotions_in_flight: int
    writes_queued: int
    takes: dict[str, Any]
    puts: dict[str, Any]
    claim_outcomes: dict[str, int]
    label_takes: dict[str, int]
    objects: dict[str, int]
    prefetches: dict[str, int]
    evictions: dict[str, int]
    disk: dict[str, Any]
    pressure: dict[str, Any]
    resident_bytes_by_namespace: dict[str, int]


def collect(ram_tier: "RamTier") -> RamStatistics:
    """Return the present counters of ``ram_tier``."""
    index, reads, writes = ram_tier.index, ram_tier.reads, ram_tier.writes
    return RamStatistics(
        ram_bytes=index.ram.bytes,
        ram_bytes_cap=index.ram.bytes_cap,
        ram_bytes_peak=index.ram.peak_bytes,
        ram_bytes_by_state=dict(index.ram.bytes_by_state),
        images=index.ram.images,
        images_cap=index.ram.images_cap,
        ssd_bytes=index.ssd.bytes,
        ssd_bytes_cap=index.ssd.bytes_cap,
        ssd_bytes_by_state=dict(index.ssd.bytes_by_state),
        namespaces=len(index.namespaces),
        entries=len(index.entries),
        loading=ram_tier.takes.is_loading,
        leases=len(ram_tier.takes.leases),
        pins=len(ram_tier.pins.pins),
        claims=len(ram_tier.claims.claims),
        labels=len(ram_tier.labels.labels),
        takes_waiting=ram_tier.takes.waiting,
        puts_in_flight=len(ram_tier.puts.puts),
        offers_waiting=ram_tier.puts.waiting,
        reads_outstanding=reads.outstanding,
        promotions_in_flight=ram_tier.promotions.in_flight,
        writes_queued=writes.queued,
        takes=asdict(ram_tier.takes.counters),
        puts=asdict(ram_tier.puts.counters),
        claim_outcomes=asdict(ram_tier.claims.counters),
        label_takes={
            "label_hits": ram_tier.labels.label_hits,
            "label_misses": ram_tier.labels.label_misses,
        },
        objects=asdict(ram_tier.objects.counters),
        prefetches={"asked": ram_tier.pins.prefetches, "empty": ram_tier.pins.empty},
        evictions={**index.counters, "over_quota": index.quotas.evictions},
        pressure=ram_tier.pressure.statistics(),
        resident_bytes_by_namespace={
            namespace.name: nbytes
            for namespace, nbytes in heapq.nlargest(
                MAX_NAMESPACES, index.quotas.resident_bytes.items(), key=lambda item: item[1]
            )
        },
        disk={
            "healthy": writes.disk_healthy,
            "reason": writes.disk_reason,
            "written": writes.written,
            "written_bytes": writes.written_bytes,
            "failed": writes.failed,
            "refused": writes.refused,
            "read_bytes": reads.read_bytes,
            "read_seconds": reads.read_seconds,
            "read_failures": reads.failed,
            "damaged": reads.damaged,
            "missing": reads.missing,
            "promoted": ram_tier.promotions.promoted,
            "promotions_declined": ram_tier.promotions.declined,
            "loaded": ram_tier.loads.loaded,
            "unattached": ram_tier.loads.unattached,
            "duplicates": ram_tier.loads.duplicates,
            "damaged_at_start": ram_tier.loads.damaged,
        },
    )
