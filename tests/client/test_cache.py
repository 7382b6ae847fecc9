"""The blocking client against a small daemon in a thread: results, failures, threads and forks."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from prefixcached.client import (
    Cache,
    CallTimeout,
    Cleared,
    Declined,
    Flushed,
    Hit,
    Miss,
    NoDaemon,
    PrefixCachedError,
    ProtocolFailure,
    RestoreFailed,
    Stored,
    UseAfterClose,
    connect,
    transfer,
)
from prefixcached.protocol import limits, messages
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.messages import AnyRequest
from prefixcached.protocol.paths import SOCKET_VARIABLE
from tests.support.numpy_kv import (
    NumpyAdapter,
    NumpyCache,
    NumpyRestoration,
    NumpySnapshot,
    cut,
    make_caches,
    same,
)
from tests.support.small_daemon import Peer, SmallDaemon

pytestmark = pytest.mark.usefixtures("no_descriptor_stays")

TOKENS = list(range(100, 400))
SOON = 0.2
Behaviour = Callable[[Peer, AnyRequest], bool]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    """A daemon whose images are so small that 300 tokens need three batches of descriptors."""
    with SmallDaemon(tmp_path / "socket", segment_max_bytes=1024) as daemon:
        yield daemon


@pytest.fixture
def cache(daemon: SmallDaemon) -> Iterator[Cache]:
    """A client that raises."""
    with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter()) as cache:
        yield cache


@pytest.fixture
def tolerant(daemon: SmallDaemon) -> Iterator[Cache]:
    """A client as users have it, with little patience."""
    with Cache(daemon.path, timeout=SOON, adapter=NumpyAdapter()) as cache:
        yield cache


def store(cache: Cache, tokens: list[int] = TOKENS, **options: Any) -> Stored:
    """Put the KV of ``tokens`` and return that it was stored."""
    state = options.pop("state", False)
    stored = cache.put(tokens, make_caches(tokens, state=state), namespace="n", **options)
    assert isinstance(stored, Stored)
    return stored


def hit(cache: Cache, tokens: list[int] = TOKENS, **options: Any) -> Hit:
    """Take ``tokens``, check the KV bit for bit, and return the hit."""
    result = cache.take(tokens, namespace="n", **options)
    assert isinstance(result, Hit)
    state = "state" in result.kv[0]
    expected = make_caches(tokens[: result.length], state=state)
    assert same(result.kv, expected)
    return result


def on(kind: type[AnyRequest], behave: Behaviour) -> Behaviour:
    """Misbehave at requests of one kind."""
    return lambda peer, request: isinstance(request, kind) and behave(peer, request)


def silence(peer: Peer, request: AnyRequest) -> bool:
    """Never answer."""
    return True


def hang_up(peer: Peer, request: AnyRequest) -> bool:
    """End the connection instead of an answer, as a killed daemon does."""
    peer.socket.shutdown(socket.SHUT_RDWR)
    return True


def half_an_answer(peer: Peer, request: AnyRequest) -> bool:
    """Die within the reply, after its descriptors left."""
    send_raw = peer.send_raw

    def send_half(data: bytes, descriptors: list[int]) -> None:
        send_raw(data[: len(data) // 2], descriptors)
        peer.socket.shutdown(socket.SHUT_RDWR)

    peer.send_raw = send_half  # type: ignore[method-assign]
    return False


def garbage(peer: Peer, request: AnyRequest) -> bool:
    """Answer with what is no frame."""
    peer.send_raw(b"\x00" * 64, [])
    return True


def changed(kind: type[Any], **changes: Any) -> Behaviour:
    """Answer as usual, but with some fields of the reply changed."""

    def behave(peer: Peer, request: AnyRequest) -> bool:
        send = peer.send

        def send_changed(reply: Any, images: list[int] | None = None) -> None:
            if isinstance(reply, kind):
                reply = msgspec.structs.replace(reply, **changes)
            send(reply, images)

        peer.send = send_changed  # type: ignore[method-assign]
        return False

    return behave


# -- what works ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mapped", [False, True])
def test_what_was_put_is_taken(
    cache: Cache, daemon: SmallDaemon, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    """T12, T3: a hit gives back what was put, bit for bit, and leaves the last token.

    Also where shared memory can only be mapped, as on macOS (PLATFORM 3.1).
    """
    if is_mapped:
        monkeypatch.setattr(transfer, "is_mapped_only", lambda _: True)
    stored = store(cache)
    assert stored.length == len(TOKENS)
    assert stored.new_bytes == sum(
        array.nbytes for c in make_caches(TOKENS) for array in c.values()
    )
    result = hit(cache)
    assert (result.length, result.tier, result.matched) == (len(TOKENS) - 1, "ram", len(TOKENS) - 1)
    assert hit(cache, [*TOKENS, 7]).length == len(TOKENS)
    assert hit(cache, TOKENS[:50]).length == 49
    # Everything travelled in batches of at most 16 descriptors.
    assert sum(isinstance(request, messages.Fetch) for request in daemon.requests) > 4
    assert daemon.wait_until(lambda: daemon.leases == 0)


def test_a_branch_moves_only_its_own_rows(cache: Cache, daemon: SmallDaemon) -> None:
    """P2: a put that shares a prefix transfers what nobody holds."""
    whole = store(cache).new_bytes
    branch = [*TOKENS[:200], *range(50)]
    assert store(cache, branch).new_bytes == whole * 50 // 300
    assert hit(cache, [*branch, 1]).length == 250
    assert store(cache, branch).new_bytes == 0


def test_state_is_stored_and_restored(cache: Cache) -> None:
    """T5: state comes back at its own position."""
    store(cache, state=True)
    assert hit(cache, [*TOKENS, 1]).length == len(TOKENS)
    assert cache.take(TOKENS[:50], namespace="n") == Miss(reason="empty")


def test_a_schema_is_sent_once(cache: Cache, daemon: SmallDaemon) -> None:
    """A client names the schema it has by digest, and learns it from its first hit or put."""
    store(cache)
    with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter()) as other:
        for _ in range(2):
            hit(other)
    hit(cache)
    digests = [r.schema_digest for r in daemon.requests if isinstance(r, messages.Take)]
    assert digests[0] == b""
    assert len(digests[1]) == 16
    assert digests[2] == digests[1]


def test_arguments_travel(cache: Cache, daemon: SmallDaemon) -> None:
    """DESIGN 6: session, wait, minimum length and the time left reach the daemon."""
    store(cache, session="talk", minimum_length=9)
    hit(cache, session="talk", wait=2.5)
    (offer,) = (r for r in daemon.requests if isinstance(r, messages.Offer))
    (take,) = (r for r in daemon.requests if isinstance(r, messages.Take))
    assert (offer.label, offer.minimum, take.label, take.wait) == ("talk", 9, "talk", 2.5)
    assert 4 < offer.seconds_left <= 5
    assert 6.5 < take.seconds_left <= 7.5


def test_questions_are_answered(cache: Cache) -> None:
    """T11: peek and contains say what take would find."""
    store(cache)
    assert cache.peek(TOKENS, namespace="n") == len(TOKENS) - 1
    assert cache.peek(TOKENS, namespace="other") == 0
    assert cache.contains(TOKENS, namespace="n")
    assert not cache.contains(TOKENS[:5], namespace="n")
    assert not cache.contains([], namespace="n")
    assert cache.stats() == {"ram": {"hits": 1}}


def test_housekeeping_is_reported(cache: Cache) -> None:
    """P8, D11: flush and clear return what the daemon did."""
    assert cache.flush() == Flushed(written=3, skipped=2, failed=0, complete=True)
    assert cache.flush(timeout=1)
    assert cache.clear("n") == Cleared(images=4, ram_bytes=5)
    assert cache.clear()


def test_a_pin_lasts_for_its_block(cache: Cache, daemon: SmallDaemon) -> None:
    """F1: what was prefetched stays until its pin is released."""
    store(cache)
    with cache.prefetch(TOKENS, namespace="n") as pin:
        assert pin.length == len(TOKENS) - 1
        assert daemon.pins == 1
        hit(cache)
    assert daemon.wait_until(lambda: daemon.pins == 0)
    pin.release()
    empty = cache.prefetch([1, 2, 3], namespace="n")
    assert (empty.length, empty.reason) == (0, "")
    assert cache.statistics().lent == 0


def test_results_are_true_or_false_and_readable() -> None:
    """DESIGN 6: a result is a condition, and its text says what happened."""
    assert Hit(kv=[1], length=3, tier="ram", matched=4)
    assert not Miss(reason="empty")
    assert Stored(new_bytes=0, length=1)
    assert not Declined(reason="busy")
    assert not Flushed(reason="no-daemon")
    assert not Flushed(written=1, failed=1, complete=True)
    assert not Cleared(reason="timeout")
    assert repr(Hit(kv=["x" * 99], length=3, tier="ssd", matched=4)) == (
        "Hit(length=3, tier='ssd', matched=4)"
    )
    assert repr(Miss(reason="diverged", matched=5)) == "Miss(reason='diverged', matched=5)"
    with pytest.raises(AttributeError):
        Miss(reason="empty").reason = "other"  # type: ignore[misc]


# -- no daemon, a slow one, a broken one --------------------------------------------------------


def every_call(cache: Cache) -> list[Any]:
    """Make each call once and return what it gave."""
    pin = cache.prefetch(TOKENS, namespace="n")
    return [
        cache.take(TOKENS, namespace="n"),
        cache.put(TOKENS, make_caches(TOKENS), namespace="n"),
        cache.peek(TOKENS, namespace="n"),
        cache.contains(TOKENS, namespace="n"),
        cache.stats(),
        cache.flush(),
        cache.clear(),
        (pin.length, pin.reason),
    ]


def nothing_because(reason: str) -> list[Any]:
    """What `every_call` gives when the daemon does not serve."""
    return [
        Miss(reason=reason),
        Declined(reason=reason),
        0,
        False,
        {},
        Flushed(reason=reason),
        Cleared(reason=reason),
        (0, reason),
    ]


def test_without_a_daemon_every_call_fails_open(tmp_path: Path) -> None:
    """DESIGN 1.2: no daemon costs a miss, well within the timeout."""
    began = time.monotonic()
    with Cache(tmp_path / "socket", timeout=60, adapter=NumpyAdapter()) as cache:
        assert every_call(cache) == nothing_because("no-daemon")
        assert cache.statistics().refusals == {"no-daemon": 8}
    assert time.monotonic() - began < 30


CALLS: dict[str, Callable[[Cache], object]] = {
    "take": lambda cache: cache.take(TOKENS, namespace="n"),
    "put": lambda cache: cache.put(TOKENS, make_caches(TOKENS), namespace="n"),
    "peek": lambda cache: cache.peek(TOKENS, namespace="n"),
    "contains": lambda cache: cache.contains(TOKENS, namespace="n"),
    "stats": lambda cache: cache.stats(),
    "flush": lambda cache: cache.flush(),
    "clear": lambda cache: cache.clear(),
    "prefetch": lambda cache: cache.prefetch(TOKENS, namespace="n"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_without_fail_open_every_call_raises(
    tmp_path: Path, call: Callable[[Cache], object]
) -> None:
    """DESIGN 1.2: whoever asks for exceptions gets them, with what to do."""
    with (
        Cache(tmp_path / "socket", fail_open=False, adapter=NumpyAdapter()) as cache,
        pytest.raises(NoDaemon, match="prefixcached serve"),
    ):
        call(cache)


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (silence, "timeout"),
        (hang_up, "no-daemon"),
        (half_an_answer, "no-daemon"),
        (garbage, "protocol"),
    ],
)
@pytest.mark.parametrize(
    "request_type",
    [messages.Hello, messages.Take, messages.Fetch, messages.Offer, messages.Commit, messages.Peek],
)
def test_a_failing_daemon_costs_a_miss_at_every_step(
    daemon: SmallDaemon, behave: Behaviour, reason: str, request_type: type[AnyRequest]
) -> None:
    """C4: hung, killed, killed in mid-reply or mad, at any request: one miss."""
    with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter()) as healthy:
        store(healthy)
    now = 1000.0
    with Cache(daemon.path, timeout=SOON, adapter=NumpyAdapter(), clock=lambda: now) as cache:
        daemon.on_request = on(request_type, behave)
        branch = [*TOKENS[:10], *range(200)]
        began = time.monotonic()
        results = {
            Miss: cache.take(TOKENS, namespace="n"),
            Declined: cache.put(branch, make_caches(branch), namespace="n"),
        }
        peeked = cache.peek(TOKENS, namespace="n")
        assert time.monotonic() - began < 10 * SOON
        first_failure = {
            messages.Hello: Miss(reason=reason),
            messages.Take: Miss(reason=reason),
            messages.Fetch: Miss(reason=reason),
            messages.Offer: Declined(reason=reason),
            messages.Commit: Declined(reason=reason),
        }.get(request_type)
        assert first_failure is None or results[type(first_failure)] == first_failure
        # From the failure on the pause holds, so the peek at the end fails in every case.
        assert peeked == 0
        daemon.on_request = None
        now += 60
        hit(cache)
        assert cache.put(branch, make_caches(branch), namespace="n")
        assert cache.statistics().failures == {reason: 1}
    assert daemon.wait_until(lambda: daemon.connections == 0)


def test_a_timed_out_connection_is_not_used_again(tolerant: Cache, daemon: SmallDaemon) -> None:
    """C4: the late reply to a call that gave up never answers the next call."""
    released = threading.Event()

    def late(peer: Peer, request: AnyRequest) -> bool:
        released.wait()
        peer.send(messages.Length(length=77))
        return True

    daemon.on_request = on(messages.Peek, late)
    assert tolerant.peek(TOKENS, namespace="n") == 0
    daemon.on_request = None
    released.set()
    # The pause after the failure is 0.1 s of real time here.
    deadline = time.monotonic() + 10
    while not tolerant.clear():
        assert time.monotonic() < deadline
    assert tolerant.peek(TOKENS, namespace="n") == 0
    assert tolerant.statistics().opened == 2
    assert tolerant.statistics().failures == {"timeout": 1}


def test_a_hit_survives_a_daemon_that_dies_after_lending(cache: Cache, daemon: SmallDaemon) -> None:
    """L2: what was lent is readable to its end, whatever becomes of the daemon."""
    short = TOKENS[:40]
    store(cache, short)

    def die_after(peer: Peer, request: AnyRequest) -> bool:
        daemon.answer(peer, request)
        peer.socket.shutdown(socket.SHUT_RDWR)
        return True

    daemon.on_request = on(messages.Take, die_after)
    assert hit(cache, short).length == 39


def test_wait_prolongs_the_call_but_not_the_search_for_a_daemon(
    tolerant: Cache, daemon: SmallDaemon
) -> None:
    """Q2, C4: a call may last timeout plus wait, and no daemon is still known within timeout."""
    began = time.monotonic()
    daemon.on_request = on(messages.Take, silence)
    assert tolerant.take(TOKENS, namespace="n", wait=SOON) == Miss(reason="timeout")
    assert 2 * SOON <= time.monotonic() - began < 10 * SOON
    daemon.on_request = on(messages.Hello, silence)
    with Cache(daemon.path, timeout=SOON, adapter=NumpyAdapter()) as other:
        began = time.monotonic()
        assert other.take(TOKENS, namespace="n", wait=600) == Miss(reason="timeout")
        assert time.monotonic() - began < 10 * SOON


@pytest.mark.parametrize(
    "behave",
    [
        changed(messages.Hit, length=len(TOKENS)),
        changed(messages.Hit, length=0),
        changed(messages.Hit, schema=b"\x00"),
        changed(messages.Hit, schema=b""),
        changed(messages.Descriptors, first=3),
    ],
)
def test_a_reply_that_cannot_be_is_refused(
    cache: Cache, daemon: SmallDaemon, behave: Behaviour
) -> None:
    """DESIGN 1.1: a hit that contradicts itself or its prompt is a miss."""
    store(cache)
    with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter()) as other:
        daemon.on_request = on(messages.Take, behave)
        with pytest.raises(ProtocolFailure):
            other.take(TOKENS, namespace="n")
        assert other.statistics().idle == 0


SEGMENT = ImageKind.SEGMENT


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (messages.Part(ImageSpec(SEGMENT, 0, 8), 0, 8),),
        (messages.Part(ImageSpec(SEGMENT, 0, 8), 0, len(TOKENS) - 1),),
        (messages.Part(ImageSpec(SEGMENT, 8, len(TOKENS)), 8, len(TOKENS) - 1),),
        (messages.Part(ImageSpec(SEGMENT, 0, len(TOKENS)), 0, len(TOKENS) - 1, 1 << 30),),
    ],
)
def test_parts_that_do_not_make_up_the_hit_are_refused(
    cache: Cache, daemon: SmallDaemon, parts: tuple[messages.Part, ...]
) -> None:
    """DESIGN 1.1: rows that are missing, doubtful or not in the image are never zeros in a hit."""
    store(cache)

    def lie(peer: Peer, request: AnyRequest) -> bool:
        schema = daemon.entries["n"][0].schema
        image = daemon.entries["n"][0].images[0][1]
        peer.send(
            messages.Hit(
                lease=1, length=len(TOKENS) - 1, tier="ram", parts=parts, schema=schema, boot="b"
            ),
            [image.descriptor] * len(parts),
        )
        return True

    daemon.on_request = on(messages.Take, lie)
    with pytest.raises(RestoreFailed):
        cache.take(TOKENS, namespace="n")


@pytest.mark.parametrize(
    "images",
    [
        (ImageSpec(SEGMENT, 0, len(TOKENS) + 1),),
        (ImageSpec(ImageKind.CHECKPOINT, 5, 5),),
        (ImageSpec(ImageKind.OBJECT),),
        (ImageSpec(SEGMENT, 9, 3),),
    ],
)
def test_a_grant_of_what_was_not_offered_is_refused(
    cache: Cache, daemon: SmallDaemon, images: tuple[ImageSpec, ...]
) -> None:
    """DESIGN 1.1: a client fills nothing but what it offered, and commits nothing else."""

    def lie(peer: Peer, request: AnyRequest) -> bool:
        with open(os.devnull, "r+b") as lent:
            peer.send(
                messages.Grant(put=1, base=0, images=images, boot="b"),
                [lent.fileno()] * len(images),
            )
        return True

    daemon.on_request = on(messages.Offer, lie)
    with pytest.raises(ProtocolFailure, match="cannot be filled"):
        cache.put(TOKENS, make_caches(TOKENS), namespace="n")
    assert not any(isinstance(request, messages.Commit) for request in daemon.requests)


def test_a_full_machine_declines(cache: Cache, daemon: SmallDaemon) -> None:
    """E4: where the granted memory cannot be written, the put is declined, not half-done."""

    def lend_full(peer: Peer, request: AnyRequest) -> bool:
        with open("/dev/full", "r+b", buffering=0) as lent:
            spec = ImageSpec(SEGMENT, 0, len(TOKENS))
            peer.send(messages.Grant(put=1, base=0, images=(spec,)), [lent.fileno()])
        return True

    if not os.path.exists("/dev/full"):
        pytest.skip("only Linux has a device that is always full")
    daemon.on_request = on(messages.Offer, lend_full)
    with Cache(daemon.path, adapter=NumpyAdapter()) as tolerant:
        result = tolerant.put(TOKENS, make_caches(TOKENS), namespace="n")
    assert result == Declined(reason="no-space")


def test_mutilated_replies_cost_at_most_a_miss(cache: Cache, daemon: SmallDaemon) -> None:
    """DESIGN 1.2: no bytes that a daemon may send make a call raise, hang or leak."""
    short = TOKENS[:40]
    store(cache, short)
    random = Random(20)

    def mutilate(peer: Peer, request: AnyRequest) -> bool:
        send_raw = peer.send_raw

        def send_mutilated(data: bytes, descriptors: list[int]) -> None:
            changed_data = bytearray(data)
            for _ in range(random.randint(1, 3)):
                changed_data[random.randrange(len(data))] = random.randrange(256)
            send_raw(bytes(changed_data), descriptors)
            # A frame that became longer is never completed.
            peer.socket.shutdown(socket.SHUT_RDWR)

        peer.send_raw = send_mutilated  # type: ignore[method-assign]
        return False

    daemon.on_request = on(messages.Take, mutilate)
    now = 0.0
    with Cache(daemon.path, timeout=30, adapter=NumpyAdapter(), clock=lambda: now) as tolerant:
        reasons = set()
        for _ in range(300):
            now += 60
            result = tolerant.take(short, namespace="n")
            reasons.add("hit" if result else result.reason)
    assert {"protocol", "no-daemon", "restore-failed"} <= reasons


# -- the caller's side --------------------------------------------------------------------------


class BrokenAdapter(NumpyAdapter):
    """Fails where it is told to."""

    def __init__(self, where: str, error: Exception) -> None:
        self.where = where
        self.error = error

    def snapshot(self, caches: list[Any], tokens: Any, attachments: Any = None, /) -> Any:
        if self.where == "snapshot":
            raise self.error
        context = super().snapshot(caches, tokens, attachments)
        if self.where == "rows":
            NumpySnapshotThatFails.error = self.error
            snapshot = NumpySnapshotThatFails(caches, tokens, attachments)
            return contextlib.nullcontext(snapshot)
        return context

    def restoration(self, schema: Any, length: int, checkpoint: Any, parts: Any, /) -> Any:
        if self.where == "restoration":
            raise self.error
        restoration = super().restoration(schema, length, checkpoint, parts)
        if self.where == "targets":
            restoration.targets = self._fail  # type: ignore[assignment,method-assign]
        if self.where == "finish":
            restoration.finish = self._fail  # type: ignore[method-assign]
        return restoration

    def _fail(self, *_: object) -> Any:
        raise self.error


class NumpySnapshotThatFails(NumpySnapshot):
    """Fails when its rows are wanted."""

    error: Exception

    def rows(self, extent: Any) -> list[memoryview]:
        raise self.error


@pytest.mark.parametrize("where", ["restoration", "targets", "finish"])
def test_caches_that_cannot_be_rebuilt_are_a_miss(
    cache: Cache, daemon: SmallDaemon, where: str
) -> None:
    """T8: whatever a class of caches raises while it is restored costs a miss."""
    store(cache)
    adapter = BrokenAdapter(where, ZeroDivisionError("no such class"))
    with Cache(daemon.path, adapter=adapter) as tolerant:
        assert tolerant.take(TOKENS, namespace="n") == Miss(reason="restore-failed")
    with (
        Cache(daemon.path, adapter=adapter, fail_open=False) as strict,
        pytest.raises(RestoreFailed, match="no such class"),
    ):
        strict.take(TOKENS, namespace="n")
    # Nothing of this is the daemon's fault: no pause.
    assert strict.statistics().failures == {}
    assert daemon.wait_until(lambda: daemon.leases == 0)


def test_rows_that_cannot_be_read_abandon_the_put(cache: Cache, daemon: SmallDaemon) -> None:
    """P4: a put that fails between grant and commit leaves nothing."""
    adapter = BrokenAdapter("rows", ZeroDivisionError("no rows"))
    with Cache(daemon.path, adapter=adapter) as tolerant:
        result = tolerant.put(TOKENS, make_caches(TOKENS), namespace="n")
        assert result == Declined(reason="protocol")
        assert daemon.wait_until(lambda: daemon.connections == 0)
    assert daemon.entries == {}


class UncuttableError(Exception):
    """As `prefixcached.client.kv` has it."""

    reason = "invalid"


def test_unusable_caches_raise_and_unstorable_ones_are_declined(daemon: SmallDaemon) -> None:
    """P1: a mix-up of caches is the caller's error, also with `fail_open`."""
    with (
        Cache(daemon.path, adapter=NumpyAdapter()) as tolerant,
        pytest.raises(ValueError, match="cover 300 tokens, not 299"),
    ):
        tolerant.put(TOKENS[:-1], make_caches(TOKENS), namespace="n")
    with Cache(daemon.path, adapter=BrokenAdapter("snapshot", UncuttableError())) as tolerant:
        result = tolerant.put(TOKENS, make_caches(TOKENS), namespace="n")
        assert result == Declined(reason="invalid")
    assert daemon.requests == []


