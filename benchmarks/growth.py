"""How cost grows: with the length of a conversation, with entries, clients and agents.

For each series the slope of a line through the logarithms is printed: 1 is linear, 0 is flat. A
put must be linear in new tokens and flat in the tokens that are held.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import kv
from benchmarks.daemons import allow_descriptors, daemon
from benchmarks.harness import Goal, Row, duration, require, scratch, settle, size, workers
from benchmarks.put import cut
from prefixcached.client import Cache, connect

NAME = "growth"
SHAPE = kv.LLAMA_1B
NEW_TOKENS = 500


def run(quick: bool) -> list[Row]:
    """Measure."""
    rows = [*_length(quick), *_new_tokens(quick), *_entries(quick), *_clients(quick)]
    return [*rows, *_agents(quick)]


def series(name: str, points: Mapping[int, float], unit: str, goal: Goal | None = None) -> Row:
    """Return the row of one series: its slope, with all points in the details."""
    figure = slope(list(points), list(points.values()))
    show = duration if unit == "s" else size
    first, last = min(points), max(points)
    return Row(
        NAME, name, figure, unit="slope", goal=goal, ours=f"{show(points[last])} at {last:,}",
        peer=f"{show(points[first])} at {first:,}", peer_name="",
        details={"points": {str(x): y for x, y in points.items()}, "unit": unit, "series": name},
    )  # fmt: skip


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through (log x, log y)."""
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    mean_a, mean_b = statistics.mean(a), statistics.mean(b)
    over = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    return over / sum((p - mean_a) ** 2 for p in a)


def _length(quick: bool) -> list[Row]:
    """Put the same number of new tokens on ever longer prefixes; take the whole."""
    lengths, rounds = ((1_000, 2_000, 4_000), 3) if quick else ((1_000, 2_000, 4_000, 8_000), 7)
    whole = kv.random_kv(SHAPE, lengths[-1] + NEW_TOKENS)
    puts: dict[int, list[float]] = {length: [] for length in lengths}
    takes: dict[int, list[float]] = {length: [] for length in lengths}
    numbers = itertools.count(10)
    prompt = kv.random_tokens(lengths[-1], 9)
    with scratch() as place, daemon(place) as served, served.connect() as cache:
        for length in lengths:
            require(bool(cache.put(prompt[:length], cut(whole, length), namespace="g")), "put")
        for _, length in itertools.product(range(rounds), lengths):
            caches = cut(whole, length + NEW_TOKENS)
            tokens = prompt[:length] + kv.random_tokens(NEW_TOKENS, next(numbers))
            started = time.perf_counter()
            stored = cache.put(tokens, caches, namespace="g")
            puts[length].append(time.perf_counter() - started)
            kv.stored(stored, kv.kv_bytes(SHAPE, NEW_TOKENS))
            started = time.perf_counter()
            hit = kv.taken(cache.take([*tokens, 7], namespace="g"))
            takes[length].append(time.perf_counter() - started)
            kv.require_equal(hit.kv, caches, length + NEW_TOKENS)
            # Else the next length's take would pay for giving this one's memory back.
            del hit, caches
            settle()
    return [
        series(
            f"put of {NEW_TOKENS} new tokens, by tokens held", _medians(puts), "s",
            Goal(0.25, "at most"),
        ),
        series("take, by tokens taken", _medians(takes), "s", Goal(1.2, "at most")),
    ]  # fmt: skip


def _new_tokens(quick: bool) -> list[Row]:
    """Put ever more new tokens; count the bytes as well."""
    lengths, rounds = ((500, 1_000, 2_000), 3) if quick else ((500, 1_000, 2_000, 4_000, 8_000), 7)
    whole = kv.random_kv(SHAPE, lengths[-1])
    puts: dict[int, list[float]] = {length: [] for length in lengths}
    ram, disk = {}, {}
    numbers = itertools.count(200)
    with scratch() as place, daemon(place, ssd="8GiB") as served, served.connect() as cache:
        for number, length in itertools.product(range(rounds), lengths):
            caches = cut(whole, length)
            cache.clear()
            while cache.stats()["ram_tier"]["ram_bytes_by_state"]["freeing"]:
                time.sleep(0.01)  # the daemon gives back what the length before took
            settle()
            started = time.perf_counter()
            stored = cache.put(
                kv.random_tokens(length, next(numbers)), caches, namespace=f"g{number}"
            )
            puts[length].append(time.perf_counter() - started)
            kv.stored(stored, kv.kv_bytes(SHAPE, length))
            if number == 0:
                require(bool(cache.flush()), "flush")
                ram[length] = cache.stats()["ram_tier"]["ram_bytes_by_state"]["resident"]
                disk[length] = sum(path.stat().st_blocks * 512 for path in served.files())
    return [
        series("put of all-new KV, by tokens", _medians(puts), "s", Goal(1.2, "at most")),
        series("RAM bytes, by tokens", ram, "bytes", Goal(1.05, "at most")),
        series("bytes on SSD, by tokens", disk, "bytes", Goal(1.05, "at most")),
    ]


