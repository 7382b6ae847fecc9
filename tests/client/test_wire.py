"""One connection: whatever the daemon does, a call ends in time and no descriptor leaks."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixcached.client.errors import CallTimeout, NoDaemon, PrefixCachedError, ProtocolFailure
from prefixcached.client.wire import Wire
from prefixcached.protocol import limits, messages
from prefixcached.protocol.framing import encode
from prefixcached.protocol.messages import AnyRequest
from tests.support.descriptors import is_open
from tests.support.small_daemon import Peer, SmallDaemon

pytestmark = pytest.mark.usefixtures("no_descriptor_stays")

PEEK = messages.Peek("n", bytes(8))
SOON = 0.1
"""Seconds that a call waits for what does not come."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place for the socket."""
    return tmp_path / "socket"


@pytest.fixture
def daemon(path: Path) -> Iterator[SmallDaemon]:
    """A daemon that behaves until told otherwise."""
    with SmallDaemon(path) as daemon:
        yield daemon


def within(seconds: float) -> float:
    """The deadline in so many seconds."""
    return time.monotonic() + seconds


def opened(path: Path) -> Wire:
    """A greeted wire."""
    wire = Wire(path)
    wire.open(within(5))
    return wire


def test_a_request_gets_its_reply_and_a_one_way_message_none(daemon: SmallDaemon) -> None:
    """C2: after the greeting a wire carries one request after the other."""
    wire = opened(daemon.path)
    reply, descriptors = wire.request(PEEK, within(5))
    assert isinstance(reply, messages.Length)
    assert descriptors == []
    wire.tell(messages.Release(1))
    wire.request(messages.Status(), within(5))
    assert [type(request) for request in daemon.requests] == [
        messages.Hello,
        messages.Peek,
        messages.Release,
        messages.Status,
    ]
    assert wire.is_quiet()
    wire.close()
    wire.close()
    assert not wire.is_open
    assert not wire.is_quiet()
    with pytest.raises(NoDaemon, match="closed"):
        wire.request(PEEK, within(5))


def no_file(path: Path) -> None:
    """Nobody ever listened there."""


def left_behind(path: Path) -> None:
    """A daemon that was killed leaves its socket's file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))


def other_file(path: Path) -> None:
    """Some other file."""
    path.write_text("not a socket")


@pytest.mark.parametrize("prepare", [no_file, left_behind, other_file])
def test_nobody_listening_is_no_daemon(path: Path, prepare: Callable[[Path], None]) -> None:
    """C4: a missing daemon is known at once, and the error says how to start one."""
    prepare(path)
    wire = Wire(path)
    with pytest.raises(NoDaemon, match="prefixcached serve"):
        wire.open(within(60))
    assert not wire.is_open
    assert isinstance(wire.error, NoDaemon)


def test_a_path_too_long_for_a_socket_is_no_daemon(tmp_path: Path) -> None:
    """C4: a path that no socket can have is as good as no daemon."""
    with pytest.raises(NoDaemon, match="too long"):
        Wire(tmp_path / ("x" * 200)).open(within(60))


def test_a_full_queue_of_connections_is_waited_for_until_the_deadline(path: Path) -> None:
    """C4: a daemon that accepts nothing costs one bounded wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting: list[Wire] = []
        while not waiting or waiting[-1].is_open:
            waiting.append(Wire(path))
            with pytest.raises(CallTimeout):
                waiting[-1].open(within(SOON))
    assert all(not wire.is_open for wire in waiting)


def ignore(peer: Peer, request: AnyRequest) -> bool:
    """Never answer."""
    return True


def only_after_hello(
    behave: Callable[[Peer, AnyRequest], bool],
) -> Callable[[Peer, AnyRequest], bool]:
    """Misbehave at the first request behind the greeting."""
    return lambda peer, request: not isinstance(request, messages.Hello) and behave(peer, request)


