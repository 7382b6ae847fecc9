"""Which image to give up first (rule E3). Pure and small, so that policies can be compared."""

from typing import Protocol

from prefixcached.actors.entries import Entry


class RetentionPolicy(Protocol):
    """Gives every entry a priority; the index evicts the least among those it may evict."""

    def accessed(self, entry: Entry) -> float:
        """Return the entry's priority after its use; ``entry.used`` is the index's clock."""

    def evicted(self, entry: Entry) -> None:
        """Learn that the entry was chosen as a victim."""


class LeastRecentlyUsed:
    """`lru`: the entry whose last use is longest ago."""

    def accessed(self, entry: Entry) -> float:
        """Return the entry's last use."""
        return float(entry.used)

    def evicted(self, entry: Entry) -> None:
        """Nothing to learn."""
