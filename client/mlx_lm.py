"""mlx-lm's `generate` and `stream_generate` over the shared cache.

Input embeddings bypass the cache, so that the answer stays right: tokens do not tell what was
forwarded.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.generate import stream_generate as plain_stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixcached.client.cache import Cache
from prefixcached.client.generation import Generation, Responses, Side, check_speculation
from prefixcached.client.prompt_cache import PromptCache
from prefixcached.client.shared_prompt_cache import SharedPromptCache

__all__ = ["SharedPromptCache", "generate", "stream_generate"]

_KV_DEFAULTS: Final[dict[str, Any]] = {
    "max_kv_size": None,
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": DEFAULT_QUANTIZED_KV_START,
}
"""The options of mlx-lm that the format of KV depends on, and its defaults."""


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    *,
    cache: Cache | PromptCache | None = None,
    draft_cache: PromptCache | None = None,
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
        draft_model: As mlx-lm's. Its KV is shared apart from the model's, which serves
            generations without a draft model as well.
        cache: From `prefixcached.client.connect`, or a `PromptCache` of this very model, which
            saves reading the weights for each call. None generates as mlx-lm alone does.
        draft_cache: A `PromptCache` of ``draft_model``, to the same end.
        wait: Seconds to wait for a process that is computing this prompt right now.
        session: A name for the conversation.
        checkpoints: Further positions of the prompt at which to share the KV. Worth it for models
            with recurrent state, which can only be resumed where it was stored; the daemon leaves
            out one that is close behind another (`checkpoint_min_tokens`).
        **options: All others of `mlx_lm.generate.generate_step`, but ``prompt_cache``. Logits
            processors see the whole prompt, also where it is reused.

    Yields:
        mlx-lm's responses; ``prompt_tokens`` and progress count the whole prompt, and
        ``prompt_tps`` the tokens that were forwarded.

    Raises:
        ValueError: ``prompt_cache`` was given beside ``cache``, options contradict ``cache``, or
            the KV of the model or its draft model does not come right out of mlx-lm's speculative
            decoding.
    """
    bypass = options.get("input_embeddings") is not None
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
    options.pop("prompt_cache", None)
    if draft_model is not None:
        # As mlx-lm: it ignores the size when it speculates.
        options.pop("max_kv_size", None)
    caches = [_prompt_cache(model, cache, options)]
    if draft_model is not None:
        caches.append(_prompt_cache(draft_model, draft_cache or caches[0].cache, options))
        for each in caches:
            check_speculation(each)
    generation = Generation([Side(each) for each in caches], tokens, session, options)
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
