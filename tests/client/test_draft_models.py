"""Speculative decoding over the shared cache, against mlx-lm's own (issue 5, item 6; FIELD 2)."""

from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixcached.client import Cache, PromptCache, connect
from prefixcached.client.mlx_lm import stream_generate
from tests.client.kv.loopback import build, prefill, same_bits
from tests.client.test_generate import Session
from tests.support import models
from tests.support.daemon_process import DaemonProcess

COUNT = 12


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[Cache]:
    with connect(daemon.socket, fail_open=False) as connected:
        yield connected


def noisy(seed: int, noise: float = 0.02) -> Any:
    """A draft model that often agrees with "llama": its weights, a little changed."""
    mx.random.seed(seed)
    model = build("llama")
    draft = llama.Model(model.args)
    draft.update(model.parameters())
    projection = draft.model.layers[1].mlp.down_proj
    projection.weight = projection.weight + noise * mx.random.normal(projection.weight.shape)
    mx.eval(draft.parameters())
    return draft


@pytest.fixture
def session() -> Session:
    return Session("llama")


def told(responses: Any) -> list[tuple[int, bool]]:
    return [(response.token, response.from_draft) for response in responses]


def stock(session: Session, draft: Any, prompt: list[int], **options: Any) -> Any:
    """What mlx-lm alone answers."""
    options = {"max_tokens": COUNT} | options
    return told(
        mlx_lm.stream_generate(
            session.model, session.tokenizer, prompt, draft_model=draft, **options
        )
    )


