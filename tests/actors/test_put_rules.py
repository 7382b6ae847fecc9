"""What a put stores, moves and declines, rule by rule."""

import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind
from prefixcached.protocol.schema import Kind, Schema, TensorSpec
from tests.support.core import PAGE, Core, small_config
from tests.support.core_prompts import granted_bytes, length_of, offer, put, take, tokens

AGENT = Schema((TensorSpec("keys", Kind.APPEND, "F16", (4, 16), 1),))
"""128 bytes a token, so that pages are small beside what agents share."""


def test_only_the_extension_of_a_held_prefix_moves() -> None:
    """P2: a put of 1,000 tokens more than a held 8,000 moves the bytes of the extension alone."""
    core = Core(small_config(segment_min_tokens=256))
    assert isinstance(put(core, tokens(8000), schema=AGENT), wire.Stored)
    grant = offer(core, tokens(9000), schema=AGENT)
    assert grant.base == 8000
    assert granted_bytes(AGENT, grant) == 1000 * 128


def test_entries_that_share_a_prefix_store_it_once() -> None:
    """P2: twenty entries that share 8,000 tokens and own 1,000 each take 28,000 tokens' bytes."""
    core = Core()
    for agent in range(20):
        own = tokens(8000) + tokens(1000, start=100_000 * (agent + 1))
        assert isinstance(put(core, own, schema=AGENT), wire.Stored)
    assert core.index.ram.bytes <= 1.05 * 28_000 * 128


def test_agents_that_start_together_store_the_shared_tokens_once() -> None:
    """P5, P6: twenty clients offer 8,000 shared tokens and 1,000 own at the same moment."""
    core = Core()
    prompts = [tokens(8000) + tokens(1000, start=100_000 * (n + 1)) for n in range(20)]
    replies = [
        offer(core, prompt, schema=AGENT, session=n + 1, seconds_left=5.0)
        for n, prompt in enumerate(prompts)
    ]
    assert isinstance(replies[0], wire.Grant)
    assert replies[1:] == [None] * 19
    assert isinstance(core.reply(1, wire.Commit(replies[0].put)), wire.Stored)
    for put_id, put_in_flight in list(core.puts.puts.items()):
        assert put_in_flight.base == 8000
        core.reply(put_in_flight.session, wire.Commit(put_id))
    assert core.index.ram.bytes <= 1.05 * 28_000 * 128
    assert all(length_of(core, [*prompt, 1]) == 9000 for prompt in prompts)


def test_an_offer_does_not_wait_for_ever_for_another_put() -> None:
    """P5: after two seconds an offer is answered by what is held by then."""
    core = Core()
    assert isinstance(offer(core, tokens(50), session=1), wire.Grant)
    slot = core.call(2, wire.Offer("n", b"".join(t.to_bytes(4, "little") for t in range(50)),
                                   core.index.namespaces["n"].schema_bytes))  # fmt: skip
    assert slot.reply is None
    core.advance(2.1)
    assert isinstance(slot.reply, wire.Grant)


def test_nothing_is_visible_before_the_commit() -> None:
    """P4: granted bytes count in the budget and nobody can find them."""
    core = Core()
    grant = offer(core, tokens(40))
    assert core.index.ram.bytes_by_state["in_flight"] > 0
    assert length_of(core, tokens(41)) == 0
    core.reply(1, wire.Commit(grant.put))
    assert length_of(core, tokens(41)) == 40


def test_an_abandoned_put_leaves_nothing() -> None:
    """P4: abandoned bytes are freed and the namespace is as before."""
    core = Core()
    grant = offer(core, tokens(40))
    core.send_one_way(1, wire.Abandon(grant.put))
    assert core.index.ram.bytes == 0
    assert core.index.namespaces == {}


def test_what_is_held_is_not_moved_again() -> None:
    """P3: storing what is held answers Stored with no new bytes."""
    core = Core()
    put(core, tokens(40))
    assert put(core, tokens(40)) == wire.Stored(new_bytes=0, length=40)
    assert put(core, tokens(30)) == wire.Stored(new_bytes=0, length=30)


def test_a_put_larger_than_the_cap_is_declined() -> None:
    """P7: a put whose new bytes exceed the RAM cap is too-large, and evicts nothing."""
    core = Core(small_config(ram_bytes=4 * PAGE))
    put(core, tokens(20))
    assert put(core, tokens(4000, start=50_000)) == wire.Declined(reason="too-large")
    assert length_of(core, tokens(21)) == 20


