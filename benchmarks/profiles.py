"""Where the time of a hot path goes: `python -m benchmarks.profiles NAME`, needs py-spy.

NAME is `lookup`, `take` or `put`. Both processes are sampled while one client repeats the call, and
the functions are listed by the share of samples in which they were on the stack. Samples in which a
process only waited are counted under the function that waits. The tables in profiles/ were made so.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import kv
from benchmarks.daemons import daemon
from benchmarks.harness import environment, scratch
from benchmarks.lookup import LENGTH, fill
from prefixcached.client import Cache

SECONDS: Final = 10
RATE: Final = 200
SHOWN: Final = 40
_BACKGROUND: Final = ("StallWatch._sample", "WorkerThread._work")


def main() -> int:
    """Sample and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["lookup", "take", "put"])
    name = parser.parse_args().name
    about = environment()
    print(f"{name}: {about['when']}, commit {about['commit']}, {about['processor']}")
    with scratch() as place, daemon(place) as served, served.connect() as cache:
        call = {"lookup": _lookup, "take": _take, "put": _put}[name](cache)
        for side, pid in (("daemon", served.pid), ("client", os.getpid())):
            raw = place / side
            calls, seconds = _sample(pid, raw, call)
            print(f"\n{side}, {calls} calls, {seconds / calls * 1e6:.0f} us each while sampled")
            for share, function in _shares(raw)[:SHOWN]:
                print(f"{share:6.1%}  {function}")
    return 0


def _sample(pid: int, raw: Path, call: Callable[[], Any]) -> tuple[int, float]:
    """Repeat ``call`` while py-spy samples ``pid``; return how often, and the seconds."""
    spy = Path(sys.executable).with_name("py-spy")
    sampler = subprocess.Popen(
        [spy, "record", "--pid", str(pid), "--duration", str(SECONDS), "--rate", str(RATE),
         "--format", "raw", "--idle", "--output", raw],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    calls, started = 0, time.perf_counter()
    while sampler.poll() is None:
        for _ in range(20):
            call()
        calls += 20
    return calls, time.perf_counter() - started


def _shares(raw: Path) -> list[tuple[float, str]]:
    """Return the functions by the share of samples in which they were on the stack."""
    found: Counter[str] = Counter()
    total = 0
    for text in raw.read_text().splitlines():
        stack, _, count = text.rpartition(" ")
        if any(name in stack for name in _BACKGROUND):
            continue
        total += int(count)
        for function in {_function(frame) for frame in stack.split(";")}:
            found[function] += int(count)
    # What is on every stack says nothing.
    return [(n / total, function) for function, n in found.most_common() if n < 0.97 * total]


def _function(frame: str) -> str:
    name, _, place = frame.rpartition(" (")
    return f"{name} ({place.rpartition(':')[0].rpartition('/')[2]})"


def _lookup(cache: Cache) -> Callable[[], Any]:
    prompt = fill(cache, 1_000, LENGTH)
    array = np.array([*prompt, 1], "<u4")
    return lambda: cache.peek(array, namespace="bench")


def _take(cache: Cache) -> Callable[[], Any]:
    prompt = kv.random_tokens(2_000, 1)
    cache.put(prompt, kv.random_kv(kv.LLAMA_3B, 2_000), namespace="bench")
    return lambda: kv.taken(cache.take([*prompt, 7], namespace="bench"))


def _put(cache: Cache) -> Callable[[], Any]:
    prefix = kv.random_tokens(1_000, 1)
    caches = kv.random_kv(kv.LLAMA_1B, 2_000)
    numbers = itertools.count()
    return lambda: cache.put(
        prefix + kv.random_tokens(1_000, next(numbers)), caches, namespace="bench"
    )


if __name__ == "__main__":
    sys.exit(main())
