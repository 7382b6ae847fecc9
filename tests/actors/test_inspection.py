"""InspectionDesk: what is held and what a prompt would find, bounded, changing nothing."""

import random
import time

import pytest

from prefixcached.actors import inspection
from prefixcached.protocol import limits
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import Core, small_config
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


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


def test_each_branching_indents_once_more() -> None:
    """C5: a branch of a branch stands deeper than the branch."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    head = sequence(20)
    inner = (*head[:15], *sequence(10, 1))
    for tokens in (head, inner, (*inner[:20], *sequence(10, 2))):
        client.put(tokens)
    (namespace,) = listing(core).namespaces
    assert [(one.start, one.end, one.depth) for one in namespace.images] == [
        (0, 20, 0),
        (15, 25, 1),
        (20, 30, 2),
    ]


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


def test_a_listing_says_what_each_image_is() -> None:
    """C5: positions, size, tiers, use and holders of segments, snapshots and objects."""
    core = Core()
    client = Client(core)
    tokens = sequence(30)
    client.put(tokens[:20], "hybrid/a", state=True)
    client.put(tokens, "hybrid/a", state=True)
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("x", "U8", (3,)),))
    grant = core.reply(1, wire.OfferObject("hybrid/a", "picture", spec))
    core.reply(1, wire.Commit(grant.put))
    core.advance(7.0)
    assert client.hit((*tokens, 1), "hybrid/a").length == 30
    core.advance(2.0)
    (namespace,) = listing(core).namespaces
    assert [
        (one.kind, one.start, one.end, one.depth, one.key, one.uses, one.holders, one.idle_seconds)
        for one in namespace.images
    ] == [
        ("segment", 0, 20, 0, "", 1, 1, 2.0),
        ("checkpoint", 20, 20, 1, "", 0, 0, 9.0),
        ("segment", 20, 30, 0, "", 1, 1, 2.0),
        ("checkpoint", 30, 30, 1, "", 1, 1, 2.0),
        ("object", 0, 0, 0, "picture", 0, 0, 9.0),
    ]
    assert namespace.images[-1].nbytes == 3
    assert {one.sharing for one in namespace.images} == {1}
    assert all(one.in_ram and not one.on_ssd for one in namespace.images)
    assert namespace.count == len(namespace.images)


def test_what_was_not_used_since_the_start_has_no_idle_time() -> None:
    """D10: what the scan found on the disk is listed there, and nothing is invented of its use."""
    core = Core(small_config(ssd_bytes=1 << 20))
    disk = FakeDisk(core)
    Client(core).put(sequence(20))
    core.advance(60.0)
    disk.settle()
    restarted = Core(small_config(ssd_bytes=1 << 20), is_loaded=False)
    disk.restart(restarted, random.Random(0))
    (namespace,) = listing(restarted).namespaces
    (image,) = namespace.images
    assert (image.in_ram, image.on_ssd, image.idle_seconds) == (False, True, None)


def test_the_namespace_that_was_used_last_is_listed_first() -> None:
    """C5: whatever the order in which namespaces came, also where one holds objects alone."""
    core = Core()
    client = Client(core)
    client.put(sequence(10), "plain/a")
    client.put(sequence(10), "plain/b")
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("x", "U8", (3,)),))
    core.reply(1, wire.Commit(core.reply(1, wire.OfferObject("plain/c", "key", spec)).put))
    assert [one.namespace for one in listing(core).namespaces] == ["plain/c", "plain/b", "plain/a"]
    assert client.reuse(sequence(11), "plain/a") == 10
    assert [one.namespace for one in listing(core).namespaces] == ["plain/a", "plain/c", "plain/b"]


def test_a_listing_of_one_namespace_has_no_other() -> None:
    """C5: a namespace that is named is listed alone, and completely."""
    core = Core()
    client = Client(core)
    client.put(sequence(10), "plain/a")
    client.put(sequence(10), "plain/b")
    found = listing(core, namespace="plain/b")
    assert [one.namespace for one in found.namespaces] == ["plain/b"]
    assert found.complete
    assert listing(core, namespace="plain/c").namespaces == ()


def test_an_explanation_shows_how_the_held_prompt_goes_on() -> None:
    """T9: where a prompt leaves a segment in its middle, the rest of it is shown, newest first."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    head = sequence(20)
    client.put(head)
    client.put((*head[:10], 7, 8))
    said = core.reply(1, wire.Explain("plain/a", pack_tokens((*head[:10], 9, 9))))
    assert (said.length, said.ram_length, said.matched) == (10, 10, 10)
    assert said.continuations == (pack_tokens((7, 8)), pack_tokens(head[10:]))
    assert client.reuse((*head, 1)) == 20
    said = core.reply(1, wire.Explain("plain/a", pack_tokens((*head[:10], 9, 9))))
    assert said.continuations == (pack_tokens(head[10:]), pack_tokens((7, 8)))


def test_an_explanation_shows_the_rest_of_a_later_segment_too() -> None:
    """T9: where a prompt leaves the second segment of its path, what follows there is shown."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    tokens = sequence(40)
    client.put(tokens[:20])
    client.put(tokens)
    said = core.reply(1, wire.Explain("plain/a", pack_tokens((*tokens[:30], 9, 9))))
    assert (said.matched, said.continuations) == (30, (pack_tokens(tokens[30:]),))


def test_a_prompt_that_is_held_whole_needs_no_reason() -> None:
    """T9, T3: all but the last token is all that a hit can cover."""
    core = Core()
    client = Client(core)
    tokens = sequence(20)
    client.put(tokens)
    whole = core.reply(1, wire.Explain("plain/a", pack_tokens(tokens)))
    assert (whole.length, whole.reason) == (19, "")
    shortest = core.reply(1, wire.Explain("plain/a", pack_tokens(tokens[:2])))
    assert (shortest.length, shortest.reason) == (1, "")
    longer = core.reply(1, wire.Explain("plain/a", pack_tokens((*tokens, 5, 5))))
    assert (longer.length, longer.reason) == (20, "diverged")
    nowhere = core.reply(1, wire.Explain("plain/z", pack_tokens(tokens)))
    assert (nowhere.length, nowhere.continuations, nowhere.reason) == (0, (), "empty")


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


def test_what_is_not_looked_at_any_more_is_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: all namespaces of a listing share one bound; those behind it show their numbers."""
    core = Core()
    client = Client(core)
    client.put(sequence(10), "plain/b")
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("x", "U8", (3,)),))
    core.reply(1, wire.Commit(core.reply(1, wire.OfferObject("plain/b", "key", spec)).put))
    for salt in range(4):
        client.put(sequence(10, salt), "plain/a")
    monkeypatch.setattr(inspection, "MAX_VISITED", 4)
    first, second = listing(core).namespaces
    assert (first.namespace, len(first.images)) == ("plain/a", 4)
    assert (second.namespace, second.count, second.images) == ("plain/b", 2, ())
    assert not listing(core).complete


def test_sharing_counts_only_the_branches_that_were_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C6: what the bound leaves out is in no number."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    head = sequence(20)
    client.put(head)
    for salt in (1, 2, 3):
        client.put((*head, *sequence(10, salt)))
    monkeypatch.setattr(inspection, "MAX_VISITED", 3)
    (namespace,) = listing(core).namespaces
    assert [one.sharing for one in namespace.images] == [2, 1, 1]