def _entries(quick: bool) -> list[Row]:
    """Look up one prompt among ever more segments."""
    from benchmarks.lookup import fill, fitting

    steps, calls = ((100, 300, 1_000), 50) if quick else ((100, 300, 1_000, 3_000, 10_000), 200)
    allow_descriptors(3 * steps[-1] + 2_000)
    looked: dict[int, list[float]] = {}
    for segments in steps:
        with scratch() as place, daemon(place) as served, served.connect() as cache:
            count = fitting(cache, segments)
            prompt = [*fill(cache, count, 12_000), 1]
            looked[count] = _time_peeks(cache, prompt, calls)
    return [series("look-up, by segments held", _medians(looked), "s", Goal(0.2, "at most"))]


def _time_peeks(cache: Cache, prompt: list[int], calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        length = cache.peek(prompt, namespace="bench")
        seconds.append(time.perf_counter() - started)
        require(length == len(prompt) - 1, f"found {length}")
    return seconds


def _clients(quick: bool) -> list[Row]:
    """Look-ups by ever more processes at once: seconds for all of them, a call."""
    counts, calls = ((1, 2, 4, 8), 30) if quick else ((1, 2, 4, 8, 16, 32, 64), 50)
    each: dict[int, float] = {}
    with scratch() as place, daemon(place) as served, served.connect() as cache:
        prompt = kv.random_tokens(2_000, 1)
        require(bool(cache.put(prompt, kv.random_kv(kv.TINY, 2_000), namespace="bench")), "put")
        options = {"socket": str(served.socket), "calls": calls}
        for count in counts:
            with workers(NAME, ["client"] * count, options) as running:
                for worker in running:
                    worker.ask()
                started = time.perf_counter()
                for worker in running:
                    worker.begin()
                for worker in running:
                    worker.end()
                each[count] = (time.perf_counter() - started) / calls
    return [
        series(
            "look-ups by clients at once, seconds for a round of all", each, "s",
            Goal(1.1, "at most"),
        )
    ]  # fmt: skip


def _agents(quick: bool) -> list[Row]:
    """Bytes held by ever more agents that share 4,000 tokens and have 250 each."""
    counts = (1, 4) if quick else (1, 2, 4, 8, 16, 32)
    shared, own = 4_000, 250
    whole = kv.random_kv(kv.SMOL, shared + own)
    ram = {}
    with scratch() as place, daemon(place) as served, served.connect() as cache:
        prompt = kv.random_tokens(shared, 1)
        require(bool(cache.put(prompt, cut(whole, shared), namespace="a")), "put")
        for number in range(1, max(counts) + 1):
            tokens = prompt + kv.random_tokens(own, 500 + number)
            require(bool(cache.put(tokens, whole, namespace="a")), "put")
            if number in counts:
                held = cache.stats()["ram_tier"]["ram_bytes_by_state"]["resident"]
                distinct = kv.kv_bytes(kv.SMOL, shared + number * own)
                ram[number] = held / distinct
    last = max(ram)
    return [
        Row(
            NAME, f"RAM over bytes of distinct tokens, {last} agents", ram[last],
            goal=Goal(1.05, "at most"),
            details={"points": {str(k): v for k, v in ram.items()}, "unit": "x",
                     "series": "RAM over bytes of distinct tokens, by agents"},
        )
    ]  # fmt: skip


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Give one client."""
    prompt = [*kv.random_tokens(2_000, 1), 1]

    class Looking:
        def measure(self) -> dict[str, Any]:
            _time_peeks(cache, prompt, options["calls"])
            return {}

    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:
        yield Looking()


def _medians(values: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {key: statistics.median(each) for key, each in values.items()}
