"""What a put has to transfer (rules P2, P3, P11, T6), through the grants that clients get."""

from typing import Any

import pytest

from prefixcached.actors.entries import Checkpoint
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import StateTensor
from tests.support.core import PAGE, Core, small_config
from tests.support.core_client import Client, sequence


def test_only_what_nobody_holds_is_transferred() -> None:
    """P2: the grant starts where what is held ends."""
    client = Client(Core())
    tokens = sequence(50)
    client.store(tokens[:30])
    grant = client.grant(tokens)
    assert grant.base == 30
    assert [(i.start, i.end) for i in grant.images] == [(30, 50)]


def test_storing_again_moves_no_bytes() -> None:
    """P3: what is held already is `Stored` with no new bytes, and used anew."""
    core = Core()
    client = Client(core)
    tokens = sequence(30)
    client.store(tokens, "hybrid/a", state=True)
    (old, *_) = core.index.entries.values()
    before = old.used
    assert client.put(tokens, "hybrid/a", state=True) == wire.Stored(new_bytes=0, length=30)
    assert client.put(tokens[:20], "hybrid/a") == wire.Stored(new_bytes=0, length=20)
    assert old.used > before
    assert core.puts.counters.already_held == 2


def test_a_checkpoint_is_added_to_held_tokens() -> None:
    """P2: where only the snapshot is missing only the snapshot is granted."""
    client = Client(Core())
    tokens = sequence(30)
    client.store(tokens, "hybrid/a", state=True)
    grant = client.grant(tokens[:20], "hybrid/a", state=True)
    assert grant.base == 20
    assert [(i.kind, i.start, i.end) for i in grant.images] == [("checkpoint", 20, 20)]
    client.commit(grant)
    assert client.contains(tokens[:20], "hybrid/a")


def test_newest_attachments_win_and_the_old_ones_stay_with_their_lease() -> None:
    """P3: a checkpoint with attachments at an equal key replaces the old one."""
    core = Core()
    client = Client(core)
    tokens = sequence(20)
    client.store(tokens, attachments=b"1")
    old = client.ask((*tokens, 1))
    client.store(tokens, attachments=b"2")
    new = client.hit((*tokens, 1))
    assert [p.spec.metadata for p in new.parts if p.spec.tensors] == [b"2"]
    hit = client.verify(old, (*tokens, 1))
    assert [p.spec.metadata for p in hit.parts if p.spec.tensors] == [b"1"]
    assert core.index.ram.bytes_by_state["lingering"] > 0
    client.release(hit)
    assert core.index.ram.bytes_by_state["lingering"] == 0


def test_replacing_attachments_keeps_the_rows_of_its_position() -> None:
    """P3: where the old checkpoint carries window rows, the new one carries them too."""
    client = Client(Core())
    tokens = sequence(60)
    client.store(tokens, "ring/a")
    for version in (b"1", b"2", b"3"):
        client.store(tokens[:30], "ring/a", attachments=version)
        assert client.contains(tokens[:30], "ring/a")
    hit = client.hit(tokens[:31], "ring/a")
    assert [p.spec.metadata for p in hit.parts if p.spec.metadata] == [b"3"]


def test_rows_alone_and_a_snapshot_share_a_position() -> None:
    """P2: a snapshot that comes after rows of its position leaves them, and needs no copy."""
    client = Client(Core())
    tokens = sequence(60)
    client.store(tokens, "hybrid-ring/a", state=True)
    client.store(tokens[:30], "hybrid-ring/a")
    grant = client.grant(tokens[:30], "hybrid-ring/a", state=True)
    assert [i.windows for i in grant.images] == [()]
    client.commit(grant)
    assert client.contains(tokens[:30], "hybrid-ring/a")


def test_without_its_snapshot_a_position_gets_no_rows() -> None:
    """P2, E11: where a snapshot near is enough, rows alone would make nothing resumable."""
    client = Client(Core(small_config(checkpoint_min_tokens=8)))
    tokens = sequence(60)
    for length in (60, 25):
        client.store(tokens[:length], "hybrid-ring/a", state=True)
    assert client.put(tokens[:30], "hybrid-ring/a", state=True) == wire.Stored(0, 30)


