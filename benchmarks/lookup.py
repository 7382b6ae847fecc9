"""What a look-up costs beside a bare Trio echo of the same bytes, with 10,000 segments held.

The prompt is a list of ints, as mlx-lm has it, and any client must pack it: the echo's client packs
the same list in the same way. The rows "ids as array" leave that out on both sides. The prompt that
is found runs through 24 segments, on which thousands of others hang.

The rows "ids as array" have no goal: they show what is left when nothing is packed.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import kv
from benchmarks.daemons import EchoClient, allow_descriptors, daemon, echo_server
from benchmarks.harness import Case, Goal, Row, interleave, require, scratch, times_longer_than
from benchmarks.put import cut
from prefixcached.client import Cache
from prefixcached.protocol.tokens import pack_tokens

NAME = "lookup"
LENGTH = 12_000
CHAIN = 24
BRANCH_TOKENS = 320


def run(quick: bool) -> list[Row]:
    """Measure."""
    segments, rounds, calls = (500, 9, 20) if quick else (10_000, 41, 40)
    allow_descriptors(3 * segments + 2_000)
    with (
        scratch() as place,
        daemon(place) as served,
        echo_server(place) as echo_path,
        served.connect() as cache,
    ):
        prompt = fill(cache, fitting(cache, segments), LENGTH)
        held = cache.stats()["ram_tier"]["images"]
        asked = [*prompt, 1]
        array, packed = np.array(asked, "<u4"), np.array(asked, "<u4").tobytes()
        other = kv.random_tokens(LENGTH + 1, 99)
        other_array = np.array(other, "<u4")
        echo = EchoClient(echo_path)

        def found(lengths: list[int]) -> None:
            require(set(lengths) == {LENGTH}, f"found {lengths}")

        def missed(misses: list[Any]) -> None:
            require({miss.reason for miss in misses} == {"diverged"}, f"{misses}")

        def same(back: list[memoryview]) -> None:
            require(bytes(back[-1]) == packed, "the echo differs")

        def pack_and_echo() -> memoryview:
            return echo.call(pack_tokens(asked))

        cases = [
                Case("echo", _row(pack_and_echo, calls), check=same),
                Case("finds", _row(lambda: cache.peek(asked, namespace="bench"), calls),
                     check=found),
                Case("misses", _row(lambda: cache.take(other, namespace="bench"), calls),
                     check=missed),
                Case("echo of bytes", _row(lambda: echo.call(packed), calls), check=same),
                Case("finds array", _row(lambda: cache.peek(array, namespace="bench"), calls),
                     check=found),
                Case("misses array",
                     _row(lambda: cache.take(other_array, namespace="bench"), calls),
                     check=missed),
            ]  # fmt: skip
        seconds = interleave(cases, rounds, warm_up=2)
        echo.close()
    each = {name: [value / calls for value in values] for name, values in seconds.items()}
    about = {"segments": held, "tokens": LENGTH}
    label = f"{LENGTH // 1000}k tokens, {held:,} segments"
    goal = Goal(2.0, "at most")
    return [
        times_longer_than(NAME, f"{what}, {label}{how}", each, ours, peer, asked_for, **about)
        for what, ours, peer, how, asked_for in (
            ("take that finds", "finds", "echo", "", goal),
            ("take that misses", "misses", "echo", "", goal),
            ("take that finds", "finds array", "echo of bytes", ", ids as array", None),
            ("take that misses", "misses array", "echo of bytes", ", ids as array", None),
        )
    ]


def _row(call: Callable[[], Any], calls: int) -> Callable[[], list[Any]]:
    """Return a function that makes ``calls`` calls in a row and returns all their results.

    A miss carries a claim, which ends when the result is let go: after the clock has stopped.
    """
    return lambda: [call() for _ in range(calls)]


def fitting(cache: Cache, segments: int) -> int:
    """Return ``segments``, or as many as the daemon's limit of descriptors allows it to hold."""
    return min(segments, int(cache.stats()["ram_tier"]["images_cap"]) - 64)


def fill(cache: Cache, segments: int, length: int) -> list[int]:
    """Store ``segments`` segments and return the prompt through the first `CHAIN` of them.

    The others are branches that leave the prompt at many positions of its first 256 tokens.
    """
    prompt = kv.random_tokens(length, 1)
    whole = kv.random_kv(kv.TINY, length)
    for number in range(1, CHAIN + 1):
        end = length * number // CHAIN
        stored = cache.put(prompt[:end], cut(whole, end), namespace="bench")
        require(bool(stored), f"{stored}")
    branch = cut(whole, BRANCH_TOKENS)
    starts = itertools.cycle(range(0, 257, 16))
    for number in range(segments - CHAIN):
        start = next(starts)
        tail = kv.random_tokens(BRANCH_TOKENS - start, 1_000 + number)
        stored = cache.put([*prompt[:start], *tail], branch, namespace="bench")
        require(bool(stored), f"{stored}")
    return prompt
