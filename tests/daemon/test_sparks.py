"""Numbers in one line of text: what is drawn, and that names cannot write to the terminal."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.daemon.commands.common import plain
from prefixcached.daemon.commands.sparks import (
    bar,
    count_text,
    duration_text,
    gauge_bins,
    rate_bins,
    ratio_bins,
    spark,
)

NAN = math.nan


@given(st.text())
def test_names_are_drawn_without_control_characters(name: str) -> None:
    """A session called after an escape sequence is only shown."""
    shown = plain(name)
    assert len(shown) == len(name)
    assert shown.isprintable()


def test_a_spark_has_a_character_a_value() -> None:
    """Zero is the lowest block, the largest the highest, no value a blank; right-aligned."""
    assert spark(np.array([0.0, NAN, 4.0, 8.0]), None, 6, is_plain=False) == "  ▁ ▅█"
    assert spark(np.array([0.0, 0.5, 2.0]), 1.0, 3, is_plain=True) == ".+@"
    assert spark(np.zeros(3), None, 3, is_plain=False) == "▁▁▁"
    assert spark(np.zeros(0), None, 3, is_plain=False) == "   "


@given(st.floats(-1, 2), st.integers(0, 50))
def test_a_bar_is_as_wide_as_asked(share: float, width: int) -> None:
    """Also beyond its cap."""
    assert len(bar(share, width, is_plain=True)) == width


def test_rates_are_growth_over_the_time_that_passed() -> None:
    """A gap in the rows is time as well; too few rows have no rate."""
    counter, times = np.array([0.0, 10.0, 10.0, 70.0]), np.array([0.0, 1.0, 2.0, 5.0])
    assert rate_bins(counter, times, 9).tolist() == [10.0, 0.0, 20.0]
    assert rate_bins(counter, times, 1).tolist() == [14.0]
    assert len(rate_bins(counter[:1], times[:1], 9)) == 0
    assert len(rate_bins(counter[:0], times[:0], 9)) == 0


def test_a_ratio_without_anything_to_share_is_none() -> None:
    """No takes are neither hits nor misses."""
    parts, wholes = np.array([0.0, 5.0, 5.0]), np.array([0.0, 10.0, 10.0])
    first, second = ratio_bins(parts, wholes, 9)
    assert first == 0.5
    assert math.isnan(second)


def test_gauges_are_means_of_what_is_there() -> None:
    """Rows without a value do not count as zero."""
    values = gauge_bins(np.array([1.0, NAN, 3.0, NAN, NAN]), 2)
    assert values[0] == 2.0
    assert math.isnan(values[1])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.3e-4, "430 µs"), (1.234e-3, "1.23 ms"), (0.152, "152 ms"), (3.4, "3.4 s"), (600, "10 min")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    """Three digits and a unit."""
    assert duration_text(seconds) == text


def test_two_digits_never_become_an_exponent() -> None:
    """152 ms in two digits are 150 ms."""
    assert duration_text(0.152, 2) == "150 ms"


def test_counts_grow_in_length_slowly() -> None:
    """Thousands, millions and billions get a letter."""
    numbers = (950, 9_999, 12_345, 4_560_000, 7.5e9)
    assert [count_text(number) for number in numbers] == [
        "950", "9,999", "12.3k", "4.56M", "7.5G",
    ]  # fmt: skip
    assert all(a < b for a, b in pairwise(numbers))
