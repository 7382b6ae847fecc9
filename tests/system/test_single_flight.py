"""Several real processes, one cold prompt, one prefill (rules Q1 to Q3)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixcached.client import connect
from tests.support.daemon_process import DaemonProcess
from tests.support.openblas import openblas_environment
from tests.support.prefill_process import PrefillProcess, boundaries, forward, load, prompt_of
from tests.support.until import ram_tier, until

pytestmark = pytest.mark.slow

PROCESSES = 4
TOKENS = 400
TINY = "olmo2"
LONG_WAIT = 250.0


@contextlib.contextmanager
def processes(
    daemon: DaemonProcess, count: int, *, model: str = TINY, tokens: int = TOKENS,
    wait: float = LONG_WAIT, environment: dict[str, str] | None = None,
) -> Iterator[list[PrefillProcess]]:  # fmt: skip
    """So many processes with their model loaded."""
    with contextlib.ExitStack() as context:
        started = [
            context.enter_context(
                PrefillProcess(daemon.socket, model, tokens, wait, os.environ | (environment or {}))
            )
            for _ in range(count)
        ]
        for process in started:
            process.expect("ready")
        yield started


@pytest.fixture(scope="module")
def without_cache() -> str:
    """The logits of the tiny model's last token, by a process that shares nothing."""
    model, vocabulary = load(TINY)
    prompt, kv = prompt_of(TINY, TOKENS, vocabulary), make_prompt_cache(model)
    digests = [forward(model, prompt[a:b], kv) for a, b in boundaries(0, TOKENS)]
    return digests[-1]


def finished(process: PrefillProcess) -> dict[str, Any]:
    process.expect("fetched")
    return process.expect("done")


def test_processes_started_together_prefill_a_prompt_once(
    daemon: DaemonProcess, without_cache: str
) -> None:
    """FIELD 3: cold agents prefill once: all tokens forwarded are the prompt, and one each (Q3)."""
    with processes(daemon, PROCESSES) as started:
        for process in started:
            process.tell()
        done = [finished(process) for process in started]
    assert sorted(report["reused"] for report in done) == [0, *[TOKENS - 1] * (PROCESSES - 1)]
    assert sum(report["forwarded"] for report in done) == TOKENS + PROCESSES - 1
    assert {report["logits"] for report in done} == {without_cache}
    with connect(socket=daemon.socket) as cache:
        state = ram_tier(cache)
    assert state["takes"]["prefills_saved"] == PROCESSES - 1
    assert (state["claims"], state["takes_waiting"], state["leases"]) == (0, 0, 0)


def test_without_wait_each_process_prefills(daemon: DaemonProcess, without_cache: str) -> None:
    """Q2: who does not want to wait is answered at once, and computes the same."""
    with processes(daemon, 2, wait=0.0) as started:
        for process in started:
            process.tell("stop")
        for process in started:
            assert process.expect("fetched")["reused"] == 0
        with connect(socket=daemon.socket) as cache:
            assert ram_tier(cache)["claims"] == 2
        for process in started:
            for _ in boundaries(0, TOKENS):
                process.expect("forwarded")
                process.tell()
            assert process.expect("done")["logits"] == without_cache


@pytest.mark.parametrize("stopped_first", [False, True], ids=["killed", "hung and killed"])
def test_a_claimant_killed_in_mid_prefill_is_followed_by_exactly_one(
    daemon: DaemonProcess, without_cache: str, stopped_first: bool
) -> None:
    """Q2: one of those who waited takes over, the rest wait for it, and all answers are right."""
    with (
        processes(daemon, PROCESSES) as (first, *others),
        connect(socket=daemon.socket) as cache,
    ):
        first.tell("stop")
        assert first.expect("fetched")["reused"] == 0
        first.expect("forwarded")
        for process in others:
            process.tell()
        until(lambda: ram_tier(cache)["takes_waiting"] == len(others))
        if stopped_first:
            first.stop()
            assert ram_tier(cache)["takes_waiting"] == len(others)
        first.kill()
        done = [finished(process) for process in others]
        state = ram_tier(cache)
    assert sorted(report["reused"] for report in done) == [0, *[TOKENS - 1] * (len(others) - 1)]
    assert sum(report["forwarded"] for report in done) == TOKENS + len(others) - 1
    assert {report["logits"] for report in done} == {without_cache}
    assert state["claim_outcomes"]["orphaned"] == 1
    assert state["claim_outcomes"]["granted"] == 2
    assert (state["claims"], state["takes_waiting"]) == (0, 0)


def test_processes_that_wait_survive_their_daemon(
    daemon: DaemonProcess, without_cache: str
) -> None:
    """C4: when the daemon dies under a waiting take, its client computes by itself at once."""
    with processes(daemon, 2) as (first, second), connect(socket=daemon.socket) as cache:
        first.tell("stop")
        first.expect("fetched")
        second.tell()
        until(lambda: ram_tier(cache)["takes_waiting"] == 1)
        daemon.kill()
        report = finished(second)
    assert (report["reused"], report["forwarded"]) == (0, TOKENS)
    assert report["logits"] == without_cache


@pytest.mark.model
@pytest.mark.timeout(900)
def test_four_processes_prefill_300_tokens_of_smollm2_once(
    daemon: DaemonProcess, smollm2: Path
) -> None:
    """Q3: with the real model; started together, and with the first one killed in mid-prefill."""
    tokens = 300

    def four() -> contextlib.AbstractContextManager[list[PrefillProcess]]:
        return processes(
            daemon, PROCESSES, model=str(smollm2), tokens=tokens,
            environment=openblas_environment(),
        )  # fmt: skip

    with connect(socket=daemon.socket) as cache:
        with four() as started:
            for process in started:
                process.tell()
            together = [finished(process) for process in started]
        cache.clear()
        with four() as (first, *others):
            first.tell("stop")
            first.expect("fetched")
            first.expect("forwarded")
            for process in others:
                process.tell()
            until(lambda: ram_tier(cache)["takes_waiting"] == len(others))
            first.kill()
            left = [finished(process) for process in others]
    assert sum(report["forwarded"] for report in together) == tokens + PROCESSES - 1
    assert sum(report["forwarded"] for report in left) == tokens + len(others) - 1
    assert len({report["logits"] for report in (*together, *left)}) == 1
