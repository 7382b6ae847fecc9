"""The daemon's own memory beside images, with 10,000 segments; and what a take costs a client."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.daemons import allow_descriptors, daemon
from benchmarks.harness import Goal, Row, scratch, size, workers
from prefixcached.client import connect

NAME = "memory"
MEBIBYTE = 1 << 20


def run(quick: bool) -> list[Row]:
    """Measure."""
    if sys.platform != "linux":
        print("  left out: memory is measured through /proc")
        return []
    return [*_daemon(quick), *_client(quick)]


def _daemon(quick: bool) -> list[Row]:
    from benchmarks.lookup import fill, fitting

    steps = (0, 500) if quick else (0, 1_000, 2_500, 5_000, 10_000)
    allow_descriptors(3 * steps[-1] + 2_000)
    measured = {}
    for segments in steps:
        with scratch() as place, daemon(place) as served, served.connect() as cache:
            if segments:
                fill(cache, fitting(cache, segments), 12_000)
            held = cache.stats()["ram_tier"]["images"]
            measured[held] = served.private_bytes()
    held = max(measured)
    about = {"private_bytes_by_images": measured}
    return [
        Row(
            NAME, f"daemon memory beside images, {held:,} segments",
            measured[held] / MEBIBYTE, unit="MiB", goal=Goal(90, "at most"),
            ours=size(measured[held]), peer=size(measured[0]), peer_name="empty", details=about,
        )
    ]  # fmt: skip


def _client(quick: bool) -> list[Row]:
    from benchmarks import kv

    tokens, shape = (600, kv.LLAMA_3B) if quick else (2_000, kv.LLAMA_3B)
    with scratch() as place, daemon(place) as served:
        with served.connect() as cache:
            cache.put(kv.random_tokens(tokens, 1), kv.random_kv(shape, tokens), namespace="bench")
        options = {"socket": str(served.socket), "tokens": tokens}
        with workers(NAME, ["take"], options) as (worker,):
            told = worker.ask()
    return [
        Row(
            NAME, "client's peak during a take, over the KV that it returns",
            told["peak_bytes"] / told["kv_bytes"], goal=Goal(1.1, "at most"),
            ours=size(told["peak_bytes"]), peer=size(told["kv_bytes"]), peer_name="KV",
        )
    ]  # fmt: skip


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Give a client that measures its own peak around a take."""
    import prefixcached.client.kv  # noqa: F401, its import is no part of a take
    from benchmarks import kv
    from benchmarks.harness import settle

    class Peak:
        def measure(self) -> dict[str, Any]:
            settle()
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            before = _status("VmRSS")
            hit = kv.taken(cache.take(prompt, namespace="bench"))
            peak = _status("VmHWM") - before
            held = sum(c.keys.nbytes + c.values.nbytes for c in hit.kv)
            return {"peak_bytes": peak, "kv_bytes": held}

    prompt = [*kv.random_tokens(options["tokens"], 1), 7]
    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:
        yield Peak()


def _status(name: str) -> int:
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{name}:"):
            return int(text.split()[1]) * 1024
    raise LookupError(name)
