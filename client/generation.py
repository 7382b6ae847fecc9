"""One generation over the shared cache: what of its prompt is reused, computed and shared.

A `Generation` owns its `Side`s: the model's caches and, in speculative decoding, the draft model's
beside them. Nothing outlives one generation. mlx-lm does the decoding.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generation_stream, maybe_quantize_kv_cache
from mlx_lm.generate import stream_generate as plain_stream_generate
from mlx_lm.models.cache import CacheList

from prefixcached.client.arguments import LONGEST_SECONDS
from prefixcached.client.errors import UseAfterClose
from prefixcached.client.prompt_cache import FetchedKv, PromptCache

PREFILL_STEP_SIZE: Final = 2048
"""mlx-lm's default."""

DRAFT_PREFILL_STEP_SIZE: Final = 512
"""mlx-lm's default in speculative decoding."""

_logger = logging.getLogger(__name__)

Responses = Generator[GenerationResponse, None, None]
Processor = Callable[[mx.array, mx.array], mx.array]


class Side:
    """One model of a generation, its caches, and how much of the tokens they cover and share."""

    def __init__(self, shared: PromptCache) -> None:
        self.model = shared.model
        self.kv = FetchedKv([], [])
        self.done = 0
        """Tokens that the caches cover before mlx-lm takes over."""
        self._shared = shared
        self._stored = 0

    def fetch(self, tokens: Sequence[int], wait: float, session: str | None) -> None:
        """Take what is known of the prompt."""
        self.kv, self.done = self._shared.fetch(tokens, wait=wait, session=session)
        self._stored = self.done

    def prefill(
        self,
        tokens: list[int],
        options: dict[str, Any],
        step: int,
        report: Callable[[int], None],
    ) -> None:
        """Forward the tokens that are not covered yet, as mlx-lm does."""
        with mx.stream(options.get("stream", generation_stream)):
            while self.done < len(tokens):
                stop = min(self.done + step, len(tokens))
                report(self.done)
                self.model(mx.array(tokens[self.done : stop])[None], cache=self.kv)
                maybe_quantize_kv_cache(
                    self.kv,
                    options["quantized_kv_start"],
                    options["kv_group_size"],
                    options["kv_bits"],
                )
                mx.eval([cache.state for cache in self.kv])
                mx.clear_cache()
                self.done = stop

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long computing ``tokens`` took, unless the process slept through it."""
        if seconds <= LONGEST_SECONDS:
            self._shared.note_prefill(tokens, seconds)

    def store(self, tokens: list[int], session: str | None) -> None:
        """Share what is new of the KV of ``tokens``; trouble costs a log line, not the answer."""
        if len(tokens) <= self._stored:
            return
        self._stored = len(tokens)
        try:
            self._shared.store(tokens, self.kv, session=session)
        except (ValueError, UseAfterClose) as error:
            _logger.warning("the KV of %d tokens is not shared: %s", len(tokens), str(error))


class Generation:
    """One generation.

    Args:
        sides: Of the model and, in speculative decoding, of the draft model.
        tokens: The prompt.
        session: A name for the conversation.
        options: mlx-lm's, with those of the KV's format filled in.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        tokens: list[int],
        session: str | None,
        options: dict[str, Any],
    ) -> None:
        self._sides = sides
        self._is_drafted = len(sides) > 1
        self._tokens = tokens
        self._session = session
        self._options = options
        self._report: Callable[[int, int], None] = options.pop(
            "prompt_progress_callback", None
        ) or (lambda *_: None)
        self._are_live = True
        """Whether our lists hold the very caches that mlx-lm is decoding with."""

    def run(
        self, tokenizer: Any, max_tokens: int, wait: float, checkpoints: Iterable[int]
    ) -> Responses:
        """Generate; `prefixcached.client.mlx_lm.stream_generate` says what."""
        tokens, main = self._tokens, self._sides[0]
        try:
            deadline = time.monotonic() + wait
            for side in self._sides:
                side.fetch(tokens, max(0.0, deadline - time.monotonic()), self._session)
            reused, start = main.done, time.perf_counter()
            last = len(tokens) - 1
            stops = [position for position in sorted(set(checkpoints)) if 0 < position < last]
            for position in stops + ([last] if self._is_drafted else []):
                self._prefill(position)
            yield from self._decode(tokenizer, max_tokens, start, len(tokens) - reused)
        finally:
            for side in self._sides:
                side.kv.drop_claim()

    def _decode(self, tokenizer: Any, max_tokens: int, start: float, forwarded: int) -> Responses:
        """Let mlx-lm do the rest, and share the KV of what it yielded.

        Args:
            tokenizer: As mlx-lm's.
            max_tokens: As mlx-lm's.
            start: When the first of the prompt's tokens was forwarded.
            forwarded: How many of them are, in all.
        """
        main, thread = self._sides[0], threading.get_ident()
        responses = plain_stream_generate(
            main.model,
            tokenizer,
            mx.array(self._tokens[main.done :]),
            max_tokens,
            self._sides[1].model if self._is_drafted else None,
            prompt_cache=self._handed_over(),
            **self._decoding_options(main.done),
        )
        produced: list[int] = []
        prompt_tps = 0.0
        is_whole = False
        try:
            for response in responses:
                if not produced:
                    prompt_tps = forwarded / (time.perf_counter() - start)
                    if self._is_drafted:
                        self._report_done(len(self._tokens))
                produced.append(response.token)
                yield dataclasses.replace(
                    response, prompt_tokens=len(self._tokens), prompt_tps=prompt_tps
                )
            is_whole = True
        except GeneratorExit:
            is_whole = True
            raise
        finally:
            # Speculative decoding takes rejected tokens back out of the caches as it is closed.
            responses.close()
            # Arrays belong to the thread that made them; a collector may close us on another.
            if is_whole and self._are_live and threading.get_ident() == thread:
                self._store(self._tokens + produced)

    def _prefill(self, position: int) -> None:
        """Bring every side up to ``position`` and share what that gives."""
        default = DRAFT_PREFILL_STEP_SIZE if self._is_drafted else PREFILL_STEP_SIZE
        step = self._options.get("prefill_step_size", default)
        for index, side in enumerate(self._sides):
            # Progress is the model's own; its draft model is quick.
            report = self._report_done if index == 0 else _ignore
            before, start = side.done, time.perf_counter()
            side.prefill(self._tokens[:position], self._options, step, report)
            side.note_prefill(side.done - before, time.perf_counter() - start)
        self._store(self._tokens[:position])

    def _report_done(self, done: int) -> None:
        self._report(done, len(self._tokens))

    def _store(self, tokens: list[int]) -> None:
        for side in self._sides:
            # One that was resumed beyond these tokens cannot be what they give.
            if side.done <= len(tokens):
                side.store(tokens, self._session)

    def _handed_over(self) -> list[Any]:
        """Return the caches as mlx-lm wants them: the draft model's behind the model's."""
        if not self._is_drafted:
            return self._sides[0].kv
        kv_bits = self._options["kv_bits"]
        caches = list(chain.from_iterable(side.kv for side in self._sides))
        # mlx-lm slices this list and quantises in the slices: what turns quantised from here on is
        # not in our lists, which keep a stale plain cache.
        self._are_live = kv_bits is None or not any(hasattr(c, "to_quantized") for c in caches)
        return caches

    def _decoding_options(self, done: int) -> dict[str, Any]:
        """Return mlx-lm's options for the rest of the prompt, behind ``done`` tokens of it."""
        options = dict(self._options)
        processors = options.get("logits_processors")
        if processors:
            options["logits_processors"] = with_tokens_before(processors, self._tokens[:done])
        if self._is_drafted:
            # mlx-lm tells no progress when it speculates.
            self._report_done(done)
            return options
        start = time.perf_counter()

        def progress(processed: int, total: int) -> None:
            self._report(done + processed, len(self._tokens))
            if processed == total - 1:
                self._sides[0].note_prefill(processed, time.perf_counter() - start)
                self._store(self._tokens[:-1])

        options["prompt_progress_callback"] = progress
        return options


