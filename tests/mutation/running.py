"""Running mutants: each in a fork of a process that has everything loaded that does not change.

A change inside a function is put into the loaded functions, in a fork of a process that has
imported the modules and collected the tests. A change in what runs at import, or in a function
that importing calls, needs the module imported anew: a fork of a process that has imported pytest
and the libraries, but nothing of ours, is served the changed source by an import hook.
"""

import gc
import importlib.abc
import importlib.machinery
import math
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import pytest

from tests.mutation.baseline import Reach, run_pytest
from tests.mutation.children import Limit, Outcome, outcome_of
from tests.mutation.modules import ROOT, TESTED_IN, dotted
from tests.mutation.mutants import Mutant, change_of, digest_of, mutate

SECONDS_LEAST: Final = 10
SECONDS_FACTOR: Final = 5
"""A mutant may use the processor this many times as long as its tests did, but for quick ones."""
IMPORT_SECONDS: Final = 10
"""For importing everything once more."""
WALL_SECONDS: Final = 300.0
WALL_FACTOR: Final = 50
"""By the clock it may take far longer: others share the machine. This ends what waits for ever."""
OWN_FILE: Final = 0.1
"""How much sooner a module's own tests are tried: they notice most."""


class Result(NamedTuple):
    """What became of one mutant."""

    mutant: Mutant
    change: str
    outcome: Outcome
    tests: int
    """How many were to run; with none of them the mutant survives."""
    source: str
    """Which text of the module it was, as `mutants.digest_of`: of another one it says nothing."""


LIMITS: Final = "tests/protocol/test_limits.py::"
"""Tests of what every message may carry, wherever its fields are declared."""


def tests_for(mutant: Mutant, reach: Reach, seconds: float) -> list[str]:
    """The tests that reach a mutant, those first that are quick or of the module's own file.

    As many as take ``seconds`` together, by their time in `reach`.

    What runs at import is reached by every test of the module's functions and of its own file, and
    by those of limits; where it has none of the first, by every test of its part.
    """
    own = f"/test_{mutant.module.split('/')[-1]}::"
    lines = reach.tests.get(mutant.module, {})
    if not needs_import(mutant, reach):
        wanted = range(mutant.lines[0], mutant.lines[1] + 1)
        found = {test for line in wanted for test in lines.get(line, ())}
    else:
        found = {test for tests in lines.values() for test in tests}
        folder = TESTED_IN.get(mutant.module, f"tests/{mutant.module.split('/')[0]}/")
        found = found or {test for test in reach.seconds if test.startswith(folder)}
        found |= {test for test in reach.seconds if own in test or LIMITS in test}
    ordered = sorted(
        found, key=lambda test: (reach.seconds[test] * (OWN_FILE if own in test else 1), test)
    )
    chosen, spent = [], 0.0
    for test in ordered:
        spent += reach.seconds[test]
        if spent > seconds:
            break
        chosen.append(test)
    return chosen


def needs_import(mutant: Mutant, reach: Reach) -> bool:
    """Whether a change acts when its module is imported."""
    imported = set(reach.imported.get(mutant.module, ()))
    return mutant.function is None or not imported.isdisjoint(
        range(mutant.lines[0], mutant.lines[1] + 1)
    )


class Running(NamedTuple):
    """What a run is given: how tests are chosen, and who hears of results."""

    reach: Reach
    tests_seconds: float
    tell: Callable[[Result], None]

    def one(
        self, mutant: Mutant, run: Callable[[str, list[str]], bool], extra_seconds: int = 0
    ) -> None:
        """Tell what becomes of a mutant; ``run`` gets its source and the tests, in a fork."""
        source = (ROOT / mutant.module).read_text(encoding="utf-8")
        changed = mutate(source, mutant)
        if changed is None or _code_of(changed, mutant.module) is None:
            return
        tests = tests_for(mutant, self.reach, self.tests_seconds)
        outcome: Outcome = "survived"
        if tests:
            needed = sum(self.reach.seconds[test] for test in tests)
            seconds = extra_seconds + max(SECONDS_LEAST, math.ceil(SECONDS_FACTOR * needed))
            limit = Limit(seconds, max(WALL_SECONDS, WALL_FACTOR * needed))
            outcome = outcome_of(lambda: run(changed, tests), limit)
        change = change_of(mutant, source, changed)
        self.tell(Result(mutant, change, outcome, len(tests), digest_of(mutant.module)))


