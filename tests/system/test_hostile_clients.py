"""FIELD 3, C3, L4: whatever connects to a real daemon: it serves the others and keeps nothing.

What single sessions do about bad input, slow frames and clients that never read is tested in
tests/daemon/test_session.py; here the whole daemon stands it, over its real socket.
"""

import array
import itertools
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trio

from prefixcached.client import Cache, connect
from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.connection import CAPABILITIES
from prefixcached.protocol.framing import FORMAT, HEADER, MAGIC, FrameDecoder, encode
from prefixcached.protocol.schema import Schema, encode_schema
from prefixcached.protocol.tokens import pack_tokens
from tests.fuzz import corpus
from tests.fuzz.choices import Choices
from tests.fuzz.peer import Known
from tests.fuzz.requests import NAMES
from tests.fuzz.session_target import act, behave
from tests.support import derived_kv
from tests.support.census import Census, take_census
from tests.support.daemon_process import DaemonProcess
from tests.support.until import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")

HELLO = encode(m.Hello(version=limits.PROTOCOL_VERSION, capabilities=CAPABILITIES, client="tests"))
PROMPT = derived_kv.tokens(60, seed=5)
CROWD = 50
"""Connections at a time: well below the daemon's limit."""

Strangers = Callable[[int], list[socket.socket]]


@pytest.fixture
def small_daemon() -> Iterator[DaemonProcess]:
    """A daemon for prompts of a few tokens, which has too little RAM for all that is put."""
    options = ("--ram-bytes", "2MiB", "--put-min-tokens", "1", "--claim-min-tokens", "16")
    with DaemonProcess(*options) as process:
        yield process
        print(process.log())


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[Cache]:
    """A client that behaves, and has stored `PROMPT`."""
    with connect(socket=daemon.socket, fail_open=False) as opened:
        assert opened.put(PROMPT, derived_kv.caches(PROMPT), namespace="n")
        yield opened


@pytest.fixture
def strangers(daemon: DaemonProcess) -> Iterator[Strangers]:
    """Makes connections that have said nothing; whatever happens, they are closed in the end."""
    with ExitStack() as stack:
        yield lambda count: [stack.enter_context(connected(daemon.socket)) for _ in range(count)]


class OverSocket:
    """A daemon in a process of its own, as the fuzzer's clients meet it."""

    def __init__(self, path: Path) -> None:
        self.state_dir: Path | None = None
        self._path = path

    def connect(self) -> socket.socket:
        return connected(self._path)

    async def squeeze(self) -> None:
        pass


def connected(path: Path) -> socket.socket:
    """A new connection that has said nothing."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(str(path))
    return client


def is_served(cache: Cache) -> None:
    """A client that behaves gets its prompt back; it would give up after its five seconds."""
    assert cache.take([*PROMPT, 7], namespace="n")


def comes_back_to(daemon: DaemonProcess, cache: Cache, before: Census) -> None:
    """Wait until nothing is left of anybody."""
    until(
        lambda: take_census(daemon, cache) == before,
        lambda: (before, take_census(daemon, cache), daemon.log()),
    )


def test_what_the_fuzzer_kept_is_harmless_over_a_real_socket(small_daemon: DaemonProcess) -> None:
    """C3, C5: every kept sequence of hostile clients, one after the other, in one daemon's life."""
    tainted: set[str] = set()
    place = OverSocket(small_daemon.socket)

    async def play() -> None:
        for number, data in enumerate(corpus.packed_inputs("session")):
            choices = Choices(data)
            # Where the target draws its seed and its kind of world.
            for _ in range(3):
                choices.byte()
            pair = (choices.pick(NAMES), choices.pick(NAMES))
            known = Known(tuple(f"{name}{number}" for name in pair), tainted)
            await act(choices, place, known, is_real_time=True)
        await behave(place)

    with connect(socket=small_daemon.socket, fail_open=False) as cache:
        before = take_census(small_daemon, cache)
        trio.run(play)
        cache.clear()
        comes_back_to(small_daemon, cache, before)
    assert "Traceback" not in small_daemon.log()
    assert small_daemon.terminate() == 0


