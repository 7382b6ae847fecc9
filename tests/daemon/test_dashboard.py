"""The dashboard through HTTP: what it tells, whom it refuses, and that it changes nothing."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixcached.daemon.dashboard.icicle import MAX_NAMED, nodes_of, parents_of
from prefixcached.daemon.dashboard.payload import MAX_NAME_CHARACTERS, MAX_ROWS, name_text
from prefixcached.daemon.dashboard.site import CHARTS, FILES, Since, Site, since_of
from prefixcached.protocol.messages import LabelActivity, Listed, ListedNamespace, Listing
from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess
from tests.support.until import until

ADDRESS = "127.0.0.1"
COMMAND = [sys.executable, "-m", "prefixcached.daemon.cli", "dashboard"]
PROMPT = list(range(1000))
NAME = '<script>alert("n")</script>\x1b[31m'
PATHS = ["", *FILES, CHARTS, "look", "tree"]


class Dashboard:
    """The command in a process of its own."""

    def __init__(self, daemon: DaemonProcess, *options: str, **more: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--socket", str(daemon.socket), *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **more},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", self.address)
        assert found, (self.address, self.process.stderr and self.process.stderr.read())
        self.port, self.token = int(found[1]), found[2]

    def ask(
        self, path: str, *, method: str = "GET", host: str | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request; return status, headers and body."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'{ADDRESS}:{self.port}'}"]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        with socket.create_connection((ADDRESS, self.port), timeout=30) as sock:
            sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        head, _, found = answer.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
        return int(first.split()[1]), headers, found

    def json(self, name: str) -> Any:
        """Ask for what the page asks for."""
        status, _, body = self.ask(f"/{self.token}/{name}")
        assert status == 200
        return json.loads(body)

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C; return the exit code and all that was said on standard error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@contextmanager
def dashboard_of(daemon: DaemonProcess, *options: str, **more: str) -> Iterator[Dashboard]:
    one = Dashboard(daemon, *options, **more)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(*BOTH_TIERS) as process:
        with numpy_cache(process.socket) as cache:
            put(cache, PROMPT, NAME)
            assert cache.take([*PROMPT, 1], namespace=NAME, session=NAME)
            assert not cache.take(list(range(50)), namespace="none")
            assert cache.flush()
        yield process
        print(process.log())


@pytest.fixture(scope="module")
def dashboard(daemon: DaemonProcess) -> Iterator[Dashboard]:
    with dashboard_of(daemon) as one:
        yield one


# -- what it tells --------------------------------------------------------------------------------


def test_the_page_and_all_its_files_are_served(dashboard: Dashboard) -> None:
    """Each with its type; the page names no file that is not there, and nothing of elsewhere."""
    for name in ("", *FILES, CHARTS):
        status, headers, body = dashboard.ask(f"/{dashboard.token}/{name}")
        assert (status, int(headers["content-length"])) == (200, len(body))
        assert body or name == "charts.css"
        assert headers["x-content-type-options"] == "nosniff"
    page = dashboard.ask(f"/{dashboard.token}/")[2].decode()
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert set(links) == {*FILES, CHARTS, "data:,"} - {"", "charts.js", "tables.js", "history.js",
                                                       "texts.js"}  # fmt: skip
    for name in FILES:
        text = dashboard.ask(f"/{dashboard.token}/{name}")[2].decode()
        assert "://" not in text
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval", text)
        for module in re.findall(r'from "\./([^"]*)"', text):
            assert module in FILES


def test_it_tells_what_the_daemon_counts(dashboard: Dashboard) -> None:
    """C5: tiers, hits, misses by reason, tokens saved, latency, clients, writer, pressure."""
    look = dashboard.json("look")
    ram = look["ram_tier"]
    assert look["trouble"] == ""
    assert (ram["ram_bytes_cap"], ram["ssd_bytes_cap"]) == (64 << 20, 256 << 20)
    assert ram["takes"]["tokens_reused"] == len(PROMPT)
    assert ram["takes"]["misses"] == {"empty": 1}
    assert ram["disk"]["written_bytes"] > 0
    assert ram["pressure"]["level"] in ("unknown", "normal", "warn", "critical")
    requests = {one["request"]: one for one in look["latency"]}
    assert requests["take"]["count"] == 2
    assert 0 < requests["take"]["p50"] <= requests["take"]["p90"] <= requests["take"]["p99"]
    shown = {'<script>alert("n")</script>?[31m'}
    assert {one["label"] for one in look["sessions"]} == shown
    columns = look["history"]["second"]["columns"]
    assert {len(values) for values in columns.values()} == {len(look["history"]["second"]["times"])}
    assert "misses_empty" in columns


def test_its_own_connection_is_no_client(dashboard: Dashboard, daemon: DaemonProcess) -> None:
    """Whoever looks on is not part of the picture."""
    assert dashboard.json("look")["clients_count"] == 0
    with numpy_cache(daemon.socket) as cache:
        assert cache.take([*PROMPT, 1], namespace=NAME)
        (client,) = dashboard.json("look")["clients"]
    assert client["pid"] == os.getpid()


def test_only_new_rows_are_told(dashboard: Dashboard) -> None:
    """The history comes in increments; another run's numbers mean nothing."""
    look = dashboard.json("look")
    boot, second = look["boot"], look["history"]["second"]
    last = second["first"] + len(second["times"]) - 1
    until(lambda: dashboard.json(f"look?boot={boot}&second={last}")["history"]["second"]["times"])
    more = dashboard.json(f"look?boot={boot}&second={last}")["history"]["second"]
    assert more["first"] == last + 1
    assert len(more["times"]) < len(second["times"]) + 60
    other = dashboard.json(f"look?boot=other&second={last}")["history"]["second"]
    assert other["first"] == 1


