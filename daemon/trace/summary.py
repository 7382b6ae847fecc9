"""What a trace shows of a daemon's use: hits, misses, evictions, bytes, times. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from prefixcached.daemon.trace.trace_file import Plain, Record
from prefixcached.daemon.trace.tracer import OWN, REPLIES, REQUESTS

MEASURED: Final = ("take", "offer", "commit", "prefetch", "take-object", "offer-object")
"""Requests of inference processes whose times are compared."""

PERCENTILES: Final = (50, 90, 99)


class Times(msgspec.Struct, frozen=True):
    """Seconds from RamTier's being told to its reply, of one kind of request."""

    count: int
    percentiles: dict[int, float]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What happened within ``seconds``.

    Hits and misses are those of takes; ``hit_ratio`` is by tokens. What stands behind
    ``evictions`` is from the last statistics of the trace, and is None where it has none.
    ``left_out`` messages are missing.
    """

    seconds: float
    sessions: int
    takes: int
    tokens_requested: int
    tokens_reused: int
    hit_ratio: float
    hits: dict[str, int]
    misses: dict[str, int]
    object_hits: int
    object_misses: int
    stored: int
    declined: dict[str, int]
    evictions: int | None
    dropped_unwritten: int | None
    ssd_evictions: int | None
    written_bytes: int | None
    read_bytes: int | None
    times: dict[str, Times]
    left_out: int


class _Evictions(msgspec.Struct, frozen=True):
    evictions: int | None = None
    dropped_unwritten: int | None = None
    ssd_evictions: int | None = None


class _Disk(msgspec.Struct, frozen=True):
    written_bytes: int | None = None
    read_bytes: int | None = None


class _Counters(msgspec.Struct, frozen=True):
    """Of RamTier's statistics what no message tells."""

    evictions: _Evictions = _Evictions()
    disk: _Disk = _Disk()


class Tally:
    """Counts records one by one, so that a trace need not fit into memory."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._sessions: set[int] = set()
        self._pending: dict[int, tuple[str, float]] = {}
        self._tokens_requested = 0
        self._tokens_reused = 0
        self._hits: Counter[str] = Counter({"ram": 0, "ssd": 0})
        self._misses: Counter[str] = Counter()
        self._objects: Counter[str] = Counter()
        self._stored = 0
        self._declined: Counter[str] = Counter()
        self._statistics: Plain = {}
        self._times: dict[str, list[float]] = {}
        self._left_out = 0

    def add(self, record: Record) -> None:
        """Count one record."""
        self._seconds = record.seconds
        if record.channel == REQUESTS and record.message.get("type") == "call":
            self._request(record)
        elif record.channel == REPLIES:
            self._reply(record)
        elif record.channel == OWN and record.type == "statistics":
            self._statistics = record.facts.report
        elif record.channel == OWN:
            self._left_out += record.facts.records

    def _request(self, record: Record) -> None:
        if record.type in MEASURED:
            self._sessions.add(record.session)
            self._pending[record.session] = record.type, record.seconds
        if record.type == "take":
            tokens = record.body.get("tokens")
            self._tokens_requested += len(tokens) // 4 if isinstance(tokens, bytes) else 0

    def _reply(self, record: Record) -> None:
        kind, since = self._pending.pop(record.session, ("", 0.0))
        if not kind:
            return
        self._times.setdefault(kind, []).append(record.seconds - since)
        reply = record.facts
        match kind, record.type:
            case "take", "hit":
                self._hits[reply.tier] += 1
                self._tokens_reused += reply.length
            case "take", "miss":
                self._misses[reply.reason] += 1
            case "take-object", ("hit" | "miss") as outcome:
                self._objects[outcome] += 1
            case _, "stored":
                self._stored += 1
            case _, "declined":
                self._declined[reply.reason] += 1
            case _:
                pass

    def summary(self) -> Summary:
        """Return what was counted so far."""
        counters = _counters_of(self._statistics)
        return Summary(
            seconds=self._seconds,
            sessions=len(self._sessions),
            takes=self._hits.total() + self._misses.total(),
            tokens_requested=self._tokens_requested,
            tokens_reused=self._tokens_reused,
            hit_ratio=self._tokens_reused / max(1, self._tokens_requested),
            hits=dict(self._hits),
            misses=dict(sorted(self._misses.items())),
            object_hits=self._objects["hit"],
            object_misses=self._objects["miss"],
            stored=self._stored,
            declined=dict(sorted(self._declined.items())),
            evictions=counters.evictions.evictions,
            dropped_unwritten=counters.evictions.dropped_unwritten,
            ssd_evictions=counters.evictions.ssd_evictions,
            written_bytes=counters.disk.written_bytes,
            read_bytes=counters.disk.read_bytes,
            times={kind: _times(self._times[kind]) for kind in MEASURED if kind in self._times},
            left_out=self._left_out,
        )


def summarise(records: Iterable[Record]) -> Summary:
    """Return the summary of all ``records``."""
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.summary()


def _times(seconds: Sequence[float]) -> Times:
    ordered = sorted(seconds)
    return Times(
        len(ordered),
        {p: ordered[math.ceil(len(ordered) * p / 100) - 1] for p in PERCENTILES},
    )


def _counters_of(statistics: Plain) -> _Counters:
    """Return what a daemon's statistics say; nothing where they are another version's."""
    try:
        return msgspec.convert(statistics.get("ram_tier", {}), _Counters)
    except msgspec.ValidationError:
        return _Counters()
