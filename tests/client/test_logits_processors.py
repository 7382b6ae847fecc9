"""Logits processors with reused tokens (FIELD 2): the answer is that of the whole prompt."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from prefixcached.client import Cache, connect
from tests.client.kv.loopback import forward, prefill
from tests.client.test_generate import Session
from tests.support import models
from tests.support.daemon_process import DaemonProcess

SHARED = 40
COUNT = 8


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[Cache]:
    with connect(daemon.socket, fail_open=False) as connected:
        yield connected


def decode(
    model: Any, kv: list[Any], prompt: Sequence[int], covered: int, visible: int
) -> list[int]:
    """Resume ``kv`` in this process; processors see the tokens from position ``visible`` on."""
    processors = make_logits_processors(repetition_penalty=1.7, repetition_context_size=200)
    prefill(model, kv, prompt[covered:-1])
    tokens = list(prompt)
    while len(tokens) < len(prompt) + COUNT:
        logits = forward(model, kv, tokens[-1:])[:, -1, :]
        for processor in processors:
            logits = processor(mx.array(tokens[visible:]), logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        tokens += np.array(mx.argmax(logprobs, axis=-1)).tolist()
    return tokens[len(prompt) :]


def test_repetition_penalty(cache: Cache) -> None:
    """FIELD 2: five prompts answer as in one process that resumes the same chunks."""
    # A vocabulary of 100, so that the shared tokens are among those that would be sampled.
    session = Session("mixtral")
    trunk = models.tokens("mixtral", 60)
    prompts = [trunk] + [
        trunk[:SHARED] + models.tokens("mixtral", 20, seed=seed) for seed in range(1, 5)
    ]
    kept = make_prompt_cache(session.model)
    prefill(session.model, kept, trunk[:-1])
    depends_on_reused = False
    for prompt in prompts:
        covered = 0 if prompt is trunk else SHARED
        kv = [] if prompt is trunk else copy.deepcopy(kept)
        trim_prompt_cache(kv, len(trunk) - 1 - covered)
        kv = kv or make_prompt_cache(session.model)
        expected = decode(session.model, copy.deepcopy(kv), prompt, covered, 0)
        depends_on_reused |= expected != decode(session.model, kv, prompt, covered, covered)
        processors = make_logits_processors(repetition_penalty=1.7, repetition_context_size=200)
        told = session.shared(prompt, max_tokens=COUNT, cache=cache, logits_processors=processors)
        assert told == (expected, covered)
    # Else the test would pass without the reused tokens as well.
    assert depends_on_reused


@pytest.mark.parametrize("checkpoints", [(), (20, 30)])
def test_processors_see_every_token_once(cache: Cache, checkpoints: tuple[int, ...]) -> None:
    """FIELD 2: a processor sees prompt and answer, whatever was reused or computed ahead."""
    session = Session("llama")
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        assert tokens.dtype in (mx.int32, mx.int64)
        seen.append(np.array(tokens).tolist())
        return logits

    for reused in (0, 59):
        seen.clear()
        told = session.shared(
            session.prompt,
            max_tokens=4,
            cache=cache,
            checkpoints=checkpoints,
            logits_processors=[processor],
        )
        assert told[1] == reused
        assert seen[0] == session.prompt
        assert [len(tokens) for tokens in seen] == list(range(60, 60 + len(seen)))
        assert seen[3] == session.prompt + told[0][:3]
