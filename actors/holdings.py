"""What connections hold of RamTier, for those who watch: a frozen copy, made when asked for.

It visits leases, pins, puts, claims and labels, never entries. `RamTier` owns all of them.
"""

import heapq
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol.messages import ClaimActivity, LabelActivity

if TYPE_CHECKING:
    from prefixcached.actors.ram_tier import RamTier


class Held(msgspec.Struct, frozen=True):
    """What one connection holds. ``waits_for`` is the session that its take waits for, or 0."""

    leases: int = 0
    pins: int = 0
    puts: int = 0
    claims: int = 0
    waits_for: int = 0


class Holdings(msgspec.Struct, frozen=True):
    """What all connections hold, by session, and the conversations used last.

    ``complete`` is false where `limits.MAX_WATCHED` left a claim or a label out.
    """

    by_session: dict[int, Held]
    claims: tuple[ClaimActivity, ...]
    labels: tuple[LabelActivity, ...]
    complete: bool


NOTHING_HELD = Held()
NO_HOLDINGS = Holdings({}, (), (), complete=True)


def collect_holdings(ram_tier: "RamTier", now: float) -> Holdings:
    """Return what is held at ``now``, a time of `trio.current_time`."""
    leases = Counter(lease.session for lease in ram_tier.takes.leases.values())
    pins = Counter(pin.session for pin in ram_tier.pins.pins.values())
    puts = Counter(put.session for put in ram_tier.puts.puts.values())
    claims = ram_tier.claims.claims
    claimed = Counter(claim.session for claim in claims.values())
    awaited = ram_tier.takes.awaited_claims
    waiting = Counter(awaited.values())
    waits_for = {
        session: claims[claim].session for session, claim in awaited.items() if claim in claims
    }
    labels = ram_tier.labels.labels.values()
    latest = heapq.nlargest(limits.MAX_WATCHED, labels, key=lambda label: label.used_seconds)
    return Holdings(
        by_session={
            session: Held(
                leases[session], pins[session], puts[session], claimed[session],
                waits_for.get(session, 0),
            )
            for session in {*leases, *pins, *puts, *claimed, *waits_for}
        },
        claims=tuple(
            ClaimActivity(claim.session, claim.namespace, claim.length, waiting[claim.id])
            for claim in list(claims.values())[: limits.MAX_WATCHED]
        ),
        labels=tuple(
            LabelActivity(
                label.name, label.namespace, label.length, max(0.0, now - label.used_seconds)
            )
            for label in latest
        ),
        complete=len(claims) <= limits.MAX_WATCHED and len(labels) <= limits.MAX_WATCHED,
    )  # fmt: skip