def test_a_thousand_connections_come_and_go(
    daemon: DaemonProcess, cache: Cache, strangers: Strangers
) -> None:
    """C3: in every state, in good order or not: each costs nothing once it is gone."""
    before = take_census(daemon, cache)
    accepted = cache.stats()["listener"]["accepted"]
    take = encode(m.Take("n", pack_tokens(PROMPT)))
    says = itertools.cycle((
        b"", HELLO, HELLO[:9], b"GET / HTTP/1.1\r\n\r\n", HELLO + take, take,
        HEADER.pack(MAGIC, FORMAT, 255, 0), HEADER.pack(MAGIC, FORMAT, 0, limits.MAX_FRAME_BYTES),
    ))  # fmt: skip
    for _ in range(1000 // CROWD):
        crowd = strangers(CROWD)
        for number, client in enumerate(crowd):
            data = next(says)
            if data and number % 5 == 0:
                rights = array.array("i", [client.fileno()] * 3)
                client.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            elif data:
                client.sendall(data)
        is_served(cache)
        for client in crowd:
            client.close()
    comes_back_to(daemon, cache, before)
    listener = cache.stats()["listener"]
    # Some were gone before the kernel could say who they were.
    assert listener["accepted"] + listener["refused"]["gone"] == accepted + 1000
    assert listener["endings"]["internal"] == 0


@pytest.mark.slow
def test_clients_that_drip_bytes_keep_nobody_waiting(
    daemon: DaemonProcess, cache: Cache, strangers: Strangers
) -> None:
    """C3: slow-loris: `hello` and every frame have a deadline, however steadily bytes arrive."""
    before = take_census(daemon, cache)
    crowd = strangers(CROWD)
    greeted, silent = crowd[::2], crowd[1::2]
    for client in greeted:
        client.sendall(HELLO)
        client.recv(1 << 16)
    for client in crowd:
        client.sendall(HEADER.pack(MAGIC, FORMAT, 0, limits.MAX_FRAME_BYTES))
    endings: dict[int, bytes] = {}
    while len(endings) < CROWD:
        is_served(cache)
        waiting = [client for client in crowd if client.fileno() not in endings]
        # The pace at which they drip; whoever is told something need not wait for the others.
        ended = select.select(waiting, [], [], 0.05)[0]
        for client in waiting:
            if client in ended:
                endings[client.fileno()] = client.recv(1 << 16)
            else:
                with suppress(ConnectionError):  # it ended since
                    client.send(b"\x00")
    for clients, reason in ((silent, "hello-timeout"), (greeted, "frame-timeout")):
        assert {_failure(endings[client.fileno()]) for client in clients} == {reason}
    for client in crowd:
        client.close()
    comes_back_to(daemon, cache, before)


def _failure(data: bytes) -> str:
    decoder = FrameDecoder("reply")
    decoder.feed(data)
    frame = decoder.next_frame()
    assert frame is not None
    assert isinstance(frame.message, m.Failed)
    return frame.message.reason


@pytest.mark.slow
def test_clients_that_never_read_lose_their_leases(
    daemon: DaemonProcess, cache: Cache, strangers: Strangers
) -> None:
    """L4: a reply beyond the socket's buffers is waited for a while, and by nobody else."""
    before = take_census(daemon, cache)
    schema = encode_schema(Schema(description=bytes(1_000_000)))
    tokens = pack_tokens(derived_kv.tokens(40, seed=8))
    crowd = strangers(3)
    for client in crowd:
        client.sendall(HELLO)
        client.recv(1 << 16)
    crowd[0].sendall(encode(m.Offer("large", tokens, schema)))
    put = _reply(crowd[0])
    assert isinstance(put, m.Grant), put
    crowd[0].sendall(encode(m.Commit(put.put)))
    assert isinstance(_reply(crowd[0]), m.Stored)
    for client in crowd:
        client.sendall(encode(m.Take("large", tokens + b"\x07\x00\x00\x00")))
    until(lambda: take_census(daemon, cache).holdings["leases"] == len(crowd))
    is_served(cache)
    until(lambda: cache.stats()["listener"]["endings"]["slow-reader"] == len(crowd))
    assert take_census(daemon, cache).holdings == before.holdings
    for client in crowd:
        client.close()
    cache.clear(namespace="large")
    comes_back_to(daemon, cache, before)


def _reply(client: socket.socket) -> m.Reply:
    """The next reply; descriptors that come with it are closed."""
    decoder = FrameDecoder("reply")
    while True:
        data, descriptors, _, _ = socket.recv_fds(client, 1 << 16, limits.MAX_DESCRIPTORS)
        for descriptor in descriptors:
            os.close(descriptor)
        assert data
        decoder.feed(data)
        frame = decoder.next_frame()
        if frame is not None:
            assert isinstance(frame.message, m.Reply)
            return frame.message
