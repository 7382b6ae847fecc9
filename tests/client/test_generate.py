"""`generate` and `stream_generate`: mlx-lm's answers, with KV from a real daemon (DESIGN 6)."""

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixcached.client import Cache, connect, generation
from prefixcached.client.mlx_lm import generate, stream_generate
from prefixcached.client.prompt_cache import PromptCache
from tests.client.kv.loopback import build, prefill
from tests.client.word_tokenizer import word_tokenizer
from tests.support import models
from tests.support.daemon_process import DaemonProcess


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[Cache]:
    with connect(daemon.socket, fail_open=False) as connected:
        yield connected


class Session:
    """One tiny model and its prompts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = build(name)
        self.tokenizer = word_tokenizer(models.vocab_size(name))
        self.prompt = models.tokens(name, 60)

    def plain(self, prompt: list[int], **options: Any) -> list[int]:
        responses = mlx_lm.stream_generate(self.model, self.tokenizer, prompt, **options)
        return [response.token for response in responses]

    def shared(self, prompt: list[int], **options: Any) -> tuple[list[int], int]:
        """Return the answer's tokens and how many of the prompt's were reused."""
        seen: list[tuple[int, int]] = []

        def progress(processed: int, total: int) -> None:
            seen.append((processed, total))

        responses = list(
            stream_generate(
                self.model, self.tokenizer, prompt, prompt_progress_callback=progress, **options
            )
        )
        assert {total for _, total in seen} == {len(prompt)}
        assert [processed for processed, _ in seen] == sorted(processed for processed, _ in seen)
        assert seen[-1] == (len(prompt), len(prompt))
        assert {response.prompt_tokens for response in responses} == {len(prompt)}
        return [response.token for response in responses], seen[0][0]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma4", "llama4"])
def test_conversation(cache: Cache, name: str) -> None:
    """T1: a second run reuses all but one token, and a next turn the answer as well."""
    session = Session(name)
    first = session.plain(session.prompt, max_tokens=6)
    assert session.shared(session.prompt, max_tokens=6, cache=cache) == (first, 0)
    assert session.shared(session.prompt, max_tokens=6, cache=cache) == (first, 59)
    turn = [*session.prompt, *first, 5, 6, 7]
    second, reused = session.shared(turn, max_tokens=6, cache=cache)
    assert reused == 66
    # What the shared cache resumes, mlx-lm alone resumes alike.
    kv = make_prompt_cache(session.model)
    assert session.plain(session.prompt, max_tokens=6, prompt_cache=kv) == first
    assert session.plain(turn[66:], max_tokens=6, prompt_cache=kv) == second


def test_stop_token_is_stored(cache: Cache) -> None:
    """FIELD 2: the stored KV ends with the stop token."""
    session = Session("llama")
    first = session.plain(session.prompt, max_tokens=6)
    # The last token that appears for the first time ends the answer.
    end = max(first.index(token) for token in first)
    session.tokenizer = TokenizerWrapper(session.tokenizer, eos_token_ids=[first[end]])
    answer, _ = session.shared(session.prompt, max_tokens=6, cache=cache)
    assert answer == first[: end + 1]
    prompt = [*session.prompt, *answer, 9]
    assert session.shared(prompt, max_tokens=1, cache=cache)[1] == len(prompt) - 1


def test_caller_stops_early(cache: Cache) -> None:
    """FIELD 2: closing the generator stores the prompt and what was yielded."""
    session = Session("llama")
    responses = stream_generate(
        session.model, session.tokenizer, session.prompt, max_tokens=50, cache=cache
    )
    yielded = [next(responses).token for _ in range(4)]
    responses.close()
    assert session.shared([*session.prompt, *yielded, 9], max_tokens=1, cache=cache)[1] == 64


def test_another_thread_may_generate(cache: Cache) -> None:
    """FIELD 2: the answer is shared by the thread that computes it, whoever asked for it."""
    session = Session("llama")
    responses = stream_generate(
        session.model, session.tokenizer, session.prompt, max_tokens=6, cache=cache
    )
    answer: list[int] = []
    thread = threading.Thread(
        target=lambda: answer.extend(response.token for response in responses)
    )
    thread.start()
    thread.join()
    assert session.shared([*session.prompt, *answer, 9], max_tokens=1, cache=cache)[1] == 66


def test_failure_in_between_stores_no_answer(cache: Cache) -> None:
    """P4: an error of the caller's passes through, and only the prompt was stored."""
    session = Session("llama")
    responses = stream_generate(
        session.model, session.tokenizer, session.prompt, max_tokens=50, cache=cache
    )
    token = next(responses).token
    with pytest.raises(KeyError):
        responses.throw(KeyError("caller"))
    assert session.shared([*session.prompt, token, 9], max_tokens=1, cache=cache)[1] == 59


