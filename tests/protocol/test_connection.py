"""`Connection`: which message is legal when, descriptors, versions, and errors that stay."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.connection import (
    CAPABILITIES,
    CLOSED,
    NEED_DATA,
    ONE_WAY,
    REPLIES,
    Connection,
    Received,
    Role,
    State,
    VersionMismatchError,
)
from prefixcached.protocol.errors import LocalProtocolError, RemoteProtocolError
from prefixcached.protocol.framing import Message, encode
from tests.protocol.examples import CHECKPOINT, SEGMENT
from tests.protocol.examples import REPLIES as REPLY_EXAMPLES
from tests.protocol.examples import REQUESTS as REQUEST_EXAMPLES

HELLO = m.Hello(version=limits.PROTOCOL_VERSION, capabilities=("cache", "flush"))
WELCOME = m.Welcome(version=limits.PROTOCOL_VERSION, capabilities=CAPABILITIES)
FAILED = m.Failed(reason="protocol")
REQUESTS = [request for request in REQUEST_EXAMPLES if not isinstance(request, m.Hello)]
SPOKEN = [request for request in REQUESTS if type(request) not in ONE_WAY]


class Pair:
    """A client's and a daemon's connection with nothing but memory between them."""

    def __init__(self) -> None:
        self.client = Connection(Role.CLIENT)
        self.daemon = Connection(Role.DAEMON)

    def states(self) -> set[State]:
        return {self.client.state, self.daemon.state}

    def ask(self, request: m.AnyRequest) -> object:
        self.daemon.receive(self.client.send(request))
        return self.daemon.next_event()

    def answer(self, reply: m.AnyReply, descriptors: list[int] | None = None) -> object:
        sent = descriptors or []
        self.client.receive(self.daemon.send(reply, len(sent)), sent)
        return self.client.next_event()


def greeted() -> Pair:
    pair = Pair()
    assert pair.ask(HELLO) == Received(HELLO, [])
    assert pair.answer(WELCOME) == Received(WELCOME, [])
    return pair


def pending(request: m.AnyRequest) -> Pair:
    pair = greeted()
    assert pair.ask(request) == Received(request, [])
    return pair


def reply_to(request: m.AnyRequest) -> m.AnyReply:
    return next(reply for reply in REPLY_EXAMPLES if type(reply) in REPLIES[type(request)])


# -- the table ------------------------------------------------------------------------------------


def test_a_conversation_goes_through_its_states() -> None:
    """Hello, then one request at a time with its reply, one-way messages between them."""
    pair = Pair()
    assert pair.states() == {State.START}
    pair.ask(HELLO)
    assert pair.states() == {State.GREETED}
    pair.answer(WELCOME)
    for request in SPOKEN:
        assert pair.states() == {State.IDLE}
        assert pair.ask(request) == Received(request, [])
        assert pair.states() == {State.PENDING}
        reply = reply_to(request)
        assert pair.answer(reply) == Received(reply, [])
        assert pair.ask(m.Release(lease=1)) == Received(m.Release(lease=1), [])
    assert pair.client.next_event() is pair.daemon.next_event() is NEED_DATA


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_nothing_comes_before_hello(message: m.AnyRequest) -> None:
    """C3: a request before Hello is refused by either side."""
    pair = Pair()
    with pytest.raises(LocalProtocolError, match="is start"):
        pair.client.send(message)
    pair.daemon.receive(encode(message))
    with pytest.raises(RemoteProtocolError, match="is start"):
        pair.daemon.next_event()


def test_hello_comes_once() -> None:
    """C3: a second Hello is refused by either side."""
    pair = greeted()
    with pytest.raises(LocalProtocolError):
        pair.client.send(HELLO)
    pair.daemon.receive(encode(HELLO))
    with pytest.raises(RemoteProtocolError):
        pair.daemon.next_event()


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_one_request_is_in_flight(message: m.AnyRequest) -> None:
    """C3: while a reply is pending nothing is legal from the client, one-way messages included."""
    pair = pending(m.Status())
    with pytest.raises(LocalProtocolError, match="pending, after status"):
        pair.client.send(message)
    pair.daemon.receive(encode(message))
    with pytest.raises(RemoteProtocolError, match="while the reply to its status was pending"):
        pair.daemon.next_event()


def test_a_single_byte_while_a_reply_is_pending_is_an_error() -> None:
    """C3: what is pipelined is refused as it arrives, not when its frame is complete."""
    pair = greeted()
    pair.daemon.receive(pair.client.send(m.Status()) + b"P")
    assert pair.daemon.next_event() == Received(m.Status(), [])
    with pytest.raises(RemoteProtocolError, match="pending"):
        pair.daemon.next_event()


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (request, reply)
        for request, reply in product(SPOKEN, REPLY_EXAMPLES)
        if type(reply) not in REPLIES[type(request)] and not isinstance(reply, m.Failed)
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_reply_that_belongs_to_another_request_is_refused(
    request_: m.AnyRequest, reply: m.AnyReply
) -> None:
    """C3: each request has exactly the replies of the table, checked on both sides."""
    pair = pending(request_)
    with pytest.raises(LocalProtocolError):
        pair.daemon.send(reply)
    pair.client.receive(encode(reply))
    with pytest.raises(RemoteProtocolError):
        pair.client.next_event()


@pytest.mark.parametrize("reply", REPLY_EXAMPLES[2:], ids=lambda reply: type(reply).__name__)
def test_a_reply_without_a_request_is_refused(reply: m.AnyReply) -> None:
    """C3: an idle client hears nothing but Failed."""
    pair = greeted()
    with pytest.raises(LocalProtocolError):
        pair.daemon.send(reply)
    pair.client.receive(encode(reply))
    with pytest.raises(RemoteProtocolError):
        pair.client.next_event()


@pytest.mark.parametrize("state", [Pair, greeted, lambda: pending(m.Status())])
def test_failed_is_legal_at_any_time_and_ends_the_conversation(state: type[Pair]) -> None:
    """C3: after Failed neither side says or hears anything."""
    pair = state()
    assert pair.answer(FAILED) == Received(FAILED, [])
    assert pair.client.next_event() is CLOSED
    assert pair.daemon.next_event() is CLOSED
    with pytest.raises(LocalProtocolError):
        pair.client.send(m.Status())
    with pytest.raises(LocalProtocolError):
        pair.daemon.send(FAILED)
    pair.daemon.receive(b"whatever the client was still writing")
    assert pair.daemon.next_event() is CLOSED
    assert not pair.daemon.has_partial_frame


# -- the end of the stream ------------------------------------------------------------------------


def test_an_end_between_messages_is_in_good_order() -> None:
    """A daemon hears a client leave; so does an idle client."""
    pair = greeted()
    pair.daemon.receive(pair.client.send(m.Release(lease=1)))
    for side in (pair.client, pair.daemon):
        side.receive_eof()
    assert pair.daemon.next_event() == Received(m.Release(lease=1), [])
    assert pair.daemon.next_event() is pair.client.next_event() is CLOSED


def test_who_leaves_without_a_byte_leaves_in_good_order() -> None:
    """L1: a connection that nobody used is over, without an error."""
    connection = Connection(Role.DAEMON)
    assert not connection.has_partial_frame
    connection.receive_eof()
    assert connection.next_event() is CLOSED
    assert connection.state is State.CLOSED


def test_after_the_end_nothing_is_sent() -> None:
    """L1: to a peer that is gone, each side's own message is the caller's mistake."""
    pair = pending(m.Status())
    pair.daemon.receive_eof()
    assert pair.daemon.next_event() is CLOSED
    assert pair.daemon.state is State.CLOSED
    with pytest.raises(LocalProtocolError, match="is closed"):
        pair.daemon.send(m.StatusReport(report={}))


def test_an_end_instead_of_a_reply_is_an_error() -> None:
    """A daemon that goes away during a request leaves its client an error, not silence."""
    pair = pending(m.Status())
    pair.client.receive_eof()
    with pytest.raises(RemoteProtocolError, match="before it replied to status"):
        pair.client.next_event()


def test_a_client_that_leaves_during_a_request_is_in_good_order() -> None:
    """L1: a client may die at any time; the daemon learns it as an end."""
    pair = pending(m.Status())
    pair.daemon.receive_eof()
    assert pair.daemon.next_event() is CLOSED


@pytest.mark.parametrize("length", [1, 7, 8, 20])
def test_an_end_within_a_frame_is_an_error(length: int) -> None:
    """C3: half a frame is no message."""
    pair = greeted()
    pair.daemon.receive(pair.client.send(m.Take(namespace="n", tokens=b"1234"))[:length])
    pair.daemon.receive_eof()
    with pytest.raises(RemoteProtocolError, match="in the middle of a frame"):
        pair.daemon.next_event()


def test_bytes_after_the_end_are_a_bug_of_the_caller() -> None:
    """`receive_eof` is the last word."""
    pair = greeted()
    pair.daemon.receive_eof()
    with pytest.raises(LocalProtocolError):
        pair.daemon.receive(b"x")


# -- errors stay ----------------------------------------------------------------------------------


def test_a_remote_error_stays() -> None:
    """C3: nothing after it is believed, and the daemon may say Failed once."""
    pair = greeted()
    pair.daemon.receive(b"GET / HTTP/1.1\r\n")
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="does not speak"):
            pair.daemon.next_event()
        pair.daemon.receive(encode(m.Status()))
    assert isinstance(pair.answer(FAILED), Received)
    with pytest.raises(LocalProtocolError):
        pair.daemon.send(FAILED)


def test_after_a_remote_error_a_client_says_nothing() -> None:
    """C4: a client does not go on over a connection that it cannot trust."""
    pair = pending(m.Status())
    pair.client.receive(b"garbage!")
    with pytest.raises(RemoteProtocolError):
        pair.client.next_event()
    with pytest.raises(LocalProtocolError, match="failed"):
        pair.client.send(m.Status())


def test_after_a_remote_error_the_daemon_says_only_failed() -> None:
    """C3: a reply to a connection that broke the protocol is a bug of the daemon."""
    pair = pending(m.Status())
    pair.daemon.receive(b"P")
    with pytest.raises(RemoteProtocolError):
        pair.daemon.next_event()
    with pytest.raises(LocalProtocolError):
        pair.daemon.send(m.StatusReport(report={}))


def test_a_local_error_stays() -> None:
    """Who broke the table once does not send again, since the peer may be out of step."""
    pair = greeted()
    with pytest.raises(LocalProtocolError):
        pair.client.send(HELLO)
    with pytest.raises(LocalProtocolError, match="failed before"):
        pair.client.send(m.Status())


def test_what_came_before_a_remote_error_is_dropped() -> None:
    """C3: up to 16 MiB would stay until whoever caused the error has read `Failed`."""
    pair = greeted()
    pair.daemon.receive(b"garbage, clearly")
    with pytest.raises(RemoteProtocolError):
        pair.daemon.next_event()
    assert not pair.daemon.has_partial_frame


def fail_remotely(connection: Connection) -> None:
    connection.receive(b"garbage, clearly")
    with suppress(RemoteProtocolError):
        connection.next_event()


def fail_locally(connection: Connection) -> None:
    with suppress(LocalProtocolError):
        connection.send(FAILED)


@pytest.mark.parametrize("fail", [fail_remotely, fail_locally])
def test_a_failed_connection_waits_for_no_garbage_collector(
    fail: Callable[[Connection], None],
) -> None:
    """C3: a hundred clients that send garbage would leave gigabytes until it runs."""
    gc.disable()
    try:
        connection = Connection(Role.CLIENT)
        fail(connection)
        kept = weakref.ref(connection)
        del connection
        assert kept() is None
    finally:
        gc.enable()


# -- versions and capabilities --------------------------------------------------------------------


def test_a_newer_minor_version_is_welcome() -> None:
    """C2: within a major version, newer and older work together."""
    pair = Pair()
    assert isinstance(pair.ask(m.Hello(version=(1, 99), capabilities=("cache", "new"))), Received)
    assert isinstance(pair.answer(m.Welcome(version=(1, 0), capabilities=("cache",))), Received)
    assert pair.client.capabilities == pair.daemon.capabilities == {"cache"}


def test_capabilities_are_what_both_named() -> None:
    """C2: a message group is used only when both sides have it."""
    pair = Pair()
    assert pair.daemon.capabilities == frozenset()
    pair.ask(HELLO)
    assert pair.daemon.capabilities == frozenset()
    pair.answer(WELCOME)
    assert pair.client.capabilities == pair.daemon.capabilities == {"cache", "flush"}


def test_another_major_version_is_refused_in_plain_words() -> None:
    """C2: the text names both versions and the remedy."""
    daemon = Connection(Role.DAEMON)
    daemon.receive(encode(m.Hello(version=(2, 0))))
    with pytest.raises(VersionMismatchError, match=r"client speaks protocol 2\.0 .* daemon 1\.0"):
        daemon.next_event()
    client = Connection(Role.CLIENT)
    client.send(HELLO)
    client.receive(encode(m.Welcome(version=(3, 1))))
    for _ in range(2):
        with pytest.raises(VersionMismatchError, match=r"restart the daemon"):
            client.next_event()


# -- descriptors ----------------------------------------------------------------------------------

TAKE = m.Take(namespace="n", tokens=bytes(8))
PARTS = (m.Part(SEGMENT, 256, 512), m.Part(CHECKPOINT, 512, 512))
HIT = m.Hit(lease=1, length=512, tier="ram", parts=PARTS)


def test_descriptors_come_in_order_with_their_message() -> None:
    """A client gets exactly what the frame declares; then they are its caller's."""
    pair = pending(TAKE)
    assert pair.answer(HIT, [8, 7]) == Received(HIT, [8, 7])
    assert pair.client.take_unclaimed() == []


