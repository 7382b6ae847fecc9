"""The page of `prefixcached status`: what matters of the statistics, for people. Pure.

Nothing is missing from ``status --json`` that is here; docs/operations.md explains every counter.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from prefixcached.daemon.commands.common import age_text, counted
from prefixcached.daemon.commands.sparks import duration_text
from prefixcached.daemon.sizes import bytes_text

BAR_CELLS: Final = 20

Report = Mapping[str, Any]


class Line(NamedTuple):
    """One line of the page. ``is_alarm`` where something is to be done about it."""

    name: str
    text: str
    is_alarm: bool = False


def page(report: Report) -> Iterator[Line]:
    """Return the page, line by line."""
    about, ram = report["daemon"], report["ram_tier"]
    up = age_text(about["uptime_seconds"])
    yield Line("daemon", f"version {about['version']}, process {about['pid']}, up {up}")
    yield Line("socket", about["socket"])
    yield Line("RAM", _tier(ram["ram_bytes"], ram["ram_bytes_cap"]) + f"  {_images(ram)}")
    yield from _ssd(report)
    yield _pressure(ram["pressure"])
    yield from _hits(ram)
    yield _puts(ram["puts"])
    yield from _writer(report)
    yield from _restores(report.get("restores", {}))
    yield from _clients(report)
    yield from _trouble(report)


def bar(share: float) -> str:
    """A share, 0 to 1, as a bar."""
    filled = round(min(max(share, 0.0), 1.0) * BAR_CELLS)
    return "█" * filled + "░" * (BAR_CELLS - filled)


def percent(part: float, whole: float) -> str:
    """A share as text; a dash where there is nothing to share."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _tier(used: int, cap: int) -> str:
    return f"{bar(used / cap if cap else 0)} {bytes_text(used)} of {bytes_text(cap)}"


def _images(ram: Report) -> str:
    namespaces = counted(ram["namespaces"], "namespace")
    return f"{ram['images']:,} of {counted(ram['images_cap'], 'image')}, {namespaces}"


def _ssd(report: Report) -> Iterator[Line]:
    ram = report["ram_tier"]
    if "ssd_tier" not in report:
        yield Line("SSD", "off: a restart forgets everything")
        return
    loading = "  reading its files" if ram["loading"] else ""
    yield Line("SSD", _tier(ram["ssd_bytes"], ram["ssd_bytes_cap"]) + loading)
    # A daemon of an older version does not say it.
    if state_dir := report["daemon"].get("state_dir"):
        yield Line("files", state_dir)


def _pressure(pressure: Report) -> Line:
    level = pressure.get("level", "unknown")
    text = f"{level}: {pressure['reason']}" if pressure.get("reason") else level
    if pressure.get("released_bytes"):
        text += f"; gave back {bytes_text(pressure['released_bytes'])} so far"
    return Line("pressure", text, is_alarm=level in ("warn", "critical"))


def _hits(ram: Report) -> Iterator[Line]:
    takes = ram["takes"]
    reused, requested = takes["tokens_reused"], takes["tokens_requested"]
    yield Line(
        "hit ratio",
        f"{percent(reused, requested)} of tokens reused ({reused:,} of {requested:,})",
    )
    misses = sum(takes["misses"].values())
    text = (
        f"{takes['takes']:,}: {takes['ram_hits']:,} hit in RAM, {takes['ssd_hits']:,} on SSD, "
        f"{misses:,} missed"
    )
    yield Line("takes", text + _by_reason(takes["misses"]))
    if takes["waits"]:
        saved = counted(takes["prefills_saved"], "prefill")
        yield Line("waits", f"{takes['waits']:,} for another process, {saved} saved")


def _puts(puts: Report) -> Line:
    declined = sum(puts["declined"].values())
    text = (
        f"{puts['stored']:,} stored ({bytes_text(puts['stored_bytes'])}), "
        f"{puts['already_held']:,} held already, {declined:,} declined"
    )
    return Line("puts", text + _by_reason(puts["declined"]))


def _by_reason(counts: Mapping[str, int]) -> str:
    said = ", ".join(
        f"{reason} {count:,}"
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
        if count
    )
    return f" ({said})" if said else ""


def _writer(report: Report) -> Iterator[Line]:
    tier = report.get("ssd_tier")
    if tier is None:
        return
    disk = report["ram_tier"]["disk"]
    queued = report["ram_tier"]["writes_queued"]
    bound = tier["daily_write_bytes"]
    today = f"{bytes_text(tier['written_today_bytes'])} in 24 hours"
    if bound:
        today += f" of {bytes_text(bound)}"
    if not disk["healthy"]:
        yield Line(
            "writer", f"FAILING: {disk['reason']}; {queued:,} queued; {today}", is_alarm=True
        )
    else:
        yield Line("writer", (f"{queued:,} queued; " if queued else "idle; ") + today)
    if failure := tier.get("deletion_failure"):  # a daemon of an older version does not say it
        states = report["ram_tier"]["ssd_bytes_by_state"]
        stays = bytes_text(states["undeletable"] + states["trash"])
        yield Line("deletions", f"FAILING: {failure}; {stays} cannot be freed", is_alarm=True)


def _restores(restores: Report) -> Iterator[Line]:
    if not restores.get("restores"):
        return
    rate = restores["bytes"] / restores["seconds"] if restores["seconds"] else 0.0
    text = (
        f"{restores['restores']:,}, {bytes_text(int(rate))}/s, "
        f"longest {duration_text(restores['longest_seconds'])}"
    )
    if restores["slow"]:
        text += f", {restores['slow']:,} slower than computing"
    yield Line("restores", text, is_alarm=bool(restores["slow"]))


def _clients(report: Report) -> Iterator[Line]:
    ram = report["ram_tier"]
    held = ", ".join(
        counted(ram[f"{what}s"], what) for what in ("lease", "pin", "claim") if ram[f"{what}s"]
    )
    # The command that asks is a client as well.
    others = max(0, report["listener"]["current"] - 1)
    yield Line("clients", f"{others:,} connected" + (f"; they hold {held}" if held else ""))


def _trouble(report: Report) -> Iterator[Line]:
    """Whatever is zero on a good day."""
    disk, endings = report["ram_tier"]["disk"], report["listener"]["endings"]
    refused = sum(report["listener"]["refused"].values())
    counts = {
        "damaged files": disk["damaged"] + disk["damaged_at_start"],
        "failed restores": report["ram_tier"]["takes"]["restores_failed"],
        "dropped unwritten": report["ram_tier"]["evictions"]["dropped_unwritten"],
        "event loop stalls": report.get("event_loop", {}).get("stalls", 0),
        "refused connections": refused,
        "internal errors": endings["internal"],
        "log lines left out": report.get("log", {}).get("suppressed", 0),
    }
    said = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    if said:
        yield Line("look at", said, is_alarm=True)
