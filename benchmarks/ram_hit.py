"""A hit in RAM until the caches are ready, against `load_prompt_cache` of the same KV from memory.

Ready includes the first appended token, since a buffer that is exactly full is copied whole then.
mlx-lm 0.32 saves its buffers with their room to grow, so neither side pays that; an earlier mlx-lm
does. The figure without that token is shown apart.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from benchmarks import kv
from benchmarks.daemons import daemon
from benchmarks.harness import (
    Case,
    Goal,
    Row,
    faster_than,
    interleave,
    memory_directory,
    scratch,
    size,
    workers,
)
from prefixcached.client import connect

NAME = "ram_hit"
TAKE, LOAD = "take", "load_prompt_cache"


def run(quick: bool) -> list[Row]:
    """Measure."""
    tokens, rounds = 2_000, 4 if quick else 15
    shape = kv.LLAMA_3B
    nbytes = kv.kv_bytes(shape, tokens)
    about = {"bytes": nbytes, "tokens": tokens, "shape": shape.name}
    label = size(nbytes)
    rows = []
    with scratch() as place, scratch(memory_directory()) as memory, daemon(place) as served:
        original = kv.random_kv(shape, tokens)
        file = memory / "peer.safetensors"
        save_prompt_cache(str(file), original)
        with served.connect() as cache:
            assert cache.put(kv.random_tokens(tokens, 1), original, namespace="bench")
        del original
        figures = [
            (True, f"RAM hit to ready, {label}", Goal(1.0)),
            (False, f"RAM hit before the first token, {label}", None),
        ]
        for append, name, goal in figures[:1] if quick else figures:
            options = {
                "tokens": tokens, "append": append, "file": str(file),
                "socket": str(served.socket),
            }  # fmt: skip
            with workers(NAME, (TAKE, LOAD), options) as pair:
                seconds = interleave(pair, rounds)
            rows.append(faster_than(NAME, name, seconds, TAKE, LOAD, goal, **about))
    return rows


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Case]:
    """Give one side: a client that takes, or mlx-lm that loads a file."""
    tokens, shape = options["tokens"], kv.LLAMA_3B
    original = kv.random_kv(shape, tokens)
    prompt = [*kv.random_tokens(tokens, 1), 7]
    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:

        def restore() -> Any:
            if role == TAKE:
                caches: Any = kv.taken(cache.take(prompt, namespace="bench")).kv
            else:
                caches = load_prompt_cache(options["file"])
                mx.eval([array for layer in caches for array in (layer.keys, layer.values)])
            if options["append"]:
                kv.append_one(caches, shape)
            return caches

        yield Case(role, restore, check=lambda caches: kv.require_equal(caches, original, tokens))
