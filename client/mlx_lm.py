"""mlx-lm's `generate` and `stream_generate` over the shared cache.

Nothing here outlives one generation. Bypassed, so that the answer stays right, are draft models,
logits processors (they would see only the tokens that are forwarded) and input embeddings (tokens
do not tell what was forwarded).
"""

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    GenerationResponse,
    generation_stream,
    maybe_quantize_kv_cache,
)
from mlx_lm.generate import stream_generate as plain_stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixcached.client.cache import Cache
from prefixcached.client.prompt_cache import FetchedKv, PromptCache

_PREFILL_STEP_SIZE: Final = 2048
"""mlx-lm's default."""

_KV_DEFAULTS: Final[dict[str, Any]] = {
    "max_kv_size": None,
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": DEFAULT_QUANTIZED_KV_START,
}
"""The options of mlx-lm that the format of KV depends on, and its defaults."""

_logger = logging.getLogger(__name__)

Responses = Generator[GenerationResponse, None, None]


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    *,
    cache: Cache | PromptCache | None = None,
    wait: float = 0.0,
    session: str | None = None,
    checkpoints: Iterable[int] = (),
    **options: Any,
) -> Responses:
    """Generate as `mlx_lm.stream_generate` does, reusing and sharing KV.

    The KV is shared when the prompt is done, all but its last token, and again at the end (or when
    the caller closes the generator), with the prompt and all yielded tokens. Trouble with the
    cache costs time, never the answer.

    Args:
        model: As mlx-lm's.
        tokenizer: As mlx-lm's.
        prompt: As mlx-lm's: text, or token ids.
        max_tokens: As mlx-lm's.
        draft_model: As mlx-lm's; the cache is bypassed then.
        cache: From `prefixcached.client.connect`, or a `PromptCache` of this very model, which
            saves reading the weights for each call. None generates as mlx-lm alone does.
        wait: Seconds to wait for a process that is computing this prompt right now.
        session: A name for the conversation.
        checkpoints: Further positions of the prompt at which to share the KV. Worth it for models
            with recurrent state, which can only be resumed where it was stored; the daemon leaves
            out one that is close behind another (`checkpoint_min_tokens`).
        **options: All others of `mlx_lm.generate.generate_step`, but ``prompt_cache``.

    Yields:
        mlx-lm's responses; ``prompt_tokens`` and progress count the whole prompt, and
        ``prompt_tps`` the tokens that were forwarded.

    Raises:
        ValueError: ``prompt_cache`` was given beside ``cache``, or options contradict ``cache``.
    """
    bypass = (
        draft_model is not None
        or bool(options.get("logits_processors"))
        or options.get("input_embeddings") is not None
    )
    tokens = [] if cache is None or bypass else _token_ids(tokenizer, prompt)
    if cache is not None and options.get("prompt_cache") is not None:
        raise ValueError("cache= brings its own caches: leave prompt_cache= out, or cache=")
    if cache is None or not tokens:
        return cast(
            Responses,
            plain_stream_generate(
                model, tokenizer, cast(Any, prompt), max_tokens, draft_model, **options
            ),
        )
    generation = _Generation(model, tokens, _prompt_cache(model, cache, options), session, options)
    return generation.run(tokenizer, max_tokens, wait, checkpoints)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int],
    verbose: bool = False,
    **options: Any,
) -> str:
    """Return the whole answer, as `mlx_lm.generate` does. Options as `stream_generate`."""
    text = ""
    response = None
    for response in stream_generate(model, tokenizer, prompt, **options):
        text += response.text
        if verbose:
            sys.stdout.write(response.text)
            sys.stdout.flush()
    if verbose and response is not None:
        sys.stdout.write(
            f"\n{'=' * 10}\n"
            f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {response.generation_tokens} tokens, "
            f"{response.generation_tps:.3f} tokens-per-sec\n"
            f"Peak memory: {response.peak_memory:.3f} GB\n"
        )
    return text


