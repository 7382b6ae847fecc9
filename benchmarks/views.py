"""Takes by 8 busy clients with every view open, against the same without any.

The views: `top` in a terminal, redrawing every second, the dashboard's process with a reader that
asks as its page does, and a scraper of the exporter that asks as often. They are stopped (SIGSTOP)
while the rounds without them run, so both phases have the same processes and connections; the
phases alternate, each long enough for several redraws. The browser that draws the page is not part
of it.
"""

import contextlib
import json
import os
import pty
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.daemons import START_SECONDS, Daemon, daemon
from benchmarks.harness import ROOT, Goal, Row, duration, quartiles, require, scratch, workers
from prefixcached.client import connect

NAME = "views"
TOKENS = 2_000
WITH, WITHOUT = "with views", "without"
SCRAPE_SECONDS: Final = 1.0
"""Prometheus asks every 15 s: this is the harder case."""
PAGE_SECONDS: Final = 1.0
"""As the dashboard's page."""
TREE_LOOKS: Final = 3
"""The page asks for the tree after so many looks."""


def run(quick: bool) -> list[Row]:
    """Measure."""
    from benchmarks import kv

    clients, rounds, seconds = (4, 3, 1.5) if quick else (8, 15, 3.0)
    with (
        scratch() as place,
        _metrics_port() as port,
        daemon(place) as served,
        served.connect() as cache,
    ):
        prompt = kv.random_tokens(TOKENS, 1)
        require(bool(cache.put(prompt, kv.random_kv(kv.TINY, TOKENS), namespace="views")), "put")
        options = {"socket": str(served.socket), "seconds": seconds}
        roles = [str(number) for number in range(clients)]
        middles: dict[str, list[float]] = {WITH: [], WITHOUT: []}
        tails: dict[str, list[float]] = {WITH: [], WITHOUT: []}
        with workers(NAME, roles, options) as running, _views(served, port) as views:
            for number in range(-1, rounds):
                for phase in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                    views.show(phase == WITH)
                    for worker in running:
                        worker.begin()
                    each = sorted(s for worker in running for s in worker.end()["latencies"])
                    if number >= 0:
                        middles[phase].append(statistics.median(each))
                        tails[phase].append(each[int(len(each) * 0.99)])
            views.show(True)
            require(views.is_there, "top ended or drew nothing")
            require(views.scrapes > 0, "nothing was scraped")
            require(views.looks > 0, "the dashboard told nothing")
    label = f"{clients} busy clients, every view open"
    rows = []
    for name, found, goal in (
        ("p50", middles, Goal(1.05, "at most")), ("p99", tails, None),
    ):  # fmt: skip
        grown = [a / b for a, b in zip(found[WITH], found[WITHOUT], strict=True)]
        low, middle, high = quartiles(grown)
        rows.append(
            Row(
                NAME, f"take {name}, {label}", middle, goal=goal, spread=(low, high),
                ours=duration(statistics.median(found[WITH])),
                peer=duration(statistics.median(found[WITHOUT])), peer_name="without",
                details={"scrapes": views.scrapes, "drawn_bytes": views.drawn_bytes,
                         "looks": views.looks, "rounds": rounds, "seconds": seconds},
            )
        )  # fmt: skip
    return rows


class Views:
    """`top`, the dashboard with its reader, and a scraper, which go on or stand still."""

    def __init__(self, served: Daemon, port: int) -> None:
        self.drawn_bytes = 0
        self.scrapes = 0
        self.looks = 0
        self._address = f"http://127.0.0.1:{port}/metrics"
        self._master, slave = pty.openpty()
        self._top = subprocess.Popen(
            [sys.executable, "-m", "prefixcached.daemon.cli", "top", "--socket",
             str(served.socket)],
            stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        os.close(slave)
        self._dashboard = subprocess.Popen(
            [sys.executable, "-m", "prefixcached.daemon.cli", "dashboard", "--socket",
             str(served.socket)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
            text=True, start_new_session=True,
        )  # fmt: skip
        assert self._dashboard.stdout is not None
        self._page = self._dashboard.stdout.readline().strip()
        require(self._page.startswith("http://"), "the dashboard did not start")
        self._shown, self._closed = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work) for work in (self._draw, self._scrape, self._read)
        ]
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self.drawn_bytes and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def is_there(self) -> bool:
        """Whether `top` runs and has drawn."""
        return self._top.poll() is None and self.drawn_bytes > 0

    def show(self, on: bool) -> None:
        """Let the views run, or stop them."""
        for view in (self._top, self._dashboard):
            view.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        if on:
            self._shown.set()
        else:
            self._shown.clear()

    def close(self) -> None:
        """End them."""
        self._closed.set()
        self.show(True)
        self._top.terminate()
        self._top.wait()
        for thread in self._threads:
            thread.join()
        self._dashboard.terminate()
        self._dashboard.wait()
        assert self._dashboard.stdout is not None
        self._dashboard.stdout.close()
        os.close(self._master)

    def _draw(self) -> None:
        # At the end of the terminal's other side: EIO on Linux, nothing on macOS.
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self.drawn_bytes += len(data)

    def _scrape(self) -> None:
        while not self._closed.is_set():
            self._shown.wait()
            with urllib.request.urlopen(self._address, timeout=10) as answer:
                self.scrapes += bool(answer.read())
            self._closed.wait(SCRAPE_SECONDS)

    def _read(self) -> None:
        boot, last = "", {"second": 0, "minute": 0}
        while not self._closed.is_set():
            self._shown.wait()
            query = "&".join(f"{step}={number}" for step, number in last.items())
            look = json.loads(self._ask(f"look?boot={boot}&{query}"))
            boot = look["boot"]
            for step, rows in look["history"].items():
                last[step] = rows["first"] + len(rows["times"]) - 1
            if self.looks % TREE_LOOKS == 0:
                self._ask("tree")
            self.looks += 1
            self._closed.wait(PAGE_SECONDS)

    def _ask(self, name: str) -> bytes:
        # A reader that asked just before its server was stopped waits until that goes on.
        with urllib.request.urlopen(self._page + name, timeout=60) as answer:
            return bytes(answer.read())


@contextlib.contextmanager
def _views(served: Daemon, port: int) -> Iterator[Views]:
    views = Views(served, port)
    try:
        yield views
    finally:
        views.close()


@contextlib.contextmanager
def _metrics_port() -> Iterator[int]:
    """Have daemons that start meanwhile serve metrics on a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    os.environ["PREFIXCACHED_METRICS_PORT"] = str(port)
    try:
        yield port
    finally:
        del os.environ["PREFIXCACHED_METRICS_PORT"]


class Taker:
    """Takes all the time."""

    def __init__(self, cache: Any, prompt: list[int], seconds: float) -> None:
        self._cache = cache
        self._prompt = prompt
        self._seconds = seconds

    def measure(self) -> dict[str, Any]:
        """Take for as long as told; return each take's seconds."""
        latencies = []
        end = time.perf_counter() + self._seconds
        while (started := time.perf_counter()) < end:
            taken = self._cache.take(self._prompt, namespace="views")
            latencies.append(time.perf_counter() - started)
            require(bool(taken) and taken.length == TOKENS, f"{taken}")
        return {"latencies": latencies}


@contextlib.contextmanager
def cases(_: str, options: Mapping[str, Any]) -> Iterator[Taker]:
    """Give one client."""
    from benchmarks import kv

    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:
        yield Taker(cache, [*kv.random_tokens(TOKENS, 1), 1], options["seconds"])