@pytest.mark.parametrize("greets", [False, True])
def test_no_answer_is_a_timeout_and_ends_the_wire(daemon: SmallDaemon, greets: bool) -> None:
    """C4: a timed-out connection is closed, so that a late reply meets nobody."""
    daemon.on_request = only_after_hello(ignore) if greets else ignore
    wire = Wire(daemon.path)
    began = time.monotonic()
    if greets:
        wire.open(within(5))
    with pytest.raises(CallTimeout, match="too slow"):
        wire.request(PEEK, within(SOON)) if greets else wire.open(within(SOON))
    assert time.monotonic() - began < 5
    assert not wire.is_open
    assert isinstance(wire.error, CallTimeout)


def test_a_reply_that_trickles_does_not_outlast_the_deadline(daemon: SmallDaemon) -> None:
    """C4: the deadline is absolute: bytes that arrive do not prolong it."""
    stop = threading.Event()

    def trickle(peer: Peer, request: AnyRequest) -> bool:
        for byte in peer.connection.send(messages.StatusReport(report={"x": "y" * 4000})):
            if stop.wait(SOON / 20):
                break
            peer.send_raw(bytes([byte]), [])
        return True

    daemon.on_request = only_after_hello(trickle)
    wire = opened(daemon.path)
    began = time.monotonic()
    with pytest.raises(CallTimeout):
        wire.request(messages.Status(), within(2 * SOON))
    assert time.monotonic() - began < 10 * SOON
    stop.set()


def test_a_daemon_that_reads_nothing_cannot_hold_a_sender(path: Path) -> None:
    """C4: sending is bounded as well."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        wire = Wire(path)

        def greet_only() -> None:
            peer, _ = listener.accept()
            welcome = messages.Welcome(version=limits.PROTOCOL_VERSION)
            peer.sendall(encode(welcome))
            greeted.wait()
            peer.close()

        greeted = threading.Event()
        thread = threading.Thread(target=greet_only)
        thread.start()
        wire.open(within(5))
        with pytest.raises(CallTimeout, match="sending"):
            wire.request(messages.Peek("n", bytes(4 * limits.MAX_TOKENS)), within(SOON))
        greeted.set()
        thread.join()
    assert not wire.is_open


def test_no_time_left_is_not_the_daemons_fault(daemon: SmallDaemon) -> None:
    """C4: a deadline that is already over ends the call without blaming the daemon."""
    wire = opened(daemon.path)
    with pytest.raises(CallTimeout, match="no time left"):
        wire.request(PEEK, within(-1))
    assert not wire.is_open
    assert wire.error is None


@pytest.mark.parametrize("kept_bytes", [0, 1, 7, 8, 20])
def test_a_daemon_that_dies_in_mid_reply_is_no_daemon(daemon: SmallDaemon, kept_bytes: int) -> None:
    """C4: half a reply is no reply, wherever it ends, and its descriptors are closed."""

    def die(peer: Peer, request: AnyRequest) -> bool:
        with open(os.devnull) as lent:
            data = peer.connection.send(messages.Descriptors(first=0, count=1), 1)
            if kept_bytes:
                peer.send_raw(data[:kept_bytes], [lent.fileno()])
        peer.socket.shutdown(socket.SHUT_RDWR)
        return True

    daemon.on_request = only_after_hello(die)
    wire = opened(daemon.path)
    with pytest.raises(NoDaemon):
        wire.request(messages.Fetch(1, 0), within(5))
    assert not wire.is_open


def raw(data: bytes, descriptors: int = 0) -> Callable[[Peer, AnyRequest], bool]:
    """Answer with these bytes beside so many descriptors."""

    def behave(peer: Peer, request: AnyRequest) -> bool:
        with open(os.devnull) as lent:
            peer.send_raw(data, [lent.fileno()] * descriptors)
        return True

    return behave


GARBAGE = {
    "not the protocol": raw(b"HTTP/1.1 200 OK\r\n"),
    "a frame too large": raw(b"PC\x01\x00\xff\xff\xff\xff"),
    "no msgpack": raw(b"PC\x01\x00\x03\x00\x00\x00\xc1\xc1\xc1"),
    "a request": raw(encode(PEEK)),
    "another reply": raw(encode(messages.Stored(new_bytes=0, length=0))),
    "a second welcome": raw(encode(messages.Welcome(version=(1, 0)))),
    "descriptors missing": raw(encode(messages.Descriptors(first=0, count=2), 2), 1),
    "descriptors too many": raw(encode(messages.Descriptors(first=0, count=1), 1), 2),
    "descriptors with garbage": raw(b"garbage!", 16),
    "more than any frame may have": raw(encode(messages.Descriptors(first=0, count=1), 1), 253),
    "refusal": raw(encode(messages.Failed(reason="internal", detail="out of luck"))),
}


@pytest.mark.parametrize("behave", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_a_protocol_failure(
    daemon: SmallDaemon, behave: Callable[[Peer, AnyRequest], bool]
) -> None:
    """C4: what the protocol forbids ends the wire, and no descriptor of it stays open."""
    daemon.on_request = only_after_hello(behave)
    wire = opened(daemon.path)
    with pytest.raises(ProtocolFailure):
        wire.request(messages.Fetch(1, 0), within(5))
    assert not wire.is_open
    assert isinstance(wire.error, ProtocolFailure)


def test_another_major_version_says_what_to_do(daemon: SmallDaemon) -> None:
    """C2: a daemon of another major version is refused in plain words."""
    welcome = messages.Welcome(version=(limits.PROTOCOL_VERSION[0] + 1, 0))
    daemon.on_request = raw(encode(welcome))
    with pytest.raises(ProtocolFailure, match="install the same major version"):
        Wire(daemon.path).open(within(5))


def test_a_message_beyond_the_limits_ends_the_wire_only(daemon: SmallDaemon) -> None:
    """C3: a request that the daemon would refuse is not sent at all."""
    wire = opened(daemon.path)
    with pytest.raises(ProtocolFailure, match="at most"):
        wire.request(messages.Peek("n" * 600, b""), within(5))
    assert not wire.is_open
    assert len(daemon.requests) == 1


def test_received_descriptors_are_closed_exactly_once(daemon: SmallDaemon) -> None:
    """A descriptor's number is never closed again after somebody else got it."""

    def lend(peer: Peer, request: AnyRequest) -> bool:
        with open(os.devnull) as lent:
            peer.send(messages.Descriptors(first=0, count=3), [lent.fileno()] * 3)
        return True

    daemon.on_request = only_after_hello(lend)
    wire = opened(daemon.path)
    _, descriptors = wire.request(messages.Fetch(1, 0), within(5))
    assert len(descriptors) == 3
    assert not any(os.get_inheritable(fd) for fd in descriptors)
    wire.close_descriptor(descriptors[0])
    with open(os.devnull) as other:
        assert other.fileno() == descriptors[0]
        wire.close_descriptor(descriptors[0])
        assert wire.holds_descriptors
        wire.close()
        assert is_open(other.fileno())
    assert not any(is_open(fd) for fd in descriptors)