def test_a_text_that_is_no_utf_8_is_the_callers_mistake(tolerant: Cache) -> None:
    """P10: the reason that a UnicodeError carries is none why a put is declined."""
    mistake = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    with (
        Cache(tolerant._pool.path, adapter=BrokenAdapter("snapshot", mistake)) as cache,
        pytest.raises(UnicodeEncodeError),
    ):
        cache.put(TOKENS, make_caches(TOKENS), namespace="n")


def test_what_the_callers_kv_takes_is_not_the_daemons_time(daemon: SmallDaemon) -> None:
    """C4: KV that mlx computes only when it is looked at is stored all the same."""

    class LazyAdapter(NumpyAdapter):
        def snapshot(self, *arguments: Any) -> Any:
            time.sleep(1.5 * SOON)  # longer than the call may take
            return super().snapshot(*arguments)

    with Cache(daemon.path, timeout=SOON, fail_open=False, adapter=LazyAdapter()) as cache:
        store(cache)


def test_unsupported_tokens_are_a_miss_and_counted(cache: Cache, daemon: SmallDaemon) -> None:
    """N5: ids that do not fit are neither looked up nor stored, never wrapped."""
    for tokens in ([1, -5], [1, 2**32], [1, 2**70]):
        assert cache.take(tokens, namespace="n") == Miss(reason="unsupported-tokens")
        assert cache.put(tokens, [], namespace="n") == Declined(reason="unsupported-tokens")
        assert cache.peek(tokens, namespace="n") == 0
        assert not cache.contains(tokens, namespace="n")
        assert cache.prefetch(tokens, namespace="n").reason == "unsupported-tokens"
    assert cache.statistics().refusals == {"unsupported-tokens": 15}
    assert daemon.requests == []


