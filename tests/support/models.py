"""Tiny random models of real architectures, one for each way that mlx-lm keeps a cache.

`tiny-models.json` holds the model arguments: small enough that a prefill takes milliseconds
on a CPU, complete enough that each class of mlx-lm cache appears in at least one of them.
"""

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, cast

import mlx.core as mx
import mlx.nn as nn


class Description(TypedDict):
    """One entry of `tiny-models.json`."""

    module: str
    args: dict[str, Any]
    vocab_size: int


@cache
def _descriptions() -> dict[str, Description]:
    path = Path(__file__).with_name("tiny-models.json")
    return cast(dict[str, Description], json.loads(path.read_text(encoding="utf-8")))


def names() -> tuple[str, ...]:
    """The name of every model that `build` can build, sorted."""
    return tuple(sorted(_descriptions()))


def module(name: str) -> str:
    """The name of its module in `mlx_lm.models`."""
    return _descriptions()[name]["module"].rpartition(".")[2]


def vocab_size(name: str) -> int:
    """Token ids in [0, vocab_size) are valid for this model."""
    return _descriptions()[name]["vocab_size"]


def build(name: str, *, seed: int = 0) -> nn.Module:
    """A float32 model with random weights: equal seeds give equal weights.

    float32, because mixtures of experts run on a CPU in nothing else. The global random
    state of MLX is seeded on the way, so what a test draws afterwards repeats too.

    Raises:
        KeyError: `tiny-models.json` has no model of this name.
    """
    description = _descriptions()[name]
    loaded = importlib.import_module(description["module"])
    mx.random.seed(seed)
    model = cast(nn.Module, loaded.Model(loaded.ModelArgs.from_dict(description["args"])))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def tokens(name: str, count: int, *, seed: int = 0) -> list[int]:
    """Valid token ids, the same for equal arguments; a longer list starts with the shorter."""
    return tokens_below(vocab_size(name), count, seed=seed)


def tokens_below(size: int, count: int, *, seed: int = 0) -> list[int]:
    """`tokens` for a vocabulary of this size."""
    state = (seed * 2_654_435_761 + 97) % 2**32
    drawn = []
    for _ in range(count):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        drawn.append((state >> 8) % size)
    return drawn
