"""Metrics for Prometheus: what each is called, what it says, where in `status` it comes from. Pure.

Names, units and labels follow Prometheus's conventions: base units, `_total` for counters, one
metric for one thing with labels for its kinds. No label has a namespace, a session or anything else
that a client chose: metrics are kept for years and seen by others. Needs `prometheus_client`, the
extra `metrics`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from prefixcached.actors.pressure_policy import Level
from prefixcached.protocol.messages import LatencyReport

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

PREFIX: Final = "prefixcached_"

EXPORTED_STEPS: Final = (1.0, 2.5, 5.0)
"""Of a decade of the histogram's bounds: as usual for Prometheus, where every bucket of every
request is a series that is kept."""


class Source(NamedTuple):
    """Where numbers come from: a dotted path in the report.

    With ``by`` the path leads to a map, whose keys become values of that label. ``labels`` are
    given to each.
    """

    path: str
    by: str = ""
    labels: tuple[tuple[str, str], ...] = ()


class Family(NamedTuple):
    """One metric."""

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    sources: tuple[Source, ...]


def _one(
    kind: Literal["counter", "gauge"], name: str, path: str, text: str, by: str = ""
) -> Family:
    return Family(kind, name, text, (Source(path, by),))


def _several(
    kind: Literal["counter", "gauge"], name: str, text: str, label: str, **paths: str
) -> Family:
    sources = tuple(Source(path, "", ((label, value),)) for value, path in paths.items())
    return Family(kind, name, text, sources)


_RAM: Final = "ram_tier"

FAMILIES: Final[tuple[Family, ...]] = (
    _one("gauge", "uptime_seconds", "daemon.uptime_seconds", "Seconds since the start."),
    Family(
        "gauge", "tier_bytes", "Allocated bytes by tier and state.",
        (
            Source(f"{_RAM}.ram_bytes_by_state", "state", (("tier", "ram"),)),
            Source(f"{_RAM}.ssd_bytes_by_state", "state", (("tier", "ssd"),)),
        ),
    ),
    _several(
        "gauge", "tier_limit_bytes", "Cap of each tier.", "tier",
        ram=f"{_RAM}.ram_bytes_cap", ssd=f"{_RAM}.ssd_bytes_cap",
    ),
    _one("gauge", "images", f"{_RAM}.images", "Images in RAM."),
    _one("gauge", "images_limit", f"{_RAM}.images_cap", "Cap of images in RAM."),
    _one("gauge", "entries", f"{_RAM}.entries", "Segments, checkpoints and objects in any tier."),
    _one("gauge", "namespaces", f"{_RAM}.namespaces", "Namespaces that hold something."),
    _one("gauge", "loading", f"{_RAM}.loading", "1 while the index is read from files."),
    _one("gauge", "leases", f"{_RAM}.leases", "Hits that clients hold."),
    _one("gauge", "pins", f"{_RAM}.pins", "Prefetched prefixes that clients hold."),
    _one("gauge", "claims", f"{_RAM}.claims", "Prompts that are being computed."),
    _one("gauge", "sessions", f"{_RAM}.labels", "Conversations with a live label."),
    _one("gauge", "takes_waiting", f"{_RAM}.takes_waiting", "Takes that wait for a prefill."),
    _one("gauge", "puts_in_flight", f"{_RAM}.puts_in_flight", "Puts granted and not committed."),
    _one("gauge", "offers_waiting", f"{_RAM}.offers_waiting", "Offers that wait."),
    _one("gauge", "writes_queued", f"{_RAM}.writes_queued", "Images that wait to be written."),
    _one("counter", "takes", f"{_RAM}.takes.takes", "Takes."),
    _several(
        "counter", "hits", "Look-ups by tier: ram counts also where SSD served more.", "tier",
        ram=f"{_RAM}.takes.ram_hits", ssd=f"{_RAM}.takes.ssd_hits",
    ),
    _one("counter", "ram_misses", f"{_RAM}.takes.ram_misses", "Look-ups with nothing in RAM."),
    _one("counter", "misses", f"{_RAM}.takes.misses", "Takes that found nothing.", "reason"),
    _one("counter", "tokens_requested", f"{_RAM}.takes.tokens_requested", "Tokens of all prompts."),
    _one("counter", "tokens_reused", f"{_RAM}.takes.tokens_reused", "Tokens not computed again."),
    _one(
        "counter", "restores_failed", f"{_RAM}.takes.restores_failed",
        "Files that could not be read when wanted.",
    ),
    _one("counter", "take_waits", f"{_RAM}.takes.waits", "Takes that waited for a prefill."),
    _one(
        "counter", "prefills_saved", f"{_RAM}.takes.prefills_saved",
        "Waits that ended with the prefix.",
    ),
    _one("counter", "offers", f"{_RAM}.puts.offers", "Puts offered."),
    _one("counter", "puts_stored", f"{_RAM}.puts.stored", "Puts that became visible."),
    _one("counter", "stored_bytes", f"{_RAM}.puts.stored_bytes", "Bytes of images published."),
    _one("counter", "puts_held", f"{_RAM}.puts.already_held", "Offers of what was held already."),
    _one("counter", "puts_declined", f"{_RAM}.puts.declined", "Puts declined.", "reason"),
    _one("counter", "puts_abandoned", f"{_RAM}.puts.abandoned", "Puts given up or died in."),
    _several(
        "counter", "offer_waits", "Offers that waited, by what for.", "cause",
        put=f"{_RAM}.puts.waits_for_put", room=f"{_RAM}.puts.waits_for_room",
    ),
    _one("counter", "claims_granted", f"{_RAM}.claim_outcomes.granted", "Claims given out."),
    _several(
        "counter", "claims_ended", "Claims that ended, by how.", "outcome",
        **{name: f"{_RAM}.claim_outcomes.{name}"
           for name in ("covered", "dropped", "orphaned", "declined")},
    ),
    _several(
        "counter", "session_takes", "Takes of a session: at or beyond its last entry, or not.",
        "outcome",
        hit=f"{_RAM}.label_takes.label_hits", miss=f"{_RAM}.label_takes.label_misses",
    ),
    _several(
        "counter", "object_takes", "Takes of objects; a restore is a hit on SSD.", "outcome",
        hit=f"{_RAM}.objects.object_hits", miss=f"{_RAM}.objects.object_misses",
        restore=f"{_RAM}.objects.object_restores",
    ),
    _one("counter", "prefetches", f"{_RAM}.prefetches.asked", "Prefetches."),
    _one("counter", "prefetches_empty", f"{_RAM}.prefetches.empty", "Prefetches without a pin."),
    _several(
        "counter", "evictions", "Entries evicted for room, by tier.", "tier",
        ram=f"{_RAM}.evictions.evictions", ssd=f"{_RAM}.evictions.ssd_evictions",
    ),
    _one("counter", "demotions", f"{_RAM}.evictions.demotions", "Idle images that left RAM."),
    _one(
        "counter", "dropped_unwritten", f"{_RAM}.evictions.dropped_unwritten",
        "Images that left RAM and are on no tier.",
    ),
    _one("counter", "promotions", f"{_RAM}.disk.promoted", "Images copied from SSD into RAM."),
    _one("gauge", "disk_healthy", f"{_RAM}.disk.healthy", "1 while writing works."),
    _one("counter", "ssd_writes", f"{_RAM}.disk.written", "Images written."),
    _one("counter", "ssd_written_bytes", f"{_RAM}.disk.written_bytes", "Bytes written."),
    _one("counter", "ssd_writes_failed", f"{_RAM}.disk.failed", "Writes that failed."),
    _one("counter", "ssd_writes_refused", f"{_RAM}.disk.refused", "Images left out by policy."),
    _one("counter", "ssd_read_bytes", f"{_RAM}.disk.read_bytes", "Bytes read and verified."),
    _one("counter", "ssd_read_seconds", f"{_RAM}.disk.read_seconds", "Seconds of reading."),
    _one("counter", "ssd_reads_failed", f"{_RAM}.disk.read_failures", "Reads that failed."),
    _one("counter", "ssd_damaged_files", f"{_RAM}.disk.damaged", "Files found damaged."),
    _one("gauge", "ssd_written_today_bytes", "ssd_tier.written_today_bytes",
         "Bytes written in 24 hours."),
    _one("gauge", "pressure_target_bytes", f"{_RAM}.pressure.target_bytes",
         "What RAM may hold under the present memory pressure."),
    _one("counter", "pressure_released_bytes", f"{_RAM}.pressure.released_bytes",
         "Bytes given back under memory pressure."),
    _one("counter", "restores", "restores.restores", "Hits that clients copied, as they say."),
    _one("counter", "restored_bytes", "restores.bytes", "Bytes that clients copied."),
    _one("counter", "restore_seconds", "restores.seconds", "Seconds of copying."),
    _one("counter", "restores_slow", "restores.slow", "Restores slower than computing."),
    _one("gauge", "connections", "listener.current", "Connections now."),
    _one("counter", "connections_accepted", "listener.accepted", "Connections served."),
    _one("counter", "connections_refused", "listener.refused", "Connections refused.", "reason"),
    _one("counter", "connections_ended", "listener.endings", "How connections ended.", "reason"),
    _one("counter", "event_loop_stalls", "event_loop.stalls", "Steps of more than 0.1 s."),
)  # fmt: skip
"""Everything but the latency histogram, the pressure level and the version."""


def text_of(report: Mapping[str, Any], latency: LatencyReport | None) -> bytes:
    """Return the text for Prometheus.

    Args:
        report: As in the reply to `Status`: plain values. Sections that are not there are left out.
        latency: As in the reply to `Latency`; None leaves the histogram out.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot([*families(report, latency)]))
    return generate_latest(registry)


