"""A bounded memory of what was evicted and why, so that a miss can say so (rule T9). Pure."""

from collections import OrderedDict
from typing import Final

from prefixcached.actors.entries import Entry, Segment
from prefixcached.protocol.tokens import TokenArray

REMEMBERED: Final = 4096
"""Evictions remembered: hours of an agent farm's churn in under a megabyte."""


class EvictedMemory:
    """Where segments left the tree: namespace, position and first token, with the cause.

    The key says where a walk stops that would have gone on; it is a hint for people, and two
    paths that agree in all three are told apart by nothing that matters to them.
    """

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, int, int], str] = OrderedDict()

    def remember(self, entry: Entry, cause: str) -> None:
        """Note that ``entry`` is leaving the cache for good."""
        if isinstance(entry, Segment):
            self._causes[entry.namespace.name, entry.start, int(entry.tokens[0])] = cause
            if len(self._causes) > REMEMBERED:
                self._causes.popitem(last=False)

    def cause(self, namespace: str, tokens: TokenArray, matched: int) -> str | None:
        """Return why the walk stopped at ``matched``, if an eviction is remembered there."""
        if matched >= tokens.size:
            return None
        return self._causes.get((namespace, matched, int(tokens[matched])))
