"""A start on 10,000 files: the first answer after READY, and the moment all of them are known."""

import time

from benchmarks import kv
from benchmarks.daemons import Daemon, allow_descriptors
from benchmarks.harness import Goal, Row, duration, quartiles, require, scratch
from benchmarks.lookup import fill

NAME = "start"


def run(quick: bool) -> list[Row]:
    """Measure."""
    segments, rounds = (500, 2) if quick else (10_000, 7)
    allow_descriptors(3 * segments + 2_000)
    first, complete = [], []
    with scratch() as place:
        served = Daemon(place, ssd="8GiB")
        served.start()
        try:
            served.wait_until_loaded()
            with served.connect(timeout=600) as cache:
                prompt = fill(cache, segments, 12_000)
                flushed = cache.flush()
                require(bool(flushed), f"{flushed}")
            files = len(served.files())
            for _ in range(rounds):
                served.stop()
                served.start()
                with served.connect() as cache:
                    cache.peek([*prompt, 1], namespace="bench")
                    first.append(time.perf_counter() - served.started_seconds)
                    while cache.stats()["ram_tier"]["loading"]:
                        time.sleep(0.01)
                    complete.append(time.perf_counter() - served.started_seconds)
                    length = cache.peek([*prompt, 1], namespace="bench")
                    require(length == len(prompt), f"{length} tokens are known after the start")
        finally:
            served.stop()
    rows = []
    for name, values, goal in (
        (f"first answer after READY, {files:,} files", first, 0.3),
        (f"index complete after READY, {files:,} files", complete, 3.0),
    ):
        low, middle, high = quartiles(values)
        rows.append(
            Row(
                NAME, name, middle, unit="s", spread=(low, high),
                goal=Goal(goal * files / 10_000 if quick and goal > 1 else goal, "at most"),
                ours=duration(middle), details={"seconds": values, "shape": kv.TINY.name},
            )
        )  # fmt: skip
    return rows
