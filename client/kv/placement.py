"""Where token positions stand along a token axis, in a cache's buffer or in an image. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefixcached.client.kv.errors import UnusableImageError
from prefixcached.protocol.ranges import merge, subtract
from prefixcached.protocol.schema import Range


class Span(NamedTuple):
    """Positions [start, end) stand at rows [row, row + end - start)."""

    start: int
    end: int
    row: int


class Placement(NamedTuple):
    """A token axis of ``rows`` rows; ``spans`` say which position stands where."""

    rows: int
    spans: tuple[Span, ...]


class Transfer(NamedTuple):
    """``rows`` rows from row ``source`` on belong at row ``target`` and after."""

    source: int
    target: int
    rows: int


def packed(ranges: Iterable[Range]) -> tuple[Span, ...]:
    """Return the spans of rows that stand in the order of ``ranges`` without gaps."""
    spans: list[Span] = []
    row = 0
    for start, end in ranges:
        spans.append(Span(start, end, row))
        row += end - start
    return tuple(spans)


def positions(spans: Iterable[Span]) -> tuple[Range, ...]:
    """Return which positions ``spans`` hold."""
    return merge((span.start, span.end) for span in spans)


def without(spans: Iterable[Span], removed: Sequence[Range]) -> tuple[Span, ...]:
    """Return ``spans`` less the positions in ``removed``."""
    return tuple(
        Span(start, end, span.row + start - span.start)
        for span in spans
        for start, end in subtract([(span.start, span.end)], removed)
    )


def intersect(left: Iterable[Range], right: Iterable[Range]) -> tuple[Range, ...]:
    """Return the positions that lie in both."""
    left = merge(left)
    return subtract(left, subtract(left, right))


def transfers(
    source: Sequence[Span], target: Sequence[Span], ranges: Iterable[Range]
) -> list[Transfer]:
    """Return how the rows of the positions in ``ranges`` move from ``source`` to ``target``.

    Rows that stand side by side on both sides are one transfer. The order is that of ``ranges``.

    Raises:
        UnusableImageError: A position is on one side only.
    """
    moves: list[Transfer] = []
    for start, end in ranges:
        position = start
        while position < end:
            here, there = _holding(source, position), _holding(target, position)
            stop = min(end, here.end, there.end)
            move = Transfer(
                here.row + position - here.start,
                there.row + position - there.start,
                stop - position,
            )
            if moves and _adjacent(moves[-1], move):
                last = moves.pop()
                move = Transfer(last.source, last.target, last.rows + move.rows)
            moves.append(move)
            position = stop
    return moves


def _holding(spans: Sequence[Span], position: int) -> Span:
    for span in spans:
        if span.start <= position < span.end:
            return span
    raise UnusableImageError(f"no row for token {position}; there are rows for {positions(spans)}")


def _adjacent(first: Transfer, second: Transfer) -> bool:
    return first.source + first.rows == second.source and first.target + first.rows == second.target
