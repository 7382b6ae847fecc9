"""A process that serves many models over the shared cache, as its parent orders, one line each.

    python -m tests.support.architecture_process SOCKET

Two of them run side by side. Each order names an architecture and a method of `Work`; the answer
tells, as digests, what the caches hold and how they continue. The parent compares.
"""

import copy
import gc
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

PUTS: Final = (24, 40, 43)
"""Where the producer shares its KV."""

CALLS: Final = (0, 20, 24, 33, 40, 41, 42, 43)
"""Bounds of its calls; from 40 on it decodes, so that a ring rotates."""

FORK: Final = 33
"""Where the diverging prompt leaves."""

BRANCH_END: Final = 49
"""How far the taker computes that one."""

SUFFIXES: Final = (1, 2, 16)

ROWS: Final = frozenset(
    {"KVCache", "QuantizedKVCache", "ConcatenateKVCache", "RotatingKVCache", "ChunkedKVCache"}
)
"""Classes with one row a token; any other is state, resumable only where it was put (rule T5)."""

Answer = dict[str, Any]


class Work:
    """One model, its share of the cache, and its own caches."""

    def __init__(self, name: str, cache: Any) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        from prefixcached.client import PromptCache
        from tests.support import architectures

        self._model: Any = architectures.build(name)
        self._shared = PromptCache(self._model, cache=cache)
        self._fresh = make_prompt_cache(self._model)
        size = architectures.vocab_size(name)
        self._trunk = architectures.tokens(name, 64)
        # Differs from the trunk in every token.
        self._other = [(token + 1) % size for token in self._trunk]
        self._suffix = architectures.tokens(name, max(SUFFIXES), seed=5)

    def prompts(self) -> dict[str, list[int]]:
        """What is taken: longer and shorter prompts than were put, exact and diverging ones."""
        trunk, other = self._trunk, self._other
        return {
            "longer": trunk[:59],
            "exact": trunk[:43],
            "middle": trunk[:41],
            "shorter": trunk[:21],
            "diverging": self._branch(),
            "unrelated": other[:30],
        }

    def _branch(self) -> list[int]:
        return self._trunk[:FORK] + self._other[FORK:BRANCH_END]

    def empty(self) -> Answer:
        """Take what nobody has put yet."""
        return self._taken(self._trunk)

    def produce(self) -> Answer:
        """Put at `PUTS`, and answer what every prompt is to be answered with."""
        kv, references = self._shared.fresh(), {}
        for start, end in pairwise(CALLS):
            self._forward(kv, self._trunk[start:end])
            references[end] = copy.deepcopy(kv)
            if end in PUTS:
                stored = self._shared.store(self._trunk[:end], kv)
                assert stored, stored
        is_recurrent = any(type(leaf).__name__ not in ROWS for leaf in _leaves(kv))
        rows = {"longer": 43, "exact": 42, "middle": 40, "shorter": 20, "diverging": FORK}
        state = {"longer": 43, "exact": 40, "middle": 40, "diverging": 24}
        positions = state if is_recurrent else rows
        answers = {case: self._described(references[p], p) for case, p in positions.items()}
        missed = {"unrelated": {"reused": 0, "reason": "diverged"}}
        if is_recurrent:
            missed["shorter"] = {"reused": 0, "reason": "no-checkpoint"}
        return {**answers, **missed}

    def take(self) -> Answer:
        """Take every prompt."""
        return {case: self._taken(prompt) for case, prompt in self.prompts().items()}

    def branch(self) -> Answer:
        """Continue the diverging prompt from what another process put, and put it."""
        prompt = self._branch()
        kv, reused = self._shared.fetch(prompt)
        # Recurrent state resumes before the fork. What is computed again up to there is held and
        # not stored twice (rule P2), so only the same calls make the same bits.
        for start, end in pairwise(sorted({reused, FORK, BRANCH_END})):
            self._forward(kv, prompt[start:end])
        stored = self._shared.store(prompt, kv)
        assert stored, stored
        return self._described(list(kv), len(prompt))

    def take_branch(self) -> Answer:
        """Take the branch that another process put."""
        return self._taken([*self._branch(), 1])

    def _taken(self, prompt: list[int]) -> Answer:
        kv, reused = self._shared.fetch(prompt)
        if not reused:
            assert [type(leaf) for leaf in _leaves(kv)] == [type(x) for x in _leaves(self._fresh)]
            return {"reused": reused, "reason": kv.misses[0]}
        return self._described(list(kv), reused)

    def _forward(self, kv: list[Any], tokens: Sequence[int]) -> str:
        """Forward tokens in one call; return a digest of their logits."""
        import mlx.core as mx

        logits = self._model(mx.array(list(tokens))[None], cache=kv)
        mx.eval(logits, [cache.state for cache in kv])
        return _digest([logits])

    def _described(self, kv: list[Any], length: int) -> Answer:
        """Tell the rows or state of each cache, and the logits of each suffix and of one after."""
        leaves = _leaves(kv)
        # A ring that decoding has rotated keeps its phase at the end of a put alone (rule T12).
        has_lost_phase = length not in (*PUTS, BRANCH_END) and any(
            type(leaf).__name__ == "RotatingKVCache" and leaf.max_size <= length for leaf in leaves
        )
        continued = {}
        for count in SUFFIXES[has_lost_phase:]:
            caches = copy.deepcopy(kv)
            continued[str(count)] = [
                self._forward(caches, self._suffix[:count]),
                self._forward(caches, [3]),
            ]
        return {
            "reused": length,
            "classes": [type(leaf).__name__ for leaf in leaves],
            "slices": [_digest(_slices(leaf, length)) for leaf in leaves],
            "continued": continued,
        }


