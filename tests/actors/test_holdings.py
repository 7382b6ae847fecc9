"""What connections hold, as those who watch see it: bounded, the newest labels first."""

from itertools import count

from prefixcached.actors.claims import Claim
from prefixcached.actors.desk import RamConfig
from prefixcached.actors.holdings import Held, collect_holdings
from prefixcached.actors.labels import Label
from prefixcached.actors.ram_tier import RamTier
from prefixcached.protocol import limits
from prefixcached.protocol.tokens import token_array


async def test_nothing_held_is_an_empty_report() -> None:
    """A daemon that has just started."""
    found = RamTier(RamConfig(ram_bytes=1 << 20, ssd_bytes=0)).holdings()
    assert (found.by_session, found.claims, found.labels, found.complete) == ({}, (), (), True)


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