def test_descriptors_may_arrive_before_the_rest_of_their_frame() -> None:
    """The kernel delivers them with the frame's first byte."""
    pair = pending(TAKE)
    data = pair.daemon.send(HIT, 2)
    pair.client.receive(data[:1], [8, 7])
    assert pair.client.next_event() is NEED_DATA
    pair.client.receive(data[1:])
    assert pair.client.next_event() == Received(HIT, [8, 7])


@pytest.mark.parametrize("sent", [[], [8], [8, 7, 6]])
def test_surplus_and_missing_descriptors_are_errors(sent: list[int]) -> None:
    """C3: a frame that lies about its descriptors is refused, and those that came are returned."""
    pair = pending(TAKE)
    pair.client.receive(pair.daemon.send(HIT, 2), sent)
    with pytest.raises(RemoteProtocolError, match=f"declared 2 descriptors and sent {len(sent)}"):
        pair.client.next_event()
    assert pair.client.take_unclaimed() == sent
    assert pair.client.take_unclaimed() == []


def test_descriptors_of_a_frame_that_has_begun_are_judged_with_it() -> None:
    """C3: what arrives beside the first byte of the next frame is not this frame's surplus."""
    pair = pending(TAKE)
    data = pair.daemon.send(HIT, 1) + encode(FAILED)
    pair.client.receive(data[:-1], [8, 7])
    assert pair.client.next_event() == Received(HIT, [8])
    assert pair.client.next_event() is NEED_DATA
    pair.client.receive(data[-1:])
    with pytest.raises(RemoteProtocolError, match="declared 0 descriptors and sent 1"):
        pair.client.next_event()
    assert pair.client.take_unclaimed() == [7]