def test_failure_in_the_prompt_drops_the_claim(cache: Cache) -> None:
    """Q1: who fails to compute a prompt keeps nobody waiting, even where the error is kept."""
    session = Session("llama")
    prompt = models.tokens("llama", 600)

    def progress(processed: int, total: int) -> None:
        assert cache.statistics().claims == 1
        raise KeyError(processed, total)

    responses = stream_generate(
        session.model, session.tokenizer, prompt, cache=cache, prompt_progress_callback=progress
    )
    with pytest.raises(KeyError) as kept:
        next(responses)
    assert cache.statistics().claims == 0
    assert kept.value.args == (0, 600)


@pytest.mark.parametrize("step", [7, 2048])
def test_checkpoints(cache: Cache, step: int) -> None:
    """DESIGN 6: further positions are shared, where a recurrent model can be resumed."""
    session = Session("qwen3_next")
    options: dict[str, Any] = {"max_tokens": 4, "cache": cache, "prefill_step_size": step}
    session.shared(session.prompt, checkpoints=[40, 20, 200, 0, 59], **options)
    for shared in (20, 40):
        branch = [*session.prompt[:shared], 3, 3, 3]
        kv = make_prompt_cache(session.model)
        ends = [*range(step, 20, step), 20, *range(20 + step, shared, step)]
        prefill(session.model, kv, branch[:shared], ends)
        expected = session.plain(branch[shared:], max_tokens=4, prompt_cache=kv)
        assert session.shared(branch, **options) == (expected, shared)


def test_quantised(cache: Cache) -> None:
    """N4: with kv_bits, prompts shorter and longer than the start are reused alike."""
    session = Session("llama")
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 50}
    for length in (30, 60):
        prompt = session.prompt[:length]
        expected = session.plain(prompt, max_tokens=5, **options)
        assert session.shared(prompt, max_tokens=5, cache=cache, **options)[0] == expected
        assert session.shared(prompt, max_tokens=5, cache=cache, **options)[1] == length - 1


def test_rings_of_a_given_size(cache: Cache) -> None:
    """T13: with `max_kv_size`, a ring that prompt and answer overran is resumed as mlx-lm's own."""
    session = Session("olmo2")
    options: dict[str, Any] = {"max_kv_size": 32, "max_tokens": 6}
    first = session.plain(session.prompt, **options)
    for reused in (0, 59):
        assert session.shared(session.prompt, cache=cache, **options) == (first, reused)
    turn = [*session.prompt, *first, 5, 6, 7]
    told = session.shared(turn, cache=cache, **options)
    kv = make_prompt_cache(session.model, max_kv_size=32)
    assert isinstance(kv[0], RotatingKVCache)
    assert session.plain(session.prompt, prompt_cache=kv, **options) == first
    assert told == (session.plain(turn[66:], prompt_cache=kv, **options), 66)
    # Another size is another format.
    options["max_kv_size"] = 40
    assert session.shared(session.prompt, cache=cache, **options)[1] == 0


def test_without_a_daemon(tmp_path: Path) -> None:
    """C4: with no daemon, generation is plain mlx-lm's."""
    session = Session("llama")
    expected = session.plain(session.prompt, max_tokens=5)
    with connect(tmp_path / "nobody") as nobody:
        assert session.shared(session.prompt, max_tokens=5, cache=nobody) == (expected, 0)


