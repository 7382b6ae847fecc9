"""The prefix tree as an icicle: from a listing to nodes, each with its parent. Pure.

A listing has an order and depths, which count branchings: pieces of a conversation that only grows
stand at one depth. Here each hangs on the piece that it continues.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from prefixcached.daemon.dashboard.payload import name_text
from prefixcached.protocol.messages import LabelActivity, Listed, Listing

MAX_IMAGES: Final = 1000
"""Pieces of the tree on the page: what a browser draws again without a stutter."""

MAX_SESSIONS: Final = 100
"""Conversations that are looked for in the tree, those used last."""

MAX_PLACES: Final = 64
"""Branches that one conversation may lie in: with more it says nothing worth the search."""

MAX_NAMED: Final = 5
"""Conversations named at one piece."""

NOBODY: Final = -1

TIERS: Final = {(True, False): "ram", (False, True): "ssd", (True, True): "both"}
"""By whether it is in RAM and on SSD; neither is on its way out."""


class Node(msgspec.Struct, frozen=True):
    """One box. ``parent`` is the number of another, -1 for a namespace's own."""

    parent: int
    name: str
    kind: str
    tier: str = ""
    tokens: int = 0
    nbytes: int = 0
    idle_seconds: float | None = None
    uses: int = 0
    sharing: int = 0
    holders: int = 0
    sessions: tuple[str, ...] = ()


def tree_json(listing: Listing, labels: Sequence[LabelActivity]) -> bytes:
    """Return the tree as JSON: the nodes, and how many pieces there are in all."""
    return msgspec.json.encode({
        "trouble": "",
        "nodes": nodes_of(listing, labels),
        "shown": sum(len(one.images) for one in listing.namespaces),
        "count": sum(one.count for one in listing.namespaces),
    })  # fmt: skip


def nodes_of(listing: Listing, labels: Sequence[LabelActivity]) -> list[Node]:
    """Return all nodes, parents before children; a node's number is its place."""
    nodes: list[Node] = []
    # By name: those used last would change places as one looks at them.
    for namespace in sorted(listing.namespaces, key=lambda one: one.namespace):
        images = namespace.images
        if not images:
            continue
        root = len(nodes)
        nodes.append(Node(NOBODY, name_text(namespace.namespace), "namespace"))
        parents = parents_of(images)
        sessions: list[list[str]] = [[] for _ in images]
        # Of a part of the tree nobody can say which branches have so many tokens.
        if len(images) == namespace.count:
            own = [one for one in labels if one.namespace == namespace.namespace]
            sessions = sessions_of(images, parents, own[:MAX_SESSIONS])
        nodes.extend(
            _node(image, root + 1 + parent, named)
            for image, parent, named in zip(images, parents, sessions, strict=True)
        )
    return nodes


def parents_of(images: Sequence[Listed]) -> list[int]:
    """Return for each image the place of what it hangs on, -1 at the top."""
    parents: list[int] = []
    above: list[int] = []
    for number, image in enumerate(images):
        while above and images[above[-1]].depth > image.depth:
            above.pop()
        if not (above and _continues(images[above[-1]], image)):
            while above and images[above[-1]].depth >= image.depth:
                above.pop()
        parents.append(above[-1] if above else NOBODY)
        above.append(number)
    return parents


def _continues(before: Listed, image: Listed) -> bool:
    """Whether ``image`` is the only piece behind ``before``: the same prompts end below both."""
    return (
        image.kind == before.kind == "segment"
        and image.depth == before.depth
        and image.start == before.end
        and image.sharing == before.sharing
    )


def sessions_of(
    images: Sequence[Listed], parents: Sequence[int], labels: Sequence[LabelActivity]
) -> list[list[str]]:
    """Return for each image the conversations that certainly lie at or below it.

    The daemon says how many tokens a conversation has, not in which branch: where several branches
    have so many, it is named at what all of them share.
    """
    sessions: list[list[str]] = [[] for _ in images]
    for label in labels:
        places = [
            number for number, image in enumerate(images) if image.start < label.tokens <= image.end
        ]
        if not places or len(places) > MAX_PLACES:
            continue
        common = set(_path(parents, places[0]))
        for number in places[1:]:
            common &= set(_path(parents, number))
        for number in common:
            sessions[number].append(name_text(label.label))
    return sessions


def _path(parents: Sequence[int], number: int) -> Iterator[int]:
    while number != NOBODY:
        yield number
        number = parents[number]


def _node(image: Listed, parent: int, sessions: Sequence[str]) -> Node:
    match image.kind:
        case "segment":
            name = f"{image.start:,}–{image.end:,}"  # noqa: RUF001, a range
        case "checkpoint":
            name = f"checkpoint at {image.end:,}"
        case "object":
            name = name_text(image.key)
    more = len(sessions) - MAX_NAMED
    named = (*sessions[:MAX_NAMED], *([f"{more:,} more"] if more > 0 else []))
    return Node(
        parent=parent, name=name, kind=image.kind,
        tier=TIERS.get((image.in_ram, image.on_ssd), "leaving"),
        tokens=image.end - image.start, nbytes=image.nbytes, idle_seconds=image.idle_seconds,
        uses=image.uses, sharing=image.sharing, holders=image.holders, sessions=named,
    )  # fmt: skip
