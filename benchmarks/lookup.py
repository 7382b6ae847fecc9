"""What a look-up costs beside a bare Trio echo of the same bytes, with 10,000 segments held."""

import itertools
from typing import Any

import numpy as np

from benchmarks import kv
from benchmarks.daemons import EchoClient, allow_descriptors, daemon, echo_server
from benchmarks.harness import Case, Goal, Row, interleave, require, scratch, times_longer_than
from prefixcached.client import Cache

NAME = "lookup"


def run(quick: bool) -> list[Row]:
    """Measure."""
    segments, rounds, calls = (1_000, 7, 40) if quick else (10_000, 15, 100)
    length = 12_000
    allow_descriptors(2 * segments + 2_000)
    with scratch() as place, daemon(place) as served, echo_server(place) as echo_path:
        with served.connect() as cache:
            prompt = fill(cache, segments, length)
            held = cache.stats()["ram_tier"]["images"]
            require(cache.peek([*prompt, 1], namespace="bench") == length, "the prompt is not held")
            echo = EchoClient(echo_path)
            asked = [*prompt, 1]
            packed = np.array(asked, "<u4").tobytes()
            array = np.array(asked, "<u4")
            other = kv.random_tokens(length + 1, 99)

            def repeat(call: Any) -> Any:
                def calls_in_a_row() -> Any:
                    result = None
                    for _ in range(calls):
                        result = call()
                    return result

                return calls_in_a_row

            seconds = interleave(
                [
                    Case(
                        "echo", repeat(lambda: echo.call(packed)),
                        check=lambda back: require(bytes(back) == packed, "the echo differs"),
                    ),
                    Case(
                        "finds", repeat(lambda: cache.peek(asked, namespace="bench")),
                        check=lambda n: require(n == length, f"found {n}"),
                    ),
                    Case(
                        "finds (array)", repeat(lambda: cache.peek(array, namespace="bench")),
                        check=lambda n: require(n == length, f"found {n}"),
                    ),
                    Case(
                        "misses", repeat(lambda: cache.take(other, namespace="bench")),
                        check=lambda miss: require(miss.reason == "diverged", f"{miss}"),
                    ),
                ],
                rounds,
            )  # fmt: skip
            echo.close()
    each = {name: [value / calls for value in values] for name, values in seconds.items()}
    about = {"segments": held, "tokens": length}
    label = f"{length // 1000}k tokens, {held:,} segments"
    return [
        times_longer_than(
            NAME, f"take that finds, {label}", each, "finds", "echo", Goal(2.0, "at most"), **about
        ),
        times_longer_than(
            NAME, f"take that misses, {label}", each, "misses", "echo", Goal(2.0, "at most"),
            **about,
        ),
        times_longer_than(
            NAME, "the same, found, tokens given as an array", each, "finds (array)", "echo", None,
            **about,
        ),
    ]  # fmt: skip


def fill(cache: Cache, segments: int, length: int) -> list[int]:
    """Store ``segments`` segments: one prompt of 24 of them in a row, the others hang on it."""
    shape = kv.TINY
    chain = 24
    prompt = kv.random_tokens(length, 1)
    whole = kv.random_kv(shape, length + 64)
    from benchmarks.put import cut

    for number in range(1, chain + 1):
        end = length * number // chain
        stored = cache.put(prompt[:end], cut(whole, end), namespace="bench")
        require(bool(stored), f"{stored}")
    branch = cut(whole, 320)
    ends = itertools.cycle(range(0, 257, 16))
    for number in range(segments - chain):
        start = next(ends)
        tail = kv.random_tokens(320 - start, 1_000 + number)
        stored = cache.put([*prompt[:start], *tail], branch, namespace="bench")
        require(bool(stored), f"{stored}")
    return prompt
