"""Which positions are resumable (rules T1, T5, T6, T13), against their definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.actors.resume import covered_at_or_below
from prefixcached.protocol.image import WindowRows
from prefixcached.protocol.ranges import covers, merge
from prefixcached.protocol.schema import Range, Window, WindowShape
from tests.support.core import Core, small_config
from tests.support.core_client import Client, sequence

RINGS = st.builds(
    lambda size, keep: Window(size, min(keep, size - 1)), st.integers(1, 9), st.integers(0, 5)
)
CHUNKS = st.builds(lambda size: Window(size, shape=WindowShape.CHUNK), st.integers(1, 7))
ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=5)


@given(window=st.one_of(RINGS, CHUNKS), pieces=ROWS, position=st.integers(0, 45))
def test_a_window_is_covered_as_its_definition_says(
    window: Window, pieces: list[tuple[int, int]], position: int
) -> None:
    """T13: the position found is the largest at or below whose needed rows are all there."""
    rows: tuple[Range, ...] = merge((start, start + count) for start, count in pieces)
    expected = next(p for p in range(position, -1, -1) if covers(rows, window.needed(p)))
    assert covered_at_or_below(window, rows, position) == expected


@given(size=st.integers(2, 9), keep=st.integers(0, 5), position=st.integers(0, 40))
def test_a_full_ring_never_needs_its_oldest_row(size: int, keep: int, position: int) -> None:
    """T13: at most size-1 rows are needed, the kept ones and the last size-keep-1 among them."""
    keep = min(keep, size - 1)
    needed = Window(size, keep).needed(position)
    rows = {p for start, end in needed for p in range(start, end)}
    recent = set(range(max(0, position - (size - keep - 1)), position))
    assert rows == recent | set(range(min(keep, position)))
    assert len(rows) <= size - 1


def test_append_is_usable_at_every_position() -> None:
    """T5: a prefix inside a longer entry is usable by slicing, whatever its length."""
    client = Client(Core())
    tokens = sequence(40)
    client.store(tokens)
    for length in range(2, 41):
        assert client.reuse(tokens[:length]) == length - 1


def test_state_is_usable_only_at_its_checkpoints() -> None:
    """T5: a hybrid model resumes at the longest checkpoint that the prompt goes beyond."""
    client = Client(Core())
    tokens = sequence(40)
    for length in (10, 25, 40):
        client.store(tokens[:length], "hybrid/a", state=True)
    assert client.reuse((*tokens, 1), "hybrid/a") == 40
    assert client.reuse(tokens, "hybrid/a") == 25
    assert client.reuse(tokens[:26], "hybrid/a") == 25
    assert client.reuse(tokens[:25], "hybrid/a") == 10
    miss = client.miss(tokens[:10], "hybrid/a")
    assert (miss.reason, miss.matched) == ("no-checkpoint", 10)


def test_attachments_are_usable_at_their_own_position_only() -> None:
    """T5: a shorter prompt gets the slices under a checkpoint, never its attachments."""
    client = Client(Core())
    tokens = sequence(30)
    client.store(tokens[:20], attachments=b"{}")
    client.store(tokens)
    longer = client.hit(tokens)
    assert longer.length == 29
    assert all(part.spec.metadata == b"" for part in longer.parts)
    own = client.hit(tokens[:21])
    assert own.length == 20
    assert [p.spec.metadata for p in own.parts if p.spec.tensors] == [b"{}"]
    assert client.reuse(tokens[:20]) == 19


def test_a_window_branch_is_resumable_at_its_own_end() -> None:
    """P2: window 8, 60 tokens held; a branch that shares 30 and owns 5 is whole at its end."""
    client = Client(Core())
    held = sequence(60)
    branch = (*held[:30], *sequence(5, salt=1))
    client.store(held, "ring/a")
    grant = client.grant(branch, "ring/a")
    assert grant.base == 30
    assert grant.images[-1].windows[0].ranges == ((28, 35),)
    client.commit(grant)
    assert client.contains(branch, "ring/a")
    assert client.reuse((*branch, 9), "ring/a") == 35
    assert client.miss((*held[:30], 9), "ring/a").reason == "window-gap"


def test_a_chunk_needs_nothing_at_its_boundary() -> None:
    """T13: a chunked layer resumes at a multiple of its size without any row, else from there."""
    client = Client(Core())
    tokens = sequence(14)
    client.store(tokens, "chunk/a")
    assert client.reuse((*tokens, 1), "chunk/a") == 14
    assert client.reuse((*tokens[:13], 1), "chunk/a") == 13
    assert client.reuse((*tokens[:11], 1), "chunk/a") == 8


def test_rows_beyond_need_serve_an_edited_tail() -> None:
    """T13: older rows that the client still has are stored and make earlier ends resumable."""
    client = Client(Core())
    tokens = sequence(60)
    client.store(tokens, "ring/a", extra=20)
    assert client.reuse((*tokens[:50], 1), "ring/a") == 50
    other = sequence(60, salt=1)
    client.store(other, "ring/a", extra=0)
    assert client.reuse((*other[:50], 1), "ring/a") == 0


def test_a_window_image_behind_the_hit_is_lent_for_its_rows() -> None:
    """T13: rows that a later image of the path holds count, and are then lent with the hit."""
    client = Client(Core())
    held = sequence(40)
    branch = (*held[:4], *sequence(2, salt=1))
    client.store(held, "ring/a")
    client.store(branch, "ring/a")
    hit = client.hit(branch[:5], "ring/a")
    assert hit.length == 4
    assert [(p.use_start, p.use_end) for p in hit.parts] == [(0, 4), (4, 4)]


def test_a_shorter_match_than_the_minimum_is_not_usable() -> None:
    """T6: within the segments of a put with a minimum, a shorter prefix is `below-minimum`."""
    client = Client(Core())
    tokens = sequence(40)
    client.store(tokens, minimum=30)
    assert client.reuse(tokens) == 39
    assert client.reuse((*tokens[:30], 1)) == 30
    miss = client.miss((*tokens[:29], 1))
    assert (miss.reason, miss.matched) == ("below-minimum", 29)


def test_a_minimum_leaves_what_lies_before_it_usable() -> None:
    """T6: the part below the segment of such a put serves as before."""
    client = Client(Core())
    tokens = sequence(40)
    client.store(tokens[:20])
    client.store(tokens, minimum=35)
    assert client.reuse((*tokens[:30], 1)) == 20


def test_missing_rows_are_a_declined_put() -> None:
    """P1: an offer without the rows that its end needs, held or offered, is `invalid`."""
    client = Client(Core())
    assert client.refusal(sequence(30), "ring/a", windows=(WindowRows(),)) == "invalid"
    wrong = (WindowRows(((20, 31),)),)
    assert client.refusal(sequence(30), "ring/a", windows=wrong) == "invalid"


@pytest.mark.parametrize("segment_bytes", [1 << 20, 8000])
def test_a_long_put_is_several_images_with_rows_on_the_last(segment_bytes: int) -> None:
    """DESIGN 3: a put is cut into images of bounded size; hits tile them again."""
    client = Client(Core(small_config(segment_max_bytes=segment_bytes)))
    tokens = sequence(50)
    grant = client.grant(tokens, "chunk/a")
    assert [image.end for image in grant.images][-1] == 50
    assert all(not any(w.ranges for w in image.windows) for image in grant.images[:-1])
    client.commit(grant)
    assert client.reuse((*tokens, 1), "chunk/a") == 50
    assert (len(grant.images) > 1) is (segment_bytes == 8000)


def test_rows_of_a_checkpoint_behind_the_divergence_do_not_count() -> None:
    """T13: a hit lends only checkpoints that its path passes, so their rows are all there are."""
    client = Client(Core())
    tokens = sequence(60)
    for length in (60, 25, 32):
        client.store(tokens[:length], "ring/a")
    assert client.reuse((*tokens[:32], 1), "ring/a") == 32
    assert client.reuse((*tokens[:30], 1), "ring/a") == 25


def test_a_checkpoint_behind_the_divergence_hides_none_before_it() -> None:
    """T13: the rows of an earlier checkpoint count, whichever of the two was stored first."""
    client = Client(Core())
    tokens = sequence(60)
    client.store(tokens, "ring/a")
    for length in (50, 30):
        client.store(tokens[:length], "ring/a")
    assert client.reuse((*tokens[:30], 1), "ring/a") == 30
