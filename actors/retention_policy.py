"""Which image to give up first (rule E3). Pure and small, so that policies can be compared.

A policy turns each use of an entry into a priority, one number; the index evicts the least among
those it may evict, leaves before their ancestors. benchmarks/retention.py compares the policies;
docs/behaviour.md, E3, has its figures.
"""

from typing import Final, Protocol

from prefixcached.actors.entries import Checkpoint, Entry, Segment

MAX_USES: Final = 8
"""Uses that count for `frequency`: beyond it an entry that was popular once would outlive the cache
several times over, and the difference between 8 and 80 decides nothing against a scan's 1."""

TIE_BREAK: Final = 1e-9
"""Weight of the clock in a priority: among equals the least recently used goes first, also among
what was found on the disk at the start and not used since (D5). 10**8 uses weigh a tenth of one."""


class RetentionPolicy(Protocol):
    """Gives every entry a priority; the index evicts the least among those it may evict."""

    def accessed(self, entry: Entry) -> float:
        """Return the entry's priority after a use that ``used`` and ``uses`` count already."""
        ...

    def evicted(self, entry: Entry) -> None:
        """Learn that the entry was chosen as a victim."""
        ...


class LeastRecentlyUsed:
    """`lru`: the entry whose last use is longest ago."""

    def accessed(self, entry: Entry) -> float:
        """Return the entry's last use."""
        return float(entry.used)

    def evicted(self, entry: Entry) -> None:
        """Nothing to learn."""


class CostSize:
    """`cost-size`: GreedyDual-Size with frequency.

    Priority is age + cost x uses / bytes, where cost is the length of the prefix that ends there:
    what a client computes again without it. Its storing is the first use. The age rises to the
    priority of each victim, so that what is not used any more is overtaken, however valuable it
    was. (P. Cao, S. Irani, "Cost-aware
    WWW proxy caching algorithms", 1997; L. Cherkasova, "Improving WWW proxies performance with
    Greedy-Dual-Size-Frequency caching policy", 1998.)
    """

    def __init__(self) -> None:
        self.age = 0.0

    def accessed(self, entry: Entry) -> float:
        """Return age + cost x uses / bytes, in tokens a mebibyte, and a little for recency."""
        mebibytes = max(entry.charged_bytes, 1) / (1 << 20)
        value = prefix_length(entry) * (1 + entry.uses) / mebibytes
        return self.age + value + entry.used * TIE_BREAK

    def evicted(self, entry: Entry) -> None:
        """Let the age rise to the victim's priority."""
        self.age = max(self.age, entry.priority)


class Frequency:
    """`frequency`: least frequently used with dynamic ageing, which a scan does not flush.

    Priority is age + uses, the uses capped and the age as in `CostSize`: an entry used once is
    evicted within one turnover of what was used once, one used n times after n of them. Among
    equals the least recently used goes first.
    """

    def __init__(self) -> None:
        self.age = 0.0

    def accessed(self, entry: Entry) -> float:
        """Return age + uses, and a little for recency."""
        return self.age + 1 + min(entry.uses, MAX_USES) + entry.used * TIE_BREAK

    def evicted(self, entry: Entry) -> None:
        """Let the age rise to the victim's priority."""
        self.age = max(self.age, entry.priority)


POLICIES: Final[dict[str, type[RetentionPolicy]]] = {
    "lru": LeastRecentlyUsed,
    "cost-size": CostSize,
    "frequency": Frequency,
}
"""The policies by the name that configuration gives them."""

DEFAULT_POLICY: Final = "lru"
"""Chosen by benchmarks/retention.py; the figures stand in docs/behaviour.md, E3."""


def policy_named(name: str) -> RetentionPolicy:
    """Return a new policy.

    Raises:
        ValueError: There is none of that name; the message lists those there are.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"{name!r} is no retention policy; choose one of {', '.join(POLICIES)}")
    return policy()


def prefix_length(entry: Entry) -> int:
    """Return the tokens of the prefix that ends with ``entry``; 1 for an object, which has none."""
    if isinstance(entry, Segment):
        return entry.end
    return entry.position if isinstance(entry, Checkpoint) else 1
