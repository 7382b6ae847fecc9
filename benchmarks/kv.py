"""Real mlx-lm caches with random contents, and what "ready" and "equal" mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from benchmarks.harness import require
from prefixcached.client import Declined, Hit, Miss, Stored


@dataclass(frozen=True)
class Shape:
    """The KV of a model: ``layers`` times keys and values of ``heads`` x ``dim`` a token."""

    name: str
    layers: int
    heads: int
    dim: int
    dtype: mx.Dtype = mx.bfloat16

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token has."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.size


LLAMA_3B: Final = Shape("Llama-3.2-3B", 28, 8, 128)
"""112 KiB a token; 2,000 tokens are 229 MB."""

LLAMA_1B: Final = Shape("Llama-3.2-1B", 16, 8, 64)
"""32 KiB a token."""

SMOL: Final = Shape("SmolLM2-135M", 30, 3, 64, mx.float16)
"""22.5 KiB a token in float16."""

TINY: Final = Shape("tiny", 1, 1, 8)
"""32 bytes a token: for what must not depend on the bytes of KV."""


def random_kv(shape: Shape, tokens: int, seed: int = 0) -> list[KVCache]:
    """Return evaluated caches of ``tokens`` random tokens, with room to grow as after a prefill.

    A prefix of a longer one with the same seed has the same bits: a token's row depends on its
    position alone, as after a prefill of the same prompt.
    """
    random = np.random.default_rng(seed)
    caches = []
    for _ in range(shape.layers):
        cache = KVCache()
        # Token by token in memory, so that a longer draw only adds rows.
        drawn = random.integers(
            0, 256, (tokens, 2, shape.heads, shape.dim * shape.dtype.size), dtype=np.uint8
        )
        # Exponents below the top: bit patterns of finite numbers, as KV has.
        if shape.dtype.size == 2:
            drawn[..., 1::2] &= 0xBF
        keys, values = (
            mx.array(np.ascontiguousarray(drawn[:, part].swapaxes(0, 1))[None]).view(shape.dtype)
            for part in range(2)
        )
        cache.update_and_fetch(keys, values)
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
        random = np.random.default_rng((seed, len(caches)))
    return caches


def random_tokens(count: int, seed: int) -> list[int]:
    """Return random token ids, as mlx-lm passes them: a list of ints."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 128_000, count)]


def append_one(caches: Sequence[Any], shape: Shape) -> None:
    """Append one token to every layer and evaluate: an exactly full buffer is copied whole here."""
    new = []
    for cache in caches:
        one = mx.ones((1, shape.heads, 1, shape.dim), dtype=shape.dtype)
        cache.update_and_fetch(one, one)
        new += [cache.keys, cache.values]
    mx.eval(new)


def require_equal(left: Sequence[Any], right: Sequence[Any], tokens: int) -> None:
    """Raise `WrongBytes` unless both hold the same bits for the first ``tokens`` tokens."""
    require(len(left) == len(right), f"{len(left)} layers, not {len(right)}")
    for one, other in zip(left, right, strict=True):
        for a, b in ((one.keys, other.keys), (one.values, other.values)):
            same = mx.array_equal(
                a[..., :tokens, :].view(mx.uint16), b[..., :tokens, :].view(mx.uint16)
            )
            require(bool(same.item()), f"the KV of {tokens} tokens differs")


def kv_bytes(shape: Shape, tokens: int) -> int:
    """Bytes of KV of ``tokens`` tokens."""
    return shape.token_bytes * tokens


def taken(result: Hit | Miss) -> Hit:
    """Return ``result``; raise `WrongBytes` where it is a miss: no benchmark measures those."""
    require(isinstance(result, Hit), f"{result}")
    assert isinstance(result, Hit)
    return result


def stored(result: Stored | Declined, new_bytes: int) -> None:
    """Raise `WrongBytes` unless exactly ``new_bytes`` were stored."""
    require(isinstance(result, Stored) and result.new_bytes == new_bytes, f"{result}")
