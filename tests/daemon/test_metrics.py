"""Metrics: the text, the exporter on the loopback, the dashboard that uses them."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from prefixcached.daemon.exporter import Exporter
from prefixcached.daemon.latency import Latencies
from prefixcached.daemon.loopback_http import ADDRESS, MAX_TOLD, Answer, LoopbackServer
from prefixcached.daemon.prometheus import FAMILIES, text_of
from prefixcached.protocol.messages import Take
from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess
from tests.support.numpy_kv import make_caches

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "prefixcached.json"
PROMPT = list(range(1000))
SECRET = "a-secret-of-the-user"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(*BOTH_TIERS) as process:
        with numpy_cache(process.socket) as cache:
            put(cache, PROMPT, SECRET)
            assert cache.take([*PROMPT, 1], namespace=SECRET, session=SECRET)
            assert not cache.take(list(range(50)), namespace="none")
            assert not cache.put([1, 2], make_caches([1, 2]), namespace=SECRET)
        yield process
        print(process.log())


@pytest.fixture(scope="module")
def text(daemon: DaemonProcess) -> str:
    shown = invoke("metrics", socket=daemon.socket)
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.fixture(scope="module")
def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


# -- the text -------------------------------------------------------------------------------------


def test_the_text_says_what_the_daemon_counts(families: dict[str, Metric]) -> None:
    """C5: the numbers of `status`, under Prometheus's names and units."""
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["prefixcached_takes_total",] == 2
    assert values["prefixcached_tokens_reused_total",] == len(PROMPT)
    assert values["prefixcached_misses_total", ("reason", "empty")] == 1
    assert values["prefixcached_tier_limit_bytes", ("tier", "ram")] == 64 << 20
    assert values["prefixcached_tier_bytes", ("state", "resident"), ("tier", "ram")] > 0
    assert sum(value for (name, *_), value in values.items()
               if name == "prefixcached_pressure_level") == 1  # fmt: skip
    count = values["prefixcached_request_duration_seconds_count", ("request", "take")]
    last = values[
        "prefixcached_request_duration_seconds_bucket", ("le", "+Inf"), ("request", "take")
    ]
    assert count == last == 2
    assert values["prefixcached_request_duration_seconds_sum", ("request", "take")] > 0


def test_every_metric_keeps_the_conventions(families: dict[str, Metric], text: str) -> None:
    """Prefix, help, a type, base units, no unit that is none."""
    assert len(families) == len(FAMILIES) + 3
    for name, family in families.items():
        assert name.startswith("prefixcached_"), name
        assert family.documentation.endswith("."), name
        assert family.type in ("gauge", "counter", "histogram"), name
        assert not re.search(r"(_ms|_mib|_gib|_kb|_percent|_ratio_total)\b", name), name
        if family.type == "counter":
            assert f"# TYPE {name}_total counter" in text
    assert families["prefixcached_request_duration_seconds"].type == "histogram"


def test_buckets_never_fall(families: dict[str, Metric]) -> None:
    """A histogram's buckets are cumulative."""
    buckets: dict[str, list[float]] = {}
    for sample in families["prefixcached_request_duration_seconds"].samples:
        if sample.name.endswith("_bucket"):
            buckets.setdefault(sample.labels["request"], []).append(sample.value)
    assert len(buckets["take"]) > 15
    for values in buckets.values():
        assert values == sorted(values)


def test_no_metric_tells_what_a_client_chose(text: str) -> None:
    """Namespaces and sessions stay out of what is kept for years and seen by others."""
    assert SECRET not in text


def test_sections_that_are_not_there_are_left_out() -> None:
    """A daemon without an SSD tier, or an older one, still has metrics."""
    text = text_of({"daemon": {"version": "1"}}, None).decode()
    assert 'prefixcached_info{version="1"} 1.0' in text
    assert "request_duration" not in text
    assert list(text_string_to_metric_families(text))


