"""A trace of a real daemon, looked at and replayed by the command line."""

import json
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefixcached.client import connect
from prefixcached.daemon.trace.trace_file import Record, TraceWriter, encoded, reading
from prefixcached.daemon.trace.tracer import OWN, REPLIES, REQUESTS
from tests.daemon.command_line import invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess
from tests.support.recorded_traffic import make_traffic
from tests.support.until import ram_tier, until

BOTH = ("--ram-bytes", "1MiB", "--ssd-bytes", "64MiB")
"""RAM for a tenth of the traffic, so that it is evicted and comes back from SSD."""

ONE_WAY = ("release", "unpin", "abandon", "drop-claim", "client-gone")


def record(path: Path, *options: str) -> Path:
    with DaemonProcess(*options, "--trace", str(path)) as daemon:
        with numpy_cache(daemon.socket) as cache:
            until(lambda: not ram_tier(cache)["loading"])
        make_traffic(daemon.socket)
        assert daemon.terminate() == 0, daemon.log()
    return path


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a daemon whose RAM holds everything."""
    return record(tmp_path_factory.mktemp("trace") / "t", "--ram-bytes", "64MiB")


def replayed(path: Path, *options: str) -> dict[str, Any]:
    result = invoke("replay", str(path), "--json", *options)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.output)
    return report


def records(path: Path) -> list[Record]:
    with reading(path) as (_, found):
        return list(found)


def same(report: dict[str, Any], *names: str) -> None:
    for name in names:
        assert report["replayed"][name] == report["recorded"][name], name


@pytest.mark.slow
def test_a_replay_against_the_same_configuration_gives_the_same_hits(in_ram: Path) -> None:
    """Three clients at once, shared prefixes, hybrids, objects, labels, claims and a clear."""
    kinds = {r.type for r in records(in_ram) if r.channel == "session->ram_tier"}
    assert kinds >= {
        "take", "offer", "commit", "release", "take-object", "offer-object", "prefetch", "unpin",
        "peek", "close-label", "clear",
    }  # fmt: skip
    assert any(r.message.get("claim") for r in records(in_ram))
    report = replayed(in_ram)
    same(report, "takes", "tokens_requested", "tokens_reused", "hits", "misses", "object_hits")
    comparison = report["comparison"]
    assert report["recorded"]["takes"] == comparison["equal_takes"] == 72
    assert (comparison["late"], comparison["ended_sessions"]) == (0, 0)
    assert report["recorded"]["hits"]["ram"] > 30


@pytest.mark.slow
def test_a_replay_under_pressure_on_both_tiers_decides_the_same(tmp_path: Path) -> None:
    """Also what depends on when a write, a read or a copy ended: take by take, to the byte."""
    path = record(tmp_path / "t", "--ram-bytes", "256KiB", "--ssd-bytes", "600KiB")
    report = replayed(path)
    assert report["followed"]["reason"] == ""
    assert report["comparison"]["equal_takes"] == report["recorded"]["takes"] == 72
    same(
        report, "tokens_reused", "hits", "misses", "object_hits", "stored", "declined",
        "evictions", "dropped_unwritten", "ssd_evictions", "written_bytes",
    )  # fmt: skip
    assert report["recorded"]["hits"]["ssd"] > 3
    assert report["recorded"]["evictions"] > 20
    assert report["recorded"]["ssd_evictions"] > 20


@pytest.mark.slow
def test_idle_hours_pass_at_once_and_end_no_connection(tmp_path: Path) -> None:
    """The record's clock leaps; what a client does meanwhile has deadlines of seconds."""
    path = record(tmp_path / "t", "--ram-bytes", "64MiB", "--ssd-bytes", "0")
    longer: list[Record] = []
    asking: set[int] = set()
    now = night = 0.0
    for one in records(path):
        # While nobody waits for a reply: a wait would be over in the morning.
        if one.channel == REQUESTS and not asking and night < 50_000.0:
            longer += [
                Record(one.seconds, OWN, "", {"type": "turn", "now": t, "wake": True})
                for t in (now + night + 100.0 * n for n in range(100))
            ]
            night += 10_000.0
        if one.channel == REQUESTS and one.type not in ONE_WAY:
            asking.add(one.session)
        elif one.channel in (REPLIES, REQUESTS):
            asking.discard(one.session)
        message = one.message
        if one.type == "turn":
            now = message["now"]
            message = message | {"now": now + night}
        longer.append(Record(one.seconds, one.channel, one.flow, message))
    with reading(path) as (header, _):
        pass
    writer = TraceWriter(path, header)
    writer.append([encoded(one) for one in longer])
    writer.close()
    report = replayed(path)
    assert (report["followed"]["reason"], night) == ("", 50_000.0)
    assert report["followed"]["turns"] > 800
    assert report["comparison"]["equal_takes"] == 72
    assert (report["comparison"]["late"], report["comparison"]["ended_sessions"]) == (0, 0)


