"""Which checkpoints are worth their weight (rule E11). Pure.

A checkpoint of a large hybrid model weighs as much as thousands of tokens of its KV, and a
conversation leaves one or two at every turn. The next turn goes on from the newest; an edit or a
retry from one of the few before it; a shared system prompt from one that was hit already.
"""

from collections.abc import Iterator
from typing import Final

from prefixcached.actors.entries import Checkpoint
from prefixcached.actors.resume import checkpoints_on, held, longest_resumable
from prefixcached.actors.tree import Path
from prefixcached.protocol.schema import Schema

KEPT_PER_CHAIN: Final = 4
"""Newest checkpoints of a chain that rank like segments: two turns, with one at the end of the
prompt and one at the end of the answer."""


def has_resumable_near(schema: Schema, path: Path, length: int, min_tokens: int) -> bool:
    """Whether less than ``min_tokens`` below ``length`` the ``path`` can be resumed already."""
    position = longest_resumable(schema, path, length - 1, held).position
    return position > 0 and length - position < min_tokens


def ranked(path: Path) -> Iterator[tuple[Checkpoint, bool]]:
    """Yield the snapshots on ``path``, and whether each is older than those to keep."""
    snapshots = [checkpoint for checkpoint in checkpoints_on(path) if checkpoint.has_state]
    for age, checkpoint in enumerate(reversed(snapshots)):
        yield checkpoint, age >= KEPT_PER_CHAIN
