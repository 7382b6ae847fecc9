"""Which images a hit lends, and what of each is used. Pure."""

from typing import NamedTuple

from prefixcached.actors.entries import Checkpoint, Entry
from prefixcached.actors.resume import Available, checkpoints_on
from prefixcached.actors.tree import Path
from prefixcached.protocol.ranges import clip, merge, subtract
from prefixcached.protocol.schema import Range, Schema


class Lent(NamedTuple):
    """One image of a hit; append slices of [use_start, use_end) come from it."""

    entry: Entry
    use_start: int
    use_end: int


def parts_of(schema: Schema, path: Path, position: int, available: Available) -> list[Lent]:
    """Return the images that a hit of ``position`` tokens needs, in path order.

    Images that contribute neither slices, nor window rows, nor the snapshot are left out: each
    costs a descriptor. An image behind ``position`` may have rows of before it, since the path
    goes on to it; of such a one no slices are used.
    """
    wanted = [merge(window.needed(position)) for window in schema.windows]
    lent: list[Lent] = []
    # Deepest first: the last image of a window usually has all the rows that are needed, and the
    # phase of a ring is that of the image that ends at the hit.
    for checkpoint in reversed(checkpoints_on(path)):
        is_snapshot = checkpoint.position == position and checkpoint.has_state
        if available(checkpoint) and (_takes_rows(checkpoint, position, wanted) or is_snapshot):
            lent.append(Lent(checkpoint, position, position))
    for segment, end in reversed(path.steps):
        if not available(segment):
            continue
        use_start, use_end = min(segment.start, position), min(end, position)
        gives_rows = _takes_rows(segment, use_end, wanted)
        if gives_rows or (schema.append_token_bytes and use_end > use_start):
            lent.append(Lent(segment, use_start, use_end))
    return lent[::-1]


def _takes_rows(entry: Entry, end: int, wanted: list[tuple[Range, ...]]) -> bool:
    """Whether ``entry`` has rows that are still wanted; takes them off ``wanted``."""
    if not entry.spec.windows:
        return False
    limit = entry.position if isinstance(entry, Checkpoint) else end
    taken = False
    for group, rows in enumerate(entry.spec.windows):
        usable = clip(rows.ranges, 0, limit)
        remaining = subtract(wanted[group], usable)
        if remaining != wanted[group]:
            wanted[group] = remaining
            taken = True
    return taken
