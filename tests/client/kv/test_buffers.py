"""Views of MLX's memory, and memory that nobody has filled."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from prefixcached.client.kv import snapshot
from prefixcached.client.kv.buffers import DTYPE_NAMES, flat_bytes, integers, unfilled
from prefixcached.client.kv.placement import Span, packed, transfers
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor, layout
from prefixcached.protocol.schema import ITEM_BYTES
from tests.client.kv.loopback import Store, filled, same_bits


@pytest.mark.parametrize("shape", [(), (0,), (3,), (1, 2, 5, 4), (1, 2, 0, 4), (1, 2, 5, 0)])
@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"F64"}))
def test_unfilled_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    """Arrays come with the dtype and shape asked for, and what is written to them stays.

    float64 has no place in a cache: MLX computes it on the CPU alone.
    """
    names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    array, other = unfilled([StateTensor("a", dtype, shape), StateTensor("b", "U8", (3,))])
    assert (array.dtype, array.shape, other.shape) == (names[dtype], shape, (3,))
    memory = flat_bytes(integers(array))
    pattern = bytes(index % 2 for index in range(memory.nbytes))
    if memory.nbytes:
        memory[:] = pattern
    assert flat_bytes(integers(array + mx.zeros_like(array))).nbytes == len(pattern)
    assert bytes(flat_bytes(integers(array))) == pattern


def test_nothing_unfilled() -> None:
    """No tensors are no arrays."""
    assert unfilled([]) == []


def test_views_end_with_the_context() -> None:
    """P1: no view of a snapshot outlives it, even if the caller keeps one."""
    with snapshot([filled(20)], range(20)) as taken:
        plan = layout(taken.schema, ImageSpec(ImageKind.SEGMENT, 0, 20))
        (views, _) = (taken.rows(extent) for extent in plan.extents)
        assert all(view.readonly for view in views)
    with pytest.raises(ValueError, match="released"):
        views[0].tobytes()


def test_no_copy_and_no_view_left() -> None:
    """P1: rows are MLX's own memory, and the next token is written in place afterwards."""
    cache = filled(20)
    address = np.array(cache.keys.view(mx.uint32), copy=False).ctypes.data
    with snapshot([cache], range(20)) as taken:
        extent = layout(taken.schema, ImageSpec(ImageKind.SEGMENT, 0, 20)).extents[0]
        first = np.frombuffer(taken.rows(extent)[0], dtype=np.uint8)
        assert first.ctypes.data == address
        del first
    _append_one(cache)
    assert np.array(cache.keys.view(mx.uint32), copy=False).ctypes.data == address


def test_restored_buffers_grow_in_place() -> None:
    """T2: the first token appended to a restored cache copies nothing: no view is left on it."""
    store = Store()
    store.put([filled(256)], range(256))
    (cache,) = store.take(256)
    assert cache.keys.shape[-2] == 512
    address = np.array(cache.keys.view(mx.uint32), copy=False).ctypes.data
    _append_one(cache)
    assert cache.keys.shape[-2] == 512
    assert np.array(cache.keys.view(mx.uint32), copy=False).ctypes.data == address


def test_copies_are_independent() -> None:
    """T2: what one taker does with its copy changes nothing for another."""
    store = Store()
    store.put([filled(20)], range(20))
    (first,), (second,) = store.take(20), store.take(20)
    first.keys[..., :20, :] = 0
    assert same_bits(store.take(20)[0].keys, second.keys)


def test_room_is_zeros() -> None:
    """Rows that no part fills are zeros, so that a mask of zeros makes nothing of them."""
    store = Store()
    store.put([filled(20)], range(20))
    (cache,) = store.take(13)
    assert not cache.keys[..., 13:, :].any().item()
    assert not cache.values[..., 13:, :].any().item()


def test_description_is_constant() -> None:
    """N4: the description has nothing in it that grows with the tokens."""
    with snapshot([filled(20)], range(20)) as short, snapshot([filled(300)], range(300)) as long:
        assert short.schema == long.schema
    assert json.loads(short.schema.description) == [{"class": "mlx_lm.models.cache.KVCache"}]


def test_transfers_join_and_keep_order() -> None:
    """Rows that stand side by side on both sides move together; the order is the ranges'."""
    ring = (Span(0, 2, 0), Span(10, 13, 5), Span(13, 16, 2))
    assert transfers(ring, packed([(0, 2), (10, 16)]), [(0, 2), (10, 16)]) == [
        (0, 0, 2), (5, 2, 3), (2, 5, 3)
    ]  # fmt: skip
    assert transfers(packed([(0, 9)]), packed([(0, 4), (4, 9)]), [(2, 8)]) == [(2, 2, 6)]


def _append_one(cache: KVCache) -> None:
    one = mx.ones((1, 2, 1, 8))
    mx.eval(one)
    cache.update_and_fetch(one, one)
    mx.eval(cache.keys, cache.values)