def test_a_wait_in_vain_ends_by_the_records_clock(tmp_path: Path) -> None:
    """Q2: what was computed too late is not waited for longer, or shorter, than in the record."""
    path, prompt = tmp_path / "t", list(range(400))
    with (
        DaemonProcess("--trace", str(path)) as daemon,
        numpy_cache(daemon.socket) as one,
        numpy_cache(daemon.socket) as other,
    ):
        until(lambda: not ram_tier(one)["loading"])
        assert not one.take(prompt, namespace="n")
        assert not other.take(prompt, namespace="n", wait=1.0)
        put(one, prompt)
        assert other.take(prompt, namespace="n", wait=1.0)
        one.close()
        other.close()
        assert daemon.terminate() == 0
    report = replayed(path)
    assert report["followed"]["reason"] == ""
    same(report, "takes", "hits", "misses", "tokens_reused")
    assert report["comparison"]["equal_takes"] == 3


def test_a_trace_without_turns_is_replayed_at_its_own_pace(tmp_path: Path) -> None:
    """As an older version wrote it; what is missing is said."""
    path = tmp_path / "t"
    with DaemonProcess("--trace", str(path)) as daemon, numpy_cache(daemon.socket) as cache:
        until(lambda: not ram_tier(cache)["loading"])
        put(cache, range(300))
        assert cache.take([*range(300), 1], namespace="n")
        cache.close()
        assert daemon.terminate() == 0
    old = [one for one in records(path) if one.type not in ("turn", "new-image")]
    with reading(path) as (header, _):
        pass
    writer = TraceWriter(path, header)
    writer.append([encoded(one) for one in old])
    writer.close()
    report = replayed(path)
    assert "has no turns" in report["followed"]["reason"]
    same(report, "takes", "hits", "tokens_reused", "stored")


def test_a_replay_with_both_tiers_gives_the_same_hits(tmp_path: Path) -> None:
    """Also where entries leave RAM and come back from SSD."""
    path, prompts = tmp_path / "t", [[seed, *range(600)] for seed in range(8)]
    with (
        DaemonProcess("--ram-bytes", "256KiB", "--ssd-bytes", "64MiB", "--trace", str(path)) as d,
        numpy_cache(d.socket) as one,
        numpy_cache(d.socket) as other,
    ):
        until(lambda: not ram_tier(one)["loading"])
        for prompt in prompts:
            put(one, prompt)
            # So that no put is declined for a slow disk, which no replay could know.
            assert other.flush()
        for cache in (other, one, one):
            for prompt in prompts[::-2]:
                assert cache.take([*prompt, 1], namespace="n")
        one.close()
        other.close()
        assert d.terminate() == 0
    report = replayed(path)
    same(report, "takes", "tokens_requested", "tokens_reused", "misses", "stored", "written_bytes")
    assert report["comparison"]["equal_takes"] == report["recorded"]["takes"] == 12
    assert report["recorded"]["hits"]["ssd"] > 3
    assert report["replayed"]["hits"]["ssd"] > 3
    assert report["replayed"]["evictions"] > 3
    less = replayed(path, "--ssd-bytes", "0")
    assert less["replayed"]["tokens_reused"] < report["replayed"]["tokens_reused"]
    assert less["replayed"]["hits"]["ssd"] == 0


