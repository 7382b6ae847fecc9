"""Look-ups of 50,000 tokens by 8 processes at once while puts evict, beside the same echo.

The putter goes on during both phases, so the echo bears the same load. Each process alternates
between a prompt that is found and one that is not.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.daemons import EchoClient, allow_descriptors, daemon, echo_server
from benchmarks.harness import Goal, Row, duration, quartiles, ratios, require, scratch, workers
from prefixcached.client import connect
from prefixcached.protocol.tokens import pack_tokens

NAME = "lookup_load"
LENGTH = 50_000
LOOKUP, ECHO, CHURN = "lookup", "echo", "churn"


def run(quick: bool) -> list[Row]:
    """Measure."""
    from benchmarks import kv
    from benchmarks.lookup import fill, fitting

    clients, segments, rounds, calls = (4, 500, 3, 10) if quick else (8, 9_500, 9, 30)
    allow_descriptors(3 * segments + 2_000)
    # Full from the start: an image of the filling takes one page of 16 KiB, the long prompt 98.
    ram = f"{(segments + 98 + 4) * 16}KiB"
    with (
        scratch() as place,
        daemon(place, ram=ram) as served,
        echo_server(place) as echo_path,
        served.connect() as cache,
    ):
        require(fitting(cache, segments) == segments, "too few descriptors are allowed")
        fill(cache, segments, 12_000)
        prompt = kv.random_tokens(LENGTH, 5)
        require(bool(cache.put(prompt, kv.random_kv(kv.TINY, LENGTH), namespace="long")), "put")
        options = {"socket": str(served.socket), "echo": str(echo_path), "calls": calls}
        roles = [LOOKUP] * clients + [ECHO] * clients + [CHURN]
        seconds: dict[str, list[list[float]]] = {LOOKUP: [], ECHO: []}
        before = cache.stats()["ram_tier"]["evictions"]["evictions"]
        with cache.prefetch([*prompt, 1], namespace="long") as pin:
            require(pin.length == LENGTH, "the long prompt is not held")
            with workers(NAME, roles, options) as running:
                *peers, churn = running
                for number in range(rounds):
                    order = (LOOKUP, ECHO) if number % 2 else (ECHO, LOOKUP)
                    for role in order:
                        chosen = [worker for worker in peers if worker.name == role]
                        churn.begin()
                        for worker in chosen:
                            worker.begin()
                        told = [worker.end() for worker in chosen]
                        churn.end()
                        seconds[role].append([s for one in told for s in one["latencies"]])
        evicted = cache.stats()["ram_tier"]["evictions"]["evictions"] - before
        require(evicted > 0, "nothing was evicted: there was no load")
    middle = {role: [statistics.median(each) for each in lists] for role, lists in seconds.items()}
    figure, spread = ratios(middle[LOOKUP], middle[ECHO])
    pooled = sorted(s for each in seconds[LOOKUP] for s in each)
    tails = [_percentile(sorted(each), 0.99) / statistics.median(each) for each in seconds[LOOKUP]]
    echo_tails = [
        _percentile(sorted(each), 0.99) / statistics.median(each) for each in seconds[ECHO]
    ]
    about = {
        "clients": clients, "tokens": LENGTH, "segments": segments, "evictions": evicted,
        "calls": len(pooled),
    }  # fmt: skip
    label = f"{LENGTH // 1000}k tokens, {clients} clients, evicting"
    low, tail, high = quartiles(tails)
    return [
        Row(
            NAME, f"look-up p50, {label}", figure, goal=Goal(1.5, "at most"), spread=spread,
            ours=duration(statistics.median(middle[LOOKUP])),
            peer=duration(statistics.median(middle[ECHO])), peer_name="echo", details=about,
        ),
        Row(
            NAME, f"look-up p99 over its p50, {label}", tail, goal=Goal(5.0, "at most"),
            spread=(low, high), ours=duration(_percentile(pooled, 0.99)),
            peer=f"{statistics.median(echo_tails):.2f} x", peer_name="the echo's p99 over its p50",
            details=about,
        ),
    ]  # fmt: skip


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class Repeated:
    """Measures each of many calls by itself."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls

    def measure(self) -> dict[str, Any]:
        """Make the calls; return their seconds."""
        latencies = []
        # Kept: a miss carries a claim, whose end is a message of its own.
        results = []
        for call, check in self._calls():
            started = time.perf_counter()
            results.append(call())
            latencies.append(time.perf_counter() - started)
            check(results[-1])
        return {"latencies": latencies}


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Give one client, or the putter."""
    from benchmarks import kv

    prompt = [*kv.random_tokens(LENGTH, 5), 1]
    if role == ECHO:
        client = EchoClient(Path(options["echo"]))
        size = 4 * len(prompt)

        def echoes() -> Iterator[Any]:
            for _ in range(options["calls"]):
                yield (
                    lambda: client.call(pack_tokens(prompt)),
                    lambda back: require(len(back) == size, "the echo is short"),
                )

        yield Repeated(echoes)
        return
    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:
        if role == LOOKUP:
            other = kv.random_tokens(LENGTH + 1, 6)

            def look_ups() -> Iterator[Any]:
                for number in range(options["calls"]):
                    if number % 2:
                        yield (
                            lambda: cache.take(other, namespace="long"),
                            lambda miss: require(not miss, "a prompt that nobody stored was found"),
                        )
                    else:
                        yield (
                            lambda: cache.peek(prompt, namespace="long"),
                            lambda length: require(length == LENGTH, f"found {length}"),
                        )

            yield Repeated(look_ups)
        else:
            with _churn(cache) as churning:
                yield churning


@contextlib.contextmanager
def _churn(cache: Any) -> Iterator[Any]:
    """Put as fast as one process can, all the time from the first "go" on."""
    from benchmarks import kv

    caches = kv.random_kv(kv.TINY, 480)
    stop, go = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def put() -> None:
        go.wait()
        number = 0
        try:
            while not stop.is_set():
                number += 1
                cache.put(kv.random_tokens(480, 50_000 + number), caches, namespace="churn")
        except Exception as error:  # noqa: BLE001, told at the next round
            failures.append(error)

    class Started:
        def measure(self) -> dict[str, Any]:
            go.set()
            require(not failures, f"{failures}")
            return {}

    thread = threading.Thread(target=put)
    thread.start()
    try:
        yield Started()
    finally:
        stop.set()
        go.set()
        thread.join()
