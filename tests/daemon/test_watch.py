"""Watching a daemon: clients and what each does, latencies, history, over a real socket."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from prefixcached.client.wire import Wire
from prefixcached.daemon.commands.watching import SeriesTable, Watcher
from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.connection import CAPABILITIES
from tests.daemon.clients import connected
from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.daemon.conftest import Front
from tests.support.daemon_process import DaemonProcess
from tests.support.small_daemon import Peer, SmallDaemon
from tests.support.until import until

PROMPT = list(range(1000))
COLD = list(range(5000, 7000))
TAKE = m.Take(namespace="n", tokens=bytes(400))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(*BOTH_TIERS) as process:
        yield process
        print(process.log())


@contextmanager
def wire(path: Path) -> Iterator[Wire]:
    opened = Wire(path)
    opened.open(time.monotonic() + 10)
    try:
        yield opened
    finally:
        opened.close()


def ask(opened: Wire, request: m.AnyRequest) -> m.Reply:
    return opened.request(request, time.monotonic() + 10)[0]


def activity(path: Path) -> m.ActivityReport:
    with wire(path) as opened:
        report = ask(opened, m.Activity())
    assert isinstance(report, m.ActivityReport)
    return report


def test_the_daemon_names_the_group() -> None:
    """C2: a client asks only a daemon that named `watch`."""
    assert "watch" in CAPABILITIES


def test_a_client_is_shown_with_what_it_is_and_holds(daemon: DaemonProcess) -> None:
    """Its process, its requests, and the claim of a prompt that it computes (Q1)."""
    with numpy_cache(daemon.socket) as cache:
        result = cache.take(COLD, namespace="cold")
        assert not result
        report = activity(daemon.socket)
        (own,) = [client for client in report.clients if client.claims]
        assert own.pid > 0
        assert own.client.startswith("prefixcached")
        assert (own.doing, own.requests, own.leases, own.waits_for) == ("", 1, 0, 0)
        assert own.connected_seconds >= 0
        (claim,) = report.claims
        assert claim == m.ClaimActivity(own.session, "cold", len(COLD) - 1, 0)
        (asker,) = [client for client in report.clients if client.doing]
        assert asker.doing == "activity"
    until(lambda: not activity(daemon.socket).claims)


def test_a_take_that_waits_says_for_whom(daemon: DaemonProcess) -> None:
    """Q2: who waits for another's prefill is shown with the one that computes it."""
    with numpy_cache(daemon.socket) as claimant, numpy_cache(daemon.socket) as waiter:
        claimed = claimant.take(COLD, namespace="wait")  # the claim ends with its last reference
        assert not claimed
        thread = threading.Thread(target=waiter.take, args=(COLD,), kwargs={
            "namespace": "wait", "wait": 60.0})  # fmt: skip
        thread.start()
        until(lambda: any(one.waits_for for one in activity(daemon.socket).clients))
        report = activity(daemon.socket)
        (waiting,) = [one for one in report.clients if one.waits_for]
        (claim,) = report.claims
        assert (waiting.waits_for, waiting.doing) == (claim.session, "take")
        assert claim.waiting == 1
        put(claimant, COLD, "wait")
        thread.join(30)
        assert not thread.is_alive()


def test_leases_pins_and_sessions_are_shown(daemon: DaemonProcess) -> None:
    """L1, F1, S1: what is lent and pinned, by connection, and the newest label first."""
    with numpy_cache(daemon.socket) as cache, wire(daemon.socket) as holder:
        put(cache, PROMPT, "held")
        for name in ("older", "newer"):
            assert cache.take([*PROMPT, 1], namespace="held", session=name)
        packed = np.array([*PROMPT, 1], "<u4").tobytes()
        hit = ask(holder, m.Take(namespace="held", tokens=packed))
        assert isinstance(hit, m.Hit)
        with cache.prefetch([*PROMPT, 1], namespace="held") as pin:
            assert pin.length == len(PROMPT)
            report = activity(daemon.socket)
        assert [one.leases for one in report.clients if one.leases] == [1]
        assert [one.pins for one in report.clients if one.pins] == [1]
        shown = [(one.label, one.tokens) for one in report.labels if one.namespace == "held"]
        assert shown == [("newer", len(PROMPT)), ("older", len(PROMPT))]
        assert report.complete


