"""Small puts and takes on a `Core`: one image of one page each, unless asked for more."""

import numpy as np

from prefixcached.actors.entries import Entry
from prefixcached.protocol import messages as wire
from prefixcached.protocol.messages import Reply
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import Core, Slot
from tests.support.core_payload import encoded

ENTRY_TOKENS = 20
"""With 712 bytes for each token of the plain schema, this is one page."""


def tokens_of(name: int, pages: int = 1) -> tuple[int, ...]:
    """Tokens that no other name begins with; ``pages`` pages of KV."""
    return tuple(range(name * 10_000, name * 10_000 + ENTRY_TOKENS * pages))


def packed(name: int, pages: int = 1, *, more: int = 0) -> bytes:
    """The same, packed, with ``more`` tokens behind it."""
    tail = tuple(range(name * 10_000 + 5000, name * 10_000 + 5000 + more))
    return pack_tokens(tokens_of(name, pages) + tail)


def offer(core: Core, name: int, *, session: int = 1, namespace: str = "plain",
          pages: int = 1) -> Slot:  # fmt: skip
    """Offer the KV of one name."""
    return core.call(
        session, wire.Offer(namespace, packed(name, pages), encoded("plain"), seconds_left=0.0)
    )


def put(core: Core, name: int, *, session: int = 1, namespace: str = "plain",
        pages: int = 1) -> Reply:  # fmt: skip
    """Put the KV of one name; the bytes are zeros."""
    granted = offer(core, name, session=session, namespace=namespace, pages=pages).reply
    assert granted is not None
    if not isinstance(granted, wire.Grant):
        return granted
    reply = core.call(session, wire.Commit(granted.put)).reply
    assert reply is not None
    return reply


def take(core: Core, name: int, *, session: int = 1, namespace: str = "plain",
         pages: int = 1) -> Slot:  # fmt: skip
    """Take a prompt that goes on behind the KV of one name."""
    return core.call(session, wire.Take(namespace, packed(name, pages, more=1)))


def read(core: Core, name: int, *, session: int = 1, namespace: str = "plain",
         pages: int = 1) -> int:  # fmt: skip
    """Take and release; return the tokens that hit, of what is in RAM."""
    reply = take(core, name, session=session, namespace=namespace, pages=pages).reply
    if not isinstance(reply, wire.Hit):
        return 0
    core.call(session, wire.Release(reply.lease))
    return reply.length


def entry_of(core: Core, name: int) -> Entry | None:
    """The entry that holds the first tokens of one name, in either tier."""
    first = np.uint32(name * 10_000)
    for entry in core.index.entries.values():
        tokens = getattr(entry, "tokens", None)
        if tokens is not None and entry.spec.start == 0 and tokens[0] == first:
            return entry
    return None


def in_ram(core: Core) -> set[int]:
    """The names whose first image is in RAM."""
    return {
        int(entry.tokens[0]) // 10_000  # type: ignore[attr-defined]
        for entry in core.index.entries.values()
        if entry.memory is not None and entry.spec.start == 0
    }
