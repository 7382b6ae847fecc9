"""A conversation of 50 short turns on a long prefix: bytes written to SSD against bytes of tokens.

Every turn is flushed, the worst case: each tail reaches the disk before the next turn absorbs it.
Files are counted by listing them after each flush, so no counter of the daemon is trusted.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from benchmarks import kv
from benchmarks.daemons import daemon
from benchmarks.harness import Goal, Row, require, scratch, size
from benchmarks.put import cut

NAME = "turns"
SHAPE = kv.Shape("turns", 8, 2, 64, mx.float16)
STATE_BYTES = 256 * 1024


def run(quick: bool) -> list[Row]:
    """Measure."""
    turns, new, prefix = (10, 200, 2_000) if quick else (50, 200, 8_000)
    return [
        row
        for is_hybrid in (False, True)
        for row in _converse(turns, new, prefix, is_hybrid=is_hybrid)
    ]


def _converse(turns: int, new: int, prefix: int, *, is_hybrid: bool) -> list[Row]:
    total = prefix + turns * new
    whole = kv.random_kv(SHAPE, total)
    prompt = kv.random_tokens(total, 3)
    kind = "hybrid" if is_hybrid else "attention"
    written = {"segment": 0, "checkpoint": 0}
    seen: set[str] = set()
    with scratch() as place, daemon(place, ssd="8GiB") as served, served.connect() as cache:
        for turn in range(turns + 1):
            length = prefix + turn * new
            caches = cut(whole, length)
            if is_hybrid:
                caches += [_state(turn)]
            stored = cache.put(prompt[:length], caches, namespace="turns")
            require(bool(stored), f"{stored}")
            flushed = cache.flush()
            require(bool(flushed), f"{flushed}")
            for path in served.files():
                if path.name not in seen:
                    seen.add(path.name)
                    written[_kind(path)] += path.stat().st_size
        hit = kv.taken(cache.take([*prompt, 7], namespace="turns"))
        require(hit.length == total, f"{hit}")
        kv.require_equal([c for c in hit.kv if isinstance(c, KVCache)], whole, total)
        kept = sum(path.stat().st_size for path in served.files())
    distinct = kv.kv_bytes(SHAPE, total)
    about = {"files_seen": len(seen), "kept_bytes": kept, "distinct_bytes": distinct} | written
    rows = [
        Row(
            NAME, f"{turns} turns of {new}, {kind}: segment bytes written",
            written["segment"] / distinct, goal=Goal(2.0, "at most"), ours=size(written["segment"]),
            peer=size(distinct), peer_name="distinct tokens", details=about,
        )
    ]  # fmt: skip
    if is_hybrid:
        states = (turns + 1) * STATE_BYTES
        rows.append(
            Row(
                NAME, f"{turns} turns of {new}, {kind}: checkpoint bytes written",
                written["checkpoint"] / states, ours=size(written["checkpoint"]),
                peer=size(states), peer_name="snapshots", details=about,
            )
        )  # fmt: skip
    return rows


def _state(seed: int) -> Any:
    """A recurrent layer's state, another one each turn."""
    cache = ArraysCache(1)
    cache[0] = mx.random.normal((1, STATE_BYTES // 4), key=mx.random.key(seed))
    mx.eval(cache[0])
    return cache


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    text = json.dumps(header["__metadata__"])
    return "checkpoint" if "checkpoint" in text else "segment"
