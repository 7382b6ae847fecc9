"""Rotating caches, whose rows stand in several orders (rules T12 and T13)."""

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, trim_prompt_cache

from prefixcached.client.kv import UncuttableKvError, snapshot
from prefixcached.protocol.image import ImageKind, ImageSpec, WindowRows
from prefixcached.protocol.limits import WINDOW_EXTRA_ROWS
from tests.client.kv.loopback import Store, build, forward, prefill, same_bits
from tests.client.kv.test_loopback import assert_same_continuation
from tests.support import models

SIZE = 16


def rings(keep: int, size: int = SIZE) -> list[Any]:
    return [RotatingKVCache(max_size=size, keep=keep) for _ in range(2)]


@pytest.mark.parametrize("singles", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("prompt", [3, SIZE - 1, SIZE, SIZE + 1, 40])
@pytest.mark.parametrize("keep", [0, 4])
def test_every_order(keep: int, prompt: int, singles: int) -> None:
    """T12: full or not, rotated or not, with sinks or not, a ring continues bit for bit."""
    model, tokens = build("llama"), models.tokens("llama", 80)
    producer = rings(keep)
    end = prompt + singles
    prefill(model, producer, tokens[:end], boundaries=range(prompt, end))
    store = Store()
    store.put(producer, tokens[:end])
    for suffix in (1, 2, 16):
        restored, reference = store.take(end), copy.deepcopy(producer)
        assert restored[0].keys.shape[-2] == SIZE
        assert_same_continuation(model, reference, restored, tokens[end : end + suffix])


@pytest.mark.parametrize("position", [1, 6, 7, 19, 39])
def test_prefix_of_a_ring_that_is_not_full(position: int) -> None:
    """T13: a ring that has not overwritten anything can be cut anywhere."""
    model, tokens = build("llama"), models.tokens("llama", 80)
    producer = rings(keep=4, size=64)
    prefill(model, producer, tokens[:40])
    store = Store()
    store.put(producer, tokens[:40], cuts=(7, 20))
    trim_prompt_cache(producer, 40 - position)
    assert_same_continuation(model, producer, store.take(position), tokens[position : position + 9])


@pytest.mark.parametrize("keep", [0, 4])
def test_phase_is_kept_only_by_a_rotated_ring(keep: int) -> None:
    """T12: the phase is the write index of a ring that single tokens have overwritten."""
    model, tokens = build("llama"), models.tokens("llama", 80)
    producer = rings(keep)
    prefill(model, producer, tokens[:20])
    with snapshot(producer, tokens[:20]) as taken:
        assert taken.windows[0].phase == -1
    forward(model, producer, tokens[20:21])
    with snapshot(producer, tokens[:21]) as taken:
        assert taken.windows[0].phase == keep + 1
    forward(model, producer, tokens[21:24])
    with snapshot(producer, tokens[:24]) as taken:
        assert taken.windows[0].phase == -1


@pytest.mark.parametrize("keep", [0, 4])
def test_phase_is_ignored_below_the_end(keep: int) -> None:
    """T12: at an earlier position than the put's end, rows stand in temporal order."""
    model, tokens = build("llama"), models.tokens("llama", 80)
    producer = rings(keep)
    prefill(model, producer, tokens[:25], boundaries=range(20, 25))
    store = Store()
    store.put(producer, tokens[:25])
    restored = store.take(24)
    assert restored[0]._idx == SIZE
    stopped = rings(keep)
    prefill(model, stopped, tokens[:24], boundaries=range(20, 24))
    # Two tokens or more put the producer's ring in temporal order as well.
    assert_same_continuation(model, stopped, restored, tokens[24:26])


def test_rows_beyond_need() -> None:
    """T13: what a long update leaves behind is stored too, up to a limit."""
    for update in (20, WINDOW_EXTRA_ROWS + 50):
        cache = RotatingKVCache(max_size=SIZE, keep=2)
        rows = mx.random.normal((1, 1, 30 + update, 4))
        cache.update_and_fetch(rows[..., :30, :], rows[..., :30, :])
        cache.update_and_fetch(rows[..., 30:, :], rows[..., 30:, :])
        length = 30 + update
        with snapshot([cache], range(length)) as taken:
            needed = length - (SIZE - 2 - 1)
            extra = min(update, WINDOW_EXTRA_ROWS)
            assert taken.windows[0].ranges == ((0, 2), (needed - extra, length))


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("length", [SIZE, 40])
def test_filler_row_is_never_stored(keep: int, length: int) -> None:
    """T13: the row that a restored ring lacks stays unknown when that ring is put again."""
    model, tokens = build("llama"), models.tokens("llama", 80)
    producer = rings(keep)
    prefill(model, producer, tokens[:length])
    needed = SIZE - keep - 1
    rows = ((0, keep), (length - needed, length))[keep == 0 :]
    lean = Store()
    with snapshot(producer, tokens[:length]) as taken:
        lean.schema = taken.schema
        windows = (WindowRows(rows),)
        lean.add(taken, ImageSpec(ImageKind.SEGMENT, 0, length, windows=windows))
    restored = lean.take(length)
    again = Store()
    again.put(restored, tokens[:length])
    assert again.windows[0].ranges == rows
    assert_same_continuation(model, producer, again.take(length), tokens[40:41])


def test_a_cut_that_loses_rows_is_refused() -> None:
    """P1: a full ring cannot be cut where its rows are gone."""
    cache = RotatingKVCache(max_size=8)
    for _ in range(3):
        cache.update_and_fetch(mx.ones((1, 1, 6, 2)), mx.ones((1, 1, 6, 2)))
    for _ in range(9):
        cache.update_and_fetch(mx.ones((1, 1, 1, 2)), mx.ones((1, 1, 1, 2)))
    with pytest.raises(UncuttableKvError, match="window of 8 rows"):
        snapshot([cache], range(24))


def test_unfilled_ring_has_room() -> None:
    """T13: a short ring is restored with room, in steps, and never more than its size."""
    for size, length, rows in ((1024, 10, 256), (1024, 256, 512), (300, 270, 300), (300, 300, 300)):
        cache = RotatingKVCache(max_size=size)
        keys = mx.random.normal((1, 1, length, 4))
        cache.update_and_fetch(keys, keys)
        store = Store()
        store.put([cache], range(length))
        restored = store.take(length)[0]
        assert restored.keys.shape[-2] == rows
        assert restored._idx == length
        assert same_bits(restored.keys[..., :length, :], keys)