def test_prompts_beyond_the_protocols_limit(cache: Cache, daemon: SmallDaemon) -> None:
    """C3: what is too long to send is looked up by its beginning and never stored."""
    store(cache)
    long = [*TOKENS, *[0] * limits.MAX_TOKENS]
    assert hit(cache, long).length == len(TOKENS)
    assert cache.peek(long, namespace="n") == len(TOKENS)
    assert not cache.contains(long, namespace="n")
    assert cache.put(long, [], namespace="n") == Declined(reason="too-large")
    assert cache.put([], [], namespace="n") == Declined(reason="too-short")


BAD_CALLS: dict[str, Callable[[Cache], object]] = {
    "tokens of floats": lambda cache: cache.take([0.5], namespace="n"),  # type: ignore[list-item]
    "tokens of text": lambda cache: cache.peek("abc", namespace="n"),  # type: ignore[arg-type]
    "tokens in two dimensions": lambda cache: cache.contains([[1], [2]], namespace="n"),  # type: ignore[list-item]
    "namespace too long": lambda cache: cache.take(TOKENS, namespace="é" * 257),
    "namespace of bytes": lambda cache: cache.clear(b"n"),  # type: ignore[arg-type]
    "session too long": lambda cache: cache.prefetch(TOKENS, namespace="n", session="x" * 513),
    "negative wait": lambda cache: cache.take(TOKENS, namespace="n", wait=-1),
    "endless wait": lambda cache: cache.take(TOKENS, namespace="n", wait=float("inf")),
    "negative minimum": lambda cache: cache.put(TOKENS, [], namespace="n", minimum_length=-1),
    "minimum no integer": lambda cache: cache.put(TOKENS, [], namespace="n", minimum_length=0.5),  # type: ignore[arg-type]
    "no time": lambda cache: cache.flush(timeout=0),
    "timeout of text": lambda cache: connect(timeout="1"),  # type: ignore[arg-type]
    "timeout of nothing": lambda cache: connect(timeout=0.0),
    "timeout not a number": lambda cache: connect(timeout=float("nan")),
    "path with NUL": lambda cache: connect(socket="a\0b"),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_arguments_raise_also_with_fail_open(
    tmp_path: Path, call: Callable[[Cache], object]
) -> None:
    """DESIGN 1.2: the caller's own mistakes are told at once, with or without a daemon."""
    with Cache(tmp_path / "socket", adapter=NumpyAdapter()) as cache:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(cache)
        assert not isinstance(caught.value, PrefixCachedError)
        assert cache.statistics().refusals == {}


def test_connect_finds_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN 6: the argument counts before the variable, the variable before the default."""
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "named"))
    with connect() as cache:
        assert "named" in repr(cache)
    with connect(socket=tmp_path / "given") as cache:
        assert "given" in repr(cache)
    monkeypatch.delenv(SOCKET_VARIABLE)
    with connect() as cache:
        assert repr(cache).endswith("prefixcached.sock'>")


def test_a_closed_cache_says_so(cache: Cache) -> None:
    """A cache that was closed is a bug in the caller, not a miss."""
    store(cache)
    cache.close()
    cache.close()
    with pytest.raises(UseAfterClose):
        cache.take(TOKENS, namespace="n")


def test_the_client_imports_without_mlx() -> None:
    """DESIGN 2: `import prefixcached.client` needs neither mlx nor a daemon."""
    code = (
        "import sys, prefixcached.client\n"
        "assert not [name for name in sys.modules if name.split('.')[0].startswith('mlx')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- several at once ----------------------------------------------------------------------------


def test_eight_threads_share_one_cache(daemon: SmallDaemon) -> None:
    """Q3: calls of different threads neither wait for nor see each other."""
    failures: list[BaseException] = []
    with Cache(daemon.path, timeout=60, fail_open=False, adapter=NumpyAdapter()) as cache:
        together = threading.Barrier(8)

        def work(number: int) -> None:
            try:
                together.wait()
                for turn in range(6):
                    tokens = [*TOKENS[:20], number, turn, *range(number * 10, number * 10 + 30)]
                    store(cache, tokens)
                    assert hit(cache, [*tokens, 1]).length == len(tokens)
                    assert cache.peek(tokens, namespace="n") == len(tokens) - 1
            except BaseException as error:  # noqa: BLE001, the main thread reports it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert cache.statistics().opened <= 8
    assert daemon.wait_until(lambda: daemon.connections == 0)


# Python 3.12 and later warn of any fork beside threads; that is what this is about.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_uses_the_cache_it_inherited(cache: Cache, daemon: SmallDaemon) -> None:
    """C4: parent and child go on side by side; the child's pin and connections are its own."""
    store(cache)
    with cache.prefetch(TOKENS, namespace="n") as pin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pin.release()
                assert hit(cache).length == len(TOKENS) - 1
                own = [*TOKENS, 1, 2, 3]
                store(cache, own)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        # The child's release was not the parent's.
        assert daemon.pins == 1
        assert cache.peek([*TOKENS, 1, 2, 3, 4], namespace="n") == len(TOKENS) + 3
        assert cache.statistics().opened == 2


def test_timeouts_and_failures_have_their_kinds(daemon: SmallDaemon) -> None:
    """C4: the exceptions of `fail_open=False` tell a slow daemon from a broken one."""
    for behave, kind in ((silence, CallTimeout), (garbage, ProtocolFailure), (hang_up, NoDaemon)):
        daemon.on_request = on(messages.Take, behave)
        with (
            Cache(daemon.path, timeout=SOON, fail_open=False, adapter=NumpyAdapter()) as cache,
            pytest.raises(kind),
        ):
            cache.take(TOKENS, namespace="n")


def test_the_stand_in_for_kv_is_sound() -> None:
    """The numpy caches of these tests differ with every token, so that mix-ups are seen."""
    caches: list[NumpyCache] = make_caches(TOKENS)
    assert same(cut(caches, 50), make_caches(TOKENS[:50]))
    assert not same(make_caches([1, 2, 3]), make_caches([2, 1, 3]))
    assert NumpyRestoration.attachments is None
