"""Arithmetic on sorted, disjoint, half-open ranges of token positions."""

from collections.abc import Iterable, Sequence

from prefixcached.protocol.schema import Range


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the union of ``ranges`` as sorted, disjoint, non-touching ranges."""
    merged: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def clip(ranges: Iterable[Range], start: int, end: int) -> tuple[Range, ...]:
    """Return the parts of ``ranges`` that lie in [start, end)."""
    clipped = ((max(a, start), min(b, end)) for a, b in ranges)
    return tuple((a, b) for a, b in clipped if a < b)


def subtract(ranges: Iterable[Range], removed: Iterable[Range]) -> tuple[Range, ...]:
    """Return the positions of ``ranges`` that are not in ``removed``."""
    remaining = merge(ranges)
    for low, high in merge(removed):
        pieces: list[Range] = []
        for start, end in remaining:
            if start < min(end, low):
                pieces.append((start, min(end, low)))
            if max(start, high) < end:
                pieces.append((max(start, high), end))
        remaining = tuple(pieces)
    return remaining


def covers(held: Sequence[Range], wanted: Iterable[Range]) -> bool:
    """Whether every position of ``wanted`` lies in ``held`` (merged ranges)."""
    return all(any(a <= start and end <= b for a, b in held) for start, end in wanted)
