"""The tiny models give every class of mlx-lm cache that the adapter has to deal with."""

from typing import Any

import mlx.core as mx
import mlx.utils
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.support import models

CLASSES = {
    "llama": ["KVCache"] * 4,
    "exaone4": ["RotatingKVCache"] * 3 + ["KVCache"],
    "gemma4": ["RotatingKVCache"] * 5 + ["KVCache"],
    "qwen3_next": ["ArraysCache"] * 3 + ["KVCache"],
    "mamba2": ["ArraysCache"] * 4,
    "llama4": ["ChunkedKVCache"] * 3 + ["KVCache"],
    "deepseek_v32": ["CacheList(KVCache,KVCache)"] * 4,
    "longcat_flash_ngram": ["ArraysCache"] + ["CacheList(KVCache,KVCache)"] * 4,
}


def describe(cache: Any) -> str:
    name = type(cache).__name__
    nested = getattr(cache, "caches", None)
    return f"{name}({','.join(map(describe, nested))})" if nested else name


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_prefills_into_the_classes_it_stands_for(name: str) -> None:
    """Twenty tokens go through the model, and its caches are of the classes expected."""
    model = models.build(name)
    caches = make_prompt_cache(model)
    logits = model(mx.array([models.tokens(name, 20)]), cache=caches)
    assert logits.shape[:2] == (1, 20)
    assert not mx.isnan(logits).any().item()
    assert sorted(map(describe, caches)) == sorted(CLASSES[name])


def test_equal_seeds_give_equal_weights() -> None:
    """A second process that builds the same model may share its cache; another seed may not."""

    def weights(seed: int) -> list[tuple[str, mx.array]]:
        flat = mlx.utils.tree_flatten(models.build("mixtral", seed=seed).parameters())
        assert isinstance(flat, list)
        return flat

    first, same, other = weights(0), weights(0), weights(1)
    assert all(mx.array_equal(a, b).item() for (_, a), (_, b) in zip(first, same, strict=True))
    assert not all(mx.array_equal(a, b).item() for (_, a), (_, b) in zip(first, other, strict=True))


def test_a_longer_prompt_starts_with_the_shorter() -> None:
    """Tokens repeat, stay in the vocabulary, and differ by seed."""
    long = models.tokens("mixtral", 50)
    assert models.tokens("mixtral", 20) == long[:20]
    assert all(0 <= token < models.vocab_size("mixtral") for token in long)
    assert models.tokens("mixtral", 20, seed=1) != long[:20]
