"""Every architecture of mlx-lm: put in one process, taken in another (rules T5, T9, T12, P2)."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Self

import pytest

from tests.support import architectures
from tests.support.daemon_process import DaemonProcess
from tests.support.openblas import openblas_environment

ANSWER_SECONDS = 400.0
"""For one order, on a machine that runs other tests as well: the largest model takes 20 s."""

LEFT_OUT_SECONDS = 30.0
"""For one that is known to fail: some of them hang in the ruins of their heap."""

SAMPLE = (
    "deepseek_v32",
    "deepseek_v41",
    "exaone4",
    "gemma3n",
    "iquestloopcoder",
    "kimi_linear",
    "llama4",
    "longcat_flash_ngram",
    "mamba2",
    "mixtral",
    "qwen3_next",
    "recurrent_gemma",
)
"""Small models with every class of cache, alone and mixed, and fewer or more caches than layers."""


class LostError(Exception):
    """The process ended, or did not answer in time."""


class ArchitectureProcess:
    """An `architecture_process`, seen from its parent: started when it is first needed."""

    def __init__(self, socket: object) -> None:
        self._command = [
            sys.executable, "-m", "tests.support.architecture_process", str(socket)
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self._reader = ThreadPoolExecutor(max_workers=1)

    def ask(self, name: str, order: str) -> dict[str, Any]:
        """Return the answer; LostError where there is none, and the next order starts afresh."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | openblas_environment(),
            )
        stdin, stdout = self._pipes(self._process)
        try:
            stdin.write(json.dumps([name, order]) + "\n")
            stdin.flush()
            seconds = LEFT_OUT_SECONDS if name in architectures.LEFT_OUT else ANSWER_SECONDS
            line = self._reader.submit(stdout.readline).result(seconds)
        except (TimeoutError, BrokenPipeError):
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.poll()
        self.end()
        end = "the process hung" if code is None else f"the process ended with {code}"
        raise LostError(f"{order}: {end}")

    @staticmethod
    def _pipes(process: "subprocess.Popen[str]") -> tuple[IO[str], IO[str]]:
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in self._pipes(self._process):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._reader.shutdown()


@pytest.fixture
def pair(daemon: DaemonProcess) -> Iterator[tuple[ArchitectureProcess, ArchitectureProcess]]:
    with (
        ArchitectureProcess(daemon.socket) as producer,
        ArchitectureProcess(daemon.socket) as taker,
    ):
        yield producer, taker


def compare(producer: ArchitectureProcess, taker: ArchitectureProcess, name: str) -> list[str]:
    """Return what is wrong with an architecture; LostError or RuntimeError if it does not run."""

    def ask(process: ArchitectureProcess, order: str) -> dict[str, Any]:
        answer = process.ask(name, order)
        if "error" in answer:
            raise RuntimeError(f"{order}: {answer['error']}")
        return answer

    def differences(case: str, expected: dict[str, Any], told: dict[str, Any]) -> list[str]:
        return [
            f"{name}, {case}: {key} is {told.get(key)} instead of {expected.get(key)}"
            for key in sorted({*expected, *told})
            if expected.get(key) != told.get(key)
        ]

    wrong = differences("nothing put", {"reused": 0, "reason": "empty"}, ask(taker, "empty"))
    expected, told = ask(producer, "produce"), ask(taker, "take")
    assert set(expected) == set(told)
    for case in expected:
        wrong += differences(case, expected[case], told[case])
    branch = ask(taker, "branch")
    return wrong + differences("branch", branch, ask(producer, "take_branch"))


def run(
    pair: tuple[ArchitectureProcess, ArchitectureProcess], names: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return what is wrong, and which architectures did not run and why."""
    wrong: list[str] = []
    stopped: dict[str, str] = {}
    for name in names:
        try:
            wrong += compare(*pair, name)
        except (LostError, RuntimeError) as error:
            stopped[name] = str(error)
    return wrong, stopped


@pytest.mark.timeout(300)
def test_a_sample_of_architectures(
    pair: tuple[ArchitectureProcess, ArchitectureProcess],
) -> None:
    """T12: in another process, every class of cache is resumed bit for bit, or is a miss (T9)."""
    assert run(pair, SAMPLE) == ([], {})


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_architecture(
    pair: tuple[ArchitectureProcess, ArchitectureProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """T12: every architecture that runs here is resumed bit for bit by another process."""
    names = architectures.names()
    wrong, stopped = run(pair, names)
    with capsys.disabled():
        print(f"\n{len(names) - len(stopped)} of {len(names)} architectures")
        for name, reason in stopped.items():
            told = architectures.LEFT_OUT.get(name, "unexpectedly")
            print(f"  left out: {name}, {told} ({reason})")
    assert wrong == []
    assert set(stopped) <= set(architectures.LEFT_OUT)
