"""Which image to give up first (rule E3). Pure and small, so that policies can be compared.

A policy turns each use of an entry into a priority, one number; the index evicts the least among
those it may evict, leaves before their ancestors. benchmarks/retention.py compares the policies;
docs/behaviour.md, E3, has its figures. Each policy object owns what it remembers.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Protocol

from prefixcached.actors.entries import Checkpoint, Entry, Segment

TIE_BREAK: Final = 1e-9
"""Weight of the clock in a priority: among equals the least recently used goes first, also among
what was found on the disk at the start and not used since (D5). 10**8 uses weigh a tenth of one."""

PROTECTED_SHARE: Final = 0.8
"""Share of the RAM cap for what was hit; in the rest new entries wait for their first hit. Its
inventors' share (R. Karedla, J. Love, B. Wherry, "Caching strategies to improve disk system
performance", 1994)."""

PROTECTED_PRIORITY: Final = 1e12
"""Added to the priority of a protected entry: more than the index's clock will ever count."""


class RetentionPolicy(Protocol):
    """Gives every entry a priority; the index evicts the least among those it may evict."""

    def accessed(self, entry: Entry, ram_bytes_cap: int) -> Iterable[Entry]:
        """Set the priority of ``entry`` after a use that its ``used`` and ``uses`` count already.

        Returns:
            Other entries whose priorities have changed by it.
        """
        ...

    def evicted(self, entry: Entry) -> None:
        """Learn that the entry was chosen as a victim."""
        ...

    def left_ram(self, entry: Entry) -> None:
        """Learn that the entry is not resident any more, for whatever reason."""
        ...


class LeastRecentlyUsed:
    """`lru`: the entry whose last use is longest ago."""

    def accessed(self, entry: Entry, ram_bytes_cap: int) -> Iterable[Entry]:
        """Priority is the last use."""
        entry.priority = float(entry.used)
        return ()

    def evicted(self, entry: Entry) -> None:
        """Nothing to learn."""

    def left_ram(self, entry: Entry) -> None:
        """Nothing to learn."""


class CostSize:
    """`cost-size`: GreedyDual-Size with frequency.

    Priority is age + cost x uses / bytes, where cost is the length of the prefix that ends there:
    what a client computes again without it. Its storing is the first use. The age rises to the
    priority of each victim, so that what is not used any more is overtaken, however valuable it
    was. (P. Cao, S. Irani, "Cost-aware WWW proxy caching algorithms", 1997; L. Cherkasova,
    "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", 1998.)
    """

    def __init__(self) -> None:
        self.age = 0.0

    def accessed(self, entry: Entry, ram_bytes_cap: int) -> Iterable[Entry]:
        """Priority is age + cost x uses / bytes, in tokens a mebibyte, and a little for recency."""
        mebibytes = max(entry.charged_bytes, 1) / (1 << 20)
        value = prefix_length(entry) * (1 + entry.uses) / mebibytes
        entry.priority = self.age + value + entry.used * TIE_BREAK
        return ()

    def evicted(self, entry: Entry) -> None:
        """Let the age rise to the victim's priority."""
        self.age = max(self.age, entry.priority)

    def left_ram(self, entry: Entry) -> None:
        """Nothing to learn."""


class Segmented:
    """`segmented`: least recently used in two classes, which a scan does not flush (rule E9).

    What was hit is protected and goes after all that was not. Protected entries may take most of
    the cap; beyond it the least recently used of them are as good as newly stored ones again. So
    a scan passes through the rest of the cache, and what nobody reads any more leaves in time.
    """

    def __init__(self) -> None:
        self._protected: OrderedDict[str, Entry] = OrderedDict()
        self.protected_bytes = 0

    def accessed(self, entry: Entry, ram_bytes_cap: int) -> Iterable[Entry]:
        """Priority is the last use, behind that of all unprotected entries if it was ever hit."""
        entry.priority = float(entry.used)
        if not entry.uses or entry.memory is None:
            return ()
        entry.priority += PROTECTED_PRIORITY
        if entry.id in self._protected:
            self._protected.move_to_end(entry.id)
            return ()
        self._protected[entry.id] = entry
        self.protected_bytes += entry.charged_bytes
        demoted: list[Entry] = []
        while self.protected_bytes > PROTECTED_SHARE * ram_bytes_cap and len(self._protected) > 1:
            oldest = next(iter(self._protected.values()))
            self._forget(oldest)
            oldest.priority = float(entry.used)
            demoted.append(oldest)
        return demoted

    def evicted(self, entry: Entry) -> None:
        """Nothing to learn."""

    def left_ram(self, entry: Entry) -> None:
        """On SSD alone, its last use counts as for any other there."""
        if entry.id in self._protected:
            self._forget(entry)
            entry.priority = float(entry.used)

    def _forget(self, entry: Entry) -> None:
        del self._protected[entry.id]
        self.protected_bytes -= entry.charged_bytes


POLICIES: Final[dict[str, type[RetentionPolicy]]] = {
    "lru": LeastRecentlyUsed,
    "cost-size": CostSize,
    "segmented": Segmented,
}
"""The policies by the name that configuration gives them."""

DEFAULT_POLICY: Final = "segmented"
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