def test_descriptors_without_a_frame_are_an_error() -> None:
    """C3: nothing claims them, so the caller closes them."""
    pair = greeted()
    pair.client.receive(b"", [8])
    with pytest.raises(RemoteProtocolError, match="no frame declares"):
        pair.client.next_event()
    assert pair.client.take_unclaimed() == [8]


def test_a_daemon_refuses_descriptors_before_their_frame_is_complete() -> None:
    """C3: a client cannot let the daemon hold its descriptors while it writes slowly."""
    pair = greeted()
    pair.daemon.receive(encode(m.Status())[:3], [5])
    with pytest.raises(RemoteProtocolError, match="client sent 1 descriptors; clients send none"):
        pair.daemon.next_event()
    assert pair.daemon.take_unclaimed() == [5]


@pytest.mark.parametrize("declared", [0, 1])
def test_a_daemon_accepts_no_descriptors(declared: int) -> None:
    """C3: a client that sends or declares any is refused, and they are returned for closing."""
    pair = greeted()
    pair.daemon.receive(encode(m.Status(), declared), [5, 6][: 2 - declared])
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        pair.daemon.next_event()
    assert pair.daemon.take_unclaimed() == [5, 6][: 2 - declared]


def test_a_declaration_without_descriptors_is_refused_too() -> None:
    """C3: a request's header must declare none."""
    pair = greeted()
    pair.daemon.receive(encode(m.Status(), 1))
    with pytest.raises(RemoteProtocolError, match="status with 1 descriptors; expected 0"):
        pair.daemon.next_event()


