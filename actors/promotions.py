"""PromotionDesk: copies images from SSD into RAM, off the critical path. Part of RamTier, pure.

Rules T7, E6, E7: a promotion is reserved whole or not made, and never evicts what is used more.
Nor does it evict in vain: where what it evicts takes a moment to be freed, it waits for that.
"""

from collections.abc import Callable, Iterable

from prefixcached.actors.desk import Shared
from prefixcached.actors.entries import Entry, Memory
from prefixcached.actors.eviction import Room
from prefixcached.actors.reads import ReadDesk
from prefixcached.protocol.actor_messages import Promoted, PromoteImage

HITS_TO_PROMOTE = {"second-hit": 2, "always": 1}
"""Hits on SSD after which an image becomes resident, by the `promote` setting."""


class PromotionDesk:
    """Owns the promotions in flight."""

    def __init__(self, shared: Shared, reads: ReadDesk) -> None:
        self._shared = shared
        self._index = shared.index
        self._reads = reads
        self._in_flight: dict[str, tuple[Entry, Memory]] = {}
        self._room_awaited: dict[str, Entry] = {}
        self._waiters: dict[str, list[Callable[[float], None]]] = {}
        self.is_suspended = False
        """Set while memory is short: what is optional goes first (rule M2)."""
        self.is_room_wanted = False
        """Set while an offer waits for room: nothing optional may take it (rule E6)."""
        self.promoted = 0
        self.declined = 0

    @property
    def in_flight(self) -> int:
        """Promotions whose bytes are being read."""
        return len(self._in_flight)

    def after_hit(self, entries: Iterable[Entry]) -> None:
        """Promote those of ``entries`` that were hit on SSD often enough (rule T7)."""
        enough = HITS_TO_PROMOTE.get(self._shared.config.promote)
        if enough is not None:
            for entry in entries:
                if entry.ssd_hits >= enough:
                    self.promote(entry)

    def promote(self, entry: Entry, done: Callable[[float], None] | None = None) -> bool:
        """Begin to make ``entry`` resident; ``done`` is called when it is, or failed to be.

        False if the budget does not allow it, or there is nothing to do; ``done`` is not called.
        """
        if not _is_promotable(entry):
            return False
        if entry.id not in self._in_flight and entry.id not in self._room_awaited:
            room = self._room_for(entry)
            if room is Room.SOON:
                self._index.hold((entry,))  # the file must stay until it is read
                self._room_awaited[entry.id] = entry
            elif room is Room.NEVER or not self._start(entry):
                self.declined += 1
                return False
        if done is not None:
            self._waiters.setdefault(entry.id, []).append(done)
        return True

    def retry(self, now: float) -> None:
        """Begin what has room by now, and give up what others took the room of."""
        for entry in list(self._room_awaited.values()):
            ram = self._index.ram
            fits = ram.fits(entry.charged_bytes, 1)
            may_start = not self.is_suspended and not self.is_room_wanted
            is_wanted = _is_promotable(entry) and may_start
            if is_wanted and not fits and ram.fits(entry.charged_bytes, 1, leaving="freeing"):
                continue
            del self._room_awaited[entry.id]
            if not is_wanted or not fits or not self._start(entry):
                self.declined += 1
                self._tell(entry, now)
            self._index.release((entry,))

    def _room_for(self, entry: Entry) -> Room:
        if self.is_suspended or self.is_room_wanted:
            return Room.NEVER
        earlier = self._room_awaited.values()  # the room that they wait for is not this one's
        nbytes = entry.charged_bytes + sum(other.charged_bytes for other in earlier)
        return self._shared.eviction.make_room(nbytes, 1 + len(earlier), below=entry.priority)

    def _start(self, entry: Entry) -> bool:
        try:
            memory = self._shared.create_memory(entry.nbytes)
        except OSError:
            return False
        assert entry.file is not None
        self._index.ram.add("promoting", entry.charged_bytes)
        self._index.hold((entry,))  # the file must stay while it is read
        self._in_flight[entry.id] = (entry, memory)
        self._shared.orders.prefetcher(PromoteImage(entry.file), memory)
        return True

    def finished(self, outcome: Promoted, now: float) -> None:
        """The bytes are in memory, or could not be brought there."""
        entry, memory = self._in_flight.pop(outcome.id)
        if outcome.error:
            self._reads.note_failure(outcome)
        unwanted = self.is_suspended or not entry.attached or entry.memory is not None
        if outcome.error or unwanted:
            self._index.give_back(memory, "promoting", entry.charged_bytes)
        else:
            self.promoted += 1
            self._index.set_memory(entry, memory, "promoting")
        self._index.release((entry,))
        self._tell(entry, now)

    def _tell(self, entry: Entry, now: float) -> None:
        for done in self._waiters.pop(entry.id, ()):
            done(now)


def _is_promotable(entry: Entry) -> bool:
    return entry.memory is None and entry.file is not None and entry.attached
