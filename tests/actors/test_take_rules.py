"""What a take finds, lends and misses, rule by rule."""

import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import PAGE, Core, small_config
from tests.support.core_prompts import length_of, offer, put, take, tokens


def test_the_last_token_is_never_covered() -> None:
    """T3: a hit never covers the last token, also where all of them are held."""
    core = Core()
    put(core, tokens(40))
    assert take(core, tokens(40)).length == 39
    assert take(core, tokens(1)).reason == "diverged"
    assert isinstance(take(core, []), wire.Miss)


def test_a_prefix_of_a_window_model_needs_its_rows() -> None:
    """T5, T13: slices serve anywhere, window rows only where they are covered."""
    core = Core()
    put(core, tokens(60), schema="ring", rows=[(40, 60)])
    assert length_of(core, tokens(61)) == 60
    assert length_of(core, tokens(48)) == 47
    miss = take(core, tokens(40))
    assert (miss.reason, miss.matched) == ("window-gap", 40)


def test_a_hybrid_resumes_at_its_checkpoints() -> None:
    """T5: state is usable only at exactly the position of a checkpoint."""
    core = Core()
    put(core, tokens(30), schema="hybrid")
    put(core, tokens(60), schema="hybrid")
    assert length_of(core, tokens(61)) == 60
    assert length_of(core, tokens(60)) == 30
    miss = take(core, tokens(30))
    assert (miss.reason, miss.matched) == ("no-checkpoint", 30)


def test_a_minimum_bars_shorter_matches() -> None:
    """T6: within the segments of a put with a minimum, a shorter match is not usable."""
    core = Core()
    put(core, tokens(60), minimum=50)
    assert length_of(core, tokens(56)) == 55
    miss = take(core, tokens(40))
    assert (miss.reason, miss.matched) == ("below-minimum", 40)


def test_a_put_without_a_minimum_is_not_hidden_by_one_that_had_it() -> None:
    """T6: what a put is told is `Stored` can be reused from its own minimum on, whoever was first.

    A continuation asks the same of the path that it builds on.
    """
    core = Core()
    put(core, tokens(60), minimum=1000)
    assert take(core, tokens(61)).reason == "below-minimum"
    put(core, tokens(60), minimum=70)
    assert take(core, tokens(61)).reason == "below-minimum"
    put(core, tokens(60))
    assert length_of(core, tokens(61)) == 60
    put(core, tokens(60, start=500), minimum=1000)
    put(core, tokens(80, start=500))
    assert length_of(core, tokens(41, start=500)) == 40


@pytest.mark.parametrize(
    ("prompt", "reason", "matched"),
    [(tokens(20, start=900), "diverged", 0), (tokens(40, start=1), "diverged", 0)],
)
def test_a_miss_says_where_the_prompt_diverged(
    prompt: list[int], reason: str, matched: int
) -> None:
    """T9: a miss carries a reason and how many tokens matched."""
    core = Core()
    put(core, tokens(40))
    miss = take(core, prompt)
    assert (miss.reason, miss.matched) == (reason, matched)


def test_a_miss_says_that_nothing_is_there() -> None:
    """T9: an unknown namespace is empty."""
    assert take(Core(), tokens(40)).reason == "empty"


def test_contains_is_exact() -> None:
    """T11: contains answers for exactly these tokens."""
    core = Core()
    put(core, tokens(60), schema="hybrid")

    def contains(count: int) -> int:
        reply = core.reply(1, wire.Contains("n", pack_tokens(tokens(count))))
        assert isinstance(reply, wire.Length)
        return reply.length

    assert [contains(60), contains(59), contains(61)] == [60, 0, 0]


def test_a_lease_holds_its_images_until_it_is_released() -> None:
    """L1, E2: lent images are never victims; a second release is harmless."""
    core = Core(small_config(ram_bytes=2 * PAGE, retention="lru"))
    put(core, tokens(20))
    hit = take(core, tokens(21))
    for n in range(1, 6):
        put(core, tokens(20, start=100 * n))
    assert length_of(core, tokens(21)) == 20
    for _ in range(2):
        core.send_one_way(1, wire.Release(hit.lease))
    for n in range(6, 9):
        put(core, tokens(20, start=100 * n))
    assert length_of(core, tokens(21)) == 0


def test_leaves_go_before_their_ancestors() -> None:
    """E2: the least recent leaf is evicted first, and never what something hangs on."""
    core = Core(small_config(ram_bytes=4 * PAGE))
    put(core, tokens(20))
    put(core, tokens(40))
    put(core, tokens(20, start=500))
    put(core, tokens(20, start=600))
    put(core, tokens(20, start=700))
    assert length_of(core, tokens(41)) == 20


def test_the_number_of_images_is_a_cap_too() -> None:
    """E1: images are limited like bytes."""
    core = Core(small_config(max_images=3))
    for n in range(10):
        put(core, tokens(20, start=100 * n))
        assert core.index.ram.images <= 3


def test_releasing_a_lease_lets_a_waiting_put_in() -> None:
    """E10: room that a release makes is given to who waits for it."""
    core = Core(small_config(ram_bytes=2 * PAGE), auto_free=False)
    put(core, tokens(40))
    assert offer(core, tokens(40, start=900), session=2, seconds_left=5.0) is None
    core.finish_free()
    assert len(core.puts.puts) == 1