@pytest.mark.slow
def test_smaller_ram_finds_less(in_ram: Path) -> None:
    """What a replay is for: what would another cap have cost?"""
    report = replayed(in_ram, "--ram-bytes", "192KiB", "--retention", "lru")
    before, after = report["recorded"], report["replayed"]
    assert report["options"]["retention"] == "lru"
    assert report["options"]["checkpoint_min_tokens"] == "1", "the recorded option holds"
    assert after["takes"] == before["takes"]
    assert after["hit_ratio"] < before["hit_ratio"]
    assert after["evictions"] > before["evictions"] == 0
    assert report["comparison"]["shorter_takes"] > 0
    followed = report["followed"]
    assert "the record goes on with" in followed["reason"] or "this daemon" in followed["reason"]
    assert followed["turns"] > 5, "up to the first difference it decided the same"


@pytest.mark.slow
def test_more_ram_finds_more(tmp_path: Path) -> None:
    """What the record lacks is granted, filled, lent and given back, as its clients would have."""
    path = record(tmp_path / "t", "--ram-bytes", "192KiB")
    report = replayed(path, "--ram-bytes", "64MiB", "--ssd-bytes", "64MiB")
    before, after = report["recorded"], report["replayed"]
    assert after["hit_ratio"] > before["hit_ratio"]
    assert after["stored"] > before["stored"]
    assert report["comparison"]["longer_takes"] > 0
    assert (report["comparison"]["late"], report["comparison"]["ended_sessions"]) == (0, 0)


def test_a_take_that_waited_waits_again(tmp_path: Path) -> None:
    """Q2: two clients and one prefill; the replay brings them together in the same order."""
    path, prompt = tmp_path / "t", list(range(400))
    with (
        DaemonProcess("--trace", str(path)) as daemon,
        numpy_cache(daemon.socket) as one,
        numpy_cache(daemon.socket) as other,
        ThreadPoolExecutor() as threads,
    ):
        claim = one.take(prompt, namespace="n")
        assert not claim
        waiting = threads.submit(other.take, prompt, namespace="n", wait=30.0)
        until(lambda: ram_tier(one)["takes_waiting"])
        put(one, prompt)
        assert waiting.result()
        one.close()
        other.close()
        assert daemon.terminate() == 0
    for speed in ("0", "1"):
        report = replayed(path, "--speed", speed)
        same(report, "takes", "hits", "misses", "tokens_reused")
        assert report["recorded"]["tokens_reused"] == 399
        assert report["comparison"]["late"] == 0


@pytest.mark.slow
def test_a_replay_for_people_says_what_it_cannot_know(in_ram: Path) -> None:
    """Files from before the record are not in it; where it is not followed, time is left out."""
    result = invoke("replay", str(in_ram))
    assert result.exit_code == 0, result.output
    for words in (
        "hit ratio by tokens",
        "Of 72 takes 72 found as much",
        "Every decision is the record's (",
        "on SSD when",
    ):
        assert words in result.output
    assert "--speed 1" not in result.output
    result = invoke("replay", str(in_ram), "--ram-bytes", "192KiB")
    for words in ("Every decision is the record's up to ", "replay paces itself", "--speed 1"):
        assert words in result.output


def test_one_request_is_followed_through_the_actors(tmp_path: Path) -> None:
    """`--flow` shows an offer, its commit and its file, in order; filters show what they say."""
    path = tmp_path / "t"
    with DaemonProcess(*BOTH, "--trace", str(path)) as daemon, numpy_cache(daemon.socket) as cache:
        until(lambda: not ram_tier(cache)["loading"])
        put(cache, range(300))
        cache.take([*range(200), 9], namespace="n", session="SECRET")
        assert cache.flush()
        assert cache.stats()["trace"]["is_recording"]
        cache.close()
        assert daemon.terminate() == 0
    flow = next(r.flow for r in records(path) if r.type == "offer")
    lines = invoke("trace", str(path), "--flow", flow, "--json").stdout.splitlines()
    shown = [json.loads(line) for line in lines]
    assert [(one["channel"], _type(one)) for one in shown] == [
        ("session->ram_tier", "offer"), ("ram_tier->session", "grant"),
        ("session->ram_tier", "commit"), ("ram_tier->ram_tier", "sealed"),
        ("ram_tier->session", "stored"), ("ram_tier->ssd_tier", "write-image"),
        ("ssd_tier->ram_tier", "written"),
    ]  # fmt: skip
    assert shown[0]["message"]["request"]["tokens"] == {"bytes": 1200}
    takes = invoke("trace", str(path), "--type", "take", "--session", flow.split(".")[0]).stdout
    assert len(takes.splitlines()) == 1
    assert "tokens=201" in takes
    assert "SECRET" not in takes
    lines = invoke("trace", str(path), "--channel", "*->ssd_tier").stdout.splitlines()
    assert len(lines) >= 2
    assert all(" ram_tier->ssd_tier " in line for line in lines)
    assert path.stat().st_mode & 0o777 == 0o600
    for asked in (("--flow", "99.1"), ("--type", "levitate"), ("--session", "99")):
        result = invoke("trace", str(path), *asked)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "nothing in" in result.output
    assert "turn" not in {_type(json.loads(line)) for line in _lines(path, "--json")}
    assert all(" turn " in line for line in _lines(path, "--type", "turn"))