def test_a_process_that_sleeps_for_days_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: however long a prefill seems to have taken, it is no reason to end a generation."""
    session = Session("llama")
    expected = session.plain(session.prompt, max_tokens=5)
    days = itertools.count(0, 90_000)
    monkeypatch.setattr(
        generation,
        "time",
        SimpleNamespace(perf_counter=lambda: float(next(days)), monotonic=time.monotonic),
    )
    with connect(tmp_path / "nobody") as nobody:
        assert session.shared(session.prompt, max_tokens=5, cache=nobody) == (expected, 0)


def test_daemon_killed_in_between(daemon: DaemonProcess) -> None:
    """DESIGN 1.2: a daemon that dies during a generation costs nothing but the store."""
    session = Session("llama")
    expected = session.plain(session.prompt, max_tokens=5)
    with connect(daemon.socket) as cache:
        responses = stream_generate(
            session.model, session.tokenizer, session.prompt, max_tokens=5, cache=cache
        )
        first = next(responses).token
        daemon.kill()
        assert [first, *(response.token for response in responses)] == expected


def test_input_embeddings_bypass_the_cache(cache: Cache) -> None:
    """DESIGN 6: tokens do not tell what was forwarded, so nothing is looked up or shared."""
    session = Session("llama")
    embeddings = session.model.model.embed_tokens(mx.array(session.prompt[::-1]))
    options: dict[str, Any] = {"max_tokens": 5, "input_embeddings": embeddings}
    expected = session.plain(session.prompt, **options)
    for _ in range(2):
        told = session.shared(session.prompt, cache=cache, **options)
        assert told == (expected, 0)
    assert PromptCache(session.model, cache=cache).fetch(session.prompt)[1] == 0


def test_text_and_verbose(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    """DESIGN 6: `generate` takes text, returns text, and tells what mlx-lm tells."""
    session = Session("llama")
    text = " ".join(map(str, session.prompt))
    expected = mlx_lm.generate(session.model, session.tokenizer, text, max_tokens=5)
    for verbose in (False, True):
        told = generate(session.model, session.tokenizer, text, verbose, max_tokens=5, cache=cache)
        assert told == expected
    printed = capsys.readouterr().out
    assert expected in printed
    assert "Prompt: 60 tokens" in printed
    assert generate(session.model, session.tokenizer, text, max_tokens=5) == expected


def test_prompt_cache_object(cache: Cache) -> None:
    """DESIGN 6: a `PromptCache` saves reading the weights, and its settings count."""
    session = Session("llama")
    shared = PromptCache(session.model, cache=cache, kv_bits=8, kv_group_size=32)
    expected = session.plain(
        session.prompt, max_tokens=5, kv_bits=8, kv_group_size=32, quantized_kv_start=0
    )
    assert session.shared(session.prompt, max_tokens=5, cache=shared) == (expected, 0)
    assert session.shared(session.prompt, max_tokens=5, cache=shared) == (expected, 59)
    # The default of mlx-lm's, as whoever wraps it passes on.
    assert session.shared(session.prompt, max_tokens=5, cache=shared, prompt_cache=None)[1] == 59
    with pytest.raises(ValueError, match="kv_bits=4 contradicts"):
        stream_generate(session.model, session.tokenizer, [1, 2], cache=shared, kv_bits=4)
    with pytest.raises(ValueError, match="another model"):
        stream_generate(build("llama4"), session.tokenizer, [1, 2], cache=shared)
    with pytest.raises(ValueError, match="prompt_cache="):
        stream_generate(session.model, session.tokenizer, [1, 2], cache=shared, prompt_cache=[])


def test_a_cache_that_is_closed_in_the_middle_of_an_answer(daemon: DaemonProcess) -> None:
    """DESIGN 1.2: the answer goes on; it is only not shared."""
    session = Session("llama")
    with connect(daemon.socket) as cache:
        responses = stream_generate(
            session.model, session.tokenizer, session.prompt, max_tokens=5, cache=cache
        )
        answer = [next(responses).token]
    answer += [response.token for response in responses]
    assert answer == session.plain(session.prompt, max_tokens=5)


def test_trouble_in_storing_is_logged(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """DESIGN 1.2: KV that cannot be stored costs a log line, never the answer."""
    session = Session("llama")
    expected = session.plain(session.prompt, max_tokens=5)
    shared = PromptCache(session.model, cache=cache)

    def progress(processed: int, total: int) -> None:
        if processed == total:
            # What a broken model might do: one layer forgets a part of the prompt.
            kv[0].trim(30)

    kv, _ = shared.fetch(session.prompt)
    original = shared.fetch
    shared.fetch = lambda *_, **__: (kv, 0)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        responses = stream_generate(
            session.model,
            session.tokenizer,
            session.prompt,
            max_tokens=5,
            cache=shared,
            prompt_progress_callback=progress,
        )
        assert next(responses).token == expected[0]
        responses.close()
    shared.fetch = original  # type: ignore[method-assign]
    assert "is not shared" in caplog.text
