"""`put` of all-new KV, and of a little new KV on much that is held, against `save_prompt_cache`.

Both save into memory that nobody has touched: an empty namespace, a new file. mlx-lm's file holds
its buffers with their room to grow, at most 255 tokens more.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
    require,
    scratch,
    size,
    workers,
)
from prefixcached.client import connect

NAME = "put"
PUT, SAVE = "put", "save_prompt_cache"


def run(quick: bool) -> list[Row]:
    """Measure."""
    new, rounds = 2_000, 4 if quick else 15
    held, more, more_rounds = (2_000, 250, 4) if quick else (8_000, 1_000, 11)
    return [
        measure(f"put, all new, {size(kv.kv_bytes(kv.LLAMA_3B, new))}", 0, new, rounds, Goal(1.1)),
        measure(
            f"put of {more:,} new tokens on {held:,} held", held, more, more_rounds, Goal(5.0)
        ),
    ]  # fmt: skip


def measure(name: str, held: int, new: int, rounds: int, goal: Goal) -> Row:
    """Return the row for ``new`` tokens on ``held`` ones."""
    shape = _shape(held)
    with scratch() as place, scratch(memory_directory()) as memory, daemon(place) as served:
        options = {
            "held": held, "new": new, "socket": str(served.socket),
            "file": str(memory / "peer.safetensors"),
        }  # fmt: skip
        with workers(NAME, (PUT, SAVE), options) as pair:
            seconds = interleave(pair, rounds)
    return faster_than(
        NAME, name, seconds, PUT, SAVE, goal, bytes=kv.kv_bytes(shape, new),
        peer_bytes=kv.kv_bytes(shape, held + new), shape=shape.name,
    )  # fmt: skip


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Case]:
    """Give one side: a client that puts, or mlx-lm that saves a file."""
    held, new = options["held"], options["new"]
    shape = _shape(held)
    original = kv.random_kv(shape, held + new)
    if role == SAVE:
        file = Path(options["file"])
        yield Case(
            role, lambda: save_prompt_cache(str(file), original),
            lambda: file.unlink(missing_ok=True),
            lambda _: kv.require_equal(load_prompt_cache(str(file)), original, held + new),
        )  # fmt: skip
        return
    prefix = kv.random_tokens(held, 2)
    numbers = itertools.count(100)
    prompt: list[int] = []
    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:

        def before() -> None:
            # Everything but the prefix is new to the daemon.
            nonlocal prompt
            cache.clear()
            if held:
                require(bool(cache.put(prefix, cut(original, held), namespace="bench")), "held")
            prompt = prefix + kv.random_tokens(new, next(numbers))

        def check(stored: Any) -> None:
            kv.stored(stored, kv.kv_bytes(shape, new))
            hit = kv.taken(cache.take([*prompt, 7], namespace="bench"))
            kv.require_equal(hit.kv, original, held + new)

        yield Case(role, lambda: cache.put(prompt, original, namespace="bench"), before, check)


def _shape(held: int) -> kv.Shape:
    return kv.LLAMA_1B if held else kv.LLAMA_3B


def cut(caches: Sequence[Any], tokens: int) -> Any:
    """Return new caches with the first ``tokens`` tokens of ``caches``."""
    result = []
    for cache in caches:
        short = type(cache)()
        short.update_and_fetch(cache.keys[..., :tokens, :], cache.values[..., :tokens, :])
        mx.eval(short.keys, short.values)  # else the first put would pay for the copy
        result.append(short)
    return result
