"""KV as numpy arrays whose every byte follows from the tokens and a salt; no mlx is needed.

As `derived_kv`: row ``i`` of each tensor is a hash of tokens [0, i]. The caches are those of
`numpy_kv`, for processes that must start quickly or be many.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.numpy_kv import HEADS, WIDTH, NumpyCache

LANES = HEADS * WIDTH
STATE_SHAPE = (3, 5)


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids, the same for equal arguments; a longer list starts with the shorter."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 1 << 20, count)]


def caches(
    prompt: Sequence[int], *, salt: int = 0, layers: int = 2, state: bool = False
) -> list[NumpyCache]:
    """Return caches as if ``prompt`` had been forwarded by the model called ``salt``."""
    history = _history(prompt)
    built: list[NumpyCache] = []
    for layer in range(layers):
        keys = _bits(history, salt * 8191 + 2 * layer)
        values = _bits(history, salt * 8191 + 2 * layer + 1)
        cache: NumpyCache = {"keys": _rows(keys), "values": _rows(values)}
        if state:
            cache["state"] = np.resize(keys[-1].astype(np.float32), STATE_SHAPE)
        built.append(cache)
    return built


def assert_derived(
    kv: Sequence[Any], prompt: Sequence[int], *, salt: int = 0, layers: int = 2, state: bool = False
) -> None:
    """Fail unless ``kv`` is, bit for bit, what `caches` gives for exactly ``prompt``."""
    wanted = caches(prompt, salt=salt, layers=layers, state=state)
    assert len(kv) == len(wanted)
    for found, cache in zip(kv, wanted, strict=True):
        assert found.keys() == cache.keys()
        for name, array in cache.items():
            # As integers: half of the patterns of a hash are no numbers or equal to none.
            same = np.array_equal(found[name].view(np.uint16), array.view(np.uint16))
            assert same, f"wrong bytes in {name} for {len(prompt)} tokens"


def features(key: str) -> dict[str, NDArray[np.uint16]]:
    """Return the arrays of an object, which follow from its key."""
    return {"features": _bits(_history([ord(letter) for letter in key]), 7)}


def _history(prompt: Sequence[int]) -> NDArray[np.uint64]:
    array = np.asarray(prompt, dtype=np.uint64)
    weights = np.arange(1, array.size + 1, dtype=np.uint64) * np.uint64(2654435761)
    return np.cumsum((array + np.uint64(1)) * weights)  # wraps: a hash


def _bits(history: NDArray[np.uint64], tensor: int) -> NDArray[np.uint16]:
    lanes = np.arange(1, LANES + 1, dtype=np.uint64) * np.uint64(0x4F1BBCDCBFA53E0B)
    mixed = history[:, None] * lanes[None, :] + np.uint64(tensor * 977)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(48)).astype(np.uint16)


def _rows(bits: NDArray[np.uint16]) -> NDArray[np.float16]:
    shaped = bits.reshape(-1, HEADS, WIDTH).transpose(1, 0, 2)
    return np.ascontiguousarray(shaped).view(np.float16)
