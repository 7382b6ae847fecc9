"""What connections hold, as those who watch see it: bounded, the newest labels first."""

from itertools import count

import pytest

from prefixcached.actors.claims import Claim
from prefixcached.actors.desk import RamConfig
from prefixcached.actors.holdings import NO_HOLDINGS, Held, collect_holdings
from prefixcached.actors.labels import Label
from prefixcached.actors.ram_tier import RamTier
from prefixcached.protocol import limits
from prefixcached.protocol import messages as wire
from prefixcached.protocol.tokens import token_array
from tests.support.core import Core, small_config
from tests.support.core_traffic import offer, packed, put, take


async def test_nothing_held_is_an_empty_report() -> None:
    """A daemon that has just started."""
    found = RamTier(RamConfig(ram_bytes=1 << 20, ssd_bytes=0)).holdings()
    assert (found.by_session, found.claims, found.labels, found.complete) == ({}, (), (), True)
    assert found == NO_HOLDINGS


def test_claims_belong_to_their_session() -> None:
    """Q1: each claim is counted with its connection and shown with its length."""
    ram_tier = RamTier(RamConfig(ram_bytes=1 << 20, ssd_bytes=0))
    for number, session in zip(count(1), (7, 7, 9), strict=False):
        claim = Claim(number, session, "n", token_array(bytes(4 * 300)))
        ram_tier.claims.claims[number] = claim
    found = collect_holdings(ram_tier, 0.0)
    assert found.by_session == {7: Held(claims=2), 9: Held(claims=1)}
    assert [(one.session, one.tokens, one.waiting) for one in found.claims] == [
        (7, 300, 0), (7, 300, 0), (9, 300, 0),
    ]  # fmt: skip


def test_each_connection_shows_what_it_holds() -> None:
    """L1, F1, P4, Q2: leases, pins, puts and the wait for another's prefill, each with its own."""
    core = Core(small_config(claim_min_tokens=5))
    put(core, 1)
    for _ in range(2):
        assert isinstance(take(core, 1, session=3).reply, wire.Hit)
    pinned = core.reply(4, wire.Prefetch("plain", packed(1, more=1)))
    assert isinstance(pinned, wire.Pinned)
    assert isinstance(offer(core, 2, session=5).reply, wire.Grant)
    assert isinstance(take(core, 7, session=6).reply, wire.Miss)
    waiting = core.call(7, wire.Take("plain", packed(7, more=1), wait=5.0))
    assert waiting.reply is None
    found = collect_holdings(core, core.clock)
    assert found.by_session == {
        3: Held(leases=2),
        4: Held(pins=1),
        5: Held(puts=1),
        6: Held(claims=1),
        7: Held(waits_for=6),
    }
    assert [(one.session, one.tokens, one.waiting) for one in found.claims] == [(6, 20, 1)]
    assert found.complete


def test_as_many_as_are_watched_is_all_there_is() -> None:
    """C5: a report says that something is missing exactly where it is."""
    ram_tier = RamTier(RamConfig(ram_bytes=1 << 20, ssd_bytes=0))
    for number in range(1, limits.MAX_WATCHED + 1):
        claim = Claim(number, number, "n", token_array(bytes(4 * 300)))
        ram_tier.claims.claims[number] = claim
        label = Label("n", f"{number}", None, number, float(number))
        ram_tier.labels.labels["n", label.name] = label
    assert collect_holdings(ram_tier, 0.0).complete
    one_more = limits.MAX_WATCHED + 1
    ram_tier.claims.claims[one_more] = Claim(one_more, 1, "n", token_array(bytes(4)))
    found = collect_holdings(ram_tier, 0.0)
    assert not found.complete
    assert len(found.claims) == limits.MAX_WATCHED
    assert all(label.idle_seconds == 0.0 for label in found.labels), "used after `now` is not idle"


def test_the_newest_labels_are_shown_and_the_rest_is_said() -> None:
    """S1: bounded, and never silently."""
    ram_tier = RamTier(RamConfig(ram_bytes=1 << 20, ssd_bytes=0))
    for number in range(limits.MAX_WATCHED + 5):
        label = Label("n", f"{number}", None, number, float(number))
        ram_tier.labels.labels["n", label.name] = label
    found = collect_holdings(ram_tier, 1000.0)
    assert len(found.labels) == limits.MAX_WATCHED
    assert not found.complete
    assert found.labels[0].label == f"{limits.MAX_WATCHED + 4}"
    assert found.labels[0].idle_seconds == 1000.0 - (limits.MAX_WATCHED + 4)


def test_what_was_given_out_is_no_way_into_the_owner() -> None:
    """Who watches gets a copy that nobody can change, for all that look at it share it."""
    core = Core(small_config())
    put(core, 1)
    take(core, 1, session=3)
    found = collect_holdings(core, core.clock)
    for part, field in ((found, "complete"), (found.by_session[3], "leases")):
        with pytest.raises(AttributeError):
            setattr(part, field, 0)
