"""The segment tree without splits (DESIGN 3): walking, attaching, cutting paths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.actors import tree
from prefixcached.actors.entries import Checkpoint, Namespace, Segment, entries_below
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.schema import Schema
from prefixcached.protocol.tokens import token_array

Tokens = tuple[int, ...]


def new_namespace() -> Namespace:
    return Namespace("n", b"", Schema())


def segment(namespace: Namespace, tokens: Tokens, start: int, name: str = "s") -> Segment:
    spec = ImageSpec(ImageKind.SEGMENT, start, start + len(tokens))
    return Segment(name, namespace, spec, 0, token_array(tokens), start)


def insert(namespace: Namespace, tokens: Tokens) -> None:
    """Store ``tokens`` as a put does: what no segment has becomes one."""
    path = tree.walk(namespace.root, token_array(tokens))
    if path.matched < len(tokens):
        new = segment(namespace, tokens[path.matched :], path.matched)
        tree.attach(new, path.last or namespace.root)


@given(
    stored=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12),
    wanted=st.lists(st.integers(0, 2), max_size=14),
)
def test_walk_finds_the_longest_common_prefix(stored: list[list[int]], wanted: list[int]) -> None:
    """T1: a walk matches as many tokens as the best of all stored sequences shares."""
    namespace = new_namespace()
    for tokens in stored:
        insert(namespace, tuple(tokens))
    path = tree.walk(namespace.root, token_array(wanted))
    best = 0
    for tokens in stored:
        common = 0
        while common < min(len(tokens), len(wanted)) and tokens[common] == wanted[common]:
            common += 1
        best = max(best, common)
    assert path.matched == best
    rebuilt: list[int] = []
    for step in path.steps:
        rebuilt += step.segment.tokens[: step.end - step.segment.start].tolist()
    assert rebuilt == wanted[:best]


def test_a_child_attaches_inside_its_parent_and_nothing_is_split() -> None:
    """A branch leaves the parent as it is: one node, found by position and first token."""
    namespace = new_namespace()
    parent = segment(namespace, (1, 2, 3, 4, 5), 0, "parent")
    branch = segment(namespace, (9, 9), 3, "branch")
    tree.attach(parent, namespace.root)
    tree.attach(branch, parent)
    path = tree.walk(namespace.root, token_array((1, 2, 3, 9, 9, 7)))
    assert [(s.segment.id, s.end) for s in path.steps] == [("parent", 3), ("branch", 5)]
    assert path.matched == 5
    assert parent.end == 5
    assert branch.path_tokens().tolist() == [1, 2, 3, 9, 9]


@pytest.mark.parametrize(
    ("tokens", "start", "message"),
    [
        ((4, 8), 3, "itself continues"),
        ((9,), 0, "cannot attach"),
        ((9,), 6, "cannot attach"),
        ((7, 7), 2, "already has a child"),
    ],
)
def test_what_would_make_a_walk_ambiguous_is_refused(
    tokens: Tokens, start: int, message: str
) -> None:
    """A child outside its parent, or one that starts as another path does, is a ValueError."""
    namespace = new_namespace()
    parent = segment(namespace, (1, 2, 3, 4, 5), 0)
    tree.attach(parent, namespace.root)
    tree.attach(segment(namespace, (7,), 2), parent)
    with pytest.raises(ValueError, match=message):
        tree.attach(segment(namespace, tokens, start), parent)


def test_nothing_attaches_before_what_it_hangs_on_begins() -> None:
    """A child and a checkpoint lie behind the first token of their segment, never before it."""
    namespace = new_namespace()
    top = segment(namespace, (1, 2, 3), 0, "top")
    middle = segment(namespace, (4, 5, 6), 3, "middle")
    tree.attach(top, namespace.root)
    tree.attach(middle, top)
    for start in (1, 2, 3):
        with pytest.raises(ValueError, match="cannot attach"):
            tree.attach(segment(namespace, (9,), start), middle)
    for position in (2, 3):
        early = Checkpoint("e", namespace, ImageSpec(ImageKind.CHECKPOINT, position, position), 0)
        with pytest.raises(ValueError, match="not of"):
            tree.attach_checkpoint(early, middle)
    tree.attach(segment(namespace, (9,), 4), middle)
    tree.attach(segment(namespace, (9,), 6), middle)
    assert tree.walk(namespace.root, token_array((1, 2, 3, 4, 9))).matched == 5
    assert tree.walk(namespace.root, token_array((1, 2, 3, 4, 5, 6, 9))).matched == 7


def test_cutting_a_path_drops_segments_that_start_behind() -> None:
    """A path cut at P uses only segments that start before P, and none beyond it."""
    namespace = new_namespace()
    insert(namespace, (1, 2, 3))
    insert(namespace, (1, 2, 3, 4, 5))
    path = tree.walk(namespace.root, token_array((1, 2, 3, 4, 5)))
    assert [step.end for step in path.cut(4).steps] == [3, 4]
    assert [step.end for step in path.cut(3).steps] == [3]
    assert path.cut(0).steps == ()
    assert path.cut(9) is path


def test_checkpoints_belong_to_the_segment_that_owns_their_position() -> None:
    """A checkpoint lies in (start, end] of its segment; a snapshot and rows alone may share one."""
    namespace = new_namespace()
    owner = segment(namespace, (1, 2, 3), 2)
    rows = Checkpoint("r", namespace, ImageSpec(ImageKind.CHECKPOINT, 4, 4), 0)
    snapshot = Checkpoint(
        "s", namespace, ImageSpec(ImageKind.CHECKPOINT, 4, 4, metadata=b"{}"), 0
    )  # fmt: skip
    tree.attach_checkpoint(rows, owner)
    tree.attach_checkpoint(snapshot, owner)
    assert set(entries_below(owner)) == {owner, rows, snapshot}
    with pytest.raises(ValueError, match="already has"):
        tree.attach_checkpoint(rows, owner)
    outside = Checkpoint("o", namespace, ImageSpec(ImageKind.CHECKPOINT, 2, 2), 0)
    with pytest.raises(ValueError, match="not of"):
        tree.attach_checkpoint(outside, owner)
    tree.detach_checkpoint(rows)
    assert rows.segment is None
    assert owner.checkpoints == {snapshot.key: snapshot}


def test_detaching_takes_the_whole_subtree_along() -> None:
    """What hangs on a detached segment is not found any more."""
    namespace = new_namespace()
    insert(namespace, (1, 2))
    insert(namespace, (1, 2, 3, 4))
    top = next(iter(namespace.root.children.values()))
    tree.detach(top)
    assert tree.walk(namespace.root, token_array((1, 2, 3, 4))).matched == 0
    assert len(entries_below(top)) == 2
    assert np.array_equal(top.tokens, token_array((1, 2)))


@pytest.mark.parametrize(
    ("before", "prompt", "matched"),
    [((), (7, 7, 7, 8), 2), ((1, 2, 3, 7), (1, 2, 3, 7, 7, 8), 5)],
)
def test_a_segment_matches_at_its_own_position_alone(
    before: Tokens, prompt: Tokens, matched: int
) -> None:
    """T1: tokens that stand elsewhere in the prompt are no match, or wrong KV would be served."""
    namespace = new_namespace()
    insert(namespace, before)
    insert(namespace, (*before, 7, 7, 8))
    assert tree.walk(namespace.root, token_array(prompt)).matched == matched