def _lines(path: Path, *options: str) -> list[str]:
    lines = invoke("trace", str(path), *options).stdout.splitlines()
    assert lines
    return lines


def _type(one: dict[str, Any]) -> str:
    message: dict[str, Any] = one["message"]
    found: str = message.get("request", message)["type"]
    return found


def test_the_trace_of_a_killed_daemon_is_readable_and_replays(tmp_path: Path) -> None:
    """SIGKILL costs the last moment: all that was written before is there."""
    path = tmp_path / "t"
    with DaemonProcess("--trace", str(path)) as daemon, numpy_cache(daemon.socket) as cache:
        put(cache, range(300))
        put(cache, range(400))
        until(lambda: sum(r.type == "stored" for r in records(path)) == 2)
        daemon.kill()
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    assert [r.type for r in records(path)].count("stored") >= 1
    report = replayed(path)
    assert report["replayed"]["stored"] == 2


def limit_files(pid: int, nbytes: int) -> None:
    """As a full disk does, refuse what would make a file longer; images are shorter."""
    if sys.platform == "linux":
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, nbytes))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits another process")
def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    """The daemon serves on, log and counters say that the trace ended, and it is readable."""
    path = tmp_path / "t"
    with DaemonProcess("--trace", str(path)) as daemon, numpy_cache(daemon.socket) as cache:
        put(cache, range(100))
        limit = path.stat().st_size + 20_000
        limit_files(daemon.pid, limit)
        until(lambda: cache.peek(range(500), namespace="n") and _has_ended(cache))
        assert cache.stats()["trace"]["failures"] == 1
        put(cache, range(50), "other")
        assert cache.peek(range(51), namespace="other") == 50
        assert "the trace ends here" in daemon.log()
        assert daemon.terminate() == 0
    assert records(path)[0].type == "statistics"


def _has_ended(cache: Any) -> bool:
    return not cache.stats()["trace"]["is_recording"]


def test_a_daemon_without_a_trace_has_none(daemon: DaemonProcess) -> None:
    """No file, no section, no counters."""
    with connect(socket=daemon.socket) as cache:
        assert "trace" not in cache.stats()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("trace", "FILE"), "is no trace"),
        (("replay", "FILE"), "is no trace"),
        (("serve", "--trace", "FILE"), "exists and is no trace"),
        (("serve", "--trace-tokens"), "--trace-tokens without --trace"),
    ],
)
def test_wrong_use_is_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """What is no trace is named, and never written over."""
    file = tmp_path / "notes.txt"
    file.write_text("no trace at all, but somebody's notes")
    result = invoke(
        *(str(file) if a == "FILE" else a for a in arguments),
        socket=tmp_path / "s",
        environment={"PREFIXCACHED_STATE_DIR": str(tmp_path / "state")},
    )
    assert result.exit_code != 0
    assert says in result.output
    assert file.read_text().startswith("no trace")


def test_a_replay_needs_a_daemon_that_starts(in_ram: Path) -> None:
    """A value that `serve` refuses is refused with its words."""
    result = invoke("replay", str(in_ram), "--retention", "astrology")
    assert result.exit_code == 1
    assert "astrology" in result.output