class _Generation:
    """One generation: its tokens, its caches, and what of them is shared already."""

    def __init__(
        self,
        model: nn.Module,
        tokens: list[int],
        shared: PromptCache,
        session: str | None,
        options: dict[str, Any],
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._shared = shared
        self._session = session
        self._options = options
        self._report: Callable[[int, int], None] = options.pop(
            "prompt_progress_callback", None
        ) or (lambda *_: None)
        self._kv = FetchedKv([], [])
        self._stored = 0
        self._thread = threading.get_ident()

    def run(
        self, tokenizer: Any, max_tokens: int, wait: float, checkpoints: Iterable[int]
    ) -> Responses:
        tokens, last = self._tokens, len(self._tokens) - 1
        self._kv, reused = self._shared.fetch(tokens, wait=wait, session=self._session)
        self._stored = done = reused
        for position in sorted(set(checkpoints)):
            if done < position < last:
                self._prefill(done, position)
                self._store(tokens[:position])
                done = position

        start = time.perf_counter()

        def progress(processed: int, total: int) -> None:
            self._report(done + processed, len(tokens))
            if processed == total - 1:
                self._shared.note_prefill(processed, time.perf_counter() - start)
                self._store(tokens[:last])

        responses = plain_stream_generate(
            self._model,
            tokenizer,
            mx.array(tokens[done:]),
            max_tokens,
            prompt_cache=self._kv,
            prompt_progress_callback=progress,
            **self._options,
        )
        produced: list[int] = []
        is_whole = False
        try:
            for response in responses:
                produced.append(response.token)
                yield dataclasses.replace(response, prompt_tokens=len(tokens))
            is_whole = True
        except GeneratorExit:
            is_whole = True
            raise
        finally:
            responses.close()
            # Arrays belong to the thread that made them; a collector may close us on another.
            if is_whole and threading.get_ident() == self._thread:
                self._store(tokens + produced)
            self._kv.drop_claim()

    def _prefill(self, start: int, end: int) -> None:
        """Forward tokens [start, end) as mlx-lm's `generate_step` does."""
        step = self._options.get("prefill_step_size", _PREFILL_STEP_SIZE)
        with mx.stream(self._options.get("stream", generation_stream)):
            while start < end:
                stop = min(start + step, end)
                self._report(start, len(self._tokens))
                self._model(mx.array(self._tokens[start:stop])[None], cache=self._kv)
                maybe_quantize_kv_cache(
                    self._kv,
                    self._options["quantized_kv_start"],
                    self._options["kv_group_size"],
                    self._options["kv_bits"],
                )
                mx.eval([cache.state for cache in self._kv])
                mx.clear_cache()
                start = stop

    def _store(self, tokens: list[int]) -> None:
        if len(tokens) <= self._stored:
            return
        self._stored = len(tokens)
        try:
            self._shared.store(tokens, self._kv, session=self._session)
        except ValueError as error:
            _logger.warning("the KV of %d tokens is not shared: %s", len(tokens), error)


def _prompt_cache(
    model: nn.Module, cache: Cache | PromptCache, options: dict[str, Any]
) -> PromptCache:
    """Return the `PromptCache` to use, and put its KV options into ``options``."""
    if not isinstance(cache, PromptCache):
        for name, default in _KV_DEFAULTS.items():
            options.setdefault(name, default)
        return PromptCache(model, cache=cache, **{name: options[name] for name in _KV_DEFAULTS})
    if cache.model is not model:
        raise ValueError("cache= was made for another model: make a PromptCache for this one")
    for name in _KV_DEFAULTS:
        if options.setdefault(name, getattr(cache, name)) != getattr(cache, name):
            raise ValueError(
                f"{name}={options[name]} contradicts the PromptCache, made with "
                f"{name}={getattr(cache, name)}"
            )
    return cache


def _token_ids(tokenizer: Any, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """Return the prompt's token ids as mlx-lm computes them."""
    if isinstance(prompt, mx.array):
        return cast(list[int], prompt.tolist())
    if not isinstance(prompt, str):
        return list(prompt)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    bos = tokenizer.bos_token
    encoded = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    return list(encoded)
