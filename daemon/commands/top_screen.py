"""The picture of `prefixcached top`: from what was seen to lines that fit the terminal. Pure."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, Group
from rich.text import Text

from prefixcached.daemon.commands.common import age_text, counted, plain
from prefixcached.daemon.commands.sparks import (
    bar,
    count_text,
    duration_text,
    gauge_bins,
    rate_bins,
    ratio_bins,
    spark,
)
from prefixcached.daemon.commands.top_tables import SORTS, clients_table, processes, sessions_table
from prefixcached.daemon.commands.watching import Look, SeriesTable
from prefixcached.daemon.history_rings import Rows
from prefixcached.daemon.latency import percentile
from prefixcached.daemon.sizes import bytes_text
from prefixcached.protocol.messages import LatencyReport

SPANS: Final = (("2 min", 120), ("hour", 60), ("day", 1440))
"""Name, and how many rows: of seconds for the first, else of minutes."""

LABEL_WIDTH: Final = 9
VALUE_WIDTH: Final = 12
BAR_WIDTH: Final = 24
LEAST_BAR_WIDTH: Final = 6
AMOUNTS_WIDTH: Final = 52
"""Of a tier's line beside its bar."""
HISTORY_LINES: Final = 20
"""Of a terminal's height: a lower one shows half of the history."""
LEAST_HISTORY_LINES: Final = 16
"""A lower one shows none: who is connected matters more."""
FEWEST_SESSIONS: Final = 2
"""Rows of sessions that clients leave room for."""


@dataclass
class View:
    """What the user chose."""

    sort: str = SORTS[0]
    is_reversed: bool = False
    span: int = 0
    is_over: bool = False

    def press(self, keys: str) -> None:
        """Do what keys say; others do nothing."""
        for key in keys.lower():
            match key:
                case "q":
                    self.is_over = True
                case "s":
                    self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
                case "r":
                    self.is_reversed = not self.is_reversed
                case "h":
                    self.span = (self.span + 1) % len(SPANS)
                case _:
                    pass


def screen(
    look: Look, recent: SeriesTable, day: SeriesTable, view: View, console: Console,
    trouble: str = "",
) -> Group:  # fmt: skip
    """Return the picture, at most as high as ``console``.

    Args:
        look: What was seen last.
        recent: The history by seconds.
        day: The history by minutes.
        view: What the user chose.
        console: Says how large the picture may be, and whether it can show blocks.
        trouble: Why the last look failed, if it did.
    """
    is_plain = not console.encoding.lower().startswith("utf")
    width, height = console.size
    summary = _summary(look, recent, width, is_plain=is_plain)
    top = [_header(look.report, width, trouble), *summary]
    name, rows = SPANS[view.span]
    table = day if view.span else recent
    history = list(_history(table, name, rows, width, is_plain=is_plain))
    if height < HISTORY_LINES:
        history = history[:3] if height >= LEAST_HISTORY_LINES else []
    top += history
    rows_left = max(0, height - len(top) - 3)  # two headings, one line of keys
    labels = look.activity.labels
    seen = processes(look.activity, os.getpid())
    for_sessions = min(
        len(labels), max(FEWEST_SESSIONS, rows_left - len(seen)), max(0, rows_left - bool(seen))
    )
    most = max(0, rows_left - for_sessions)
    clients = clients_table(seen, most, view.sort, width, is_reversed=view.is_reversed)
    sessions = sessions_table(look, for_sessions)
    order = f"{view.sort}, reversed" if view.is_reversed else view.sort
    keys = f"q quit   s sort: {order}   r reverse   h history: {name}"
    return Group(*top, clients, sessions, _line(keys, style="dim"))


def _header(report: Mapping[str, Any], width: int, trouble: str) -> Text:
    if trouble:
        return _line(plain(f"Trying again: {trouble}"), style="bold red")
    daemon, ram = report["daemon"], report["ram_tier"]
    level = ram["pressure"]["level"]
    line = Text(f"prefixcached {daemon['version']}", style="bold")
    line.append(f"  pid {daemon['pid']}  up {age_text(daemon['uptime_seconds'])}", style="not bold")
    line.append("  pressure ", style="not bold")
    line.append(level, style="bold red" if level in ("warn", "critical") else "not bold")
    if ram["loading"]:
        line.append("  loading", style="yellow")
    clock = time.strftime("%H:%M:%S")
    space = width - line.cell_len - len(clock)
    if space > 0:
        line.append(" " * space + clock, style="not bold")
    return _clip(line)


