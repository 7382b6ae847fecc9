"""The mutants of a module: each is its source with one change.

Cosmic-ray's operators exchange signs, comparisons, numbers, booleans, exceptions and loops. Two are
ours: a statement is removed, and a function does nothing. `shape` says which places do not count;
beside those, comparisons of order are not exchanged for those of identity or membership.
"""

import difflib
import functools
import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins

from tests.mutation.modules import ROOT
from tests.mutation.shape import Shape, Span, replaced

NEEDS_ARGUMENTS: Final = ("core/VariableInserter", "core/VariableReplacer")
NUMBERS: Final = "core/NumberReplacer"
REMOVED: Final = "ours/RemoveStatement"
EMPTIED: Final = "ours/EmptyFunction"
ORDER: Final = frozenset({"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"})
OPPOSITES: Final = ({"Is", "IsNot"}, {"In", "NotIn"})


class Mutant(NamedTuple):
    """One change.

    ``lines`` are the first and the last of its statement. ``function`` is the outermost one around
    it, None where the change is in code that runs when the module is imported.
    """

    module: str
    operator: str
    occurrence: int
    line: int
    lines: tuple[int, int]
    function: str | None


def share_of(module: str, share: float) -> list[Mutant]:
    """A choice of a module's mutants, the same in every run, in the order in which it grows."""
    mutants = list(mutants_of(module))
    random.Random(module).shuffle(mutants)
    return mutants[: math.ceil(share * len(mutants))]


@functools.cache
def digest_of(module: str) -> str:
    """Return what tells a module's text from any other."""
    return hashlib.sha256((ROOT / module).read_bytes()).hexdigest()[:16]


@functools.cache
def mutants_of(module: str) -> tuple[Mutant, ...]:
    """The mutants of a module: at each place one of each family, the same in every run.

    Ten other signs for a `+` would tell little more than one.
    """
    source = (ROOT / module).read_text(encoding="utf-8")
    shape = Shape(source)
    places: dict[tuple[Span, str], list[Mutant]] = defaultdict(list)
    for operator, occurrence, span in (*_of_cosmic_ray(source), *_of_ours(shape)):
        if _tells(operator) and not shape.is_left_out(span, is_number=operator == NUMBERS):
            mutant = Mutant(
                module,
                operator,
                occurrence,
                span.start[0],
                (span.start[0], span.end[0]) if operator == EMPTIED else shape.statement_at(span),
                shape.function_at(span),
            )
            places[span, operator.split("_")[0]].append(mutant)
    chosen = (random.Random(str(place)).choice(found) for place, found in places.items())
    return tuple(sorted(chosen))


def mutate(source: str, mutant: Mutant) -> str | None:
    """The module's source with the change, None where it changes nothing."""
    if mutant.operator == REMOVED:
        changed = replaced(source, Shape(source).removals[mutant.occurrence])
    elif mutant.operator == EMPTIED:
        changed = replaced(source, Shape(source).emptied[mutant.occurrence])
    else:
        operator = cosmic_ray.plugins.get_operator(mutant.operator)()
        try:
            changed = cosmic_ray.mutating.mutate_code(source, operator, mutant.occurrence)
        except AttributeError:  # its exception replacer knows no dotted name among several
            return None
    return None if changed == source else changed


def change_of(mutant: Mutant, source: str, changed: str) -> str:
    """The change in one line, as `old → new`."""
    if mutant.operator == EMPTIED:
        return f"the body of {mutant.function} → return"
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
    signed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    before, after = (
        " ".join(text for line in signed if line[0] == sign and (text := line[1:].strip()))
        for sign in "-+"
    )
    return f"{before} → {after}"


def _tells(operator: str) -> bool:
    if not operator.startswith("core/ReplaceComparisonOperator"):
        return True
    old, new = operator.split("_")[1:]
    return {old, new} <= ORDER or {old, new} in OPPOSITES


def _of_cosmic_ray(source: str) -> Iterator[tuple[str, int, Span]]:
    operators: dict[str, Any] = {
        name: cosmic_ray.plugins.get_operator(name)()
        for name in sorted(cosmic_ray.plugins.operator_names())
        if name not in NEEDS_ARGUMENTS
    }
    seen = Counter[str]()
    for node in cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(source)):
        for name, operator in operators.items():
            for start, end in operator.mutation_positions(node):
                yield name, seen[name], Span(start, end)
                seen[name] += 1


def _of_ours(shape: Shape) -> Iterator[tuple[str, int, Span]]:
    for operator, replacements in ((REMOVED, shape.removals), (EMPTIED, shape.emptied)):
        for occurrence, replacement in enumerate(replacements):
            yield operator, occurrence, replacement.span
