"""A hit on SSD, warm against `load_prompt_cache` from the same disk, cold against plain reading.

The daemon runs with a RAM cap below one segment, so that nothing is promoted and every take is
served from the files. Cold means: the daemon was just started, so nothing is verified, and
`mincore` finds no page of the files in memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from benchmarks import kv
from benchmarks.daemons import Daemon
from benchmarks.harness import (
    Case,
    Goal,
    Row,
    Worker,
    drop_from_page_cache,
    faster_than,
    interleave,
    require,
    scratch,
    size,
    workers,
)
from prefixcached.client import connect

NAME = "ssd_hit"
TAKE, LOAD, READ = "take", "load_prompt_cache", "sequential read"
READ_BYTES = 1 << 20
"""Of the plain reader; larger reads are slower here, since their buffer leaves the L2 cache."""


@dataclass(frozen=True)
class Prepared:
    """A worker's case, prepared by this process."""

    worker: Worker
    before: Callable[[], None]

    @property
    def name(self) -> str:
        """The worker's."""
        return self.worker.name

    def measure(self) -> float:
        """Prepare, then run."""
        self.before()
        return self.worker.measure()


def run(quick: bool) -> list[Row]:
    """Measure."""
    tokens, rounds, cold_rounds = 2_000, 5 if quick else 15, 11
    shape = kv.LLAMA_3B
    nbytes = kv.kv_bytes(shape, tokens)
    about = {"bytes": nbytes, "tokens": tokens, "shape": shape.name}
    label = size(nbytes)
    with scratch() as place:
        served = Daemon(place, ssd="8GiB")
        served.start()
        try:
            served.wait_until_loaded()
            original = kv.random_kv(shape, tokens)
            peer = place / "peer.safetensors"
            save_prompt_cache(str(peer), original)
            with served.connect() as cache:
                assert cache.put(kv.random_tokens(tokens, 1), original, namespace="bench")
                flushed = cache.flush()
                require(bool(flushed), f"{flushed}")
            del original
            served.ram = "16MiB"
            served.restart()
            options = {
                "tokens": tokens, "file": str(peer), "socket": str(served.socket),
                "files": [str(path) for path in served.files()],
            }  # fmt: skip
            with workers(NAME, (TAKE, LOAD), options) as pair:
                warm = interleave(pair, rounds)

            def drop() -> None:
                drop_from_page_cache(served.files())

            def restart() -> None:
                served.restart()
                drop()

            warm_row = faster_than(
                NAME, f"SSD hit to ready, warm page cache, {label}", warm, TAKE, LOAD, Goal(1.0),
                **about,
            )  # fmt: skip
            if quick:
                # A few rounds show nothing cold: other users of the disk change it that much.
                return [warm_row]
            with workers(NAME, (TAKE, READ), options) as (take, read):
                cold = interleave([Prepared(take, restart), Prepared(read, drop)], cold_rounds)
                verified = interleave([Prepared(take, drop), Prepared(read, drop)], cold_rounds)
        finally:
            served.stop()
    return [
        warm_row,
        faster_than(
            NAME, f"SSD hit to ready, cold, after a restart, {label}", cold, TAKE, READ,
            Goal(0.75), **about,
        ),
        faster_than(
            NAME, f"SSD hit to ready, cold, verified before, {label}", verified, TAKE, READ, None,
            **about,
        ),
    ]  # fmt: skip


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Case]:
    """Give a client, mlx-lm, or a plain reader."""
    tokens, shape = options["tokens"], kv.LLAMA_3B
    if role == READ:
        expected = sum(Path(path).stat().st_size for path in options["files"])
        yield Case(
            role, lambda: _read(options["files"]),
            check=lambda nbytes: require(nbytes == expected, f"read {nbytes} of {expected}"),
        )  # fmt: skip
        return
    original = kv.random_kv(shape, tokens)
    prompt = [*kv.random_tokens(tokens, 1), 7]

    def take() -> Any:
        # A connection of its own each time: the daemon may have been restarted.
        with connect(socket=Path(options["socket"]), timeout=120, fail_open=False) as cache:
            hit = kv.taken(cache.take(prompt, namespace="bench"))
            require(hit.tier == "ssd", f"{hit}")
            kv.append_one(hit.kv, shape)
            return hit.kv

    def load() -> Any:
        caches = load_prompt_cache(options["file"])
        mx.eval([array for layer in caches for array in (layer.keys, layer.values)])
        kv.append_one(caches, shape)
        return caches

    yield Case(
        role, take if role == TAKE else load,
        check=lambda caches: kv.require_equal(caches, original, tokens),
    )  # fmt: skip


def _read(paths: list[str]) -> int:
    buffer = memoryview(bytearray(READ_BYTES))
    total = 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while got := file.readinto(buffer):
                total += got
    return total