def test_descriptors_are_the_wires_from_the_moment_they_arrive(
    daemon: SmallDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: Ctrl-C before anybody has read their message leaves none of them open."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    wire = opened(daemon.path)
    daemon.on_request = raw(encode(messages.Descriptors(first=0, count=1), 1), 1)
    monkeypatch.setattr(wire._connection, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wire.request(messages.Fetch(1, 0), within(5))
    assert wire.holds_descriptors
    wire.close()


def test_an_idle_wire_notices_the_end_and_what_nobody_asked_for(daemon: SmallDaemon) -> None:
    """C4: a connection is not reused after its daemon went, nor after it spoke out of turn."""
    ended, surprised = opened(daemon.path), opened(daemon.path)
    assert ended.is_quiet()
    assert surprised.is_quiet()
    daemon.on_request = raw(encode(messages.Length(length=1)) * 2)
    surprised.request(PEEK, within(5))
    assert not surprised.is_quiet()
    daemon.stop()
    assert not ended.is_quiet()
    ended.close()
    surprised.close()


def test_errors_are_one_family() -> None:
    """C4: whoever wants exceptions catches one kind, and each says its reason."""
    reasons = {NoDaemon: "no-daemon", CallTimeout: "timeout", ProtocolFailure: "protocol"}
    for kind, reason in reasons.items():
        assert issubclass(kind, PrefixCachedError)
        assert kind.reason == reason