def check_speculation(shared: PromptCache) -> None:
    """Raise ValueError unless this model's KV comes right out of mlx-lm's speculative decoding.

    It tells the caches of both models apart by their layers, and takes rejected tokens out again:
    in a ring that is full or in recurrent state that does nothing, and the KV is wrong from there.
    """
    caches, layers = shared.fresh(), len(shared.model.layers)
    name = type(shared.model).__module__
    if len(caches) != layers:
        raise ValueError(
            f"{name} has {len(caches)} caches for {layers} layers, and mlx-lm's speculative "
            "decoding is wrong for such models: leave draft_model= out"
        )
    unfit = {type(leaf).__name__ for leaf in _leaves(caches)} - {"KVCache", "QuantizedKVCache"}
    if unfit:
        raise ValueError(
            f"{name} has caches of {', '.join(sorted(unfit))}, which speculative decoding cannot "
            "take rejected tokens out of: leave draft_model= out (and max_kv_size= of the "
            "PromptCache)"
        )


def with_tokens_before(processors: Iterable[Processor], tokens: Sequence[int]) -> list[Processor]:
    """Return logits ``processors`` that see ``tokens`` before those that are forwarded."""
    if not tokens:
        return list(processors)
    before = mx.array(list(tokens))

    def seeing_all(processor: Processor) -> Processor:
        def process(forwarded: mx.array, logits: mx.array) -> mx.array:
            seen = mx.concatenate([before.astype(forwarded.dtype), forwarded])
            return processor(seen, logits)

        return process

    return [seeing_all(processor) for processor in processors]


def _leaves(caches: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        found += _leaves(cache.caches) if type(cache) is CacheList else [cache]
    return found


def _ignore(_: int) -> None:
    pass
