"""Time to first token of an 8B-shaped model with random weights, with the prompt's KV held.

Meant for a machine with an accelerator: `python -m benchmarks.run large_model`. With --quick a
model of two layers, so that the code is tried anywhere. The KV is what the model computed; a hit
is compared with it bit by bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from benchmarks import kv
from benchmarks.daemons import Daemon
from benchmarks.harness import (
    Case,
    Row,
    faster_than,
    interleave,
    memory_directory,
    require,
    scratch,
    size,
)
from prefixcached.client import Cache, PromptCache

NAME = "large_model"
STEP_TOKENS: Final = 2048
"""mlx-lm's prefill step."""

LLAMA_8B: Final = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip
SMALL: Final = LLAMA_8B | {
    "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096,
}  # fmt: skip


@dataclass
class Prompt:
    """A prompt, the KV that the model computed for all of it but its last token, and logits."""

    tokens: list[int]
    kv: list[Any]
    logits: mx.array

    @property
    def nbytes(self) -> int:
        """Bytes of KV."""
        return sum(
            array[..., : cache.offset, :].nbytes
            for cache in self.kv
            for array in (cache.keys, cache.values)
        )


def run(quick: bool) -> list[Row]:
    """Measure."""
    lengths, rounds = ((600,), 3) if quick else ((8_192, 32_768), 5)
    mx.random.seed(7)
    model = llama.Model(llama.ModelArgs.from_dict(SMALL if quick else LLAMA_8B))
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    rows: list[Row] = []
    for length in lengths:
        rows += _rows(model, length, rounds)
    return rows


def _rows(model: llama.Model, length: int, rounds: int) -> list[Row]:
    prompt = _computed(model, length)
    label = f"{length:,} tokens, {size(prompt.nbytes)}"
    about = {"tokens": length, "bytes": prompt.nbytes, "device": str(mx.default_device())}
    with scratch() as place, scratch(memory_directory()) as memory:
        served = Daemon(place, ram="24GiB", ssd="16GiB")
        served.start()
        try:
            served.wait_until_loaded()
            with _shared(model, served) as (cache, shared):
                file = memory / "peer.safetensors"
                save_prompt_cache(str(file), prompt.kv)
                require(bool(shared.store(prompt.tokens[:-1], prompt.kv)), "the KV is not stored")
                seconds = interleave(
                    [
                        Case("mlx-lm", lambda: _first_token(model, prompt.tokens)),
                        Case("RAM", lambda: _resumed(model, shared, prompt), check=_same(prompt)),
                        Case("file", lambda: _loaded(model, file, prompt), check=_same(prompt)),
                    ],
                    rounds,
                )
                stored = interleave(_puts(shared, cache, memory, prompt), rounds)
                require(bool(shared.store(prompt.tokens[:-1], prompt.kv)), "the KV is not stored")
                require(bool(cache.flush()), "the flush failed")
            served.ram = "16MiB"
            served.restart()
            served.wait_until_loaded()
            with _shared(model, served) as (_, shared):
                seconds |= interleave(
                    [Case("SSD", lambda: _resumed(model, shared, prompt), check=_same(prompt))],
                    rounds,
                )
        finally:
            served.stop()
    first = "first token"
    return [
        faster_than(NAME, f"{first} from RAM, {label}", seconds, "RAM", "mlx-lm", None, **about),
        faster_than(NAME, f"{first} from SSD, {label}", seconds, "SSD", "mlx-lm", None, **about),
        faster_than(NAME, f"{first} from RAM, {label}", seconds, "RAM", "file", None, **about),
        faster_than(NAME, f"put of all-new KV, {label}", stored, "put", "save", None, **about),
    ]


def _puts(shared: PromptCache, cache: Cache, memory: Path, prompt: Prompt) -> list[Case]:
    def put() -> Any:
        return shared.store(prompt.tokens[:-1], prompt.kv)

    def clear() -> None:
        cache.clear()

    def new(result: Any) -> None:
        require(getattr(result, "new_bytes", 0) == prompt.nbytes, f"{result}")

    return [
        Case("put", put, before=clear, check=new),
        Case("save", lambda: save_prompt_cache(str(memory / "new.safetensors"), prompt.kv)),
    ]


@contextmanager
def _shared(model: llama.Model, served: Daemon) -> Iterator[tuple[Cache, PromptCache]]:
    with served.connect() as cache:
        yield cache, PromptCache(model, cache=cache)


def _computed(model: llama.Model, length: int) -> Prompt:
    tokens = [t % model.args.vocab_size for t in kv.random_tokens(length, 1)]
    caches, logits = _first_token(model, tokens)
    for cache in caches:
        cache.trim(1)
    return Prompt(tokens, caches, logits)


def _first_token(
    model: llama.Model, tokens: list[int], caches: list[Any] | None = None, start: int = 0
) -> tuple[list[Any], mx.array]:
    """Forward tokens [start, end) as mlx-lm does; return the caches and the last one's logits."""
    caches = caches if caches is not None else make_prompt_cache(model)
    last = len(tokens) - 1
    for first in range(start, last, STEP_TOKENS):
        model(mx.array(tokens[first : min(first + STEP_TOKENS, last)])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    logits = model(mx.array(tokens[last:])[None], cache=caches)[0, -1]
    mx.eval(logits)
    return caches, logits


def _resumed(model: llama.Model, shared: PromptCache, prompt: Prompt) -> tuple[list[Any], mx.array]:
    caches, reused = shared.fetch(prompt.tokens)
    require(reused == len(prompt.tokens) - 1, f"{reused} tokens were reused")
    return _first_token(model, prompt.tokens, caches, reused)


def _loaded(model: llama.Model, file: Path, prompt: Prompt) -> tuple[list[Any], mx.array]:
    return _first_token(model, prompt.tokens, load_prompt_cache(str(file)), len(prompt.tokens) - 1)


def _same(prompt: Prompt) -> Callable[[tuple[list[Any], mx.array]], None]:
    def check(result: tuple[list[Any], mx.array]) -> None:
        caches, logits = result
        kv.require_equal(caches, prompt.kv, len(prompt.tokens) - 1)
        require(bool(mx.array_equal(logits, prompt.logits).item()), "the logits differ")

    return check
