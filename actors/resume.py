"""Which position of a path a cache can be resumed at (rules T1, T5, T6, T13). Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from prefixcached.actors.entries import Checkpoint, Entry
from prefixcached.actors.tree import Path
from prefixcached.protocol.ranges import clip, covers, merge
from prefixcached.protocol.schema import Range, Schema, Window, WindowShape

Available = Callable[[Entry], bool]


class Resumption(NamedTuple):
    """The longest resumable position, and what stood in the way of a longer one.

    ``reason`` is a miss reason of rule T9; it explains ``position == 0``.
    """

    position: int
    reason: str


def resident(entry: Entry) -> bool:
    """Available in RAM."""
    return entry.memory is not None


def held(entry: Entry) -> bool:
    """Available in either tier."""
    return entry.memory is not None or entry.file is not None


def longest_resumable(schema: Schema, path: Path, limit: int, available: Available) -> Resumption:
    """Return the largest resumable position of ``path`` that is at most ``limit``.

    Every constraint yields the largest position at or below a given one that satisfies it, so
    going down from constraint to constraint until none objects finds the largest that satisfies
    all of them.
    """
    position = min(limit, path.matched)
    reason = "diverged"
    if schema.append_token_bytes:
        reach = _contiguous(path, available)
        if reach < position:
            position, reason = reach, "evicted"
    if not schema.windows and not schema.has_state and not _has_minimum(path):
        return Resumption(position, reason)
    rows = [window_rows(path, group, available) for group in range(len(schema.windows))]
    while position > 0:
        before = position
        if schema.has_state:
            position = _checkpoint_at_or_below(path, position, available)
            if position < before:
                reason = "no-checkpoint"
        for window, held_rows in zip(schema.windows, rows, strict=True):
            lower = covered_at_or_below(window, held_rows, position)
            if lower < position:
                position, reason = lower, "window-gap"
        lower = _minimum_at_or_below(path, position)
        if lower < position:
            position, reason = lower, "below-minimum"
        if position == before:
            break
    return Resumption(position, reason)


def window_rows(path: Path, group: int, available: Available) -> tuple[Range, ...]:
    """Return which rows of a window group the path's images hold, merged.

    An image's rows are those of its own path, which this path shares up to where it leaves it.
    """
    ranges: list[Range] = []
    for segment, end in path.steps:
        for image in (segment, *segment.checkpoints.values()):
            if image.spec.windows and available(image):
                if isinstance(image, Checkpoint) and image.position > end:
                    continue
                ranges.extend(clip(image.spec.windows[group].ranges, 0, end))
    return merge(ranges)


def covered_at_or_below(window: Window, rows: Sequence[Range], position: int) -> int:
    """Return the largest position <= ``position`` whose needed rows are all in ``rows``.

    Within one range of rows only its end can be resumable if any position of it is, because a
    smaller position needs older rows; and a chunk needs nothing at its own boundary.
    """
    if covers(rows, window.needed(position)):
        return position
    floor = position // window.size * window.size if window.shape is WindowShape.CHUNK else 0
    for start, end in reversed(rows):
        candidate = min(end, position)
        if candidate > max(start, floor) and covers(rows, window.needed(candidate)):
            return candidate
    return floor


def checkpoints_on(path: Path) -> list[Checkpoint]:
    """Return the checkpoints that the path passes, shortest position first."""
    found = [
        checkpoint
        for segment, end in path.steps
        for checkpoint in segment.checkpoints.values()
        if checkpoint.position <= end
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.position)


def _contiguous(path: Path, available: Available) -> int:
    reach = 0
    for segment, end in path.steps:
        if not available(segment):
            break
        reach = end
    return reach


def _has_minimum(path: Path) -> bool:
    return any(segment.minimum for segment, _ in path.steps)


def _checkpoint_at_or_below(path: Path, position: int, available: Available) -> int:
    positions = [
        checkpoint.position
        for checkpoint in checkpoints_on(path)
        if checkpoint.position <= position and checkpoint.has_state and available(checkpoint)
    ]
    return positions[-1] if positions else 0


def _minimum_at_or_below(path: Path, position: int) -> int:
    for segment, _ in reversed(path.steps):
        if segment.start < position:
            if position >= segment.minimum:
                return position
            position = segment.start
    return position
