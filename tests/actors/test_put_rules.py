"""What a put stores, moves and declines, rule by rule."""

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind
from prefixcached.protocol.schema import Kind, Schema, TensorSpec
from tests.support.core import PAGE, Core, small_config
from tests.support.core_prompts import length_of, offer, put, take, tokens

AGENT = Schema((TensorSpec("keys", Kind.APPEND, "F16", (4, 16), 1),))
"""128 bytes a token, so that pages are small beside what agents share."""


def test_entries_that_share_a_prefix_store_it_once() -> None:
    """P2: twenty entries that share 8,000 tokens and own 1,000 each take 28,000 tokens' bytes."""
    core = Core()
    for agent in range(20):
        own = tokens(8000) + tokens(1000, start=100_000 * (agent + 1))
        assert isinstance(put(core, own, schema=AGENT), wire.Stored)
    assert core.index.ram.bytes <= 1.05 * 28_000 * 128


def test_what_is_held_is_not_moved_again() -> None:
    """P3: storing what is held answers Stored with no new bytes."""
    core = Core()
    put(core, tokens(40))
    assert put(core, tokens(40)) == wire.Stored(new_bytes=0, length=40)
    assert put(core, tokens(30)) == wire.Stored(new_bytes=0, length=30)


def test_what_does_not_fit_beside_lent_bytes_is_declined() -> None:
    """P10, E2: with everything else leased a put is declined no-space and the lease stays."""
    core = Core(small_config(ram_bytes=2 * PAGE))
    put(core, tokens(40))
    hit = take(core, tokens(41))
    assert isinstance(hit, wire.Hit)
    assert offer(core, tokens(40, start=9000), seconds_left=0.0) == wire.Declined(reason="no-space")
    core.send_one_way(1, wire.Release(hit.lease))
    assert isinstance(put(core, tokens(40, start=9000)), wire.Stored)


def test_a_short_put_is_declined() -> None:
    """P10: a put below put_min_tokens is too-short."""
    core = Core(small_config(put_min_tokens=16))
    assert put(core, tokens(15)) == wire.Declined(reason="too-short")


def test_a_small_tail_is_absorbed_by_what_extends_it() -> None:
    """P11: a short leaf is replaced by the put that extends it, so that chains stay short."""
    core = Core(small_config(segment_min_tokens=256))
    put(core, tokens(1000))
    put(core, tokens(1200))
    grant = offer(core, tokens(1400))
    assert grant.base == 1000
    core.reply(1, wire.Commit(grant.put))
    assert length_of(core, tokens(1401)) == 1400
    spans = sorted((e.spec.start, e.spec.end) for e in core.index.entries.values())
    assert spans == [(0, 1000), (1000, 1400)]


def test_a_prompt_boundary_of_a_hybrid_model_is_not_absorbed() -> None:
    """P11: what has a checkpoint stays, since that is what the next turn hits."""
    core = Core(small_config(segment_min_tokens=256))
    put(core, tokens(100), schema="hybrid")
    put(core, tokens(140), schema="hybrid")
    assert length_of(core, [*tokens(100), 7, 8]) == 100
    assert length_of(core, tokens(141)) == 140


def test_a_branch_in_mid_window_is_resumable_at_its_own_end() -> None:
    """P2: with a window of 8 and 60 tokens held, a branch that shares 30 and owns 5 resumes."""
    core = Core()
    put(core, tokens(60), schema="ring", rows=[(52, 60)])
    branch = tokens(30) + tokens(5, start=900)
    grant = offer(core, branch, schema="ring", rows=[(27, 35)])
    assert grant.base == 30
    (image,) = grant.images
    assert image.windows[0].ranges == ((28, 35),)
    core.reply(1, wire.Commit(grant.put))
    assert length_of(core, [*branch, 1]) == 35


def test_rows_alone_make_a_held_position_resumable() -> None:
    """P2: where the slices are held and only window rows are missing, they travel alone."""
    core = Core()
    put(core, tokens(60), schema="ring", rows=[(52, 60)])
    assert length_of(core, tokens(31)) == 0
    grant = offer(core, tokens(30), schema="ring", rows=[(22, 30)])
    assert [image.kind for image in grant.images] == [ImageKind.CHECKPOINT]
    core.reply(1, wire.Commit(grant.put))
    assert length_of(core, tokens(31)) == 30


def test_kv_without_the_rows_that_its_end_needs_is_declined() -> None:
    """P1: tokens fewer than the KV's are declined where its windows cannot be cut to them."""
    core = Core()
    assert put(core, tokens(30), schema="ring", rows=[(26, 30)]) == wire.Declined(reason="invalid")
