"""The segment tree: a radix tree without splits. Pure; the nodes are `Segment`s.

A child attaches at (parent, position), also inside its parent, and is found by (position, first
token). Nothing is ever split, moved or renamed. The invariant that makes a walk unambiguous: a
child's first token differs from its parent's token at that position.
"""

import functools
from typing import Final, NamedTuple

from prefixcached.actors.entries import Checkpoint, Segment
from prefixcached.protocol.tokens import TokenArray, common_prefix_length


class Step(NamedTuple):
    """One segment of a path and the position up to which the path uses it."""

    segment: Segment
    end: int


_step: Final = functools.partial(tuple.__new__, Step)
"""As `Step`, from one tuple: a class's own constructor is a call of Python, 24 times a look-up."""


class Path(NamedTuple):
    """Where a walk led: the matching segments from the top, and how many tokens matched."""

    steps: tuple[Step, ...]
    matched: int

    @property
    def last(self) -> Segment | None:
        """The deepest segment, if any matched."""
        return self.steps[-1].segment if self.steps else None

    def cut(self, position: int) -> "Path":
        """The same path up to ``position`` tokens."""
        if position >= self.matched:
            return self
        steps = tuple(
            Step(segment, min(end, position))
            for segment, end in self.steps
            if segment.start < position
        )
        return Path(steps, position)


def walk(root: Segment, tokens: TokenArray) -> Path:
    """Return the longest path whose tokens are a prefix of ``tokens``."""
    steps: list[Step] = []
    node, position, size = root, 0, int(tokens.size)
    # A conversation is a chain of many segments that match whole: one comparison of bytes each.
    packed = tokens.tobytes()
    ids = memoryview(packed).cast("I")
    while position < size:
        child = node.children.get((position, ids[position]))
        if child is None:
            break
        if packed.startswith(child.tokens.data, 4 * position):
            position = child.end
        else:
            position += common_prefix_length(child.tokens, tokens[position:])
        steps.append(_step((child, position)))
        node = child
    return Path(tuple(steps), position)


def attach(segment: Segment, parent: Segment) -> None:
    """Hang ``segment`` on ``parent`` at its own start.

    Raises:
        ValueError: The position is outside the parent, taken, or the parent's own path goes on
            with the same token there. Each would make a walk ambiguous.
    """
    start, first = segment.start, int(segment.tokens[0])
    if not (parent.start < start <= parent.end or start == parent.end):
        raise ValueError(f"{segment} cannot attach at {start} of {parent.start}..{parent.end}")
    if (start, first) in parent.children:
        raise ValueError(f"position {start} of {parent} already has a child with token {first}")
    if start < parent.end and int(parent.tokens[start - parent.start]) == first:
        raise ValueError(f"{parent} itself continues with token {first} at {start}")
    parent.children[start, first] = segment
    segment.parent = parent


def detach(segment: Segment) -> None:
    """Take ``segment``, with whatever hangs on it, out of the tree."""
    parent = segment.parent
    if parent is not None:
        del parent.children[segment.start, int(segment.tokens[0])]
        segment.parent = None


def attach_checkpoint(checkpoint: Checkpoint, segment: Segment) -> None:
    """Put ``checkpoint`` on the segment that owns its position."""
    position = checkpoint.position
    if not segment.start < position <= segment.end:
        raise ValueError(f"position {position} is not of {segment}")
    if checkpoint.key in segment.checkpoints:
        raise ValueError(f"{segment} already has such a checkpoint at {position}")
    segment.checkpoints[checkpoint.key] = checkpoint
    checkpoint.segment = segment


def detach_checkpoint(checkpoint: Checkpoint) -> None:
    """Take ``checkpoint`` off its segment."""
    if checkpoint.segment is not None:
        del checkpoint.segment.checkpoints[checkpoint.key]
        checkpoint.segment = None
