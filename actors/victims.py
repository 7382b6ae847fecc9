"""A queue of possible victims, least rank first, with lazy removal. Pure."""

import heapq
from collections.abc import Callable, Iterator
from typing import Final

from prefixcached.actors.entries import Entry

Rank = tuple[bool, float]

SLACK: Final = 1024
"""Stale items tolerated before the heap is rebuilt, so that rebuilding is rare for small caches."""


class Victims:
    """Entries that may be evicted.

    An item is stale when its entry is no longer eligible or its rank changed since; stale
    items are skipped, and swept out when they are many.
    """

    def __init__(self, eligible: Callable[[Entry], bool]) -> None:
        self._eligible = eligible
        self._heap: list[tuple[Rank, str, Entry]] = []
        self._live: dict[str, Rank] = {}

    def offer(self, entry: Entry) -> None:
        """Add ``entry`` if it is eligible at its present rank."""
        if self._eligible(entry) and self._live.get(entry.id) != entry.rank:
            self._live[entry.id] = entry.rank
            heapq.heappush(self._heap, (entry.rank, entry.id, entry))
            if len(self._heap) > 2 * len(self._live) + SLACK:
                self._sweep()

    def in_order(self) -> Iterator[Entry]:
        """Yield eligible entries, least rank first.

        The caller may evict or skip each one before asking for the next; skipped entries stay
        queued. Entries that become eligible meanwhile are yielded if their rank still comes.
        """
        skipped: dict[str, tuple[Rank, str, Entry]] = {}
        try:
            while self._heap:
                item = heapq.heappop(self._heap)
                rank, entry_id, entry = item
                if self._live.get(entry_id) != rank:
                    continue
                if not self._eligible(entry) or entry.rank != rank:
                    del self._live[entry_id]
                    continue
                if entry_id not in skipped:
                    skipped[entry_id] = item
                    yield entry
        finally:
            for rank, entry_id, entry in skipped.values():
                if not self._eligible(entry):
                    self._live.pop(entry_id, None)
                elif self._live.setdefault(entry_id, rank) == rank:
                    heapq.heappush(self._heap, (rank, entry_id, entry))

    def _sweep(self) -> None:
        kept = {
            entry_id: (rank, entry_id, entry)
            for rank, entry_id, entry in self._heap
            if self._live.get(entry_id) == rank and entry.rank == rank and self._eligible(entry)
        }
        self._heap = list(kept.values())
        self._live = {entry_id: item[0] for entry_id, item in kept.items()}
        heapq.heapify(self._heap)
