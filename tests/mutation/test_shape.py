"""Where the mutation run changes code: every place counts but those that no test should notice."""

import ast

import pytest

from tests.mutation.shape import Shape, Span, replaced

SOURCE = '''\
"""Text."""

import sys
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import decimal

Names = int | str


class Message:
    limited: Annotated[int, 7] = 1

    @property
    def twice(self) -> int | None:
        """Text."""
        if self.limited > 8:
            raise ValueError(f"{self.limited + 9} is too much")
        assert self.limited + 10
        self.seen = 11
        log.warning("seen", count=12)
        return self.limited * 2


def numbers(count: "int | str"):
    if sys.platform == "darwin":
        count += 13
    else:
        count += 14
    yield from range(
        count,
    )


TABLE = [n for n in numbers(15)]
'''


def span_of(text: str) -> Span:
    """The place of a text that stands once in the source."""
    before, _, _ = SOURCE.partition(text)
    line = before.count("\n") + 1
    column = len(before) - before.rfind("\n") - 1
    return Span((line, column), (line, column + len(text)))


@pytest.mark.parametrize(
    ("text", "is_number", "counts"),
    [
        ("7", True, True),
        ("> 8", False, True),
        ("+ 9", False, False),
        ("+ 10", False, False),
        ("11", True, True),
        ("12", True, False),
        ("* 2", False, True),
        ("| None", False, False),
        ('"int | str"', False, False),
        ("13", True, False),
        ("14", True, True),
        ("15", True, True),
        ("| str\n", False, False),
        ("decimal", False, False),
    ],
)
def test_a_place_counts_where_a_test_could_notice(text: str, is_number: bool, counts: bool) -> None:
    """Types, asserts, texts of errors, log lines and another platform's branch are left alone."""
    place = span_of(text)
    place = Span(place.start, (place.start[0], place.start[1] + len(text.strip())))
    assert Shape(SOURCE).is_left_out(place, is_number=is_number) is not counts


def test_a_place_knows_its_function() -> None:
    """What runs at import is told from what a loaded function runs."""
    shape = Shape(SOURCE)
    assert shape.function_at(span_of("* 2")) == "Message.twice"
    assert shape.function_at(span_of("14")) == "numbers"
    assert shape.function_at(span_of("7")) is None
    assert shape.function_at(span_of("15")) is None
    assert shape.function_at(span_of("property")) is None


def test_a_removal_leaves_code_of_as_many_lines() -> None:
    """Each change is Python, and what follows it keeps its place."""
    shape = Shape(SOURCE)
    changed = [replaced(SOURCE, each) for each in (*shape.removals, *shape.emptied)]
    assert len(set(changed)) == len(changed)
    for source in changed:
        ast.parse(source)
        assert source.splitlines()[-1] == SOURCE.splitlines()[-1]
        assert source.count("\n") == SOURCE.count("\n")


def test_what_does_something_can_be_removed() -> None:
    """Guards, assignments to attributes, and bodies; a generator stays one."""
    shape = Shape(SOURCE)
    lines = SOURCE.splitlines()
    assert [lines[each.span.start[0] - 1].strip() for each in shape.removals] == [
        'raise ValueError(f"{self.limited + 9} is too much")',
        "self.seen = 11",
        "count += 14",
        "yield from range(",
    ]
    assert [each.text for each in shape.emptied] == ["return", "return; yield"]