def families(report: Mapping[str, Any], latency: LatencyReport | None) -> Iterator[Metric]:
    """Return every metric with its present values."""
    version = str(_at(report, "daemon.version") or "")
    info = GaugeMetricFamily(f"{PREFIX}info", "Version, as a label.", labels=["version"])
    info.add_metric([version], 1)
    yield info
    for family in FAMILIES:
        samples = [
            (labels, value) for source in family.sources for labels, value in _read(report, source)
        ]
        of_kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
        names = [name for name, _ in samples[0][0]] if samples else []
        metric = of_kind(f"{PREFIX}{family.name}", family.text, labels=names)
        for labels, value in samples:
            metric.add_metric([text for _, text in labels], value)
        yield metric
    level = _at(report, f"{_RAM}.pressure.level")
    pressure = GaugeMetricFamily(
        f"{PREFIX}pressure_level", "1 for the level in force.", labels=["level"]
    )
    for name in Level:
        pressure.add_metric([name], float(name == level))
    yield pressure
    if latency is not None:
        yield _histogram(latency)


def _histogram(latency: LatencyReport) -> Metric:
    metric = HistogramMetricFamily(
        f"{PREFIX}request_duration_seconds",
        "From the decoded request to its reply, waits included.",
        labels=["request"],
    )
    for one in latency.requests:
        if not any(one.counts):  # two dozen series that say nothing, and the time to write them
            continue
        total, buckets = 0, []
        for bound, count in zip(latency.bounds_seconds, one.counts, strict=False):
            total += count
            if _mantissa(bound) in EXPORTED_STEPS:
                buckets.append((f"{bound:g}", total))
        total += one.counts[-1]
        metric.add_metric([one.request], [*buckets, ("+Inf", total)], one.seconds)
    return metric


def _mantissa(bound: float) -> float:
    return float(f"{bound:e}".partition("e")[0])


def _read(
    report: Mapping[str, Any], source: Source
) -> Iterable[tuple[tuple[tuple[str, str], ...], float]]:
    found = _at(report, source.path)
    if found is None:
        return
    if not source.by:
        yield source.labels, float(found)
        return
    for key, value in found.items():
        yield ((source.by, str(key)), *source.labels), float(value)


def _at(report: Mapping[str, Any], path: str) -> Any:
    found: Any = report
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


class _Snapshot(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`."""
        return self._metrics
