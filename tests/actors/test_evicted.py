"""A bounded memory of evictions, so that a miss can say why the walk stopped (rule T9)."""

from pathlib import Path

from prefixcached.actors.entries import Checkpoint, Namespace, Segment
from prefixcached.actors.evicted import REMEMBERED, EvictedMemory
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.schema import Schema
from prefixcached.protocol.tokens import token_array

SPACE = Namespace("n", b"", Schema())


def segment(start: int, *tokens: int) -> Segment:
    spec = ImageSpec(ImageKind.SEGMENT, start, start + len(tokens))
    return Segment(f"{start}", SPACE, spec, 0, token_array(tokens), start)


def test_a_walk_that_an_eviction_stopped_knows_its_cause() -> None:
    """T9: the cause is told where the evicted segment began, to prompts that go on as it did."""
    memory = EvictedMemory()
    memory.remember(segment(2, 7, 8), "cap")
    assert memory.cause("n", token_array([1, 2, 7, 8]), 2) == "cap"
    assert memory.cause("n", token_array([1, 2, 9, 8]), 2) is None
    assert memory.cause("n", token_array([1, 7, 7]), 1) is None
    assert memory.cause("other", token_array([1, 2, 7]), 2) is None


def test_a_prompt_that_ends_where_an_eviction_began_lacks_nothing() -> None:
    """T9: what lay behind the prompt's end is no reason for its miss."""
    memory = EvictedMemory()
    memory.remember(segment(2, 7), "cap")
    assert memory.cause("n", token_array([1, 2]), 2) is None


def test_the_last_cause_counts() -> None:
    """T9: a segment that was stored and evicted again has the newer cause."""
    memory = EvictedMemory()
    memory.remember(segment(0, 7), "cap")
    memory.remember(segment(0, 7), "pressure")
    assert memory.cause("n", token_array([7]), 0) == "pressure"


def test_only_segments_stop_a_walk() -> None:
    """T9: a checkpoint that leaves takes no tokens along."""
    memory = EvictedMemory()
    memory.remember(Checkpoint("c", SPACE, ImageSpec(ImageKind.CHECKPOINT, 1, 1), 0), "cap")
    assert memory.cause("n", token_array([7, 7]), 1) is None


def test_as_many_are_remembered_as_the_page_says() -> None:
    """T9: the memory is bounded, and the oldest is forgotten first."""
    page = Path(__file__).parents[2] / "docs" / "behaviour.md"
    assert f"the last {REMEMBERED:,} evictions are remembered" in page.read_text(encoding="utf-8")
    memory = EvictedMemory()
    for position in range(REMEMBERED):
        memory.remember(segment(position, 7), "cap")
    tokens = token_array([7] * (REMEMBERED + 1))
    assert memory.cause("n", tokens, 0) == "cap"
    memory.remember(segment(REMEMBERED, 7), "cap")
    assert memory.cause("n", tokens, 0) is None
    assert memory.cause("n", tokens, 1) == memory.cause("n", tokens, REMEMBERED) == "cap"
