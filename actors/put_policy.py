"""What a put has to transfer: the images of a grant, from what is held and what is offered. Pure.

Rules P2 (only what nobody holds), P11 (absorbing small tails), E11, T6, T13.
"""

from typing import NamedTuple

from prefixcached.actors.checkpoint_policy import has_resumable_near
from prefixcached.actors.entries import Checkpoint, Entry, Segment
from prefixcached.actors.resume import held, window_rows
from prefixcached.actors.tree import Path
from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import (
    ImageKind,
    ImageSpec,
    WindowRows,
    check_ranges,
    check_spec,
    segment_lengths,
)
from prefixcached.protocol.messages import Offer
from prefixcached.protocol.ranges import clip, covers, merge, subtract
from prefixcached.protocol.schema import Range, Schema, Window


class PutPlan(NamedTuple):
    """What to grant: images for [base, length), segments first, then a checkpoint.

    ``absorbed`` is the leaf that the first segment replaces; the base is then its start.
    ``leaves_out_snapshot`` says that the offered one is too close to another (rule E11).
    """

    base: int
    absorbed: Segment | None
    images: tuple[ImageSpec, ...]
    leaves_out_snapshot: bool = False


def check_offer(schema: Schema, offer: Offer, length: int) -> None:
    """Raise SchemaError where an offer contradicts its schema (rule P1)."""
    if len(offer.windows) != len(schema.windows):
        raise SchemaError(
            f"{len(offer.windows)} window groups offered, the schema has {len(schema.windows)}"
        )
    for rows in offer.windows:
        check_ranges(rows.ranges, length)
    if offer.checkpoint is not None:
        spec = offer.checkpoint
        if spec.kind is not ImageKind.CHECKPOINT or spec.end != length or spec.windows:
            raise SchemaError(f"the checkpoint must stand at {length}, without window rows")
        check_spec(schema, spec)


def plan_put(
    schema: Schema,
    path: Path,
    length: int,
    offer: Offer,
    absorbable: Segment | None,
    segment_max_bytes: int,
    checkpoint_min_tokens: int,
) -> PutPlan | None:
    """Return what of an offer of ``length`` tokens has to be stored, given the ``path`` held.

    ``absorbable`` is the leaf at the path's end if it may be absorbed (`may_absorb`). None means
    that the offer leaves out rows that its end needs, so that it would be resumable nowhere new.
    """
    base, absorbed = path.matched, None
    if absorbable is not None:
        pieces = segment_lengths(schema, absorbable.start, length, segment_max_bytes)
        if pieces and pieces[0][1] > absorbable.end:
            base, absorbed = absorbable.start, absorbable
    # A snapshot is stored if there is none here or near, and one with attachments in any case
    # (rules P3, E11).
    held_snapshot = _checkpoint_at(path, length, has_state=True)
    is_new = held_snapshot is None or offer.attachments
    leaves_out = (
        offer.checkpoint is not None
        and is_new
        and not offer.attachments
        and has_resumable_near(schema, path, length, checkpoint_min_tokens)
    )
    snapshot = offer.checkpoint if is_new and not leaves_out else None
    replaced = held_snapshot if snapshot is not None else None
    rows = _rows_to_store(schema, path.cut(base), base, length, offer, replaced)
    if rows is not None and base == length and _count(rows) and snapshot is None:
        replaced = _checkpoint_at(path, length, has_state=False)
        rows = _rows_to_store(schema, path, base, length, offer, replaced)
    if rows is None:
        return None
    ranges = segment_lengths(schema, base, length, segment_max_bytes)
    images = [ImageSpec(ImageKind.SEGMENT, start, end) for start, end in ranges]
    if images and rows:
        last = images[-1]
        images[-1] = ImageSpec(ImageKind.SEGMENT, last.start, last.end, windows=rows)
    # Without the snapshot that is left out, rows would make nothing resumable.
    rows_apart = rows if base == length and _count(rows) and not leaves_out else ()
    if snapshot is not None or rows_apart:
        images.append(
            ImageSpec(
                ImageKind.CHECKPOINT, length, length, windows=rows_apart,
                tensors=snapshot.tensors if snapshot is not None else (),
                metadata=snapshot.metadata if snapshot is not None else b"",
            )
        )  # fmt: skip
    return PutPlan(base, absorbed, tuple(images), leaves_out)


def may_absorb(
    schema: Schema, path: Path, length: int, offer: Offer, segment_min_tokens: int
) -> Segment | None:
    """Return the leaf that a put may replace because it is short (rule P11), if there is one.

    Only where slices are all there is, so that the new ones cover whatever the leaf covers; a put
    with a minimum reusable length neither replaces nor is replaced (rule T6).
    """
    leaf = path.last
    if (
        leaf is None
        or not schema.is_append_only
        or path.matched != leaf.end
        or length <= leaf.end
        or leaf.end - leaf.start >= segment_min_tokens
        or not leaf.is_leaf
        or leaf.minimum
        or offer.minimum
    ):
        return None
    return leaf


def _rows_to_store(
    schema: Schema, path: Path, base: int, length: int, offer: Offer, replaced: Entry | None
) -> tuple[WindowRows, ...] | None:
    """Return the rows of each window group to store; () where the schema has none.

    None if neither the offer nor ``path`` has what the end needs. What the image ``replaced``
    holds does not count: it leaves when the put is published.
    """

    def stays(entry: Entry) -> bool:
        return entry is not replaced and held(entry)

    found: list[WindowRows] = []
    for group, (window, offered) in enumerate(zip(schema.windows, offer.windows, strict=True)):
        present = clip(window_rows(path, group, stays), 0, base)
        needed = window.needed(length)
        if not covers(merge((*present, *offered.ranges)), needed):
            return None
        wanted = merge((*needed, *_useful(window, base, length)))
        available = merge(piece for wish in wanted for piece in clip(offered.ranges, *wish))
        found.append(WindowRows(subtract(available, present), offered.phase))
    return tuple(found)


def _useful(window: Window, base: int, length: int) -> tuple[Range, ...]:
    """Rows beyond need that are worth storing: templates often rewrite a prompt's tail (T13)."""
    needed = window.needed(length)
    oldest = needed[-1][0] if needed else length
    start = max(base, oldest - limits.WINDOW_EXTRA_ROWS)
    return ((start, length),) if start < length else ()


def _count(rows: tuple[WindowRows, ...]) -> int:
    return sum(group.count for group in rows)


def _checkpoint_at(path: Path, position: int, *, has_state: bool) -> Checkpoint | None:
    for segment, end in path.steps:
        if segment.start < position <= end:
            return segment.checkpoints.get((position, has_state))
    return None