@pytest.mark.parametrize(
    ("request_", "reply", "count", "legal"),
    [
        (TAKE, HIT, 0, True),
        (TAKE, HIT, 1, True),
        (TAKE, HIT, 2, True),
        (TAKE, HIT, 3, False),
        (TAKE, m.Miss(reason="empty"), 1, False),
        (m.Fetch(of=1, first=16), m.Descriptors(first=16, count=5), 5, True),
        (m.Fetch(of=1, first=16), m.Descriptors(first=16, count=5), 4, False),
        (m.Fetch(of=1, first=16), m.Descriptors(first=16, count=5), 6, False),
        (m.Fetch(of=1, first=16), m.Descriptors(first=16, count=5), 0, False),
        (m.Commit(put=1), m.Stored(new_bytes=0, length=1), 1, False),
    ],
)
def test_a_reply_carries_at_most_one_descriptor_for_each_image(
    request_: m.AnyRequest, reply: m.AnyReply, count: int, legal: bool
) -> None:
    """C3: more than what the reply describes is refused on both sides."""
    pair = pending(request_)
    held = list(range(100, 100 + count))
    if legal:
        assert pair.answer(reply, held) == Received(reply, held)
        return
    with pytest.raises(LocalProtocolError, match="descriptors"):
        pair.daemon.send(reply, count)
    pair.client.receive(encode(reply, count), held)
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        pair.client.next_event()
    assert pair.client.take_unclaimed() == held