def test_the_tree_is_told_with_its_tiers(dashboard: Dashboard) -> None:
    """A node has its parent, tokens, bytes, tier, who shares it and when it was last used."""
    tree = dashboard.json("tree")
    namespace, segment = tree["nodes"]
    assert (namespace["parent"], namespace["kind"]) == (-1, "namespace")
    assert (segment["parent"], segment["tokens"], segment["tier"]) == (0, len(PROMPT), "both")
    assert segment["nbytes"] > 0
    assert segment["idle_seconds"] >= 0
    assert segment["sessions"] == [name_text(NAME)]
    assert tree["shown"] == tree["count"] == 1


def test_a_daemon_that_goes_is_told_of_and_waited_for() -> None:
    """The page says so, and shows the next run with its own rows."""
    with DaemonProcess() as daemon, dashboard_of(daemon) as dashboard:
        boot = dashboard.json("look")["boot"]
        daemon.kill()
        assert "no daemon" in dashboard.json("look")["trouble"]
        assert "no daemon" in dashboard.json("tree")["trouble"]
        daemon.start()
        look = dashboard.json(f"look?boot={boot}&second=5&minute=5")
        assert look["trouble"] == ""
        assert look["boot"] != boot
        assert look["history"]["second"]["first"] == 1


def test_answers_are_bounded(daemon: DaemonProcess, dashboard: Dashboard) -> None:
    """However many conversations there are, the page gets a hundred of them."""
    with numpy_cache(daemon.socket) as cache:
        for number in range(MAX_ROWS + 5):
            assert cache.take([*PROMPT, 1], namespace=NAME, session=f"s{number}")
        look = dashboard.json("look")
        assert look["ram_tier"]["labels"] >= MAX_ROWS + 5
        assert len(look["sessions"]) == MAX_ROWS
        for number in range(MAX_ROWS + 5):
            cache.close_session(f"s{number}")
    assert len(name_text("n" * 500)) == MAX_NAME_CHARACTERS