def shared(
    session: Session, draft: Any, prompt: list[int], **options: Any
) -> tuple[list[tuple[int, bool]], int]:
    """Return the answer and how much of the prompt the model reused."""
    seen: list[tuple[int, int]] = []
    responses = list(
        stream_generate(
            session.model,
            session.tokenizer,
            prompt,
            draft_model=draft,
            prompt_progress_callback=lambda *step: seen.append(step),
            **cast(Any, {"max_tokens": COUNT} | options),
        )
    )
    assert {total for _, total in seen} == {len(prompt)}
    assert seen[-1] == (len(prompt), len(prompt))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {response.prompt_tokens for response in responses} == {len(prompt)}
    return told(responses), seen[0][0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_answers_as_mlx_lm_alone(cache: Cache, session: Session, count: int) -> None:
    """DESIGN 6: cold and resumed, tokens are mlx-lm's, the drafted ones drafted alike."""
    draft = noisy(1)
    expected = stock(session, draft, session.prompt, num_draft_tokens=count)
    assert {from_draft for _, from_draft in expected} == {True, False}
    for reused in (0, 59):
        answer = shared(session, draft, session.prompt, cache=cache, num_draft_tokens=count)
        assert answer == (expected, reused)


@pytest.mark.parametrize("end", ["length", "closed", "stop"])
@pytest.mark.parametrize("noise", [0.0, 0.02, 10.0])
def test_what_is_stored_is_right(cache: Cache, session: Session, noise: float, end: str) -> None:
    """FIELD 2: no rejected token's KV is stored, however the answer ends and whoever drafts."""
    draft = noisy(1, noise)
    plain = [token for token, _ in stock(session, draft, session.prompt)]
    if end == "stop":
        last = max(plain.index(token) for token in plain)
        session.tokenizer = TokenizerWrapper(session.tokenizer, eos_token_ids=[plain[last]])
    responses = stream_generate(
        session.model, session.tokenizer, session.prompt, COUNT, draft, cache=cache
    )
    answer = []
    for response in responses:
        answer.append(response.token)
        if end == "closed" and len(answer) == 7:
            responses.close()
    assert answer == plain[: len(answer)]
    turn = [*session.prompt, *answer, 9, 9, 9]
    for model in (session.model, draft):
        kv, reused = PromptCache(model, cache=cache).fetch(turn)
        # At most the last token, and in the draft model the one before, are not covered.
        assert len(session.prompt) + len(answer) - 2 <= reused <= len(session.prompt) + len(answer)
        reference = make_prompt_cache(model)
        prefill(model, reference, turn[:reused], boundaries=(59,))
        for restored, fresh in zip(kv, reference, strict=True):
            assert restored.offset == reused
            difference = restored.keys[..., :reused, :] - fresh.keys[..., :reused, :]
            assert np.abs(np.array(difference)).max() < 1e-4
        assert same_bits(kv[0].keys[..., :59, :], reference[0].keys[..., :59, :])


def test_the_models_own_kv_serves_everybody(cache: Cache, session: Session) -> None:
    """N2: a draft model decides nothing about the model's KV, and its own is its own."""
    draft, other = noisy(1), noisy(2)
    shared(session, draft, session.prompt, cache=cache)
    assert session.shared(session.prompt, max_tokens=3, cache=cache)[1] == 59
    expected = stock(session, other, session.prompt)
    assert PromptCache(other, cache=cache).fetch(session.prompt)[1] == 0
    # The other draft model computes its own KV, the model reuses its own.
    assert shared(session, other, session.prompt, cache=cache) == (expected, 59)
    assert PromptCache(other, cache=cache).fetch(session.prompt)[1] == 59
    assert PromptCache(draft, cache=cache).fetch(session.prompt)[1] == 59


def test_prompt_caches_are_given(cache: Cache, session: Session) -> None:
    """DESIGN 6: `cache` and `draft_cache` may be PromptCaches, of these very models."""
    draft = noisy(1)
    options: dict[str, Any] = {
        "cache": PromptCache(session.model, cache=cache),
        "draft_cache": PromptCache(draft, cache=cache),
    }
    expected = stock(session, draft, session.prompt)
    for reused in (0, 59):
        assert shared(session, draft, session.prompt, **options) == (expected, reused)
    with pytest.raises(ValueError, match="another model"):
        shared(session, noisy(2), session.prompt, **options)


def test_checkpoints_and_a_single_token(cache: Cache, session: Session) -> None:
    """DESIGN 6: positions of the prompt are shared for both models; one token is a prompt."""
    draft = noisy(1)
    shared(session, draft, session.prompt, cache=cache, checkpoints=[20, 40])
    for model in (session.model, draft):
        assert PromptCache(model, cache=cache).fetch([*session.prompt[:40], 1, 1])[1] == 40
    assert shared(session, draft, [5], cache=cache) == (stock(session, draft, [5]), 0)


def test_nested_caches(cache: Cache) -> None:
    """DESIGN 6: lists of caches are rewound as well, and stored."""
    session = Session("deepseek_v32")
    draft = models.build("deepseek_v32", seed=1)
    expected = stock(session, draft, session.prompt)
    for reused in (0, 59):
        assert shared(session, draft, session.prompt, cache=cache) == (expected, reused)


@pytest.mark.parametrize("start", [0, 40, 62, 66, 70])
def test_quantised(cache: Cache, session: Session, start: int) -> None:
    """N4: quantised before, in or after the answer, tokens are mlx-lm's; nothing stale stays."""
    draft = noisy(1)
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    expected = stock(session, draft, session.prompt, **options)
    for reused in (0, 59):
        answer = shared(session, draft, session.prompt, cache=cache, **options)
        assert answer == (expected, reused)
    turn = [*session.prompt, *(token for token, _ in expected), 9]
    end = len(session.prompt) + COUNT
    for model in (session.model, draft):
        reused = PromptCache(model, cache=cache, **options).fetch(turn)[1]
        if start < 60:
            assert end - 2 <= reused <= end
        else:
            # What turned quantised within mlx-lm is not in our hands.
            assert reused == 59
        assert PromptCache(model, cache=cache).fetch(turn)[1] == (0 if start < 60 else 59)


def test_processors_with_a_draft_model(cache: Cache, session: Session) -> None:
    """FIELD 2: processors see the whole prompt, of which mlx-lm alone shows them one token."""
    draft = noisy(1)
    forbidden = mx.array([session.plain(session.prompt, max_tokens=1)[0]])

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        assert mx.array_equal(tokens[:60], mx.array(session.prompt))
        logits[..., forbidden] = -mx.inf
        return logits

    options: dict[str, Any] = {"logits_processors": [processor]}
    expected = session.plain(session.prompt, max_tokens=COUNT, **options)
    for reused in (0, 59):
        answer, done = shared(session, draft, session.prompt, cache=cache, **options)
        assert ([token for token, _ in answer], done) == (expected, reused)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma4", "6 caches for 10 layers"),
        ("afm7", "8 caches for 16 layers"),
        ("iquestloopcoder", "4 caches for 2 layers"),
        ("exaone4", "RotatingKVCache"),
        ("llama4", "ChunkedKVCache"),
        ("qwen3_next", "ArraysCache"),
    ],
)
def test_models_that_are_refused(cache: Cache, session: Session, name: str, words: str) -> None:
    """FIELD 2: where mlx-lm's speculation is wrong, a draft model is a ValueError that says so."""
    unfit = build(name)
    for model, draft in ((unfit, session.model), (session.model, unfit)):
        with pytest.raises(ValueError, match=words) as told:
            stream_generate(model, session.tokenizer, [1, 2], draft_model=draft, cache=cache)
        assert "leave draft_model= out" in str(told.value)


def test_sizes_of_rings(cache: Cache) -> None:
    """FIELD 2: `max_kv_size` is ignored as mlx-lm does; a PromptCache made with it is refused."""
    session = Session("olmo2")
    draft = models.build("olmo2", seed=1)
    expected = stock(session, draft, session.prompt, max_kv_size=16)
    assert shared(session, draft, session.prompt, cache=cache, max_kv_size=16) == (expected, 0)
    ring = PromptCache(session.model, cache=cache, max_kv_size=16)
    with pytest.raises(ValueError, match="RotatingKVCache"):
        shared(session, draft, session.prompt, cache=ring)