def test_missing_rows_of_a_held_end_come_with_the_checkpoint() -> None:
    """P2: an end inside a longer entry gets the rows that no image of its path has."""
    client = Client(Core())
    tokens = sequence(60)
    client.store(tokens, "ring/a")
    grant = client.grant(tokens[:30], "ring/a")
    assert [(i.kind, i.windows[0].ranges) for i in grant.images] == [("checkpoint", ((23, 30),))]
    client.commit(grant)
    near = client.grant(tokens[:32], "ring/a")
    assert [i.windows[0].ranges for i in near.images] == [((30, 32),)]


def test_a_small_tail_is_absorbed() -> None:
    """P11: a put that continues a short leaf starts at the leaf's start and takes its place."""
    core = Core(small_config(segment_min_tokens=16))
    client = Client(core)
    tokens = sequence(60)
    client.store(tokens[:40])
    client.store(tokens[:50])
    grant = client.grant(tokens)
    assert grant.base == 40
    assert [(i.start, i.end) for i in grant.images] == [(40, 60)]
    client.commit(grant)
    assert sorted((e.spec.start, e.spec.end) for e in core.index.entries.values()) == [
        (0, 40), (40, 60),
    ]  # fmt: skip
    assert client.reuse((*tokens, 1)) == 60
    assert core.index.counters["superseded"] == 1


def test_what_must_not_be_absorbed_is_not() -> None:
    """P11, T6: no leaf of enough tokens, with children, checkpoints or a minimum; no hybrid."""
    tokens = sequence(60)
    cases: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
        "long": ("plain/a", 4, {}, {}),
        "checkpoint": ("plain/a", 16, {"attachments": b"1"}, {}),
        "hybrid": ("hybrid/a", 16, {"state": True}, {"state": True}),
        "window": ("ring/a", 16, {}, {}),
        "held minimum": ("plain/a", 16, {"minimum": 10}, {}),
        "new minimum": ("plain/a", 16, {}, {"minimum": 10}),
    }
    for name, (namespace, least, first, second) in cases.items():
        client = Client(Core(small_config(segment_min_tokens=least)))
        client.store(tokens[:10], namespace, **first)
        assert client.grant(tokens, namespace, **second).base == 10, name


def test_a_leaf_that_the_prompt_leaves_is_not_absorbed() -> None:
    """P11: only a put that contains the leaf replaces it; another one branches off."""
    client = Client(Core(small_config(segment_min_tokens=16)))
    tokens = sequence(10)
    client.store(tokens)
    branch = (*tokens[:5], *sequence(20, 1))
    assert client.grant(branch).base == 5
    assert client.contains(tokens)


def test_a_leaf_with_a_child_is_not_absorbed() -> None:
    """P11: never what has children."""
    client = Client(Core(small_config(segment_min_tokens=16)))
    tokens = sequence(60)
    client.store(tokens[:10], minimum=1)
    client.store((*tokens[:10], 1, 2), minimum=1)
    client.store(tokens[:20])
    assert client.grant(tokens).base == 10  # the leaf 10..20, not its parent