def _leaves(caches: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        found += _leaves(cache.caches) if type(cache).__name__ == "CacheList" else [cache]
    return found


def _slices(cache: Any, length: int) -> list[Any]:
    """Return the rows that the model still reads, in temporal order, or all arrays of a state."""
    if type(cache).__name__ not in ROWS:
        return _arrays(vars(cache))
    assert cache.offset == length, (cache.offset, length)
    both = [array for array in (cache.keys, cache.values) if array is not None]
    match type(cache).__name__:
        case "RotatingKVCache":
            rows = [cache._temporal_order(array) for array in both]
            kept = min(length, cache.max_size - cache.keep - 1)
            sinks = [array[..., : min(cache.keep, length), :] for array in rows]
            return [*sinks, *(array[..., array.shape[-2] - kept :, :] for array in rows)]
        case "ChunkedKVCache":
            first = length // cache.chunk_size * cache.chunk_size - cache.start_position
            return [array[..., first : length - cache.start_position, :] for array in both]
        case _:
            return [array[..., :length, :] for array in _arrays(both)]


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [array for _, item in sorted(value.items()) for array in _arrays(item)]
    if isinstance(value, list | tuple):
        return [array for item in value for array in _arrays(item)]
    return [value] if hasattr(value, "shape") else []


def _digest(arrays: Sequence[Any]) -> str:
    import mlx.core as mx
    import numpy as np

    digest = hashlib.blake2b(digest_size=12)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.array(mx.contiguous(array).view(mx.uint8)).tobytes())
    return digest.hexdigest()


def main(socket: str) -> None:
    """Carry out orders until there are no more."""
    # Modules of mlx-lm print; the parent reads nothing but answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from prefixcached.client import connect

    works: dict[str, Work] = {}
    with connect(socket, timeout=60, fail_open=False) as cache:
        for line in sys.stdin:
            name, order = json.loads(line)
            try:
                if name not in works:
                    works.clear()
                    gc.collect()
                    works[name] = Work(name, cache)
                answer = getattr(works[name], order)()
            except (Exception, SystemExit) as error:  # noqa: BLE001, the parent is told
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
