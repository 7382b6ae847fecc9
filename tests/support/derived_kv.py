"""KV whose every byte follows from the tokens, so that whoever reads it can check it.

Row ``i`` of each tensor is a hash of tokens [0, i], as a model's KV depends on its whole prefix.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from numpy.typing import NDArray

HEADS, WIDTH, WINDOW = 2, 16, 32

PLAIN = ("append", "append")
HYBRID = ("append", "state")
EVERY_KIND = ("append", "window", "state")


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids, the same for equal arguments; a longer list starts with the shorter."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 1 << 20, count)]


def rows(prompt: Sequence[int], layer: int) -> NDArray[np.float32]:
    """Return rows of shape (1, HEADS, tokens, WIDTH) for one layer."""
    array = np.asarray(prompt, dtype=np.uint64)
    weights = np.arange(1, array.size + 1, dtype=np.uint64) * np.uint64(2654435761)
    prefix = np.cumsum((array + np.uint64(1)) * weights)  # wraps: a hash
    lanes = np.arange(1, HEADS * WIDTH + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 >> 1)
    mixed = prefix[:, None] * lanes[None, :] + np.uint64(layer * 977)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    values = (mixed >> np.uint64(40)).astype(np.float32)
    return np.ascontiguousarray(values.reshape(1, array.size, HEADS, WIDTH).transpose(0, 2, 1, 3))


def caches(prompt: Sequence[int], kinds: Sequence[str] = PLAIN) -> list[Any]:
    """Return mlx-lm caches of these kinds as if ``prompt`` had been forwarded in one call."""
    built: list[Any] = []
    for layer, kind in enumerate(kinds):
        values = mx.array(rows(prompt, layer))
        if kind == "state":
            state = ArraysCache(1)
            state[0] = values[:, :, -1, :]
            built.append(state)
            continue
        cache = KVCache() if kind == "append" else RotatingKVCache(max_size=WINDOW)
        cache.update_and_fetch(values, values + 1)
        built.append(cache)
    mx.eval([cache.state[0] for cache in built])
    return built


def assert_derived(kv: Sequence[Any], prompt: Sequence[int], kinds: Sequence[str] = PLAIN) -> None:
    """Fail unless ``kv`` is, bit for bit, what `caches` gives for exactly ``prompt``."""
    count = len(prompt)
    assert len(kv) == len(kinds)
    for layer, (cache, kind) in enumerate(zip(kv, kinds, strict=True)):
        wanted = rows(prompt, layer)
        if kind == "state":
            assert np.array_equal(np.array(cache[0]), wanted[:, :, -1, :])
            continue
        assert cache.offset == count
        if kind == "append":
            keys, values = np.array(cache.keys)[..., :count, :], np.array(cache.values)
            assert np.array_equal(keys, wanted)
            assert np.array_equal(values[..., :count, :], wanted + 1)
        else:
            # Temporal order but for a filler; the last rows are what continuing reads.
            recent = min(count, WINDOW - 1)
            keys = np.array(cache.keys)[..., : cache._idx, :]
            assert np.array_equal(keys[..., -recent:, :], wanted[..., -recent:, :])