# -- whom it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_is_there(dashboard: Dashboard, path: str) -> None:
    """Every path is 404 without it, or with one that is wrong at its end, longer or shorter."""
    token = dashboard.token
    wrong = "A" if token[-1] != "A" else "B"
    for start in (
        "/", "//", f"/{token[:-1]}{wrong}/", f"/{token}x/", f"/{token[:-1]}/", "/x/",
        f"/x/{token}/", f"/?{token}/", f"/{token.swapcase()}/", f"/%{ord(token[0]):x}{token[1:]}/",
    ):  # fmt: skip
        status, _, body = dashboard.ask(start + path)
        assert (status, body) == (404, b"404\n"), start


@pytest.mark.parametrize("path", PATHS)
def test_another_host_name_is_refused(dashboard: Dashboard, path: str) -> None:
    """A page of the web whose name resolves to 127.0.0.1 gets nothing, even with the token."""
    port = dashboard.port
    for host in ("evil.example", f"evil.example:{port}", ADDRESS, f"{ADDRESS}:{port + 1}",
                 f"{ADDRESS}:{port}.evil.example", f"[::1]:{port}", f"0.0.0.0:{port}"):  # fmt: skip
        status, _, body = dashboard.ask(f"/{dashboard.token}/{path}", host=host)
        assert (status, body) == (403, b"403\n"), host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
def test_only_reading_is_allowed(dashboard: Dashboard, method: str) -> None:
    """Every other method is refused, with the token and the right host."""
    for name in PATHS:
        status, _, _ = dashboard.ask(f"/{dashboard.token}/{name}", method=method, body=b"{}")
        assert status == 405