def test_what_does_not_fit_beside_lent_bytes_is_declined() -> None:
    """P10, E2: with everything else leased a put is declined no-space and the lease stays."""
    core = Core(small_config(ram_bytes=2 * PAGE))
    put(core, tokens(40))
    hit = take(core, tokens(41))
    assert isinstance(hit, wire.Hit)
    assert offer(core, tokens(40, start=9000), seconds_left=0.0) == wire.Declined(reason="no-space")
    core.send_one_way(1, wire.Release(hit.lease))
    assert isinstance(put(core, tokens(40, start=9000)), wire.Stored)


def test_a_second_schema_is_declined() -> None:
    """N4: a put whose tensors differ from the namespace's is declined, never mixed."""
    core = Core()
    put(core, tokens(40))
    assert put(core, tokens(60), schema=AGENT) == wire.Declined(reason="schema-mismatch")


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


def test_a_leaf_that_is_lent_stays_readable_while_it_is_absorbed() -> None:
    """L2: an absorbed segment leaves the tree at once and lingers until its last lease ends."""
    core = Core(small_config(segment_min_tokens=256))
    put(core, tokens(100))
    hit = take(core, tokens(101))
    put(core, tokens(200))
    assert core.index.ram.bytes_by_state["lingering"] > 0
    assert length_of(core, tokens(201)) == 200
    core.send_one_way(1, wire.Release(hit.lease))
    assert core.index.ram.bytes_by_state["lingering"] == 0


def test_a_prompt_boundary_of_a_hybrid_model_is_not_absorbed() -> None:
    """P11: what has a checkpoint stays, since that is what the next turn hits."""
    core = Core(small_config(segment_min_tokens=256))
    put(core, tokens(100), schema="hybrid")
    put(core, tokens(140), schema="hybrid")
    assert length_of(core, [*tokens(100), 7, 8]) == 100
    assert length_of(core, tokens(141)) == 140


def test_a_commit_after_a_clear_is_declined() -> None:
    """P6, D11: a put that a clear overtook is declined and leaves nothing."""
    core = Core()
    grant = offer(core, tokens(40))
    core.reply(2, wire.Clear())
    assert core.reply(1, wire.Commit(grant.put)) == wire.Declined(reason="cleared")
    assert core.index.ram.bytes == 0


def test_tokens_that_came_meanwhile_are_not_stored_twice() -> None:
    """P6: at commit the tree is walked again, and what another put stored is skipped."""
    core = Core()
    first = offer(core, tokens(40), session=1, seconds_left=0.0)
    second = offer(core, tokens(60), session=2, seconds_left=0.0)
    core.reply(1, wire.Commit(first.put))
    core.reply(2, wire.Commit(second.put))
    assert length_of(core, tokens(61)) == 60
    starts = sorted(e.start for e in core.index.entries.values())  # type: ignore[attr-defined]
    assert starts == [0, 40]


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


@pytest.mark.parametrize("lost", ["grant", "commit"])
def test_a_client_that_dies_in_mid_put_leaves_nothing(lost: str) -> None:
    """P4, L1: before the commit its bytes are freed; a commit that arrived is carried out."""
    core = Core(auto_seal=False)
    grant = offer(core, tokens(40))
    if lost == "commit":
        core.call(1, wire.Commit(grant.put))
    core.gone(1)
    while core.sealing:
        core.finish_seal()
    assert core.puts.puts == {}
    assert core.index.ram.bytes_by_state["in_flight"] == 0
    assert length_of(core, tokens(41)) == (40 if lost == "commit" else 0)


def test_images_that_cannot_be_sealed_are_not_published() -> None:
    """P4: a client that keeps a writable mapping gets its put declined; nothing is visible."""
    core = Core(auto_seal=False)
    grant = offer(core, tokens(40))
    slot = core.call(1, wire.Commit(grant.put))
    core.finish_seal("a writable mapping exists")
    assert slot.reply == wire.Declined(reason="invalid")
    assert core.index.ram.bytes == 0


def test_no_memory_for_the_images_is_a_declined_put() -> None:
    """E6: when shared memory cannot be made, nothing of the put stays."""
    core = Core()
    core.refuse_memory = True
    assert put(core, tokens(40)) == wire.Declined(reason="no-space")
    assert core.index.ram.bytes == 0
