"""Publishing a committed put: walk again, skip what the world gained, attach the rest. Pure.

Rules P4, P6, P11, E11. Called by PutDesk once all images of the put are immutable.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from prefixcached.actors import tree
from prefixcached.actors.checkpoint_policy import ranked
from prefixcached.actors.entries import (
    Checkpoint,
    Entry,
    Memory,
    Namespace,
    ObjectEntry,
    Segment,
)
from prefixcached.actors.index import Index
from prefixcached.actors.resume import held, window_rows
from prefixcached.actors.tree import Path
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.ranges import covers, merge
from prefixcached.protocol.tokens import TokenArray


class PutImage(NamedTuple):
    """One granted image."""

    spec: ImageSpec
    nbytes: int
    charged_bytes: int
    memory: Memory


class Publishable(Protocol):
    """What publishing needs to know of a put (`puts.Put`)."""

    namespace: Namespace
    tokens: TokenArray
    absorbed: Segment | None
    images: list[PutImage]
    minimum: int
    attachments: bool
    key: str | None


class Published(NamedTuple):
    """What became of a put's images. ``used`` is its whole path, for recency."""

    published: list[Entry]
    surplus: list[PutImage]
    used: list[Entry]
    new_bytes: int


def is_complete(put: Publishable) -> bool:
    """Whether the put's end would be resumable now: what it builds on may have gone meanwhile.

    Its base can be lost with a file, and window rows that others held at the offer with an image
    that was replaced or with a segment of its own that turned out to be surplus.
    """
    if put.key is not None:
        return True
    path = tree.walk(put.namespace.root, put.tokens)
    new = [image.spec for image in put.images if _is_new(image.spec, path.matched)]
    start = min((s.start for s in new if s.kind is ImageKind.SEGMENT), default=put.tokens.size)
    if start > path.matched:
        return False
    for group, window in enumerate(put.namespace.schema.windows):
        rows = list(window_rows(path, group, held))
        for spec in new:
            rows.extend(spec.windows[group].ranges if spec.windows else ())
        if not covers(merge(rows), window.needed(int(put.tokens.size))):
            return False
    return True


def _is_new(spec: ImageSpec, matched: int) -> bool:
    return spec.kind is not ImageKind.SEGMENT or spec.end > matched


def publish(index: Index, new_id: Callable[[], str], put: Publishable) -> Published:
    """Make the put's images findable, but for those whose tokens somebody stored meanwhile.

    The put must be complete (`is_complete`).
    """
    if put.key is not None:
        return _publish_object(index, new_id, put, put.key)
    path = tree.walk(put.namespace.root, put.tokens)
    published: list[Entry] = []
    surplus: list[PutImage] = []
    absorbed = put.absorbed if _may_still_absorb(put, path) else None
    matched = absorbed.start if absorbed is not None else path.matched
    parent = path.last or put.namespace.root
    for image in put.images:
        if image.spec.kind is not ImageKind.SEGMENT:
            continue
        if image.spec.end <= matched:
            surplus.append(image)
            continue
        start = max(image.spec.start, matched)
        # A copy: a slice would keep the whole request's tokens in memory.
        tokens = put.tokens[start : image.spec.end].copy()
        segment = Segment(
            new_id(), put.namespace, image.spec, image.nbytes, tokens, start, put.minimum
        )
        if absorbed is not None:
            index.absorb(absorbed, segment)
            absorbed = None
        else:
            index.add_segment(segment, parent)
        index.set_memory(segment, image.memory, "in_flight")
        published.append(segment)
        parent = segment
    for image in put.images:
        if image.spec.kind is ImageKind.CHECKPOINT:
            checkpoint = _publish_checkpoint(index, new_id, put, image)
            if checkpoint is None:
                surplus.append(image)
            else:
                published.append(checkpoint)
    whole = [step.segment for step in tree.walk(put.namespace.root, put.tokens).steps]
    lower_minimum(whole, put.minimum)
    used: list[Entry] = [*whole]
    used.extend(entry for entry in published if isinstance(entry, Checkpoint))
    return Published(published, surplus, used, sum(entry.nbytes for entry in published))


def lower_minimum(segments: Iterable[Segment], minimum: int) -> None:
    """Let what a put found there be reused from ``minimum`` tokens on, as the put asks (rule T6).

    Whoever stored it first with a larger minimum would else hide it from whoever needs none.
    """
    for segment in segments:
        segment.minimum = min(segment.minimum, minimum)


def _publish_object(
    index: Index, new_id: Callable[[], str], put: Publishable, key: str
) -> Published:
    """Make an object findable; one that is there under the same key is replaced (rule P3)."""
    (image,) = put.images
    existing = put.namespace.objects.get(key)
    entry = ObjectEntry(new_id(), put.namespace, image.spec, image.nbytes, key)
    if existing is not None:
        index.replace(existing, entry)
    else:
        index.add_object(entry)
    index.set_memory(entry, image.memory, "in_flight")
    return Published([entry], [], [entry], entry.nbytes)


def _may_still_absorb(put: Publishable, path: Path) -> bool:
    """Whether the leaf is as it was at the offer: still there, still a leaf, nothing gained."""
    leaf = put.absorbed
    return (
        leaf is not None
        and leaf.attached
        and leaf.is_leaf
        and path.last is leaf
        and path.matched == leaf.end
    )


def _publish_checkpoint(
    index: Index, new_id: Callable[[], str], put: Publishable, image: PutImage
) -> Checkpoint | None:
    position = image.spec.end
    path = tree.walk(put.namespace.root, put.tokens)
    owner = next((s for s, end in path.steps if s.start < position <= end), None)
    assert owner is not None, "the put's own segments cover its end"
    checkpoint = Checkpoint(new_id(), put.namespace, image.spec, image.nbytes, put.attachments)
    existing = owner.checkpoints.get(checkpoint.key)
    if existing is None:
        index.add_checkpoint(checkpoint, owner)
    elif put.attachments if checkpoint.has_state else _has_rows_of(checkpoint, existing):
        index.replace(existing, checkpoint)
    else:
        return None
    index.set_memory(checkpoint, image.memory, "in_flight")
    for other, is_surplus in ranked(path):
        index.mark_surplus(other, is_surplus)
    return checkpoint


def _has_rows_of(new: Checkpoint, old: Checkpoint) -> bool:
    """Whether ``new``, rows alone, has all the rows of ``old`` and more."""
    pairs = list(zip(new.spec.windows, old.spec.windows, strict=True))
    return new.spec.windows != old.spec.windows and all(
        covers(merge(mine.ranges), theirs.ranges) for mine, theirs in pairs
    )
