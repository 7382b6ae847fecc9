"""Numbers in one line of text: bars, sparklines, amounts. Pure."""

from typing import Final

import numpy as np

from prefixcached.daemon.commands.common import age_text
from prefixcached.daemon.history_rings import Rows

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
PLAIN_BLOCKS: Final = " .:-=+*#@"
"""For terminals that show ASCII alone."""


def count_text(number: float) -> str:
    """A number for people: 950, 12.3k, 4.56M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{number:,.0f}"


def duration_text(seconds: float, digits: int = 3) -> str:
    """Seconds for people: 430 µs, 1.23 ms, 3.4 s, 5 min."""
    if seconds >= 120:
        return age_text(seconds)
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{float(f'{seconds / size:.{digits}g}'):g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def bar(share: float, width: int, *, is_plain: bool) -> str:
    """Return a bar of ``width`` characters, filled by ``share`` (0 to 1)."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    full, empty = ("#", "-") if is_plain else ("█", "░")
    return full * filled + empty * (width - filled)


def spark(values: Rows, most: float | None, width: int, *, is_plain: bool) -> str:
    """Return one character a value, right-aligned; NaN is a blank, 0 the lowest block.

    Args:
        values: Shape (at most ``width``,).
        most: The value of a full block; None takes the largest.
        width: Characters.
        is_plain: Use ASCII.
    """
    blocks = PLAIN_BLOCKS if is_plain else BLOCKS
    known = values[~np.isnan(values)]
    top = most if most is not None else float(known.max(initial=0.0))
    drawn = ""
    for value in values[-width:]:
        if np.isnan(value):
            drawn += blocks[0]
            continue
        height = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
        drawn += blocks[1 + round(height * (len(blocks) - 2))]
    return drawn.rjust(width)


def gauge_bins(values: Rows, bins: int) -> Rows:
    """Return means of at most ``bins`` equal stretches, shape (bins,)."""
    return np.array([_mean(part) for part in _stretches(values, bins)])


def rate_bins(values: Rows, times: Rows, bins: int) -> Rows:
    """Return a counter's growth a second in at most ``bins`` stretches; NaN without time."""
    grown, passed = np.diff(values), np.diff(times[-len(values) :] if len(values) else times[:0])
    return np.array(
        [
            _ratio(more.sum(), seconds.sum())
            for more, seconds in zip(
                _stretches(grown, bins), _stretches(passed, bins), strict=True
            )
        ]
    )  # fmt: skip


def ratio_bins(parts: Rows, wholes: Rows, bins: int) -> Rows:
    """Return growth over growth of two counters in at most ``bins`` stretches; NaN without any."""
    return np.array(
        [
            _ratio(part.sum(), whole.sum())
            for part, whole in zip(
                _stretches(np.diff(parts), bins), _stretches(np.diff(wholes), bins), strict=True
            )
        ]
    )  # fmt: skip


def _stretches(values: Rows, bins: int) -> list[Rows]:
    if not len(values):
        return []
    return list(np.array_split(values, min(bins, len(values))))


def _mean(values: Rows) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("nan")
