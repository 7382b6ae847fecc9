"""`PromptCache`: one model's namespaces, with a real daemon (rules N2 to N4)."""

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from prefixcached.client import Cache, Declined, connect
from prefixcached.client.kv import UnsupportedCacheError
from prefixcached.client.prompt_cache import PromptCache
from tests.client.kv.loopback import build, prefill, same_bits
from tests.client.test_fingerprint import model as other_model
from tests.support import models
from tests.support.daemon_process import DaemonProcess

TOKENS = models.tokens("llama", 600)


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[Cache]:
    with connect(daemon.socket, fail_open=False) as connected:
        yield connected


def test_a_miss_is_usable(tmp_path: Path) -> None:
    """DESIGN 6: without a daemon, fetch gives fresh caches and store is declined."""
    shared = PromptCache(build("olmo2"), cache=connect(tmp_path / "nobody"), max_kv_size=16)
    kv, reused = shared.fetch(TOKENS)
    assert reused == 0
    assert [(type(c), c.max_size) for c in kv] == [(RotatingKVCache, 16)] * 4
    tokens = models.tokens("olmo2", 20)
    prefill(shared.model, kv, tokens)
    assert shared.store(tokens, kv) == Declined(reason="no-daemon")


def test_fetch_what_was_stored(cache: Cache) -> None:
    """T1, T3: another PromptCache of the same model gets the longest prefix but the last token."""
    shared = PromptCache(build("llama"), cache=cache)
    kv, _ = shared.fetch(TOKENS)
    prefill(shared.model, kv, TOKENS)
    assert shared.store(TOKENS, kv)
    again, reused = PromptCache(build("llama"), cache=cache).fetch(TOKENS)
    assert reused == len(TOKENS) - 1
    assert same_bits(again[0].keys[..., :reused, :], kv[0].keys[..., :reused, :])
    assert PromptCache(build("llama"), cache=cache).fetch([*TOKENS[:300], 1])[1] == 300


def test_other_models_and_salts_miss(cache: Cache) -> None:
    """N1: another model, salt or KV format never sees what one of them stored."""
    shared = PromptCache(build("llama"), cache=cache, salt="a")
    kv, _ = shared.fetch(TOKENS[:20])
    prefill(shared.model, kv, TOKENS[:20])
    assert shared.store(TOKENS[:20], kv)
    assert shared.fetch(TOKENS[:20])[1] == 19
    for other in (
        PromptCache(build("llama"), cache=cache),
        PromptCache(build("llama"), cache=cache, salt="b"),
        PromptCache(other_model(), cache=cache, salt="a"),
    ):
        assert other.fetch(TOKENS[:20])[1] == 0


def test_max_kv_size_counts_where_the_model_uses_it(cache: Cache) -> None:
    """N2: rotating and plain caches of one model are apart; a size that a model ignores is not."""
    for name, expected in (("olmo2", 0), ("llama", 19)):
        shared, tokens = PromptCache(build(name), cache=cache), models.tokens(name, 20)
        kv = shared.fresh()
        prefill(shared.model, kv, tokens)
        assert shared.store(tokens, kv)
        sized = PromptCache(build(name), cache=cache, max_kv_size=64)
        assert sized.fetch(tokens)[1] == expected


def test_quantised_and_plain_kv_of_one_prompt(cache: Cache) -> None:
    """N4: KV is stored under the format it has, and a take tries the quantised one first."""
    shared = PromptCache(
        build("llama"), cache=cache, kv_bits=8, kv_group_size=32, quantized_kv_start=100
    )
    kv, _ = shared.fetch(TOKENS)
    prefill(shared.model, kv, TOKENS[:80])
    assert shared.store(TOKENS[:80], kv)
    kv, reused = shared.fetch(TOKENS[:200])
    assert (reused, type(kv[0])) == (80, KVCache)
    prefill(shared.model, kv, TOKENS[80:150])
    quantised = [entry.to_quantized(group_size=32, bits=8) for entry in kv]
    assert shared.store(TOKENS[:150], quantised)
    kv, reused = shared.fetch(TOKENS)
    assert (reused, type(kv[0])) == (150, QuantizedKVCache)
    # Below the start no cache would be quantised yet: what is quantised there is not usable.
    kv, reused = shared.fetch([*TOKENS[:90], 1, 1, *TOKENS[92:150]])
    assert (reused, type(kv[0])) == (80, KVCache)
    # Plain KV carries no quantisation: whoever wants plain KV shares it.
    assert PromptCache(build("llama"), cache=cache).fetch(TOKENS[:80])[1] == 79
    others = PromptCache(
        build("llama"), cache=cache, kv_bits=8, kv_group_size=32, quantized_kv_start=120
    )
    assert others.fetch(TOKENS)[1] == 80