def test_one_leaf_is_absorbed_by_one_put_at_a_time() -> None:
    """P11: a leaf that another put absorbs is left alone; both continuations are found."""
    core = Core(small_config(segment_min_tokens=16, put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    tokens = sequence(10)
    first.store(tokens)
    one, two = (*tokens, *sequence(9, 1)), (*tokens, *sequence(9, 2))
    grants = first.grant(one), second.grant(two)
    assert [g.base for g in grants] == [0, 10]
    second.commit(grants[1])
    first.commit(grants[0])
    assert first.reuse((*one, 1)) == 19
    assert first.reuse((*two, 1)) == 19


def test_the_prompt_boundary_of_a_hybrid_stays() -> None:
    """P11: the checkpoint that the next turn hits is not superseded by a longer put."""
    client = Client(Core(small_config(segment_min_tokens=1000)))
    tokens = sequence(60)
    client.store(tokens[:30], "hybrid/a", state=True)
    client.store(tokens, "hybrid/a", state=True)
    assert client.reuse((*tokens[:30], 7), "hybrid/a") == 30


def test_absorbed_segments_do_not_pile_up_without_a_disk() -> None:
    """Only what has a file, or is being written, is remembered of what was absorbed."""
    core = Core(small_config(segment_min_tokens=512))
    client = Client(core)
    for length in range(2, 100, 2):
        client.store(sequence(length))
    (entry,) = core.index.entries.values()
    assert entry.superseded == []


def test_only_new_bytes_must_fit_the_cap() -> None:
    """P7: an extension of what is held is as large as what it adds."""
    core = Core(small_config(ram_bytes=4 * PAGE))
    client = Client(core)
    client.store(sequence(40))
    assert client.store(sequence(60)) == 20 * 712
    assert client.refusal(sequence(100, 1)) == "too-large"


def test_an_offer_that_contradicts_its_schema_is_invalid_also_where_all_is_held() -> None:
    """P1: validation comes first, whether or not the offered snapshot would be stored."""
    client = Client(Core())
    tokens = sequence(30)
    client.store(tokens, "hybrid/a", state=True)
    wrong = StateTensor("state", "no dtype", (50,))
    assert client.refusal(tokens, "hybrid/a", state=True, tensor=wrong) == "invalid"


def test_rows_that_were_lost_are_stored_again() -> None:
    """P2, P3: what a position shared with an image that is gone comes back with its next put."""
    core = Core()
    client = Client(core)
    tokens = sequence(60)
    for length in (60, 25, 30):
        client.store(tokens[:length], "ring/a")
    (shared,) = (e for e in core.index.entries.values() if e.spec.end == 25)
    core.index.drop_memory(shared)
    assert not client.contains(tokens[:30], "ring/a")
    client.store(tokens[:30], "ring/a")
    assert client.contains(tokens[:30], "ring/a")
    assert client.reuse((*tokens[:30], 1), "ring/a") == 30


def test_as_many_further_rows_are_stored_as_the_rule_says() -> None:
    """T13: the 7 rows that a ring of 8 needs, and 256 before them."""
    grant = Client(Core()).grant(sequence(400), "ring/a", extra=400)
    assert grant.images[-1].windows[0].ranges == ((400 - 7 - 256, 400),)


@pytest.mark.parametrize(("least", "base"), [(10, 10), (11, 0)])
def test_only_a_leaf_of_fewer_tokens_than_a_segments_least_is_absorbed(
    least: int, base: int
) -> None:
    """P11: a leaf that has as many stays."""
    client = Client(Core(small_config(segment_min_tokens=least)))
    client.store(sequence(10))
    assert client.grant(sequence(20)).base == base


def test_a_leaf_is_not_absorbed_by_a_shorter_segment() -> None:
    """P11: where images have no room for leaf and tail together, chains would get no shorter."""
    core = Core(small_config(segment_min_tokens=16, segment_max_bytes=6 * 712))
    client = Client(core)
    tokens = sequence(7)
    client.store(tokens[:6])
    (leaf,) = core.index.entries.values()
    assert (leaf.spec.start, leaf.spec.end) == (0, 6)
    assert client.grant(tokens).base == 6


def test_a_leaf_can_be_absorbed_after_another_put_gave_it_up() -> None:
    """P11: only as long as a put absorbs it is a leaf left alone."""
    client = Client(Core(small_config(segment_min_tokens=16)))
    tokens = sequence(30)
    client.store(tokens[:10])
    grant = client.grant(tokens)
    client.core.send_one_way(1, wire.Abandon(grant.put))
    assert client.grant(tokens).base == 0


def test_storing_again_refreshes_the_snapshot_at_the_end_alone() -> None:
    """P3, E11: those that the conversation has passed are of no use to its next turn."""
    core = Core()
    client = Client(core)
    tokens = sequence(30)
    for length in (10, 20, 30):
        client.store(tokens[:length], "hybrid/a", state=True)
    snapshots = {e.position: e for e in core.index.entries.values() if isinstance(e, Checkpoint)}
    before = {position: snapshot.used for position, snapshot in snapshots.items()}
    assert client.store(tokens, "hybrid/a", state=True) == 0
    refreshed = [at for at, snapshot in snapshots.items() if snapshot.used > before[at]]
    assert refreshed == [30]
