"""One process of `prefixcached demo`: loads a model, answers questions given as JSON lines.

``python -m prefixcached.client.demo_worker MODEL [SOCKET]``. With a socket it shares the daemon's
cache; without, it resumes its own earlier answers at the position that it is told, which is what
a run through the daemon is compared with. Standard output carries JSON lines alone.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

import mlx_lm
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from prefixcached.client.cache import connect
from prefixcached.client.mlx_lm import stream_generate
from prefixcached.client.prompt_cache import PromptCache
from prefixcached.protocol.tokens import common_prefix_length, token_array

Report = Callable[[int, int], None]


class Earlier(NamedTuple):
    """An answer given before: its prompt and answer, and the caches that hold them."""

    tokens: list[int]
    kv: list[Any]


class Worker:
    """A loaded model and, with a socket, the daemon's cache bound to it."""

    def __init__(self, model_folder: str, socket: str | None) -> None:
        loaded: Any = mlx_lm.load(model_folder)
        self._model, self._tokenizer = loaded[:2]
        self._shared: PromptCache | None = None
        if socket is not None:
            self._shared = PromptCache(self._model, cache=connect(socket))
        self._earlier: list[Earlier] = []

    def answer(
        self, system: str, question: str, max_tokens: int, reused: int, report: Report
    ) -> dict[str, Any]:
        """Return the answer with its figures; ``reused`` tokens are resumed without a daemon."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        prompt: list[int] = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True
        )
        seen: list[int] = []

        def progress(processed: int, total: int) -> None:
            seen.append(processed)
            report(processed, total)

        start = time.perf_counter()
        first: float | None = None
        text, tokens = "", []
        for response in self._responses(prompt, max_tokens, reused, progress):
            if first is None:
                first = time.perf_counter() - start
            text += response.text
            tokens.append(response.token)
        return {
            "prompt": prompt,
            "reused": seen[0] if self._shared is not None else reused,
            "seconds_to_first_token": first,
            "text": text.strip(),
            "answer": tokens,
        }

    def _responses(
        self, prompt: list[int], max_tokens: int, reused: int, progress: Report
    ) -> Iterator[Any]:
        if self._shared is not None:
            yield from stream_generate(
                self._model,
                self._tokenizer,
                prompt,
                max_tokens,
                cache=self._shared,
                prompt_progress_callback=progress,
            )
            return
        kv, answer = self._resumed(prompt, reused), []
        for response in mlx_lm.stream_generate(
            self._model,
            self._tokenizer,
            prompt[reused:],
            max_tokens,
            prompt_cache=kv,
            prompt_progress_callback=lambda done, _: progress(reused + done, len(prompt)),
        ):
            answer.append(response.token)
            yield response
        self._earlier.append(Earlier(prompt + answer, kv))

    def _resumed(self, prompt: list[int], reused: int) -> list[Any]:
        """Return caches of the first ``reused`` tokens, cut out of an earlier answer's."""
        for earlier in self._earlier:
            if reused and earlier.tokens[:reused] == prompt[:reused]:
                kv = copy.deepcopy(earlier.kv)
                trim_prompt_cache(kv, len(earlier.tokens) - reused)
                return kv
        if reused:
            raise ValueError(f"no earlier answer starts with these {reused} tokens")
        fresh: list[Any] = make_prompt_cache(self._model)
        return fresh


def shared_tokens(left: list[int], right: list[int]) -> int:
    """Return how many leading tokens two prompts share."""
    return common_prefix_length(token_array(left), token_array(right))


def main(arguments: list[str]) -> None:
    """Serve requests from standard input until it ends."""
    # Libraries may print; only this copy of standard output is read as JSON.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker(arguments[0], arguments[1] if len(arguments) > 1 else None)
    _say(output, event="ready")
    for line in sys.stdin:
        answer = worker.answer(
            **json.loads(line),
            report=lambda done, total: _say(output, event="progress", done=done, total=total),
        )
        _say(output, event="answer", **answer)


def _say(output: TextIO, **event: Any) -> None:
    output.write(json.dumps(event) + "\n")
    output.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
