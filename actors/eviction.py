"""Eviction: what leaves RAM and SSD so that something else fits. Part of RamTier, pure.

Rules E2, E4, E6 to E9, D5, D10. Which entries may leave at all the index knows (its queues of
victims); in which order, the retention policy. A reservation is made whole or not at all.
"""

import math
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from itertools import chain, islice
from typing import Final

from prefixcached.actors.entries import Entry
from prefixcached.actors.index import Index, may_leave_ram, may_leave_ram_without_io
from prefixcached.actors.victims import Rank
from prefixcached.protocol.actor_messages import DeleteFile

MOST_FOR_PROMOTION: Final = 500
"""Images that leave for one promotion at most, and that are looked at: a few milliseconds."""


class Room(StrEnum):
    """Answer to a reservation that is not made yet (rule E6: all or nothing)."""

    FITS = "fits"
    SOON = "soon"
    """Enough is being freed, or will be once the writer has caught up."""
    NEVER = "no-space"
    """The rest is leased, pinned or in flight."""


class Eviction:
    """Makes room in `index`. It remembers nothing."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._ram = index.ram
        self._ssd = index.ssd
        self._departures = index.departures

    def make_room(self, nbytes: int, images: int, below: float = math.inf) -> Room:
        """Evict from RAM until ``nbytes`` and ``images`` more fit, if they can at all.

        Durable victims are dropped without I/O; one that will be written is left until it is, and
        one that never will be is dropped at once: the cap wins over persistence (rule E4). Only
        entries of less priority than ``below`` are victims, none where they would not be enough.
        """
        if not self._could_fit(nbytes, images):
            return Room.NEVER
        if below < math.inf and not self._could_evict(nbytes, images, below):
            return Room.NEVER
        if not self._ram.fits(nbytes, images, leaving="freeing"):
            self._evict_until(lambda: self._ram.fits(nbytes, images, leaving="freeing"), below)
        return Room.FITS if self._ram.fits(nbytes, images) else Room.SOON

    def evict_beyond(self, limit_bytes: int) -> None:
        """Evict, by rule E4, what exceeds ``limit_bytes`` as far as it may leave now (rule M5)."""
        ram = self._ram
        self._evict_until(lambda: ram.bytes - ram.bytes_by_state["freeing"] <= limit_bytes)

    def make_room_on_disk(self, nbytes: int) -> bool:
        """Delete files until ``nbytes`` more fit once they are gone; False if they cannot.

        Files that no entry owns go first (rule D10).
        """
        leaving = self._departures.leaving_bytes
        over = self._ssd.bytes - leaving + nbytes - self._ssd.bytes_cap
        if over <= 0:
            return True
        tries = self._departures.most_deletions
        if not tries:
            return False
        fixed = sum(self._ssd.bytes_by_state[s] for s in ("writing", "lingering"))
        fixed += self._departures.staying_bytes + self._index.held_file_bytes
        if fixed + nbytes > self._ssd.bytes_cap:
            return False
        if self._departures.is_outcome_awaited:
            return True
        while over > 0 and tries and self._index.unattached:
            tries -= 1
            file_id, file = self._index.unattached.popitem()
            self._ssd.move("other", "deleting", file.allocated_bytes)
            self._index.outlet.delete_file(DeleteFile(file_id, file.path, file.allocated_bytes))
            over -= file.allocated_bytes
        if over > 0 and (wanted := self._departures.others_to_drop(over)):
            self._index.outlet.drop_others(wanted)
        if self._departures.is_drop_awaited:
            return True
        if over > 0 and tries:
            for victim in self._index.ssd_victims.in_order():
                assert victim.file is not None
                tries -= 1
                over -= victim.file.allocated_bytes
                self._index.counters["ssd_evictions"] += 1
                self._index.policy.evicted(victim)
                if victim.memory is None:
                    self._index.evicted_memory.remember(victim, "ssd-cap")
                self._index.drop_file(victim)
                if over <= 0 or not tries:
                    break
        return over <= 0 or not tries

    def fits_on_disk(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more are within the cap at this moment."""
        return self._ssd.bytes + nbytes <= self._ssd.bytes_cap

    def demote_idle(self, unused_since_seconds: float) -> int:
        """Drop the memory of durable entries unused since then (rule E8); return how many.

        Those that hang on others go first, so that these follow within the same sweep.
        """
        idle = [
            entry
            for entry in self._index.entries.values()
            if entry.used_seconds < unused_since_seconds and may_leave_ram_without_io(entry)
        ]
        demoted = 0
        for entry in idle:
            node: Entry | None = entry
            while (
                node is not None
                and node.used_seconds < unused_since_seconds
                and may_leave_ram_without_io(node)
            ):
                above = node.owner
                self._index.drop_memory(node)
                demoted += 1
                node = above
        self._index.counters["demotions"] += demoted
        return demoted

    def _could_fit(self, nbytes: int, images: int) -> bool:
        states = ("lingering", "in_flight", "promoting")
        fixed_bytes = self._index.held_bytes + sum(self._ram.bytes_by_state[s] for s in states)
        fixed_images = self._index.held_images + sum(self._ram.images_by_state[s] for s in states)
        writing = self._index.writing
        if writing is not None and writing.attached and writing.holders == 1:
            # Held by nobody but the writer: it can go as soon as it is written.
            fixed_bytes -= writing.charged_bytes
            fixed_images -= 1
        return (
            fixed_bytes + nbytes <= self._ram.limit_bytes
            and fixed_images + images <= self._ram.images_cap
        )

    def _could_evict(self, nbytes: int, images: int, below: float) -> bool:
        """Whether what may leave RAM of less priority than ``below`` makes so much room."""
        gone: Counter[str] = Counter()
        victims = islice(self._index.ram_victims.in_order(), MOST_FOR_PROMOTION)
        while not self._ram.fits(nbytes, images, leaving="freeing"):
            entry: Entry | None = next(victims, None)
            if entry is None or entry.rank >= _rank_of(below):
                return False
            while (
                entry is not None
                and entry.rank < _rank_of(below)
                and may_leave_ram(entry, gone[entry.id])
            ):
                nbytes -= entry.charged_bytes
                images -= 1
                entry = entry.owner  # which may leave with the last that hangs on it
                if entry is not None:
                    gone[entry.id] += 1
        return True

    def _evict_until(self, enough: Callable[[], bool], below: float = math.inf) -> None:
        """Evict victims of less priority than ``below`` until ``enough``, by rules E2, E4, E9."""
        # A promotion evicts nothing that is used more than it, also not for a quota (rule E7).
        quotas = self._index.quotas
        over_quota = quotas.victims(self._ram.bytes_cap) if below == math.inf else ()
        for victim in chain(over_quota, self._index.ram_victims.in_order()):
            if victim.rank >= _rank_of(below):
                break
            self._evict(victim)
            if enough():
                break

    def _evict(self, victim: Entry) -> None:
        self._index.counters["evictions"] += 1
        self._index.policy.evicted(victim)
        if victim.file is None:
            if self._index.ssd_on:
                self._index.counters["dropped_unwritten"] += 1
            self._index.evicted_memory.remember(victim, "ram-cap")
        self._index.drop_memory(victim)


def _rank_of(below: float) -> Rank:
    """The rank that no victim may reach: a promotion evicts nothing that is labelled."""
    return (False, True, below) if below < math.inf else (True, True, math.inf)
