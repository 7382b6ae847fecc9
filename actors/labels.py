"""LabelDesk: which entry a conversation used last. Part of RamTier, pure. Rules S1 to S4.

A label never changes which prefix is returned; it keeps the entry that it marks from being evicted
before unmarked ones, and counts how often a conversation found what it left.
"""

from dataclasses import dataclass

from prefixcached.actors.entries import Entry, Segment
from prefixcached.actors.index import Index


@dataclass(slots=True, eq=False)
class Label:
    """Affinity of one label in one namespace: the entry, and the length it was used up to."""

    namespace: str
    name: str
    entry: Entry | None
    length: int
    used_seconds: float


class LabelDesk:
    """Owns the labels."""

    def __init__(self, index: Index, ttl_seconds: float) -> None:
        self._index = index
        self._ttl_seconds = ttl_seconds
        self.labels: dict[tuple[str, str], Label] = {}
        self.label_hits = 0
        self.label_misses = 0

    def mark(
        self, namespace: str, name: str | None, entry: Segment | None, length: int, now: float
    ) -> None:
        """``name`` put, took or prefetched ``length`` tokens that end in ``entry``.

        Where they end at a snapshot, that is what must stay; what it hangs on stays with it.
        """
        if name is None or entry is None or not entry.attached:
            return  # evicted by a put that was granted meanwhile
        label = self.labels.get((namespace, name))
        if label is None:
            label = Label(namespace, name, None, 0, now)
            self.labels[namespace, name] = label
        self._index.move_label(label, entry.checkpoints.get((length, True), entry))
        label.length, label.used_seconds = length, now

    def count_take(self, namespace: str, name: str | None, length: int) -> None:
        """Count a take: a hit if it ends at or beyond what the label marks (rule S2)."""
        label = self.labels.get((namespace, name)) if name is not None else None
        if label is None:
            return
        if length >= label.length:
            self.label_hits += 1
        else:
            self.label_misses += 1

    def close(self, name: str, namespace: str | None) -> int:
        """Drop a label, in every namespace when that is None; return how many there were."""
        keys = [k for k in self.labels if k[1] == name and namespace in (None, k[0])]
        for key in keys:
            self._drop(key)
        return len(keys)

    def clear(self, namespace: str | None) -> None:
        """Drop the labels of a namespace, all when None (rule D11)."""
        for key in [k for k in self.labels if namespace in (None, k[0])]:
            self._drop(key)

    def expire(self, now: float) -> None:
        """Drop the labels unused for the time to live (rule S4)."""
        for key, label in list(self.labels.items()):
            if now - label.used_seconds > self._ttl_seconds:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        self._index.move_label(self.labels.pop(key), None)
