"""Rows that were taken out of a batch are caches like any other (rules P1, T12)."""

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from prefixcached.client.kv import UnusableImageError
from tests.client.kv.loopback import Store, build, forward, prefill
from tests.client.kv.test_loopback import assert_same_continuation
from tests.support import models

SIZE = 16


@pytest.mark.parametrize("decoded", [0, 1, 3, 20])
@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(max_size=SIZE)])
def test_each_row_is_stored_by_itself(make: Any, decoded: int) -> None:
    """T12: what `extract` gives after a batch of unequal prompts continues bit for bit."""
    model = build("llama")
    prompts = [models.tokens("llama", count, seed=count) for count in (9, 30)]
    singles = []
    for prompt in prompts:
        singles.append([make() for _ in model.layers])
        prefill(model, singles[-1], prompt)
    batch = [type(caches[0]).merge(list(caches)) for caches in zip(*singles, strict=True)]
    for step in range(decoded):
        model(mx.array([[step + 2], [step + 5]]), cache=batch)
        mx.eval([cache.state for cache in batch])
    for row, prompt in enumerate(prompts):
        extracted = [cache.extract(row) for cache in batch]
        tokens = prompt + [step + (2, 5)[row] for step in range(decoded)]
        assert {int(cache.offset) for cache in extracted} == {len(tokens)}
        store = Store()
        assert store.put(extracted, tokens, cuts=(4,)) == len(tokens)
        for suffix in ([7], [7, 8], list(range(3, 19))):
            reference, restored = copy.deepcopy(extracted), store.take(len(tokens))
            assert_same_continuation(model, reference, restored, suffix)


def test_a_row_extends_what_another_began() -> None:
    """P2: a row of a batch extends the entry of a single prompt, and the other way round."""
    model, tokens = build("llama"), models.tokens("llama", 40)
    first = [KVCache() for _ in model.layers]
    prefill(model, first, tokens[:20])
    store = Store()
    store.put(first, tokens[:20])
    restored = store.take(20)
    other = [KVCache() for _ in model.layers]
    prefill(model, other, tokens[:9])
    pairs = zip(restored, other, strict=True)
    batch: list[Any] = [KVCache.merge(list(pair)) for pair in pairs]
    model(mx.array([[5], [6]]), cache=batch)
    mx.eval([cache.state for cache in batch])
    row = [cache.extract(0) for cache in batch]
    store.put(row, [*tokens[:20], 5])
    again = store.take(21)
    assert [cache.offset for cache in again] == [21] * len(again)
    assert forward(model, again, [7]).shape[1] == 1
    assert_same_continuation(model, row, store.take(21), tokens[30:33])


def test_what_stands_before_the_window_of_a_row_is_not_believed() -> None:
    """T13: a batch that computes prompts of unequal length leaves padding before their windows.

    mlx-lm never reads it; a prompt that leaves this one a little earlier would.
    """
    model = build("exaone4")
    prompts = [models.tokens("exaone4", count, seed=count) for count in (70, 23, 41, 9)]
    generator = BatchGenerator(model, prefill_batch_size=4, prefill_step_size=32)
    halves = [[prompt[: len(prompt) // 2], prompt[len(prompt) // 2 :]] for prompt in prompts]
    generator.insert_segments(segments=halves, max_tokens=[3] * len(prompts))
    extracted: list[tuple[list[int], list[Any]]] = []
    while (said := generator.next()) != ([], []):
        prompt_said, answer_said = said
        ended = [one.uid for one in prompt_said if one.end_of_segment and not one.end_of_prompt]
        extracted += [(list(key), kv) for kv, key in generator.extract_cache(ended).values()]
        finished: list[Any] = [one for one in answer_said if one.finish_reason]
        extracted += [(list(one.all_tokens), one.prompt_cache) for one in finished]
    assert len(extracted) >= 2 * len(prompts)
    usable = 0
    for tokens, kv in extracted:
        store = Store()
        store.put(kv, tokens)
        for length in range(1, len(tokens) + 1):
            try:
                restored = store.take(length)
            except UnusableImageError:
                continue  # its window is not there, so a daemon would not lend it
            alone = make_prompt_cache(model)
            prefill(model, alone, tokens[:length])
            expected, found = (forward(model, cache, [7]) for cache in (alone, restored))
            assert mx.allclose(expected, found, atol=1e-3).item(), (len(tokens), length)
            usable += 1
    assert usable >= len(extracted)
