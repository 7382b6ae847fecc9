"""What a put keeps and a take restores, on real architectures, without a daemon between them."""

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from prefixcached.client.kv import OwnCaches
from tests.client.kv.loopback import Store, build, forward, leaves, prefill, same_bits
from tests.support import models

EVERY_KIND = (
    "llama",
    "exaone4",
    "gemma4",
    "qwen3_next",
    "mamba2",
    "llama4",
    "deepseek_v32",
    "longcat_flash_ngram",
    "iquestloopcoder",
    "kimi_linear",
    "recurrent_gemma",
)
SUFFIXES = (1, 2, 16)
ENTRY = 40


def assert_same_continuation(
    model: Any, left: list[Any], right: list[Any], tokens: list[int]
) -> None:
    """Both continue alike: all of ``tokens`` in one call, and then single ones."""
    assert same_bits(forward(model, left, tokens), forward(model, right, tokens))
    for token in (3, 5):
        assert same_bits(forward(model, left, [token]), forward(model, right, [token]))


@pytest.mark.parametrize("boundaries", [(), (33,), tuple(range(9, ENTRY))])
@pytest.mark.parametrize("name", EVERY_KIND)
def test_whole_entry(name: str, boundaries: tuple[int, ...]) -> None:
    """T12: at a put's own end a restored cache continues bit for bit as the producer's does."""
    model, tokens = build(name), models.tokens(name, ENTRY + 16)
    producer = make_prompt_cache(model)
    prefill(model, producer, tokens[:ENTRY], boundaries)
    store = Store()
    assert store.put(producer, tokens[:ENTRY], cuts=(7, 20)) == ENTRY
    for suffix in SUFFIXES:
        restored, reference = store.take(ENTRY), copy.deepcopy(producer)
        assert [type(cache) for cache in leaves(restored)] == [type(c) for c in leaves(reference)]
        assert_same_continuation(model, reference, restored, tokens[ENTRY : ENTRY + suffix])


@pytest.mark.parametrize("position", [1, 6, 7, 8, 19, 20, 21, 39])
@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_prefix_of_an_entry(name: str, position: int) -> None:
    """T5: a prefix at any position continues bit for bit as the producer's cache cut there."""
    model, tokens = build(name), models.tokens(name, ENTRY)
    producer = make_prompt_cache(model)
    prefill(model, producer, tokens)
    store = Store()
    store.put(producer, tokens, cuts=(7, 20))
    trim_prompt_cache(producer, ENTRY - position)
    restored = store.take(position)
    assert_same_continuation(model, producer, restored, tokens[position : position + 9] or [1])


@pytest.mark.parametrize("name", ["exaone4", "gemma4", "llama4"])
def test_prefix_within_a_window(name: str) -> None:
    """T13: rows beyond need make an earlier position usable, as if the prefill had ended there."""
    model, tokens = build(name), models.tokens(name, ENTRY)
    stopped, producer = make_prompt_cache(model), OwnCaches(make_prompt_cache(model))
    prefill(model, stopped, tokens[:30])
    prefill(model, producer, tokens, boundaries=(30,))
    store = Store()
    store.put(producer, tokens)
    for suffix in SUFFIXES:
        reference = copy.deepcopy(stopped)
        assert_same_continuation(model, reference, store.take(30), tokens[30 : 30 + suffix])


def test_extension_and_branch_share_a_prefix() -> None:
    """P2: window rows of a branch may start below its base, and both branches stay usable."""
    name = "exaone4"
    model, tokens = build(name), models.tokens(name, 60)
    other = models.tokens(name, 5, seed=9)
    trunk = make_prompt_cache(model)
    prefill(model, trunk, tokens, boundaries=(30,))
    branch = make_prompt_cache(model)
    prefill(model, branch, [*tokens[:30], *other], boundaries=(30,))
    store = Store()
    store.put(trunk, tokens, cuts=(7, 20))
    fork = Store(list(store.images), store.schema)
    fork.put(branch, [*tokens[:30], *other], base=30)
    assert fork.windows[0].ranges[0][0] < 30
    assert_same_continuation(model, branch, fork.take(35), tokens[:2])
    assert_same_continuation(model, trunk, store.take(60), tokens[:2])


def test_extension_of_a_restored_cache() -> None:
    """T12: a prefix from one process and its continuation from another make one entry."""
    for name in ("llama", "gemma4", "qwen3_next", "llama4", "longcat_flash_ngram"):
        model, tokens = build(name), models.tokens(name, 60)
        first = make_prompt_cache(model)
        prefill(model, first, tokens[:25])
        store = Store()
        store.put(first, tokens[:25], cuts=(11,))
        second = store.take(25)
        prefill(model, second, tokens[25:50], boundaries=(5,))
        store.put(second, tokens[:50], cuts=(31,))
        assert_same_continuation(model, second, store.take(50), tokens[50:53])


@pytest.mark.parametrize("position", [24, 25, 40])
def test_quantised(position: int) -> None:
    """T12: quantised words, scales and biases are restored bit for bit and continue alike."""
    model, tokens = build("llama"), models.tokens("llama", 60)
    producer: list[Any] = [QuantizedKVCache(group_size=32, bits=4) for _ in model.layers]
    prefill(model, producer, tokens[:ENTRY], boundaries=(24,))
    store = Store()
    store.put(producer, tokens[:ENTRY], cuts=(13,))
    trim_prompt_cache(producer, ENTRY - position)
    restored = store.take(position)
    assert (restored[0].group_size, restored[0].bits) == (32, 4)
    assert_same_continuation(model, producer, restored, tokens[40:42])