def test_metrics_without_a_daemon_ends_with_3(tmp_path: Path) -> None:
    """Exit code 3: nobody is there."""
    shown = invoke("metrics", socket=tmp_path / "s")
    assert shown.exit_code == 3
    assert "no daemon" in shown.output


def test_metrics_without_its_extra_says_what_to_install(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is optional: its absence is a sentence, not a traceback."""
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    monkeypatch.delitem(__import__("sys").modules, "prefixcached.daemon.prometheus", raising=False)
    monkeypatch.delattr("prefixcached.daemon.prometheus", raising=False)
    shown = invoke("metrics", socket=daemon.socket)
    assert shown.exit_code == 1
    assert "pip install 'prefixcached[metrics]'" in shown.output


# -- the exporter ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((ADDRESS, 0))
        return int(sock.getsockname()[1])


def http(port: int, request: str) -> tuple[int, bytes]:
    """Send one request; return status and body."""
    with socket.create_connection((ADDRESS, port), timeout=30) as sock:
        sock.sendall(request.replace("\n", "\r\n").encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def addresses_of(port: int) -> list[str]:
    """The addresses that listen on a port, as Linux writes them; none elsewhere."""
    table = Path("/proc/net/tcp")
    rows = [row.split() for row in table.read_text().splitlines()[1:]] if table.exists() else []
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [address for address, number in places if int(number, 16) == port]


def test_the_exporter_serves_what_the_command_prints() -> None:
    """`metrics_port` serves the same families, and counts its scrapes."""
    port = free_port()
    with DaemonProcess("--metrics-port", str(port)) as process:
        status, body = http(port, f"GET /metrics HTTP/1.1\nHost: {ADDRESS}:{port}\n\n")
        assert status == 200
        served = {one.name for one in text_string_to_metric_families(body.decode())}
        printed = invoke("metrics", socket=process.socket).output
        assert served == {one.name for one in text_string_to_metric_families(printed)}
        shown = json.loads(invoke("status", "--json", socket=process.socket).output)
        exporter = shown["metrics_exporter"]
        assert exporter == {"port": port, "scrapes": 1, "refused": 0, "failure": ""}
        assert addresses_of(port) in ([], ["0100007F"])


def test_nothing_listens_unless_asked(daemon: DaemonProcess) -> None:
    """Off by default."""
    shown = json.loads(invoke("status", "--json", socket=daemon.socket).output)
    assert shown["metrics_exporter"]["port"] == 0


def test_a_taken_port_does_not_keep_the_daemon_from_serving() -> None:
    """Metrics are never in the way: `status` says why there are none."""
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with DaemonProcess("--metrics-port", str(port)) as process:
            shown = json.loads(invoke("status", "--json", socket=process.socket).output)
            assert str(port) in shown["metrics_exporter"]["failure"]
            assert shown["metrics_exporter"]["port"] == 0
            assert "no metrics are served" in process.log()


@pytest.mark.parametrize(
    ("request_text", "status", "reason"),
    [
        ("GET / HTTP/1.1\nHost: evil.example:{port}\n\n", 403, "host"),
        ("GET / HTTP/1.1\nHost: 127.0.0.1\n\n", 403, "host"),
        ("GET / HTTP/1.1\nHost: 127.0.0.1:{port}.evil.example\n\n", 403, "host"),
        ("GET / HTTP/1.0\n\n", 403, "host"),
        ("GET / HTTP/1.1\n\n", 400, "malformed"),
        ("GET / HTTP/1.1\nHost: 127.0.0.1:{port}\nHost: evil.example\n\n", 400, "malformed"),
        ("POST / HTTP/1.1\nHost: 127.0.0.1:{port}\nContent-Length: 0\n\n", 405, "method"),
        ("DELETE / HTTP/1.1\nHost: localhost:{port}\n\n", 405, "method"),
        ("GET /else HTTP/1.1\nHost: 127.0.0.1:{port}\n\n", 404, "path"),
        ("GET /fails HTTP/1.1\nHost: 127.0.0.1:{port}\n\n", 500, "internal"),
        ("nonsense\n\n", 400, "malformed"),
        ("GET / HTTP/1.1\nHost: 127.0.0.1:{port}\nX: " + "y" * 50_000 + "\n\n", 431, "malformed"),
    ],
)
async def test_the_server_refuses_all_but_a_local_reader(
    request_text: str, status: int, reason: str
) -> None:
    """Wrong host, method, path or syntax: a status, a counter, and the next request is served."""

    async def respond(target: str) -> Answer | None:
        if target == "/fails":
            raise ZeroDivisionError("a bug in what answers")
        return Answer("text/plain", b"here") if target == "/" else None

    server = LoopbackServer(0, respond)
    async with trio.open_nursery() as nursery:
        await server.open()
        nursery.start_soon(server.run)
        asked = request_text.replace("{port}", str(server.port))
        found, _ = await trio.to_thread.run_sync(http, server.port, asked)
        assert found == status
        assert server.refused[reason] == server.refused.total() == 1
        for host in (ADDRESS, "localhost"):
            good = f"GET / HTTP/1.1\nHost: {host}:{server.port}\n\n"
            assert await trio.to_thread.run_sync(http, server.port, good) == (200, b"here")
        head = f"HEAD / HTTP/1.1\nHost: {ADDRESS}:{server.port}\n\n"
        assert await trio.to_thread.run_sync(http, server.port, head) == (200, b"")
        assert server.served == 3
        nursery.cancel_scope.cancel()


async def test_whoever_connects_and_says_nothing_costs_little() -> None:
    """Silent connections are bounded in number, and others are told so."""

    async def respond(_: str) -> Answer | None:
        return Answer("text/plain", b"")

    server = LoopbackServer(0, respond)
    async with trio.open_nursery() as nursery:
        await server.open()
        nursery.start_soon(server.run)
        silent = [await trio.open_tcp_stream(ADDRESS, server.port) for _ in range(16)]
        asked = f"GET / HTTP/1.1\nHost: {ADDRESS}:{server.port}\n\n"
        status, _ = await trio.to_thread.run_sync(http, server.port, asked)
        assert (status, server.refused["too-many"]) == (503, 1)
        # Of many more, most are closed at once: descriptors are the daemon's.
        silent += [await trio.open_tcp_stream(ADDRESS, server.port) for _ in range(100)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert server._current <= 16 + MAX_TOLD
        assert server.refused["too-many"] > 1 + 100 - MAX_TOLD - 1
        for stream in silent:
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_without_its_extra_the_exporter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon goes on without metrics."""
    monkeypatch.setitem(__import__("sys").modules, "h11", None)
    monkeypatch.delitem(__import__("sys").modules, "prefixcached.daemon.loopback_http")
    exporter = Exporter(free_port(), {}, Latencies())
    await exporter.run()
    assert exporter.statistics().failure == (
        "metrics_port needs h11: pip install 'prefixcached[metrics]'"
    )


# -- the dashboard --------------------------------------------------------------------------------


def test_the_dashboard_uses_metrics_that_exist() -> None:
    """Every query of deploy/grafana names a metric and labels that the text has."""
    board = json.loads(DASHBOARD.read_text("utf-8"))
    report: dict[str, Any] = {}
    for family in FAMILIES:
        for source in family.sources:
            *path, last = source.path.split(".")
            at = report
            for name in path:
                at = at.setdefault(name, {})
            at[last] = {"x": 1} if source.by else 1
    latencies = Latencies()
    latencies.record(Take, 0.001)
    labels: dict[str, set[str]] = {}
    for metric in text_string_to_metric_families(text_of(report, latencies.report()).decode()):
        for sample in metric.samples:
            labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        used = re.findall(r"(prefixcached_\w+)\{([^}]*)\}", query)
        assert len(used) == query.count("prefixcached_") > 0, query
        for name, selectors in used:
            assert name in labels, name
            for label in re.findall(r"(\w+)=", selectors):
                assert label in labels[name], (name, label)
        for by in re.findall(r"by \((\w+)\)", query):
            assert all(by in labels[name] for name, _ in used), query
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
