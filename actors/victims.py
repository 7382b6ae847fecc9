"""A queue of possible victims, least rank first, with lazy removal. Pure."""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from prefixcached.actors.entries import Entry

Rank = tuple[bool, bool, float]

SLACK: Final = 1024
"""Stale items tolerated before the heap is rebuilt, so that rebuilding is rare for small caches."""


class Victims:
    """Entries that may be evicted; those of equal rank in the order in which they came.

    Each entry has at most one live item in the heap, named by its number. Others are stale: their
    entry is no longer eligible or its rank changed since. Stale items are skipped, and swept out
    when they are many.
    """

    def __init__(self, eligible: Callable[[Entry], bool]) -> None:
        self._eligible = eligible
        self._numbers = count()
        self._heap: list[tuple[Rank, int, Entry]] = []
        self._live: dict[str, tuple[Rank, int]] = {}

    def __len__(self) -> int:
        """Items in the heap, stale ones included."""
        return len(self._heap)

    def offer(self, entry: Entry) -> None:
        """Take note of ``entry``, whose eligibility or rank may have changed."""
        live = self._live.get(entry.id)
        if not self._eligible(entry):
            if live is not None:
                del self._live[entry.id]
        elif live is None or live[0] != entry.rank:
            number = next(self._numbers)
            self._live[entry.id] = entry.rank, number
            heapq.heappush(self._heap, (entry.rank, number, entry))
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._sweep()

    def in_order(self) -> Iterator[Entry]:
        """Yield eligible entries, least rank first.

        The caller may evict or skip each one before asking for the next; skipped entries stay
        queued. Entries that become eligible meanwhile are yielded if their rank still comes.
        """
        passed: dict[str, tuple[Rank, int, Entry]] = {}
        try:
            while self._heap:
                item = heapq.heappop(self._heap)
                rank, number, entry = item
                if self._live.get(entry.id) != (rank, number):
                    continue
                if not self._eligible(entry) or entry.rank != rank:
                    del self._live[entry.id]
                    continue
                is_new = entry.id not in passed
                passed[entry.id] = item
                if is_new:
                    yield entry
        finally:
            for item in passed.values():
                rank, number, entry = item
                if self._live.get(entry.id) == (rank, number):
                    heapq.heappush(self._heap, item)

    def _sweep(self) -> None:
        self._heap = [
            (rank, number, entry)
            for rank, number, entry in self._heap
            if self._live.get(entry.id) == (rank, number)
        ]
        heapq.heapify(self._heap)
