"""InspectionDesk: what is held and what a prompt would find, bounded, changing nothing."""

import time

import pytest

from prefixcached.actors import inspection
from prefixcached.protocol import limits
from prefixcached.protocol import messages as wire
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import Core, small_config
from tests.support.core_client import Client, sequence


def listing(core: Core, limit: int = 1000, namespace: str | None = None) -> wire.Listing:
    reply = core.reply(1, wire.List(namespace, limit))
    assert isinstance(reply, wire.Listing)
    return reply


def test_a_conversation_that_only_grows_is_one_column() -> None:
    """Depth counts branchings: fifty turns do not indent fifty times."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    tokens = sequence(60)
    for length in (10, 20, 30, 60):
        client.put(tokens[:length])
    (namespace,) = listing(core).namespaces
    assert [(one.start, one.end, one.depth, one.sharing) for one in namespace.images] == [
        (0, 10, 0, 1),
        (10, 20, 0, 1),
        (20, 30, 0, 1),
        (30, 60, 0, 1),
    ]


def test_sharing_counts_the_branches_below() -> None:
    """A head with three continuations, one of them from its middle, is shared by all."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    head = sequence(20)
    client.put(head)
    for salt, length in ((1, 20), (2, 20), (3, 10)):
        client.put((*head[:length], *sequence(10, salt)))
    (namespace,) = listing(core).namespaces
    assert (namespace.images[0].end, namespace.images[0].sharing) == (20, 3)
    assert [one.depth for one in namespace.images] == [0, 1, 1, 1]


def test_what_was_used_last_is_listed_first_and_the_rest_is_announced() -> None:
    """The limit leaves out what matters least, and says so."""
    core = Core()
    client = Client(core)
    for salt in range(5):
        client.put(sequence(10, salt))
    client.put(sequence(10), "plain/b")
    assert client.reuse((*sequence(10, 2), 1)) == 10
    first, second = listing(core, limit=3).namespaces
    assert (first.namespace, first.count, len(first.images)) == ("plain/a", 5, 3)
    assert first.images[0].uses == 1
    assert (second.namespace, second.count, second.images) == ("plain/b", 1, ())
    assert not listing(core, limit=3).complete
    assert listing(core, limit=6).complete


def test_an_explanation_is_bounded_and_shows_every_branch() -> None:
    """T9: at most four continuations of 32 tokens, through segments however short."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    head = sequence(20)
    for salt in range(1, 8):
        for length in (10, 40):
            client.put((*head, *sequence(length, salt)))
    said = core.reply(1, wire.Explain("plain/a", pack_tokens((*head, 9, 9))))
    assert isinstance(said, wire.Explanation)
    assert (said.length, said.matched, said.reason) == (20, 20, "diverged")
    assert len(said.continuations) == limits.MAX_CONTINUATIONS
    assert said.continuations[0] == pack_tokens(sequence(32, 7))


def test_an_explanation_of_no_tokens_is_a_miss() -> None:
    """The bound of T3 holds for the empty prompt and for one token."""
    core = Core()
    Client(core).put(sequence(10))
    for tokens in ((), sequence(1)):
        said = core.reply(1, wire.Explain("plain/a", pack_tokens(tokens)))
        assert isinstance(said, wire.Explanation)
        assert said.length == 0
        assert said.reason


def test_a_large_tree_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: a listing holds the event loop for a bounded time."""
    core = Core()
    client = Client(core)
    for salt in range(40):
        client.put(sequence(10, salt))
    monkeypatch.setattr(inspection, "MAX_VISITED", 25)
    started = time.perf_counter()
    found = listing(core)
    assert time.perf_counter() - started < 1.0
    assert len(found.namespaces[0].images) == 25
    assert not found.complete
