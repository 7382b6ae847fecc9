"""Snapshots: recurrent state, nested lists, foreign classes, attachments."""

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.deepseek_v41 import LayerCache

from prefixcached.client.kv import (
    Attachment,
    UncuttableKvError,
    UnsupportedCacheError,
    UnusableImageError,
    snapshot,
)
from tests.client.kv.loopback import Store, build, filled, leaves, prefill, same_bits
from tests.client.kv.test_loopback import assert_same_continuation
from tests.support import models


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "longcat_flash_ngram"])
def test_every_checkpoint_of_a_path(name: str) -> None:
    """T5: state is restored at each position where a snapshot was taken."""
    model, tokens = build(name), models.tokens(name, 50)
    caches, store, kept = make_prompt_cache(model), Store(), {}
    for start, end in ((0, 17), (17, 30), (30, 41)):
        prefill(model, caches, tokens[start:end])
        store.put(caches, tokens[:end])
        kept[end] = copy.deepcopy(caches)
    for end, producer in kept.items():
        assert_same_continuation(model, producer, store.take(end), tokens[end : end + 3])


def test_no_state_between_checkpoints() -> None:
    """T5: a position without a snapshot is an error here, never a guess."""
    model, tokens = build("qwen3_next"), models.tokens("qwen3_next", 20)
    caches, store = make_prompt_cache(model), Store()
    prefill(model, caches, tokens)
    store.put(caches, tokens)
    with pytest.raises(UnusableImageError, match="no state at 19 tokens"):
        store.start(19)


def test_nested_lists() -> None:
    """P1: lists of caches may nest; their leaves keep their own kinds and places."""
    state = ArraysCache(2)
    state[1] = mx.random.normal((1, 3, 4)).astype(mx.bfloat16)
    producer = [CacheList(filled(), CacheList(state, filled())), filled()]
    store = Store()
    store.put(producer, range(20), cuts=(3,))
    assert [tensor.name for tensor in store.schema.tensors] == [
        "0.0.keys", "0.0.values", "0.1.1.keys", "0.1.1.values", "1.keys", "1.values"
    ]  # fmt: skip
    restored = store.take(20)
    kinds = [type(leaf) for leaf in leaves(restored)]
    assert kinds == [KVCache, ArraysCache, KVCache, KVCache]
    assert restored[0][1][0][0] is None
    assert same_bits(restored[0][1][0][1], state[1])
    assert same_bits(restored[0][1][1].keys[..., :20, :], producer[0][1][1].keys[..., :20, :])


@pytest.mark.parametrize("depth", [1, 5, 64])
def test_any_depth(depth: int) -> None:
    """P1: every kind of leaf comes back from lists in lists, whole and cut."""
    ring = RotatingKVCache(max_size=8, keep=2)
    ring.update_and_fetch(mx.random.normal((1, 2, 20, 8)), mx.random.normal((1, 2, 20, 8)))
    producer: Any = CacheList(filled(), ring)
    for _ in range(depth - 1):
        producer = CacheList(filled(), producer)
    store = Store()
    store.put([producer], range(20), cuts=(7,))
    for length in (20, 18):
        restored = leaves(store.take(length))
        expected = leaves([producer])
        assert [type(leaf) for leaf in restored] == [type(leaf) for leaf in expected]
        for left, right in zip(restored, expected, strict=True):
            if isinstance(left, KVCache):
                assert left.keys is not None
                assert same_bits(left.keys[..., :length, :], right.keys[..., :length, :])
            else:
                rows = right._temporal_order(right.keys)[..., length - 5 : length, :]
                assert same_bits(left._temporal_order(left.keys)[..., -5:, :], rows)
    for _ in range(65 - depth):
        producer = CacheList(producer)
    with pytest.raises(UnsupportedCacheError, match="64 is the limit"):
        snapshot([producer], range(20))


def test_own_class_of_a_model() -> None:
    """P1: a class without a setter or `from_state` is rebuilt from its attributes."""
    cache: Any = LayerCache(window_size=4)
    cache.update_window(mx.random.normal((1, 9, 8)))
    cache.pending_kv = mx.zeros((1, 0, 8))
    store = Store()
    assert store.put([cache], range(9)) == 9
    restored: Any = store.take(9)[0]
    assert (restored.offset, restored.window_size, restored.index_k) == (9, 4, None)
    assert same_bits(restored.window, cache.window)
    assert restored.pending_kv.shape == (1, 0, 8)
    assert type(restored) is LayerCache


def test_plain_values_and_dtypes() -> None:
    """P1: nested plain values and arrays of every dtype come back as they were."""
    dtypes = (
        mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.float16, mx.bfloat16, mx.uint32,
        mx.int32, mx.float32, mx.uint64, mx.int64, mx.complex64,
    )  # fmt: skip
    cache: Any = LayerCache(window_size=4)
    arrays = [mx.arange(6).reshape(2, 3).astype(dtype) for dtype in dtypes]
    plain = {"a": [1, 2.5, None, (True, "x", float("inf"))], 7: {}, "scalar": mx.array(3)}
    cache.offset = 5
    cache.extra = (arrays, plain)
    store = Store()
    store.put([cache], range(5))
    restored_arrays, restored_plain = store.take(5)[0].extra
    assert all(map(same_bits, restored_arrays, arrays))
    assert restored_plain.pop("scalar").item() == 3
    del plain["scalar"]
    assert restored_plain == plain


def test_state_cannot_be_cut() -> None:
    """P1: with recurrent state, caches that disagree by a token or more are declined."""
    state = ArraysCache(1)
    state[0] = mx.ones((1, 2))
    for caches, count in (([state, filled()], 19), ([state, filled(), filled(21)], 20)):
        with pytest.raises(UncuttableKvError, match="cannot be cut"):
            snapshot(caches, range(count))


def test_attachments() -> None:
    """A1: named tensors and metadata come back with their position, and only there."""
    features = mx.random.normal((4, 3)).astype(mx.bfloat16)
    image = Attachment("vision/1", {"features": features}, {"pages": [1, 2], "name": "a"})
    store = Store()
    store.put([filled()], range(20), attachments={"image": image, "empty": Attachment("x/1")})
    with snapshot([filled()], range(20), {"image": image}) as taken:
        assert taken.attachments
    restored, lent = store.start(20)
    for index, (lent_image, _) in enumerate(lent):
        for offset, views in restored.targets(index):
            for view in views:
                view[:] = lent_image.data[offset : offset + view.nbytes]
                offset += view.nbytes  # noqa: PLW2901, the next view lies behind this one
    restored.finish()
    assert restored.attachments is not None
    assert restored.attachments["empty"] == Attachment("x/1")
    assert restored.attachments["image"].metadata == image.metadata
    assert same_bits(restored.attachments["image"].tensors["features"], features)
    shorter, _ = store.start(19)
    shorter.finish()
    assert shorter.attachments is None


def test_attachments_of_another_kind() -> None:
    """A1: what is not an attachment is refused with its name."""
    wrong: Any = {"image": [mx.ones(3)]}
    with pytest.raises(UnsupportedCacheError, match="image"):
        snapshot([filled()], range(20), wrong)