def test_what_mlx_lm_replaces_is_not_kept(cache: Cache) -> None:
    """Quantising replaces the caches of the list: the plain ones leave memory with it."""
    shared = PromptCache(
        build("llama"), cache=cache, kv_bits=8, kv_group_size=32, quantized_kv_start=100
    )
    kv, _ = shared.fetch(TOKENS)
    prefill(shared.model, kv, TOKENS[:80])
    assert shared.store(TOKENS[:80], kv)
    kv, reused = shared.fetch(TOKENS[:120])
    assert reused == 80
    plain = [weakref.ref(entry) for entry in kv]
    prefill(shared.model, kv, TOKENS[80:120])
    maybe_quantize_kv_cache(kv, 100, 32, 8)
    assert isinstance(kv[0], QuantizedKVCache)
    gc.collect()
    assert [one() for one in plain] == [None] * len(plain)


def test_a_claim_lives_as_long_as_the_caches(cache: Cache) -> None:
    """Q1: who fetched a long prompt claims it until it is stored, dropped or given up."""
    shared = PromptCache(build("llama"), cache=cache)
    kv, _ = shared.fetch(TOKENS)
    assert cache.statistics().claims == 1
    copied = copy.deepcopy(kv)
    assert type(copied) is list
    del kv
    assert cache.statistics().claims == 0
    kv, _ = shared.fetch(TOKENS)
    kv.drop_claim()
    assert cache.statistics().claims == 0
    kv, _ = shared.fetch(TOKENS)
    prefill(shared.model, kv, TOKENS[:-1])
    assert cache.statistics().claims == 1
    assert shared.store(TOKENS[:-1], kv)
    assert cache.statistics().claims == 0


def test_a_quantised_prompt_is_claimed_once(cache: Cache) -> None:
    """Q1, N4: of the two formats that are asked for, the one that will be stored is claimed."""
    shared = PromptCache(build("llama"), cache=cache, kv_bits=8, quantized_kv_start=100)
    kv, _ = shared.fetch(TOKENS)
    assert cache.statistics().claims == 1
    prefill(shared.model, kv, TOKENS[:-1])
    quantised = [entry.to_quantized(group_size=64, bits=8) for entry in kv]
    assert shared.store(TOKENS[:-1], quantised)
    assert cache.statistics().claims == 0


@pytest.mark.parametrize("name", ["qwen3_next", "exaone4", "deepseek_v32"])
def test_other_kinds(cache: Cache, name: str) -> None:
    """T5: hybrid, windowed and nested caches go through the daemon and continue alike."""
    shared = PromptCache(build(name), cache=cache)
    tokens = models.tokens(name, 40)
    kv = make_prompt_cache(shared.model)
    prefill(shared.model, kv, tokens[:30])
    assert shared.store(tokens[:30], kv)
    restored, reused = shared.fetch(tokens)
    assert reused == 30
    left = shared.model(mx.array(tokens[30:])[None], cache=kv)
    assert same_bits(left, shared.model(mx.array(tokens[30:])[None], cache=restored))


def test_caches_that_cannot_be_stored(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """P1: an unsuitable class is an error for who stores it, and a model of such classes works."""

    class Foreign(KVCache):  # type: ignore[misc]
        """Holds what is neither an array nor a plain value."""

        def __init__(self) -> None:
            super().__init__()
            self.owner = object()

    shared = PromptCache(build("llama"), cache=cache)
    with pytest.raises(UnsupportedCacheError, match="owner"):
        shared.store(TOKENS[:5], [Foreign()])
    model: Any = other_model()
    model.make_cache = lambda: [Foreign()]
    with caplog.at_level(logging.WARNING):
        foreign = PromptCache(model, cache=cache)
    assert "owner" in caplog.text
    kv, reused = foreign.fetch(TOKENS)
    assert (type(kv[0]), reused) == (Foreign, 0)
    assert foreign.store(TOKENS[:5], kv) == Declined(reason="disabled")


def test_one_rank_of_several(cache: Cache) -> None:
    """N3: a model that is spread over several machines bypasses the cache."""
    model = other_model()
    model.model.pipeline_size = 2
    shared = PromptCache(model, cache=cache)
    assert shared.fetch([1, 2, 3])[1] == 0
    assert shared.store([1, 2, 3], make_prompt_cache(model)) == Declined(reason="disabled")


WINDOWED = ("exaone4", "gemma3n", "gemma4", "iquestloopcoder", "llama4", "mimo_v2_flash")


@pytest.mark.parametrize("name", WINDOWED)
def test_the_start_of_a_longer_prompt_is_stored_too(cache: Cache, name: str) -> None:
    """P2, Q3: a shared start that is stored after a prompt that goes on with it is resumed."""
    shared = PromptCache(build(name), cache=cache)
    tokens = models.tokens(name, 100)
    for length in (100, 50):
        kv = shared.fresh()
        prefill(shared.model, kv, tokens[:length])
        assert shared.store(tokens[:length], kv)
    restored, reused = shared.fetch([*tokens[:50], 1])
    assert reused == 50
    left = shared.model(mx.array([[1]]), cache=kv)
    assert mx.allclose(left, shared.model(mx.array([[1]]), cache=restored), atol=1e-3).item()
