"""The page of `prefixcached status`, from statistics that a daemon could give."""

import copy
from typing import Any

from prefixcached.daemon.commands.status_page import Line, bar, page
from tests.daemon.command_line import BOTH_TIERS, invoke
from tests.support.daemon_process import DaemonProcess

REPORT: dict[str, Any] = {
    "daemon": {
        "version": "1.2", "pid": 7, "uptime_seconds": 200.0, "socket": "/s", "state_dir": "/files",
    },
    "listener": {"current": 3, "refused": {"other-user": 0}, "endings": {"internal": 0}},
    "event_loop": {"stalls": 0},
    "log": {"suppressed": 0},
    "restores": {
        "restores": 4, "slow": 0, "bytes": 8 << 30, "seconds": 2.0, "longest_seconds": 1.5,
    },
    "ssd_tier": {
        "written_today_bytes": 1 << 30, "daily_write_bytes": None, "deletion_failure": "",
    },
    "ram_tier": {
        "ram_bytes": 1 << 30, "ram_bytes_cap": 4 << 30, "images": 1, "images_cap": 9000,
        "ssd_bytes": 10 << 30, "ssd_bytes_cap": 100 << 30, "namespaces": 1, "loading": False,
        "ssd_bytes_by_state": {"undeletable": 1 << 20, "trash": 2 << 20},
        "leases": 1, "pins": 0, "claims": 2, "writes_queued": 0,
        "takes": {
            "takes": 10, "ram_hits": 6, "ssd_hits": 2, "tokens_reused": 750,
            "tokens_requested": 1000, "waits": 0, "prefills_saved": 0, "restores_failed": 0,
            "misses": {"empty": 0, "diverged": 2},
        },
        "puts": {
            "stored": 5, "stored_bytes": 1 << 20, "already_held": 1, "declined": {"busy": 3},
        },
        "evictions": {"dropped_unwritten": 0},
        "disk": {"healthy": True, "reason": "", "damaged": 0, "damaged_at_start": 0},
        "pressure": {"level": "normal", "reason": "", "released_bytes": 0},
    },
}  # fmt: skip


def lines(**changes: Any) -> dict[str, Line]:
    """The page by name, with sections' values changed."""
    report = copy.deepcopy(REPORT)
    for path, value in changes.items():
        section = report
        *above, last = path.split("__")
        for name in above:
            section = section[name]
        section[last] = value
    return {line.name: line for line in page(report)}


def test_a_good_day_fits_a_screen_and_alarms_nobody() -> None:
    """Tiers against caps, hit ratio by tokens, pressure, writer, restores and clients."""
    said = lines()
    assert len(said) <= 24
    assert not [line for line in said.values() if line.is_alarm]
    assert all(len(line.text) < 68 for line in said.values())
    assert said["RAM"].text.startswith(bar(0.25) + " 1 GiB of 4 GiB")
    assert said["SSD"].text == bar(0.1) + " 10 GiB of 100 GiB"
    assert said["hit ratio"].text == "75.0% of tokens reused (750 of 1,000)"
    assert said["takes"].text == "10: 6 hit in RAM, 2 on SSD, 2 missed (diverged 2)"
    assert lines(restores__longest_seconds=0.00061)["restores"].text.endswith("longest 610 µs")
    assert said["files"].text == "/files"
    assert said["puts"].text.endswith("3 declined (busy 3)")
    assert said["writer"].text == "idle; 1 GiB in 24 hours"
    assert said["restores"].text == "4, 4 GiB/s, longest 1.5 s"
    assert said["clients"].text == "2 connected; they hold 1 lease, 2 claims"
    assert said["pressure"].text == "normal"
    assert "look at" not in said


def test_what_is_wrong_stands_out() -> None:
    """FIELD 3: a failing disk, memory pressure, slow restores and damage are seen at once."""
    said = lines(
        ram_tier__disk={
            "healthy": False, "reason": "no space", "damaged": 1, "damaged_at_start": 1,
        },
        ram_tier__pressure__level="critical",
        ssd_tier__deletion_failure="not permitted",
        restores__slow=1,
        event_loop__stalls=4,
        log__suppressed=9,
    )  # fmt: skip
    alarms = {name for name, line in said.items() if line.is_alarm}
    assert alarms == {"writer", "deletions", "pressure", "restores", "look at"}
    assert "FAILING: no space" in said["writer"].text
    assert said["deletions"].text == "FAILING: not permitted; 3 MiB cannot be freed"
    assert "1 slower than computing" in said["restores"].text
    assert said["look at"].text == ("damaged files 2, event loop stalls 4, log lines left out 9")


def test_a_fresh_daemon_divides_by_nothing() -> None:
    """No takes, no caps, no restores, no SSD tier."""
    report = copy.deepcopy(REPORT)
    del report["ssd_tier"], report["restores"]
    report["ram_tier"]["takes"]["tokens_requested"] = 0
    report["ram_tier"]["ram_bytes_cap"] = 0
    said = {line.name: line.text for line in page(report)}
    assert said["hit ratio"].startswith("- of tokens reused")
    assert said["SSD"] == "off: a restart forgets everything"
    assert "writer" not in said
    assert "restores" not in said


def test_a_real_report_has_all_that_the_page_needs() -> None:
    """The page of a real daemon, off a terminal: whole lines, no blanks at the ends."""
    with DaemonProcess(*BOTH_TIERS) as process:
        shown = invoke("status", socket=process.socket)
    assert shown.exit_code == 0, shown.output
    assert all(line == line.rstrip() for line in shown.output.splitlines())
    assert "0 B of 64 MiB" in shown.output
