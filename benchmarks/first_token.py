"""Time to the first token of a real model, SmolLM2-135M, for 1, 2 and 4 processes on one prompt.

Plain mlx-lm; ours with nothing held, where one process computes and the others wait; from RAM; and
from SSD after a restart of the daemon. All processes of a phase start at once; a figure is the mean
over them. Greedy decoding must give the same tokens in every phase.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.daemons import Daemon
from benchmarks.harness import Row, Worker, duration, quartiles, require, scratch, workers
from prefixcached.client.openblas import openblas_environment

NAME = "first_token"
TOKENS = 800
GENERATED = 8
WAIT_SECONDS = 300.0
PLAIN, COLD, RAM, SSD = "plain mlx-lm", "cold", "RAM", "SSD"


def run(quick: bool) -> list[Row]:
    """Measure."""
    counts, rounds = ((2,), 1) if quick else ((1, 2, 4, 8), 3)
    with scratch() as place:
        from prefixcached.client import demo_model

        try:
            model = demo_model.prepare(place / "model", "float32")
        except demo_model.DemoModelMissingError as error:
            print(f"  left out: {error}")
            return []
        return [row for count in counts for row in _count(place, model, count, rounds)]


def _count(place: Path, model: Path, count: int, rounds: int) -> list[Row]:
    """Return the rows of ``count`` processes."""
    seconds: dict[str, list[float]] = {phase: [] for phase in (PLAIN, COLD, RAM, SSD)}
    prefilled: dict[str, list[int]] = {phase: [] for phase in seconds}
    served = Daemon(place / f"d{count}", ssd="4GiB")
    served.directory.mkdir()
    served.start()
    options = {"socket": str(served.socket), "model": str(model)}
    # As many BLAS threads together as there are cores, in every phase alike.
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = {**openblas_environment(), "OPENBLAS_NUM_THREADS": threads}
    try:
        served.wait_until_loaded()
        with workers(NAME, [str(n) for n in range(count)], options, environment) as running:
            _together(running)  # the first time loads and compiles
            expected: list[int] = []
            for _ in range(rounds):
                for phase, means in seconds.items():
                    _prepare(served, phase)
                    told = _together(running, phase)
                    expected = expected or told[0]["tokens"]
                    for one in told:
                        require(one["tokens"] == expected, f"{phase} generates other tokens")
                    means.append(statistics.mean(one["first"] for one in told))
                    prefilled[phase].append(sum(one["prefilled"] for one in told))
    finally:
        served.stop()
    rows = []
    for phase in (COLD, RAM, SSD):
        each = [p / s for p, s in zip(seconds[PLAIN], seconds[phase], strict=True)]
        low, middle, high = quartiles(each)
        rows.append(
            Row(
                NAME, f"first token, {count} processes, {phase}, {TOKENS:,} tokens", middle,
                spread=(low, high), ours=_cost(seconds[phase], prefilled[phase]),
                peer=_cost(seconds[PLAIN], prefilled[PLAIN]), peer_name=PLAIN,
                details={"prefilled": prefilled, "seconds": seconds, "processes": count},
            )
        )  # fmt: skip
    return rows


def _cost(seconds: Sequence[float], prefilled: Sequence[int]) -> str:
    """Say what a phase took: time of a process, and tokens that all of them computed."""
    return f"{duration(statistics.median(seconds))}, {statistics.median(prefilled):,.0f} tokens"


def _prepare(served: Daemon, phase: str) -> None:
    with served.connect() as cache:
        if phase == COLD:
            cache.clear()
        elif phase == SSD:
            require(bool(cache.flush()), "flush")
    if phase == SSD:
        served.restart()


def _together(running: Sequence[Worker], phase: str = PLAIN) -> list[dict[str, Any]]:
    for worker in running:
        worker.begin("plain" if phase == PLAIN else "shared")
    return [worker.end() for worker in running]


class Generation:
    """One process with the model loaded."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import mlx_lm

        from benchmarks import kv
        from prefixcached.client import PromptCache, connect

        loaded: Any = mlx_lm.load(options["model"])
        self._model, self._tokenizer = loaded[:2]
        self._prompt = [token % 40_000 + 100 for token in kv.random_tokens(TOKENS, 8)]
        self._cache = connect(socket=Path(options["socket"]), timeout=120, fail_open=False)
        self._shared = PromptCache(self._model, cache=self._cache)

    def measure(self, what: str) -> dict[str, Any]:
        """Generate a little; return when the first token came."""
        import mlx_lm

        from prefixcached.client import mlx_lm as shared

        arguments: dict[str, Any] = {"max_tokens": GENERATED}
        if what == "plain":
            generate: Any = mlx_lm.stream_generate
        else:
            generate = shared.stream_generate
            arguments |= {"cache": self._shared, "wait": WAIT_SECONDS}
        # The first report says how many tokens are there before anything is computed.
        reports: list[int] = []

        def progress(processed: int, total: int) -> None:
            reports.append(processed)

        started = time.perf_counter()
        first, tokens = 0.0, []
        for response in generate(
            self._model, self._tokenizer, self._prompt, prompt_progress_callback=progress,
            **arguments,
        ):  # fmt: skip
            if not first:
                first = time.perf_counter() - started
            tokens.append(int(response.token))
        return {"first": first, "tokens": tokens, "prefilled": reports[-1] - reports[0]}


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Generation]:
    """Give one process."""
    yield Generation(options)