def run_loaded(files: list[str], mutants: Sequence[Mutant], running: Running) -> None:
    """Run mutants in forks of this process, which collects the tests of ``files`` first."""
    loop = _Loaded(mutants, running)
    status = run_pytest(files, loop)
    if loop.error is not None:
        raise loop.error
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with status {status} before the mutants ran")


def run_imported(mutants: Sequence[Mutant], running: Running) -> None:
    """Run mutants in forks of this process, which has not imported `prefixcached`."""
    for mutant in mutants:

        def run(changed: str, tests: list[str], module: str = mutant.module) -> bool:
            sys.meta_path.insert(0, _ChangedModule(module, changed))
            files = sorted({test.split("::")[0] for test in tests})
            return run_pytest(["-x", *files], _Chosen(tests)) == 0

        running.one(mutant, run, IMPORT_SECONDS)


class _Chosen:
    """A plugin that keeps the chosen tests, in their order."""

    def __init__(self, tests: list[str]) -> None:
        self._order = {test: number for number, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(kept, key=lambda item: self._order[item.nodeid])


class _Loaded:
    """A plugin that runs mutants where pytest would run the tests."""

    def __init__(self, mutants: Sequence[Mutant], running: Running) -> None:
        self._mutants = mutants
        self._running = running
        self.error: Exception | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        try:
            self._run_all(session)
        except Exception as error:
            self.error = error  # pytest shows it to nobody
            raise
        return True

    def _run_all(self, session: pytest.Session) -> None:
        items = {item.nodeid: item for item in session.items}
        things = gc.get_objects()
        functions = [thing for thing in things if isinstance(thing, types.FunctionType)]
        del things
        gc.freeze()  # forks then share more pages
        for mutant in self._mutants:

            def run(changed: str, tests: list[str], mutant: Mutant = mutant) -> bool:
                _put_into(functions, mutant, changed)
                return _pass(session, [items[test] for test in tests])

            self._running.one(mutant, run)


def _pass(session: pytest.Session, items: list[pytest.Item]) -> bool:
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


class _ChangedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source that is given."""

    def __init__(self, module: str, source: str) -> None:
        self._name = dotted(module)
        self._module = module
        self._source = source

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=_loaded_from(self._module))

    def exec_module(self, module: types.ModuleType) -> None:
        code = _code_of(self._source, self._module)
        assert code is not None
        exec(code, module.__dict__)


def _put_into(functions: list[types.FunctionType], mutant: Mutant, changed: str) -> None:
    """Give every loaded function that the change is in its new code."""
    old = _functions_of((ROOT / mutant.module).read_text(encoding="utf-8"), mutant)
    new = _functions_of(changed, mutant)
    found = 0
    for function in functions:
        if function.__code__.co_qualname == mutant.function and function.__code__ in old:
            function.__code__ = new[old.index(function.__code__)]
            found += 1
    if not found:
        raise RuntimeError(f"no function {mutant.function} of {mutant.module} is loaded")


def _functions_of(source: str, mutant: Mutant) -> list[types.CodeType]:
    """The code of every function with the mutant's name, outermost (a property has several)."""
    module = _code_of(source, mutant.module)
    assert module is not None
    found: list[types.CodeType] = []

    def visit(code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                if constant.co_qualname == mutant.function:
                    found.append(constant)
                visit(constant)

    visit(module)
    return found


def _code_of(source: str, module: str) -> types.CodeType | None:
    """The compiled module, None where the change is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of comparisons that make no sense
        try:
            return compile(source, _loaded_from(module), "exec", dont_inherit=True)
        except SyntaxError:
            return None


def _loaded_from(module: str) -> str:
    """Where Python finds the module: behind its part's link, or where that is missing."""
    return str(ROOT / "src" / "prefixcached" / module)