def test_turned_quantised_along_the_way() -> None:
    """T12: a cache that mlx-lm quantised after some plain tokens is stored as it is now."""
    model, tokens = build("llama"), models.tokens("llama", 60)
    plain = make_prompt_cache(model)
    prefill(model, plain, tokens[:30])
    producer = [cache.to_quantized(group_size=64, bits=8) for cache in plain]
    prefill(model, producer, tokens[30:41])
    store = Store()
    store.put(producer, tokens[:41])
    assert_same_continuation(model, producer, store.take(41), tokens[41:44])


def test_concatenating_class() -> None:
    """P1: a class whose buffer has no spare rows is restored without any, at any position."""
    model, tokens = build("llama"), models.tokens("llama", ENTRY)
    producer: list[Any] = [ConcatenateKVCache() for _ in model.layers]
    prefill(model, producer, tokens[:30])
    store = Store()
    store.put(producer, tokens[:30], cuts=(9,))
    restored = store.take(30)
    assert restored[0].keys.shape[-2] == 30
    for suffix in SUFFIXES:
        reference = copy.deepcopy(producer)
        assert_same_continuation(model, reference, store.take(30), tokens[30:40][:suffix])
    # Its own `trim` is broken: what it holds is cut by hand.
    for cache in producer:
        cache.keys, cache.values = cache.keys[..., :12, :], cache.values[..., :12, :]
        cache.offset = 12
    for suffix in SUFFIXES:
        reference, restored = copy.deepcopy(producer), store.take(12)
        assert restored[0].keys.shape[-2] == 12
        assert_same_continuation(model, reference, restored, tokens[20 : 20 + suffix])


@pytest.mark.parametrize("position", [7, 8, 9, 15, 16, 24, 31])
def test_chunks(position: int) -> None:
    """T13: a chunked layer resumes at, before and behind the bounds of its chunks."""
    model, tokens = build("llama4"), models.tokens("llama4", ENTRY)
    size = next(c.chunk_size for c in make_prompt_cache(model) if hasattr(c, "chunk_size"))
    assert size == 8
    stopped, producer = make_prompt_cache(model), make_prompt_cache(model)
    prefill(model, stopped, tokens[:position])
    prefill(model, producer, tokens, boundaries=(position,))
    store = Store()
    store.put(stopped, tokens[:position])
    store.put(producer, tokens)
    for end, source in ((position, stopped), (ENTRY, producer)):
        for suffix in SUFFIXES:
            reference, restored = copy.deepcopy(source), store.take(end)
            starts = {c.start_position for c in restored if hasattr(c, "start_position")}
            assert len(starts) == 1
            assert_same_continuation(model, reference, restored, tokens[:suffix])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("value_dims", [0, 16])
def test_dtypes_and_empty_dimensions(dtype: mx.Dtype, value_dims: int) -> None:
    """P1: half precision and values of no dimensions at all are rows like any other."""
    producer: list[Any] = [KVCache()]
    producer[0].update_and_fetch(
        mx.random.normal((1, 3, 21, 8)).astype(dtype),
        mx.random.normal((1, 3, 21, value_dims)).astype(dtype),
    )
    store = Store()
    store.put(producer, range(21), cuts=(4,))
    for length in (1, 4, 20, 21):
        restored = store.take(length)[0]
        assert restored.offset == length
        assert restored.values.shape[-1] == value_dims
        for left, right in (
            (producer[0].keys, restored.keys),
            (producer[0].values, restored.values),
        ):
            assert left.dtype == right.dtype
            assert same_bits(left[..., :length, :], right[..., :length, :])


def test_strided_arrays() -> None:
    """P1: arrays that do not lie in one piece are stored as what they show."""
    producer: list[Any] = [KVCache(), KVCache()]
    for cache in producer:
        cache.update_and_fetch(mx.random.normal((1, 21, 3, 8)), mx.random.normal((1, 21, 3, 8)))
    producer[0].keys = producer[0].keys.swapaxes(1, 2)
    producer[0].values = mx.broadcast_to(mx.random.normal((1, 3, 1, 8)), (1, 3, 21, 8))
    producer[1].keys = mx.random.normal((1, 3, 50, 8))[..., 10:31, :]
    producer[1].values = mx.random.normal((1, 3, 21, 16))[..., ::2]
    for cache in producer:
        cache.offset = 21
    store = Store()
    store.put(producer, range(21), cuts=(4,))
    for left, right in zip(producer, store.take(20), strict=True):
        assert same_bits(left.keys[..., :20, :], right.keys[..., :20, :])
        assert same_bits(left.values[..., :20, :], right.values[..., :20, :])


def test_caches_of_the_producer_stay_as_they_are() -> None:
    """P1: a put changes nothing in the caches, and their next token copies no buffer."""
    model, tokens = build("llama"), models.tokens("llama", ENTRY)
    producer = make_prompt_cache(model)
    prefill(model, producer, tokens)
    before = copy.deepcopy(producer)
    arrays = [cache.keys for cache in producer]
    Store().put(producer, tokens)
    assert all(cache.keys is array for cache, array in zip(producer, arrays, strict=True))
    assert_same_continuation(model, before, producer, tokens[:2])
