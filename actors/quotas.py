"""What each namespace holds in RAM, and whose victims go first when one exceeds its quota. Pure.

Rule E9. The quota is soft: a namespace may fill what nobody else wants, and gives it back first.
Owned by `Index`, which tells it what becomes resident and what leaves.
"""

from collections.abc import Callable, Iterator

from prefixcached.actors.entries import Entry, Namespace
from prefixcached.actors.victims import Victims


class Quotas:
    """Resident bytes by namespace, and with a quota a queue of victims for each.

    Args:
        share: Share of the RAM cap that one namespace may hold before its entries go first; from
            1.0 on there is no quota and no queue.
        eligible: Which entries may leave RAM.
    """

    def __init__(self, share: float, eligible: Callable[[Entry], bool]) -> None:
        self._share = share
        self._eligible = eligible
        self._queues: dict[Namespace, Victims] = {}
        self.resident_bytes: dict[Namespace, int] = {}
        self.evictions = 0
        """Victims that went first because their namespace was over its quota."""

    def became_resident(self, entry: Entry) -> None:
        """``entry`` is in the tree with its memory."""
        held = self.resident_bytes.get(entry.namespace, 0)
        self.resident_bytes[entry.namespace] = held + entry.charged_bytes

    def left(self, entry: Entry) -> None:
        """``entry`` left the tree, or its memory left it."""
        held = self.resident_bytes.get(entry.namespace, 0) - entry.charged_bytes
        self.resident_bytes[entry.namespace] = held
        if not held:  # images of no bytes may be left
            del self.resident_bytes[entry.namespace]
            self._queues.pop(entry.namespace, None)

    def offer(self, entry: Entry) -> None:
        """``entry`` may have become a victim, or have another rank as one."""
        if self._share < 1.0 and entry.namespace in self.resident_bytes:
            queue = self._queues.get(entry.namespace)
            if queue is None:
                queue = self._queues[entry.namespace] = Victims(self._eligible)
            queue.offer(entry)

    def victims(self, cap_bytes: int) -> Iterator[Entry]:
        """Yield victims of the namespaces that are over their quota, largest namespace first.

        A quota that somebody has set counts for more than a label: labelled entries of such a
        namespace go before any of another. As with `Victims`, the caller may evict or skip each.
        """
        if self._share >= 1.0:
            return
        quota = int(cap_bytes * self._share)
        over = [n for n, held in self.resident_bytes.items() if held > quota]
        for namespace in sorted(over, key=lambda n: self.resident_bytes[n], reverse=True):
            queue = self._queues.get(namespace)
            for victim in queue.in_order() if queue is not None else ():
                if self.resident_bytes.get(namespace, 0) <= quota:
                    break
                before = self.resident_bytes[namespace]
                try:
                    yield victim
                finally:  # also when the caller has room enough and asks for no more
                    self.evictions += self.resident_bytes.get(namespace, 0) < before
