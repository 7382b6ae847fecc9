"""Publishing a committed put: walk again, skip what the world gained, attach the rest. Pure.

Rules P4, P6, P11. Called by PutDesk once all images of the put are immutable.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from prefixcached.actors import tree
from prefixcached.actors.entries import (
    Checkpoint,
    Entry,
    Memory,
    Namespace,
    ObjectEntry,
    Segment,
)
from prefixcached.actors.index import Index
from prefixcached.actors.tree import Path
from prefixcached.protocol.image import ImageKind, ImageSpec
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


def publish(index: Index, new_id: Callable[[], str], put: Publishable) -> Published:
    """Make the put's images findable, but for those whose tokens somebody stored meanwhile."""
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
    used: list[Entry] = [step.segment for step in tree.walk(put.namespace.root, put.tokens).steps]
    used.extend(entry for entry in published if isinstance(entry, Checkpoint))
    return Published(published, surplus, used, sum(entry.nbytes for entry in published))


def _publish_object(
    index: Index, new_id: Callable[[], str], put: Publishable, key: str
) -> Published:
    """Make an object findable; one that is there under the same key is replaced (rule P3)."""
    (image,) = put.images
    existing = put.namespace.objects.get(key)
    if existing is not None:
        index.remove(existing)
    entry = ObjectEntry(new_id(), put.namespace, image.spec, image.nbytes, key)
    index.namespaces[put.namespace.name] = put.namespace  # the removal may have emptied it
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
    existing = owner.checkpoints.get(position)
    if existing is not None:
        gains_rows = bool(image.spec.windows) and not existing.spec.windows
        gains_state = bool(image.spec.tensors or image.spec.metadata) and not existing.has_state
        if not (put.attachments or gains_rows or gains_state):
            return None
        index.remove(existing)
    checkpoint = Checkpoint(new_id(), put.namespace, image.spec, image.nbytes, put.attachments)
    index.add_checkpoint(checkpoint, owner)
    index.set_memory(checkpoint, image.memory, "in_flight")
    return checkpoint