def test_every_measured_request_is_in_its_histogram(daemon: DaemonProcess) -> None:
    """A take and a put are counted once each, in plausible time."""
    with wire(daemon.socket) as opened, numpy_cache(daemon.socket) as cache:

        def counts() -> dict[str, int]:
            report = ask(opened, m.Latency())
            assert isinstance(report, m.LatencyReport)
            assert all(len(one.counts) == len(report.bounds_seconds) + 1
                       for one in report.requests)  # fmt: skip
            return {one.request: sum(one.counts) for one in report.requests}

        before = counts()
        put(cache, range(300, 900), "timed")
        assert cache.take([*range(300, 900), 1], namespace="timed")
        after = counts()
        grown = {name: after[name] - before[name] for name in after if after[name] > before[name]}
        grown.pop("status")  # asked until the index is loaded
        assert grown == {"offer": 1, "commit": 1, "take": 1}


def test_the_history_follows_the_counters(daemon: DaemonProcess) -> None:
    """Rows arrive while the daemon runs; asked again, only the new ones."""
    with Watcher(daemon.socket) as watcher, numpy_cache(daemon.socket) as cache:
        cache.take(PROMPT, namespace="nobody")
        takes = cache.stats()["ram_tier"]["takes"]["takes"]
        watcher.look()
        first = watcher.recent.request().after

        def caught_up() -> bool:
            watcher.look()
            return bool(watcher.recent.column("takes")[-1] >= takes)

        until(caught_up)
        assert watcher.recent.request().after > first - 1
        assert np.all(np.diff(watcher.recent.times) > 0)
        assert len(watcher.recent.times) == watcher.recent.request().after
        assert len(watcher.recent.column("of tomorrow")) == 0


def test_another_run_of_the_daemon_begins_a_new_history() -> None:
    """L3: numbers of an earlier boot mean nothing."""
    table = SeriesTable("second")

    def rows(boot: str, first: int, *values: float) -> m.HistoryReport:
        packed = np.array(values, "<f8").tobytes()
        return m.HistoryReport(
            first=first, times=packed, series=(m.Series("takes", "counter", packed),), boot=boot
        )

    assert table.take_in(rows("a", 1, 1.0, 2.0))
    assert table.take_in(rows("a", 3, 3.0))
    assert table.column("takes").tolist() == [1.0, 2.0, 3.0]
    assert table.request().after == 3
    assert not table.take_in(rows("b", 9, 50.0))
    assert table.request().after == 0
    assert table.take_in(rows("b", 1, 10.0))
    assert table.column("takes").tolist() == [10.0]


def test_a_dead_client_is_no_longer_shown(daemon: DaemonProcess) -> None:
    """A connection ends with its process, and so does its line."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.daemon.command_line import "
        f"numpy_cache\ncache = numpy_cache(Path({str(daemon.socket)!r}))\n"
        "cache.take(list(range(9)), namespace='x')\nprint(flush=True)\nsys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdin is not None
    child.stdout.readline()
    assert child.pid in {one.pid for one in activity(daemon.socket).clients}
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    until(lambda: child.pid not in {one.pid for one in activity(daemon.socket).clients})


async def test_watching_does_not_reach_ram_tier(front: Front) -> None:
    """It adds nothing to the mailbox of the actor that everybody waits for."""
    async with connected(front.path) as client:
        assert isinstance(await client.ask(TAKE), m.Miss)
        await client.say(m.Latency())
        assert (await client.failed()).detail == "this daemon cannot be watched"
        assert front.ram_tier.calls == [TAKE]


def test_an_older_daemon_is_named_as_such(directory: Path) -> None:
    """C2: without the group nothing of it is sent, and the user is told what to do."""

    def old(peer: Peer, request: m.AnyRequest) -> bool:
        if not isinstance(request, m.Hello):
            return False
        peer.send(m.Welcome(version=limits.PROTOCOL_VERSION, capabilities=("cache",), boot="b"))
        return True

    with SmallDaemon(directory / "s") as old_daemon:
        old_daemon.on_request = old
        shown = invoke("metrics", socket=directory / "s")
        assert shown.exit_code == 1
        assert "older than this command" in shown.output
        assert "prefixcached service restart" in shown.output
        assert [type(request) for request in old_daemon.requests] == [m.Hello]