@pytest.mark.parametrize(
    ("request_", "reply", "expected"),
    [
        (TAKE, HIT, "at most 2"),
        (m.Fetch(of=1, first=16), m.Descriptors(first=16, count=5), "5"),
        (TAKE, m.Miss(reason="empty"), "0"),
    ],
)
def test_who_declares_too_many_descriptors_is_told_how_many_are_legal(
    request_: m.AnyRequest, reply: m.AnyReply, expected: str
) -> None:
    """C3: whoever writes another client or daemon learns the number, or the most, it may be."""
    pair = pending(request_)
    with pytest.raises(LocalProtocolError, match=f"with 9 descriptors; expected {expected}$"):
        pair.daemon.send(reply, 9)


# -- anything at all ------------------------------------------------------------------------------

FRAMES = [encode(message) for message in (*REQUEST_EXAMPLES, *REPLY_EXAMPLES)]


def events_of(role: Role, chunks: list[bytes]) -> list[object]:
    """What a connection makes of chunks; a client asks for a status when it may."""
    connection = Connection(role)
    events: list[object] = []
    for chunk in chunks:
        connection.receive(chunk)
        try:
            while isinstance(event := connection.next_event(), Received):
                events.append(event.message)
                if role is Role.DAEMON and connection.state is State.GREETED:
                    connection.send(WELCOME)
        except RemoteProtocolError as error:
            events.append(str(error))
            return events
    return events


@given(
    role=st.sampled_from(Role),
    messages=st.lists(st.sampled_from(FRAMES) | st.binary(max_size=20), max_size=5),
    hello=st.booleans(),
)
def test_any_bytes_give_messages_or_a_remote_error(
    role: Role, messages: list[bytes], hello: bool
) -> None:
    """C3: whatever the peer sends, in whatever order, is believed or refused, nothing else."""
    events_of(role, [encode(HELLO)] * hello + messages)


@given(
    one_way=st.lists(
        st.sampled_from([m.Release(lease=1), m.Unpin(pin=2), m.Abandon(put=3)]), max_size=4
    ),
    last=st.sampled_from([m.Status(), TAKE, None, b"garbage, clearly"]),
    size=st.integers(1, 40),
)
def test_any_chunking_gives_the_same_events(
    one_way: list[Message], last: Message | bytes | None, size: int
) -> None:
    """The table applies alike however the bytes were cut, errors included."""
    tail = last if isinstance(last, bytes) else b"" if last is None else encode(last)
    data = b"".join(encode(message) for message in one_way) + tail
    whole = events_of(Role.DAEMON, [encode(HELLO), data])
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert events_of(Role.DAEMON, [encode(HELLO), *chunks]) == whole
    assert len(whole) == 1 + len(one_way) + (last is not None)
