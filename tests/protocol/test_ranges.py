"""Arithmetic on ranges is arithmetic on the sets of positions that they stand for."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prefixcached.protocol.ranges import clip, covers, merge, subtract
from prefixcached.protocol.schema import Range

RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5)
"""Empty and inverted ones too: they stand for no position."""


def positions(ranges: list[Range] | tuple[Range, ...]) -> set[int]:
    return {position for start, end in ranges for position in range(start, end)}


def is_canonical(ranges: tuple[Range, ...]) -> bool:
    """Sorted, not empty, and with a gap between each two."""
    return all(start < end for start, end in ranges) and all(
        left[1] < right[0] for left, right in pairwise(ranges)
    )


@given(ranges=RANGES)
def test_a_union_has_each_position_once(ranges: list[Range]) -> None:
    """T13: rows that several segments hold are counted once, and rows that touch are one range."""
    assert positions(merge(ranges)) == positions(ranges)
    assert is_canonical(merge(ranges))


@given(ranges=RANGES, start=st.integers(0, 12), end=st.integers(0, 12))
def test_clipping_keeps_what_lies_within(ranges: list[Range], start: int, end: int) -> None:
    """T5: of what is held only the rows of the wanted prefix are used."""
    clipped = clip(merge(ranges), start, end)
    assert positions(clipped) == positions(ranges) & set(range(start, end))
    assert is_canonical(clipped)


@given(ranges=RANGES, removed=RANGES)
def test_what_is_missing_is_what_nobody_holds(ranges: list[Range], removed: list[Range]) -> None:
    """P2: of the rows that are needed those that are held are not transferred."""
    missing = subtract(ranges, removed)
    assert positions(missing) == positions(ranges) - positions(removed)
    assert is_canonical(missing)


@given(held=RANGES, wanted=RANGES)
def test_rows_cover_what_they_contain(held: list[Range], wanted: list[Range]) -> None:
    """T13: a position is usable when all the rows that it needs are held."""
    real = [each for each in wanted if each[0] < each[1]]
    assert covers(merge(held), real) == (positions(real) <= positions(held))
