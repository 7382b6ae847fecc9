"""What the fuzzer found, replayed without it: the kept corpora and every past finding (C3)."""

import sys
from collections.abc import Sequence

import pytest

from tests.fuzz import corpus, targets
from tests.fuzz.targets import TARGETS

PARTS = 4
"""Of each corpus, so that the workers of a test run share the slow ones."""

CHOSEN = [name for name, one in TARGETS.items() if sys.platform == "linux" or not one.is_linux_only]
FINDINGS = [(target, name) for target in CHOSEN for name in corpus.findings(target)]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", CHOSEN)
def test_no_kept_input_fails(target: str, part: int) -> None:
    """An hour of fuzzing finds nothing new, and what it reached stays reached without a fault."""
    run = targets.load(target)
    inputs = corpus.packed_inputs(target)
    assert len(inputs) >= PARTS
    for data in inputs[part::PARTS]:
        run(data)


@pytest.mark.parametrize(("target", "name"), FINDINGS)
def test_no_past_finding_comes_back(target: str, name: str) -> None:
    """Every input that once failed is kept under the name of what it showed."""
    targets.load(target)(corpus.findings(target)[name])


@pytest.mark.parametrize("target", CHOSEN)
def test_an_input_that_is_cut_is_an_input(target: str) -> None:
    """Without bytes every decision is the plain one: no target needs a whole input."""
    run = targets.load(target)
    longest: bytes = max(corpus.packed_inputs(target), key=len)
    cuts: Sequence[int] = (0, 1, 2, len(longest) // 2)
    for length in cuts:
        run(longest[:length])


def test_the_repository_keeps_the_corpora_small() -> None:
    """Inputs are minimised: less than a mebibyte, and as many as a quick test can run."""
    files = [path for path in corpus.HERE.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert sum(path.stat().st_size for path in files if "__pycache__" not in path.parts) < 1 << 20
    assert all(len(corpus.packed_inputs(target)) <= corpus.MOST_INPUTS for target in TARGETS)
