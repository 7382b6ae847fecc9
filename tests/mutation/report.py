"""The page of results: a score for each module, and each survivor with the reason to accept it."""

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from typing import Final

from tests.mutation.modules import LEFT_OUT, ROOT, TESTS
from tests.mutation.mutants import mutants_of
from tests.mutation.running import Result

RESULTS: Final = ROOT / "tests" / "mutation" / "results.md"
ACCEPTED: Final = ROOT / "tests" / "mutation" / "accepted.toml"
CONFIDENCE: Final = 1.96
"""Standard deviations on either side of a share that is right 19 times in 20."""

HEAD: Final = """\
# Mutation run

`make mutation` wrote this page (`python -m tests.mutation`), so do not edit it by hand; the reasons
stand in `tests/mutation/accepted.toml`. A *mutant* is a module with one change. It is *killed* when
a test fails; when the tests no longer end, it is killed as well and counted as *timed out*. Whoever
*survives* is a change that no test notices.

The operators are those of cosmic-ray {version}, and two of ours: a statement is removed, and a
function returns at once. At each place one mutant of each family is tried, a seeded choice. Not
mutated are type annotations (but the limits in those of messages are), asserts, texts of errors,
log lines, `TYPE_CHECKING` and branches for another platform. Comparisons of order are not exchanged
for those of identity or membership.

Tests of {tests} run in the process that holds the mutant, without those marked slow or
exhaustive. Each mutant meets those that reach its statement, the quickest first, as many as take a
few seconds together; properties get {examples} examples where they do not name a number.

"""


def summary(results: Iterable[Result]) -> str:
    """A table with a row for each module, the lowest score last."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[result.mutant.module][result.outcome] += 1
    rows = sorted(counts.items(), key=lambda each: (-_score(each[1]), each[0]))
    lines = ["| module | mutants | run | killed | timed out | survived | score |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [_row(f"`{module}`", len(mutants_of(module)), found) for module, found in rows]
    total = sum(counts.values(), Counter[str]())
    lines.append(_row("**all**", sum(len(mutants_of(module)) for module, _ in rows), total))
    return "\n".join(lines)


def page(results: list[Result], examples: int) -> str:
    """The whole page."""
    total = Counter[str](result.outcome for result in results)
    score, run = _score(total), total.total()
    margin = CONFIDENCE * math.sqrt(score * (1 - score) / max(1, run))
    tests = " and ".join(f"`{each}`" for each in TESTS)
    head = HEAD.format(version=version("cosmic-ray"), tests=tests, examples=examples)
    whole = sum(len(mutants_of(module)) for module in {result.mutant.module for result in results})
    if run < whole:
        head += (
            f"This run took a seeded sample, {run:,} of {whole:,} mutants. The score of all lies "
            f"within {margin:.1%} of the sample's, 19 times in 20; that of one module is far less "
            "certain. Where tests were written against survivors of this very sample, the rest "
            "scores less until its own survivors are looked at.\n\n"
        )
    return f"{head}{summary(results)}\n\n{_left_out()}\n{_survivors(results)}"


def _row(name: str, whole: int, found: Counter[str]) -> str:
    cells = [found.total(), found["killed"], found["timed out"], found["survived"]]
    numbers = " | ".join(f"{cell:,}" for cell in (whole, *cells))
    return f"| {name} | {numbers} | {_score(found):.1%} |"


def _score(found: Counter[str]) -> float:
    return 1 - found["survived"] / max(1, found.total())


def _left_out() -> str:
    lines = ["Not mutated, and why:\n"]
    for reason, modules in LEFT_OUT.items():
        lines.append(f"- {reason}: {', '.join(f'`{module}`' for module in modules)}")
    return "\n".join(lines) + "\n"


def reasons() -> dict[tuple[str, str], str]:
    """Why each survivor is accepted, by module and change."""
    found: dict[str, dict[str, list[str]]] = tomllib.loads(ACCEPTED.read_text(encoding="utf-8"))
    return {
        (module, change): reason
        for reason, modules in found.items()
        for module, changes in modules.items()
        for change in changes
    }


def _survivors(results: list[Result]) -> str:
    known = reasons()
    by_reason: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.outcome == "survived":
            by_reason[known.get((result.mutant.module, result.change), "")].append(result)
    parts = ["## Survivors\n"]
    for reason in sorted(by_reason, key=lambda reason: (not reason, reason)):
        parts.append(f"### {reason or 'Without a reason yet'}\n")
        for result in sorted(by_reason[reason]):
            mutant = result.mutant
            change = result.change.replace("`", "'")
            parts.append(f"- `{mutant.module}:{mutant.line}` `{change}`")
        parts.append("")
    return "\n".join(parts)
