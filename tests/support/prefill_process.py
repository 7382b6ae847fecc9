"""A process that prefills one prompt over the shared cache, step by step as its parent says.

    python -m tests.support.prefill_process SOCKET MODEL COUNT WAIT

MODEL is a name of tests/support/models.py or a folder for `mlx_lm.load`. It says "ready", waits for
a line, fetches the prompt and says what it reuses; before each further call of the model but the
last it waits for a line again if it was started with a line "stop"; at the end it says how many
tokens it forwarded and what the logits of the last one are.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.support.talking_process import TalkingProcess, heard, say

STEP_TOKENS = 64
"""Tokens of one call of the model: a prefill of several calls, which can be killed in between."""


def prompt_of(model: str, count: int, vocabulary: int) -> list[int]:
    """The prompt that every process asks for."""
    return [(7 + 131 * position * position) % vocabulary for position in range(count)]


def load(model: str) -> tuple[Any, int]:
    """Return the model and the size of its vocabulary."""
    from tests.support import models

    if Path(model).is_dir():
        import mlx_lm

        loaded = mlx_lm.load(model)[0]
        return loaded, int(loaded.args.vocab_size)
    return models.build(model), models.vocab_size(model)


def forward(model: Any, tokens: list[int], kv: list[Any]) -> str:
    """Forward tokens and return a digest of the last one's logits."""
    import mlx.core as mx

    logits = model(mx.array(tokens)[None], cache=kv)[0, -1]
    mx.eval(logits, [cache.state for cache in kv])
    return xxhash.xxh3_64_hexdigest(np.array(logits.astype(mx.float32)).tobytes())


def boundaries(start: int, length: int) -> list[tuple[int, int]]:
    """The calls of a prefill from ``start`` on; the last token always has one of its own."""
    stops = [*range(STEP_TOKENS, length - 1, STEP_TOKENS), length - 1]
    edges = [start, *(stop for stop in stops if stop > start)]
    return [*itertools.pairwise(edges), (length - 1, length)]


def main(socket: str, name: str, count: int, wait: float) -> None:
    """The process."""
    from prefixcached.client import PromptCache, connect

    model, vocabulary = load(name)
    prompt = prompt_of(name, count, vocabulary)
    with connect(socket=socket, timeout=60) as cache:
        shared = PromptCache(model, cache=cache)
        say(event="ready")
        is_stepped = heard() == "stop"
        kv, reused = shared.fetch(prompt, wait=wait)
        say(event="fetched", reused=reused)
        forwarded, digest = 0, ""
        for start, end in boundaries(reused, count):
            if end == count:
                shared.store(prompt[:-1], kv)
            digest = forward(model, prompt[start:end], kv)
            forwarded += end - start
            if is_stepped:
                say(event="forwarded", tokens=forwarded)
                heard()
        say(event="done", reused=reused, forwarded=forwarded, logits=digest)


class PrefillProcess(TalkingProcess):
    """Such a process, seen from its parent."""

    def __init__(
        self, socket: Path, model: str, count: int, wait: float, environment: dict[str, str]
    ) -> None:
        super().__init__(
            __name__, str(socket), model, str(count), str(wait), environment=environment
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