def test_head_has_no_body(dashboard: Dashboard) -> None:
    """HEAD says how much GET would give."""
    status, headers, body = dashboard.ask(f"/{dashboard.token}/{CHARTS}", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 1_000_000


def test_nothing_that_is_asked_changes_anything(
    dashboard: Dashboard, daemon: DaemonProcess
) -> None:
    """No path, query or body clears, stores, takes, pins or flushes: the counters stand still."""

    def held() -> Any:
        report = json.loads(invoke("status", "--json", socket=daemon.socket).output)["ram_tier"]
        return {name: report[name] for name in
                ("ram_bytes", "images", "entries", "namespaces", "takes", "puts", "labels",
                 "leases", "pins", "evictions", "prefetches")}  # fmt: skip

    before = held()
    for name in (
        "clear", "flush", "clear?namespace=none", "look?clear=1", "tree?limit=0", "take", "put",
        "look/clear", "../clear", "..%2fclear", "%2e%2e/clear", "page.html", "site.py",
        "__init__.py", "../../cli.py", "/etc/passwd", "look?second=-1", "look?second=x",
        f"look?boot={'b' * 65}", "look?" + "&".join(f"a{n}=1" for n in range(20)),
    ):  # fmt: skip
        status, _, body = dashboard.ask(f"/{dashboard.token}/{name}")
        assert status == 404 or name in ("look?clear=1", "tree?limit=0"), (name, body[:100])
    assert held() == before


def test_a_body_is_not_kept(dashboard: Dashboard) -> None:
    """A reader that sends megabytes with its question gets the answer, and its bytes are dropped.

    The server lets it send for a second, then closes: what it sent after that may come back as a
    reset, as long as the next reader is served.
    """
    try:
        status, _, _ = dashboard.ask(f"/{dashboard.token}/", body=bytes(8 << 20))
        assert status == 200
    except ConnectionError:
        pass
    assert dashboard.ask(f"/{dashboard.token}/")[0] == 200
    status, _, _ = dashboard.ask(f"/{dashboard.token}/look?boot={'b' * 50_000}")
    assert status == 431


def test_the_browser_is_told_to_keep_it_to_itself(dashboard: Dashboard) -> None:
    """No inline code, no eval, no frames, nothing of elsewhere, no referrer, no copy on disk."""
    for name in PATHS:
        _, headers, body = dashboard.ask(f"/{dashboard.token}/{name}")
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "frame-ancestors 'none'" in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert dashboard.token.encode() not in body


def addresses_of(port: int) -> set[str]:
    """The addresses that listen on a port, as Linux writes them; none elsewhere."""
    found = set()
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net") / name
        rows = [row.split() for row in table.read_text().splitlines()[1:]] if table.exists() else []
        places = [row[1].split(":") for row in rows if row[3] == "0A"]
        found |= {address for address, number in places if int(number, 16) == port}
    return found


def test_it_listens_on_this_machine_alone(dashboard: Dashboard) -> None:
    """127.0.0.1 and nothing else."""
    assert addresses_of(dashboard.port) in (set(), {"0100007F"})


def test_each_run_has_another_token_and_port(dashboard: Dashboard, daemon: DaemonProcess) -> None:
    """An address of yesterday opens nothing."""
    with dashboard_of(daemon) as other:
        assert other.token != dashboard.token
        assert other.port != dashboard.port
        assert other.ask(f"/{dashboard.token}/")[0] == 404


def test_a_query_is_the_pages_or_none() -> None:
    """Numbers are numbers, and nothing is read without a limit."""
    assert since_of("") == Since()
    assert since_of("boot=b&second=3&minute=2") == Since("b", 3, 2)
    for query in ("second=-1", "second=1.5", "second=nan", "second", "&&&",
                  f"second={10**400}", f"boot={'b' * 65}", "a=1&" * 9 + "b=1"):  # fmt: skip
        assert since_of(query) is None, query


# -- the command ----------------------------------------------------------------------------------


def test_ctrl_c_ends_it_with_0(daemon: DaemonProcess) -> None:
    """No traceback; it said who can read the page."""
    status, said = Dashboard(daemon).end()
    assert status == 0
    assert said == "Whoever has this address can read the page. Ctrl-C ends it.\n"


def test_a_port_can_be_chosen_and_a_taken_one_is_a_sentence(daemon: DaemonProcess) -> None:
    """Exit code 1, and what to do."""
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        port = int(taken.getsockname()[1])
        taken.listen()
        done = subprocess.run(
            [*COMMAND, "--socket", str(daemon.socket), "--port", str(port)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: port {port} cannot be had: ")
    assert "Traceback" not in done.stderr
    with dashboard_of(daemon, "--port", str(port)) as dashboard:
        assert dashboard.port == port


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_browser_opens_only_when_asked(
    daemon: DaemonProcess, tmp_path: Path, is_asked: bool
) -> None:
    """`--open` gives the address to the user's browser; without it nothing is started."""
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}.new && mv {opened}.new {opened}\n')
    browser.chmod(0o700)
    options = ("--open",) if is_asked else ()
    with dashboard_of(daemon, *options, BROWSER=str(browser)) as dashboard:
        if is_asked:
            until(opened.exists)
            assert opened.read_text() == dashboard.address
        else:
            assert dashboard.ask(f"/{dashboard.token}/")[0] == 200
            assert not opened.exists()


@pytest.mark.parametrize(("module", "what"), [("h11", "h11"), ("plotly", "plotly")])
def test_without_its_extra_it_says_what_to_install(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, module: str, what: str
) -> None:
    """The extra is optional: its absence is a sentence that names it."""
    if module == "h11":
        monkeypatch.setitem(sys.modules, "h11", None)
        for name in ("loopback_http", "dashboard.site"):
            monkeypatch.delitem(sys.modules, f"prefixcached.daemon.{name}", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "plotly", None)
    shown = invoke("dashboard", socket=daemon.socket)
    assert shown.exit_code == 1
    assert f"the dashboard needs {what}: pip install 'prefixcached[dashboard]'" in shown.output


# -- the tree -------------------------------------------------------------------------------------


def piece(
    start: int, end: int, depth: int, sharing: int = 1, *, in_ram: bool = True, on_ssd: bool = False
) -> Listed:
    return Listed("segment", depth, start, end, 10 * (end - start), in_ram, on_ssd, 1.0, 0,
                  sharing, 0)  # fmt: skip


def test_a_conversation_that_only_grows_is_one_column() -> None:
    """Pieces at one depth hang on each other where one continues the other; branches do not."""
    checkpoint = Listed("checkpoint", 1, 100, 100, 5, True, False, 1.0, 0, 2, 0)
    images = [
        piece(0, 100, 0, 2), checkpoint, piece(100, 200, 0, 2),
        piece(200, 250, 1), piece(250, 300, 1),
        piece(150, 180, 1),
        piece(0, 40, 0), Listed("object", 0, 0, 0, 7, False, True, None, 0, 1, 0, "key"),
    ]  # fmt: skip
    assert parents_of(images) == [-1, 0, 0, 2, 3, 2, -1, -1]


def test_a_branch_that_begins_where_another_ends_is_no_continuation() -> None:
    """It hangs on what both branch off, where the numbers of ends tell them apart."""
    images = [piece(0, 100, 0, 3), piece(50, 80, 1, 1), piece(80, 90, 1, 2)]
    assert parents_of(images) == [-1, 0, 0]


def listing(images: list[Listed], count: int | None = None) -> Listing:
    return Listing(namespaces=(
        ListedNamespace("n", len(images) if count is None else count, tuple(images)),
        ListedNamespace("empty", 4),
    ))  # fmt: skip


def test_a_conversation_is_named_only_where_it_certainly_is() -> None:
    """At its branch where no other has so many tokens, else at what all of them share."""
    images = [piece(0, 100, 0, 3), piece(100, 200, 1), piece(100, 300, 1), piece(60, 90, 1)]
    labels = [
        LabelActivity("long", "n", 250, 1.0), LabelActivity("either", "n", 150, 1.0),
        LabelActivity("elsewhere", "m", 150, 1.0), LabelActivity("gone", "n", 900, 1.0),
    ]  # fmt: skip
    namespace, trunk, first, second, side = nodes_of(listing(images), labels)
    assert [set(one.sessions) for one in (namespace, trunk, first, second, side)] == [
        set(), {"long", "either"}, set(), {"long"}, set(),
    ]  # fmt: skip
    part = nodes_of(listing(images, count=9), labels)
    assert not any(one.sessions for one in part), "what is not listed may have as many tokens"


def test_many_conversations_are_counted() -> None:
    """A box names a few, and says how many more there are."""
    labels = [LabelActivity(f"s{number}", "n", 50, 1.0) for number in range(12)]
    _, node = nodes_of(listing([piece(0, 100, 0)]), labels)
    assert node.sessions == (*(f"s{number}" for number in range(MAX_NAMED)), "7 more")


def test_each_tier_has_its_name() -> None:
    """Colours follow from where the bytes are."""
    held = [(True, False), (False, True), (True, True), (False, False)]
    images = [piece(0, 9, 0, in_ram=ram, on_ssd=ssd) for ram, ssd in held]
    assert [one.tier for one in nodes_of(listing(images), [])[1:]] == [
        "ram", "ssd", "both", "leaving",
    ]  # fmt: skip


async def test_a_site_asks_only_for_what_its_page_asks() -> None:
    """The daemon is asked by two paths alone, below the token."""
    asked: list[object] = []

    async def look(since: Since) -> bytes:
        asked.append(since)
        return b"{}"

    async def tree() -> bytes:
        asked.append("tree")
        return b"{}"

    site = Site("t", look, tree)
    for path in ("/look", "/x/look", "/t/", "/t", "/t/else", "/t/look/", "/t/look?second=x", ""):
        await site.respond(path)
    assert asked == []
    await site.respond("/t/look?second=4")
    await site.respond("/t/tree")
    assert asked == [Since(second=4), "tree"]