def _summary(look: Look, recent: SeriesTable, width: int, *, is_plain: bool) -> Iterator[Text]:
    ram = look.report["ram_tier"]
    takes, puts, disk = ram["takes"], ram["puts"], ram["disk"]
    bar_width = max(LEAST_BAR_WIDTH, min(BAR_WIDTH, width - AMOUNTS_WIDTH))
    for name, used, cap, more in (
        ("RAM", ram["ram_bytes"], ram["ram_bytes_cap"], counted(ram["images"], "image")),
        ("SSD", ram["ssd_bytes"], ram["ssd_bytes_cap"], _disk_text(disk, ram["ssd_bytes_cap"])),
    ):
        share = used / cap if cap else 0.0
        amounts = f"{bytes_text(used)} of {bytes_text(cap)}" if cap else "off"
        yield _line(
            f"{name:<{LABEL_WIDTH}}{bar(share, bar_width, is_plain=is_plain)} "
            f"{share:4.0%}  {amounts:<24} {plain(more)}"
        )
    asked, reused = takes["tokens_requested"], takes["tokens_reused"]
    lately = ratio_bins(
        _last(recent, "tokens_reused", 60), _last(recent, "tokens_requested", 60), 1
    )
    yield _parts(
        "Tokens", width,
        f"{_percent(reused, asked)} of {count_text(asked)} reused: {count_text(reused)} saved",
        f"last minute {_share_text(lately)}",
    )  # fmt: skip
    missed = sum(takes["misses"].values())
    from_ram = max(0, takes["takes"] - missed - takes["ssd_hits"] - ram["takes_waiting"])
    reasons = sorted(takes["misses"].items(), key=lambda one: -one[1])
    why = ", ".join(f"{reason} {number:,}" for reason, number in reasons)
    yield _line(
        f"{'Takes':<{LABEL_WIDTH}}{takes['takes']:,}: RAM {_percent(from_ram, takes['takes'])}, "
        f"SSD {_percent(takes['ssd_hits'], takes['takes'])}, missed {missed:,}"
        + (f": {plain(why)}" if why else "")
    )
    yield _parts(
        "Now", width,
        counted(ram["claims"], "claim"), f"{ram['takes_waiting']:,} waiting",
        counted(ram["leases"], "lease"), counted(ram["pins"], "pin"),
        counted(ram["puts_in_flight"], "put"),
        f"{counted(takes['prefills_saved'], 'prefill')} saved",
    )  # fmt: skip
    yield _parts(
        "Writer", width,
        f"{ram['writes_queued']:,} queued",
        f"{bytes_text(round(_rate_now(recent, 'written_bytes')))}/s",
        f"{bytes_text(disk['written_bytes'])} written", f"{disk['failed']:,} failed",
        f"{bytes_text(puts['stored_bytes'])} stored",
    )  # fmt: skip
    yield _parts("Times", width, *_times(look.latency))


def _disk_text(disk: Mapping[str, Any], cap: int) -> str:
    if not cap or disk["healthy"]:
        return ""
    return f"failing: {disk['reason']}"


def _times(latency: LatencyReport) -> list[str]:
    counts = {one.request: one.counts for one in latency.requests}
    parts = []
    for request in ("take", "offer", "commit"):
        p50, p99 = (
            percentile(counts.get(request, ()), share, latency.bounds_seconds)
            for share in (0.5, 0.99)
        )
        if p50 == p50:  # NaN where there was none
            parts.append(f"{request} {duration_text(p50, 2)}/{duration_text(p99, 2)}")
    return [f"p50/p99: {parts[0]}", *parts[1:]] if parts else ["no requests yet"]


def _history(
    table: SeriesTable, name: str, rows: int, width: int, *, is_plain: bool
) -> Iterator[Text]:
    yield _line(f"History, last {name}", style="bold")
    bins = max(1, width - LABEL_WIDTH - VALUE_WIDTH)
    times = table.times[-rows:]
    reused = ratio_bins(
        _last(table, "tokens_reused", rows), _last(table, "tokens_requested", rows), bins
    )
    takes = rate_bins(_last(table, "takes", rows), times, bins)
    ram = gauge_bins(_last(table, "ram_bytes", rows), bins)
    written = rate_bins(_last(table, "written_bytes", rows), times, bins)
    cap = table.column("ram_bytes_cap")
    for label, values, most, text in (
        ("reused", reused, 1.0, _share_text(reused)),
        ("takes/s", takes, None, f"{_newest(takes):.3g}"),
        ("RAM", ram, float(cap[-1]) if len(cap) else None, bytes_text(round(_newest(ram)))),
        ("write/s", written, None, bytes_text(round(_newest(written)))),
    ):
        drawn = spark(values, most, bins, is_plain=is_plain)
        yield _line(f"{label:<{LABEL_WIDTH}}{drawn} {text:>{VALUE_WIDTH - 1}}")


# -- texts ----------------------------------------------------------------------------------------


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _share_text(shares: Rows) -> str:
    known = shares[shares == shares]
    return f"{known[-1]:.1%}" if len(known) else "-"


def _newest(values: Rows) -> float:
    known = values[values == values]
    return float(known[-1]) if len(known) else 0.0


def _last(table: SeriesTable, name: str, rows: int) -> Rows:
    return table.column(name)[-rows:]


def _rate_now(table: SeriesTable, name: str) -> float:
    return _newest(rate_bins(_last(table, name, 6), table.times[-6:], 1))


def _parts(label: str, width: int, first: str, *more: str) -> Text:
    """One line with as many of its parts as fit: half a number would be a wrong one."""
    text = f"{label:<{LABEL_WIDTH}}{first}"
    for part in more:
        if len(text) + 2 + len(part) > width:
            break
        text += f", {part}"
    return _line(text)


def _line(text: str, style: str = "") -> Text:
    return _clip(Text(text, style=style))


def _clip(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
