"""InspectionDesk: what is held and what a prompt would find, for people. Part of RamTier, pure.

It owns nothing and changes nothing: no recency, no counters (rule T11). Both answers are bounded in
size and in the time that they take of the event loop (rule C6).
"""

from collections.abc import Iterator
from typing import Final, Literal

from prefixcached.actors.entries import Checkpoint, Entry, Namespace, ObjectEntry, Segment
from prefixcached.actors.index import Index
from prefixcached.actors.takes import TakeDesk
from prefixcached.protocol import limits
from prefixcached.protocol import messages as wire
from prefixcached.protocol.tokens import TokenArray, pack_tokens, token_array

MAX_VISITED: Final = 20_000
"""Segments that one listing looks at: 25 ms. In a larger tree ``sharing`` counts what was seen."""


class InspectionDesk:
    """Answers `List` and `Explain` from the index."""

    def __init__(self, index: Index, takes: TakeDesk) -> None:
        self._index = index
        self._takes = takes

    def list(self, request: wire.List, now: float) -> wire.Listing:
        """Return what is held, at most ``request.limit`` images, those used last first."""
        chosen = [
            namespace
            for namespace in self._index.namespaces.values()
            if request.namespace in (None, namespace.name)
        ]
        chosen.sort(key=lambda namespace: -_last_use(namespace))
        listed: list[wire.ListedNamespace] = []
        left = request.limit
        visits = MAX_VISITED
        for namespace in chosen[: limits.MAX_LISTED]:
            images: list[wire.Listed] = []
            if left and visits > 0:
                tree = _Tree(namespace, visits)
                visits -= len(tree.order)
                for depth, entry in tree.walk():
                    if len(images) == left:
                        break
                    images.append(_listed(entry, depth, tree.sharing(entry), now))
            left -= len(images)
            listed.append(wire.ListedNamespace(namespace.name, namespace.entries, tuple(images)))
        complete = len(chosen) == len(listed) and all(
            len(one.images) == one.count for one in listed
        )
        return wire.Listing(namespaces=tuple(listed), complete=complete)

    def explain(self, request: wire.Explain) -> wire.Explanation:
        """Return what a take would find, by the very look-up that a take makes."""
        tokens = token_array(request.tokens)
        limit = int(tokens.size) - 1
        found = self._takes.look_up(request.namespace, tokens, limit)
        continuations: tuple[bytes, ...] = ()
        if found.namespace is not None:
            node = found.path.last or found.namespace.root
            continuations = tuple(_continuations(node, found.path.matched))
        return wire.Explanation(
            length=found.any_length,
            ram_length=found.ram_length,
            matched=found.path.matched,
            reason="" if 0 < limit <= found.any_length else found.reason,
            continuations=continuations,
        )


class _Tree:
    """One namespace's segments, parents before children, those used last first.

    ``order`` is bounded by ``visits``; what lies beyond is not seen.
    """

    def __init__(self, namespace: Namespace, visits: int) -> None:
        self._namespace = namespace
        self.order: list[tuple[int, Segment]] = []
        stack = [(0, child) for child in _by_use(namespace.root)]
        while stack and len(self.order) < visits:
            depth, node = stack.pop()
            self.order.append((depth, node))
            children = _by_use(node)
            # A conversation that only grows stays one column, however many turns it has.
            is_chain = len(children) == 1 and children[0].start == node.end
            stack.extend((depth + (not is_chain), child) for child in children)
        self._ends: dict[str, int] = {}
        for _, node in reversed(self.order):
            below = sum(self._ends.get(child.id, 0) for child in node.children.values())
            # A chain's segments end nowhere but at its last; a branch inside a segment leaves
            # that segment's own end as another.
            own = not any(child.start == node.end for child in node.children.values())
            self._ends[node.id] = below + own

    def walk(self) -> Iterator[tuple[int, Entry]]:
        """Yield each entry with its depth."""
        for depth, node in self.order:
            yield depth, node
            for checkpoint in sorted(node.checkpoints.values(), key=lambda one: one.position):
                yield depth + 1, checkpoint
        for entry in self._namespace.objects.values():
            yield 0, entry

    def sharing(self, entry: Entry) -> int:
        """Return how many prompts' ends lie at or below ``entry``."""
        return self._ends.get(entry.id, 1)


def _by_use(node: Segment) -> list[Segment]:
    """The children of ``node``, the one used last at the end of the list."""
    return sorted(node.children.values(), key=lambda child: child.used)


def _last_use(namespace: Namespace) -> int:
    tops: list[Entry] = [*namespace.root.children.values(), *namespace.objects.values()]
    return max((entry.used for entry in tops), default=0)


def _listed(entry: Entry, depth: int, sharing: int, now: float) -> wire.Listed:
    start = end = 0
    key = ""
    kind: Literal["segment", "checkpoint", "object"] = "object"
    if isinstance(entry, Segment):
        kind, start, end = "segment", entry.start, entry.end
    elif isinstance(entry, Checkpoint):
        kind, start, end = "checkpoint", entry.position, entry.position
    elif isinstance(entry, ObjectEntry):
        key = entry.key
    return wire.Listed(
        kind=kind, depth=depth, start=start, end=end, nbytes=entry.nbytes,
        in_ram=entry.memory is not None, on_ssd=entry.file is not None,
        idle_seconds=max(0.0, now - entry.used_seconds) if entry.used > 0 else None,
        uses=entry.uses, sharing=sharing, holders=entry.holders, key=key,
    )  # fmt: skip


def _continuations(node: Segment, matched: int) -> Iterator[bytes]:
    """Yield what is held behind ``matched`` tokens of a path that ends in ``node``."""
    branches: list[tuple[int, Segment, TokenArray]] = [
        (child.used, child, child.tokens)
        for (position, _), child in node.children.items()
        if position == matched
    ]
    # Behind a child that was used at the same time: that use went through the child.
    own = node.tokens[matched - node.start :]
    if own.size:
        branches.append((node.used, node, own))
    branches.sort(key=lambda branch: -branch[0])
    for _, segment, tokens in branches[: limits.MAX_CONTINUATIONS]:
        yield pack_tokens(_shown(segment, tokens))


def _shown(segment: Segment, tokens: TokenArray) -> list[int]:
    """Return the first tokens from ``tokens`` on, also where ``segment`` is short and goes on."""
    shown: list[int] = tokens[: limits.MAX_CONTINUATION_TOKENS].tolist()
    node: Segment | None = segment
    while node is not None and len(shown) < limits.MAX_CONTINUATION_TOKENS:
        behind = [child for child in node.children.values() if child.start == node.end]
        node = max(behind, key=lambda child: child.used, default=None)
        if node is not None:
            shown.extend(node.tokens[: limits.MAX_CONTINUATION_TOKENS - len(shown)].tolist())
    return shown
