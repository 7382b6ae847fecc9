"""Which tests reach which lines, and how long each takes: one run of the unchanged code."""

import contextlib
import importlib
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import coverage
import msgspec
import pytest

from tests.mutation.modules import NOT_RUN, ROOT, TESTS, dotted, mutated

PROFILE: Final = "mutation"
EXAMPLES: Final = 25
"""Of each property that does not name a number itself."""
SLOW_TEST_SECONDS: Final = 5.0
"""Of the processor. A test that takes longer, while its lines are counted, is left out."""


COLLECTING: Final = "collecting"
"""What runs while tests are collected, or between two, is reached by none of them."""


class Reach(msgspec.Struct):
    """What the tests reach. Lines are of files named relative to the root."""

    seconds: dict[str, float] = {}
    """By the name of each test that passed."""
    tests: dict[str, dict[int, list[str]]] = {}
    """By file and line: the tests that ran it."""
    imported: dict[str, list[int]] = {}
    """By file: the lines that run when it is imported."""

    def add(self, other: "Reach") -> None:
        """Take in what another process found with other tests."""
        self.seconds.update(other.seconds)
        for module, lines in other.tests.items():
            ours = self.tests.setdefault(module, {})
            for line, tests in lines.items():
                ours.setdefault(line, []).extend(tests)
        for module, imported in other.imported.items():
            self.imported[module] = sorted({*self.imported.get(module, ()), *imported})


def run_pytest(arguments: list[str], plugin: object) -> int:
    """Run pytest in this process, without a word; return its exit status."""
    quiet = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", f"--rootdir={ROOT}"]
    # Libraries are imported before pytest asks for them.
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    chosen = ["-m", "not slow and not exhaustive", f"--hypothesis-profile={PROFILE}"]
    os.chdir(ROOT)
    with silent():
        return int(pytest.main([*quiet, *chosen, *arguments], plugins=[plugin]))


@contextlib.contextmanager
def silent() -> Any:
    """Send what is printed to nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in enumerate(kept, 1):
            os.dup2(copy, descriptor)
            os.close(copy)


def test_files() -> list[str]:
    """The files of all tests that may kill a mutant."""
    found = (path for folder in TESTS for path in sorted((ROOT / folder).glob("test_*.py")))
    return [str(path.relative_to(ROOT)) for path in found if path.name not in NOT_RUN]


def measure(files: list[str]) -> Reach:
    """Run the tests of ``files`` in this process, which has not imported `prefixcached` yet."""
    watched = coverage.Coverage(
        data_file=None,
        source=[str(ROOT / "protocol"), str(ROOT / "actors")],
        config_file=False,
        messages=False,
    )
    reach = Reach()
    watched.start()
    for module in mutated():
        importlib.import_module(dotted(module))
    watched.switch_context(COLLECTING)
    run_pytest(files, _Measuring(watched, reach.seconds))
    watched.stop()
    data = watched.get_data()
    for file in data.measured_files():
        module = str(Path(file).relative_to(ROOT))
        lines: dict[int, list[str]] = defaultdict(list)
        for line, contexts in data.contexts_by_lineno(file).items():
            lines[line] = [context for context in contexts if context in reach.seconds]
            if "" in contexts:
                reach.imported.setdefault(module, []).append(line)
        reach.tests[module] = dict(lines)
    return reach


class _Measuring:
    """A plugin that counts lines and time by test; it owns neither."""

    def __init__(self, watched: coverage.Coverage, seconds: dict[str, float]) -> None:
        self._watched = watched
        self._seconds = seconds
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._watched.switch_context(item.nodeid)
        started = time.process_time()
        answer = yield
        spent = time.process_time() - started
        self._watched.switch_context(COLLECTING)
        if item.nodeid not in self._failed and spent <= SLOW_TEST_SECONDS:
            self._seconds[item.nodeid] = spent
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._failed.add(report.nodeid)
