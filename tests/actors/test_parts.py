"""Which images a hit lends, and what of each is used (actors/parts.py)."""

from tests.support.core import Core, small_config
from tests.support.core_client import Client, sequence


def test_parts_tile_the_hit_from_the_top() -> None:
    """T12: append slices of a hit come from its path's segments, each position once."""
    client = Client(Core())
    tokens = sequence(60)
    for length in (20, 40, 60):
        client.store(tokens[:length])
    branch = (*tokens[:30], *sequence(10, salt=1))
    client.store(branch)
    hit = client.hit((*branch, 1))
    assert [(p.use_start, p.use_end) for p in hit.parts] == [(0, 20), (20, 30), (30, 40)]


def test_an_image_that_contributes_nothing_is_not_lent() -> None:
    """A model of windows alone lends one image, not its whole path: each costs a descriptor."""
    client = Client(Core())
    tokens = sequence(60)
    for length in (20, 40, 60):
        client.store(tokens[:length], "sinks/a")
    hit = client.hit((*tokens, 1), "sinks/a")
    assert hit.length == 60
    # The sinks are in the first image, the last rows in the last one.
    assert [p.spec.end for p in hit.parts] == [20, 60]


def test_a_pure_state_model_lends_its_checkpoint_alone() -> None:
    """T5: with no slices and no windows a hit is one snapshot."""
    client = Client(Core())
    tokens = sequence(30)
    client.store(tokens[:10], "state/a", state=True)
    client.store(tokens, "state/a", state=True)
    hit = client.hit((*tokens, 1), "state/a")
    assert [p.spec.end for p in hit.parts] == [30]
    assert hit.length == 30


def test_a_surplus_head_is_not_used() -> None:
    """P6: rows that somebody stored first come from that image, not from the surplus head."""
    core = Core(small_config(put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    tokens = sequence(40)
    late = first.grant(tokens)
    second.store(tokens[:25])
    first.commit(late)
    hit = first.hit((*tokens, 1))
    assert [(p.spec.start, p.use_start, p.use_end) for p in hit.parts] == [(0, 0, 25), (0, 25, 40)]


def test_rows_that_one_image_gives_are_not_taken_from_another() -> None:
    """T13: of two images with the same rows the deeper one is lent: each costs a descriptor."""
    core = Core(small_config(put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    tokens = sequence(60)
    late = first.grant(tokens, "sinks/a")
    second.store(tokens[:30], "sinks/a")
    first.commit(late)
    hit = first.hit((*tokens, 1), "sinks/a")
    assert [p.spec.end for p in hit.parts] == [60]
