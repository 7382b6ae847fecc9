"""ObjectDesk: exact, immutable tensor objects by key (rules O1, O2). Part of RamTier, pure.

Storing goes through PutDesk like any put; this desk finds objects and lends them.
"""

from dataclasses import dataclass

from prefixcached.actors.desk import Answer, Shared
from prefixcached.actors.entries import ObjectEntry
from prefixcached.actors.parts import Lent
from prefixcached.actors.promotions import PromotionDesk
from prefixcached.actors.reads import OpenFile, ReadDesk
from prefixcached.actors.takes import TakeDesk
from prefixcached.protocol.messages import Hit, Miss, Part, TakeObject, Tier


@dataclass(slots=True)
class ObjectCounters:
    """Rule O2: objects are counted apart from prefixes. A restore is a hit on SSD."""

    object_hits: int = 0
    object_misses: int = 0
    object_restores: int = 0


class ObjectDesk:
    """Answers `TakeObject`; the leases are TakeDesk's."""

    def __init__(
        self, shared: Shared, takes: TakeDesk, reads: ReadDesk, promotions: PromotionDesk
    ) -> None:
        self._index = shared.index
        self._takes = takes
        self._reads = reads
        self._promotions = promotions
        self.counters = ObjectCounters()

    def take(self, session: int, request: TakeObject, answer: Answer, now: float) -> None:
        """Lend the object of that key, verified first where it is on SSD only."""
        if self._takes.refuses(session, answer):
            return
        namespace = self._index.namespaces.get(request.namespace)
        entry = namespace.objects.get(request.key) if namespace is not None else None
        if entry is None:
            self._miss(answer, "loading" if self._takes.is_loading else "empty")
            return
        if entry.memory is not None:
            self._hit(session, entry, answer, "ram", {}, now)
            return
        self._index.hold((entry,))  # until it was read; the lease holds it from then on

        def verified(files: dict[int, OpenFile] | None, now: float) -> None:
            if files is None:
                self._miss(answer, "restore-failed")
            elif entry.namespace.cleared:  # work of an older epoch is discarded (rule D11)
                files[0].close()
                self._miss(answer, "empty")
            else:
                entry.ssd_hits += 1
                self.counters.object_restores += 1
                self._hit(session, entry, answer, "ssd", files, now)
                self._promotions.after_hit((entry,))
            self._index.release((entry,))

        self._reads.read(
            session, {0: entry}, verified, abandoned=lambda: self._index.release((entry,))
        )

    def _hit(
        self, session: int, entry: ObjectEntry, answer: Answer, tier: Tier,
        files: dict[int, OpenFile], now: float,
    ) -> None:  # fmt: skip
        self.counters.object_hits += 1
        lease = self._takes.lend(session, [Lent(entry, 0, 0)], files)
        self._takes.use((entry,), now)
        offset = files[0].data_offset if files else 0
        answer.set(
            Hit(lease=lease.id, length=0, tier=tier, parts=(Part(entry.spec, 0, 0, offset),)),
            lease.descriptors(0),
        )

    def _miss(self, answer: Answer, reason: str) -> None:
        self.counters.object_misses += 1
        answer.set(Miss(reason=reason))
