"""What the page is told each second, from the daemon's replies to JSON. Pure.

Chosen numbers of `status`, the new rows of the history, percentiles, processes, conversations:
bounded in size whatever the daemon holds.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from prefixcached.daemon.commands.common import plain
from prefixcached.daemon.commands.top_tables import processes
from prefixcached.daemon.latency import percentile
from prefixcached.protocol.messages import ActivityReport, HistoryReport, LatencyReport

DRAWN: Final = frozenset({
    "ram_bytes", "ram_bytes_cap", "ram_target_bytes", "ssd_bytes", "ssd_bytes_cap",
    "takes", "ssd_hits", "tokens_requested", "tokens_reused", "evictions", "ssd_evictions",
    "write_backlog", "written_bytes", "read_bytes", "pressure_level",
    "take_p50_seconds", "take_p99_seconds", "commit_p50_seconds", "commit_p99_seconds",
})  # fmt: skip
"""Columns of the history that the page draws, beside those of misses by reason."""

MISSES: Final = "misses_"

SHOWN: Final = (
    "ram_bytes", "ram_bytes_cap", "ssd_bytes", "ssd_bytes_cap", "images", "namespaces", "loading",
    "leases", "pins", "claims", "labels", "takes_waiting", "puts_in_flight", "writes_queued",
    "takes", "puts", "evictions", "disk", "pressure",
)  # fmt: skip
"""Of RamTier's part of `status`; each is a number or a handful of them."""

MAX_ROWS: Final = 100
"""Processes, prefills and conversations on the page."""

MAX_NAME_CHARACTERS: Final = 120
"""Of a name on the page."""

SHARES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def look_json(
    report: Mapping[str, Any],
    activity: ActivityReport,
    latency: LatencyReport,
    history: Mapping[str, HistoryReport],
    own_pid: int,
) -> bytes:
    """Return the page's next picture.

    Args:
        report: What `status` shows.
        activity: Who is connected; ``own_pid`` is left out.
        latency: The histograms.
        history: By step, the new rows.
        own_pid: The process that asks.
    """
    ram, daemon = report["ram_tier"], report["daemon"]
    seen = sorted(processes(activity, own_pid), key=lambda one: (-one.doing_seconds, -one.requests))
    pids = {client.session: client.pid for client in activity.clients}
    return msgspec.json.encode({
        "trouble": "",
        "boot": history["second"].boot,
        "daemon": {name: daemon[name] for name in ("version", "pid", "uptime_seconds")},
        "ram_tier": {name: ram[name] for name in SHOWN},
        "history": {step: _columns(rows) for step, rows in history.items()},
        "latency": _latency(latency),
        "clients": [msgspec.to_builtins(one) for one in seen[:MAX_ROWS]],
        "clients_count": len(seen),
        "claims": [
            {
                "pid": pids.get(claim.session, 0), "namespace": name_text(claim.namespace),
                "tokens": claim.tokens, "waiting": claim.waiting,
            }
            for claim in activity.claims[:MAX_ROWS]
        ],
        "sessions": [
            {
                "label": name_text(label.label), "namespace": name_text(label.namespace),
                "tokens": label.tokens, "idle_seconds": label.idle_seconds,
            }
            for label in activity.labels[:MAX_ROWS]
        ],
    })  # fmt: skip


def trouble_json(reason: str) -> bytes:
    """Return what the page shows while the daemon does not answer."""
    return msgspec.json.encode({"trouble": reason})


def name_text(name: str) -> str:
    """Return a name that a client chose, without control characters and not too long."""
    shown = plain(name) or "(empty name)"
    if len(shown) > MAX_NAME_CHARACTERS:
        return f"{shown[: MAX_NAME_CHARACTERS - 1]}…"
    return shown


def _columns(report: HistoryReport) -> dict[str, Any]:
    """The rows by column; what has no value is null."""
    return {
        "first": report.first,
        "times": np.frombuffer(report.times, "<f8").tolist(),
        "columns": {
            series.name: np.frombuffer(series.values, "<f8").tolist()
            for series in report.series
            if series.name in DRAWN or series.name.startswith(MISSES)
        },
    }


def _latency(report: LatencyReport) -> list[dict[str, Any]]:
    """Percentiles since the daemon's start, of the requests that occurred."""
    rows = []
    for one in report.requests:
        values = {
            name: percentile(one.counts, share, report.bounds_seconds) for name, share in SHARES
        }
        if not math.isnan(values["p50"]):
            rows.append({"request": one.request, "count": sum(one.counts), **values})
    return rows
