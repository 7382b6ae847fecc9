"""Sessions: what passes between a client and RamTier, and how a session ends."""

import gc
import os
import socket
from pathlib import Path

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing

from prefixcached.daemon import session
from prefixcached.daemon.restores import RestoreStatistics
from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.actor_messages import Call
from prefixcached.protocol.connection import CAPABILITIES
from prefixcached.protocol.framing import FORMAT, HEADER, MAGIC, encode
from tests.daemon.clients import HELLO, Client, connected
from tests.daemon.conftest import Front, FrontMaker
from tests.daemon.fakes import FakeRamTier
from tests.protocol.examples import SEGMENT

TAKE = m.Take(namespace="n", tokens=bytes(400))


def fresh(front: Front) -> Client:
    """A connected client that has said nothing yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(front.path))
    return Client(sock)


async def settled() -> None:
    """Wait until the daemon's side has done all that it can do."""
    await trio.testing.wait_all_tasks_blocked(0.02)


# -- requests and replies -------------------------------------------------------------------------


async def test_hello_is_answered_with_what_the_daemon_speaks(front: Front) -> None:
    """C2: version, capabilities, the daemon's name and its boot id (L3)."""
    client = fresh(front)
    assert await client.ask(HELLO) == m.Welcome(
        version=limits.PROTOCOL_VERSION,
        capabilities=CAPABILITIES,
        daemon="prefixcached test",
        boot=FakeRamTier.boot,
    )
    client.close()


async def test_requests_reach_ram_tier_in_order_under_the_sessions_number(front: Front) -> None:
    """One session is one number, and its requests are its own."""
    async with connected(front.path) as first, connected(front.path) as second:
        assert await first.ask(TAKE) == m.Miss(reason="empty", matched=100, boot=FakeRamTier.boot)
        assert await second.ask(m.Peek(namespace="n", tokens=bytes(8))) == m.Length(
            length=2, boot=FakeRamTier.boot
        )
        await first.say(m.Release(lease=5))
        await first.ask(m.Clear())
        assert front.ram_tier.heard == [
            Call(1, TAKE),
            Call(2, m.Peek(namespace="n", tokens=bytes(8))),
            Call(1, m.Release(lease=5)),
            Call(1, m.Clear()),
        ]


async def test_one_way_messages_and_a_request_may_come_in_one_piece(front: Front) -> None:
    """One-way messages need no reply, so a client writes them with its next request."""
    async with connected(front.path) as client:
        pieces = [client.connection.send(m.Release(lease=n)) for n in (1, 2)]
        await client.send(b"".join([*pieces, client.connection.send(TAKE)]))
        received = await client.hear()
        assert received is not None
        assert isinstance(received.message, m.Miss)
        assert front.ram_tier.calls == [m.Release(lease=1), m.Release(lease=2), TAKE]


async def test_descriptors_of_a_reply_are_lent_in_order(
    make_front: FrontMaker, tmp_path: Path
) -> None:
    """Images travel as descriptors beside the reply; the daemon's own stay open."""
    files = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(2)]
    hit = m.Hit(lease=1, length=1, tier="ram", parts=(m.Part(SEGMENT, 256, 300),) * 2)
    async with (
        make_front(FakeRamTier(lambda _: (hit, files))) as front,
        connected(front.path) as client,
    ):
        for _ in range(3):
            await client.say(TAKE)
            received = await client.hear()
            assert received is not None
            assert received.message == msgspec.structs.replace(hit, boot=FakeRamTier.boot)
            inodes = [os.fstat(descriptor).st_ino for descriptor in received.descriptors]
            assert inodes == [os.fstat(file).st_ino for file in files]
            for descriptor in received.descriptors:
                os.close(descriptor)
    for file in files:
        os.close(file)


async def test_a_reply_that_takes_time_arrives_when_it_is_ready(front: Front) -> None:
    """A request may wait in RamTier; the session waits with it, and goes on afterwards."""
    async with connected(front.path) as client:
        await client.say(m.Flush())
        await settled()
        front.ram_tier.pending.pop().set(m.Flushed(written=1, skipped=0, failed=0))
        received = await client.hear()
        assert received is not None
        assert isinstance(received.message, m.Flushed)
        assert isinstance(await client.ask(TAKE), m.Miss)


# -- the client goes ------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_reported_once(front: Front) -> None:
    """L1: the end of the socket ends all that the client held."""
    async with connected(front.path) as client:
        await client.ask(TAKE)
    await settled()
    assert front.ram_tier.gone == [1]
    assert front.endings() == {"closed": 1}
    assert front.listener.statistics().current == 0


async def test_a_client_that_leaves_during_a_request_is_noticed_at_once(front: Front) -> None:
    """L1: the session does not wait for the reply that nobody will read."""
    async with connected(front.path) as client:
        await client.say(m.Flush())
        await settled()
        assert front.ram_tier.gone == []
    await settled()
    assert front.ram_tier.gone == [1]
    assert front.endings() == {"closed": 1}
    # RamTier may answer all the same; nobody minds.
    front.ram_tier.pending.pop().set(m.Flushed(written=0, skipped=0, failed=0))


async def test_a_client_killed_within_a_frame_is_reported(front: Front) -> None:
    """L1, C3: half a frame costs nothing."""
    async with connected(front.path) as client:
        await client.send(encode(TAKE)[:100])
        await settled()
    await settled()
    assert front.ram_tier.gone == [1]
    assert front.ram_tier.calls == []


async def test_a_client_that_leaves_before_hello_is_reported(front: Front) -> None:
    """L1: whatever the state, the session ends the same way."""
    fresh(front).close()
    await settled()
    assert front.ram_tier.gone == [1]


async def test_cancelled_sessions_are_reported_once_each(make_front: FrontMaker) -> None:
    """L1: a stop of the daemon ends idle, waiting and blocked sessions alike."""
    large = m.Hit(lease=1, length=1, tier="ram", parts=(), schema=bytes(8 << 20))
    fake = FakeRamTier(lambda request: (large, ()) if isinstance(request, m.Take) else None)
    async with (
        make_front(fake) as front,
        connected(front.path),
        connected(front.path) as waiting,
        connected(front.path) as blocked,
    ):
        await waiting.say(m.Flush())
        await blocked.say(TAKE)
        await settled()
        front.scope.cancel()
        await settled()
        assert sorted(fake.gone) == [1, 2, 3]
        assert front.endings() == {"stopping": 3}


async def test_ram_tier_hears_of_the_end_although_its_mailbox_was_full(
    make_front: FrontMaker,
) -> None:
    """L1: `ClientGone` waits for room, also when the session was cancelled."""
    fake = FakeRamTier(room=0)
    async with make_front(fake) as front:
        async with connected(front.path) as client:
            await client.ask(TAKE)
            front.scope.cancel()
            await settled()
        assert fake.gone == [1]


async def test_sessions_end_quietly_when_ram_tier_has_failed(front: Front) -> None:
    """The daemon is ending then; its sessions add no errors of their own."""
    async with connected(front.path) as client:
        front.ram_tier.fail()
        await settled()
        with structlog.testing.capture_logs() as logs:
            await client.say(TAKE)
            await client.ended()
        assert front.endings() == {"stopping": 1}
        assert not logs


# -- bad input ------------------------------------------------------------------------------------

BAD = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "huge": b"PC\x01\x00\xff\xff\xff\xff",
    "deep": b"PC\x01\x00\x40\x00\x00\x00" + b"\x91" * 64,
    "unknown tag": b"PC\x01\x00\x0c\x00\x00\x00\x81\xa4type\xa5steal",
    "reply": encode(m.Miss(reason="empty")),
    "second hello": encode(HELLO),
    "lying tokens": encode(TAKE).replace(b"\xc5\x01\x90", b"\xc5\x01\x8f"),
    "declared descriptor": encode(m.Status(), 1),
    "two requests": encode(TAKE) + encode(TAKE),
    "request and more": encode(TAKE) + b"P",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
async def test_bad_input_ends_that_session_alone(front: Front, data: bytes) -> None:
    """C3: one Failed, then the end; RamTier hears no more of it and others are served."""
    async with connected(front.path) as good, connected(front.path) as bad:
        await bad.send(data)
        failed = await bad.failed()
        assert failed.reason == "protocol"
        assert failed.detail
        assert failed.boot == FakeRamTier.boot
        await settled()
        assert front.ram_tier.gone == [2]
        assert front.ram_tier.calls == []
        assert isinstance(await good.ask(TAKE), m.Miss)
        assert front.endings() == {"protocol": 1}


async def test_what_a_client_is_told_and_the_log_says_is_bounded(front: Front) -> None:
    """C3: an error quotes what the client sent, which may be 16 MiB."""
    data = msgspec.msgpack.encode({"type": "A" * 100_000})
    with structlog.testing.capture_logs() as logs:
        async with connected(front.path) as client:
            await client.send(HEADER.pack(MAGIC, FORMAT, 0, len(data)) + data)
            failed = await client.failed()
    [line] = logs
    assert len(line["detail"]) == len(failed.detail) == session.MAX_DETAIL_CHARACTERS


async def test_bytes_while_a_reply_is_pending_end_the_session(front: Front) -> None:
    """C3: one request at a time, also when the first takes long."""
    async with connected(front.path) as client:
        await client.say(m.Flush())
        await settled()
        await client.send(encode(m.Release(lease=1)))
        failed = await client.failed()
        assert "pending" in failed.detail
    await settled()
    assert front.ram_tier.gone == [1]
    assert front.ram_tier.calls == [m.Flush()]


async def test_a_request_in_one_piece_with_hello_is_refused(front: Front) -> None:
    """C2, C3: a client reads what the daemon speaks before it asks for anything."""
    client = fresh(front)
    await client.send(encode(HELLO) + encode(TAKE))
    failed = await client.failed()
    assert "hello was pending" in failed.detail
    client.close()
    assert front.ram_tier.calls == []


async def test_descriptors_from_a_client_are_closed(front: Front) -> None:
    """C3: a daemon accepts none, and none stays open."""
    async with connected(front.path) as client:
        gc.collect()  # what earlier tests left must not be closed in between
        before = len(os.listdir("/dev/fd"))
        await client.send(encode(TAKE), [0, 1, 2])
        failed = await client.failed()
        assert "3 descriptors" in failed.detail
        await settled()
        # The session's own socket is closed as well.
        assert len(os.listdir("/dev/fd")) == before - 1


async def test_another_major_version_is_told_plainly(front: Front) -> None:
    """C2: the client's user reads which side is older and what to do."""
    client = fresh(front)
    await client.send(encode(m.Hello(version=(9, 0))))
    failed = await client.failed()
    assert failed.reason == "version"
    assert "9.0" in failed.detail
    assert "install the same major version" in failed.detail
    client.close()
    await settled()
    assert front.endings() == {"version": 1}


# -- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", encode(HELLO)[:10]])
async def test_a_client_that_never_says_hello_is_closed(
    autojump_clock: trio.testing.MockClock, front: Front, data: bytes
) -> None:
    """C3: a connection without a Hello takes up its place for a bounded time."""
    client = fresh(front)
    if data:
        await client.send(data)
    failed = await client.failed()
    assert failed.reason == "hello-timeout"
    assert trio.current_time() >= session.HELLO_SECONDS
    client.close()
    await settled()
    assert front.ram_tier.gone == [1]


async def test_a_frame_that_is_never_finished_is_given_up(
    autojump_clock: trio.testing.MockClock, front: Front
) -> None:
    """C3: trickling bytes do not extend the deadline; being idle has none."""
    async with connected(front.path) as client:
        await trio.sleep(80_000)
        start = trio.current_time()
        for byte in encode(TAKE)[:20]:
            await client.send(bytes([byte]))
            await trio.sleep(1.4)
        failed = await client.failed()
        assert failed.reason == "frame-timeout"
        assert trio.current_time() - start == pytest.approx(session.FRAME_SECONDS, abs=1)
        await settled()
        assert front.ram_tier.gone == [1]


async def test_a_client_that_stops_reading_is_closed(
    autojump_clock: trio.testing.MockClock, make_front: FrontMaker
) -> None:
    """L4: output is bounded in bytes and in time, and others are served meanwhile."""
    large = m.Hit(lease=1, length=1, tier="ram", parts=(), schema=bytes(8 << 20))
    small = m.Length(length=0)
    fake = FakeRamTier(lambda call: (large, ()) if isinstance(call, m.Take) else (small, ()))
    async with (
        make_front(fake) as front,
        connected(front.path) as lazy,
        connected(front.path) as other,
    ):
        await lazy.say(TAKE)
        await settled()
        assert await other.ask(m.Peek(namespace="n", tokens=b"")) == m.Length(
            length=0, boot=fake.boot
        )
        assert fake.gone == []
        start = trio.current_time()
        await trio.sleep(session.SEND_SECONDS + 1)
        await settled()  # macOS closes in a thread
        assert fake.gone == [1]
        assert front.endings() == {"slow-reader": 1}
        assert trio.current_time() - start < session.SEND_SECONDS + 2


# -- the daemon's own mistakes --------------------------------------------------------------------


async def test_a_bug_ends_the_session_and_is_logged_with_its_stack(make_front: FrontMaker) -> None:
    """A reply that the table forbids costs one session, not the daemon; its client is told."""
    wrong = m.Length(length=1)
    fake = FakeRamTier(
        lambda request: (wrong, ()) if isinstance(request, (m.Take, m.Peek)) else None
    )
    async with (
        make_front(fake) as front,
        connected(front.path) as victim,
        connected(front.path) as other,
    ):
        with structlog.testing.capture_logs() as logs:
            await victim.say(TAKE)
            assert (await victim.failed()).reason == "internal"
        [error] = [entry for entry in logs if entry["log_level"] == "error"]
        assert error["exc_info"]
        assert error["session"] == 1
        await settled()
        assert front.endings() == {"internal": 1}
        assert fake.gone == [1]
        assert isinstance(await other.ask(m.Peek(namespace="n", tokens=b"")), m.Length)


async def test_a_reply_that_cannot_be_encoded_ends_the_session_with_failed(
    make_front: FrontMaker,
) -> None:
    """C3: the client hears that the daemon failed, not that the connection closed."""
    huge = m.Miss(reason="x" * limits.MAX_FRAME_BYTES, matched=0)
    async with (
        make_front(FakeRamTier(lambda _: (huge, ()))) as front,
        connected(front.path) as client,
    ):
        with structlog.testing.capture_logs():
            await client.say(TAKE)
            assert (await client.failed()).reason == "internal"


async def test_status_answers_whatever_its_sources_say(front: Front) -> None:
    """C5: a path that is no UTF-8, or a count beyond 64 bits, hides no other counter."""
    front.ram_tier.statistics_sources.update(
        daemon=lambda: {"socket": os.fsdecode(b"/tmp/\xff/s"), "pid": 7},
        restores=lambda: RestoreStatistics(1, 0, 1 << 70, 0.5, 0.5),
    )
    async with connected(front.path) as client:
        reply = await client.ask(m.Status())
    assert isinstance(reply, m.StatusReport)
    assert reply.report["daemon"] == {"socket": "/tmp/\ufffd/s", "pid": 7}
    assert reply.report["restores"]["bytes"] == (1 << 63) - 1
    assert reply.boot == FakeRamTier.boot


async def test_a_failed_from_ram_tier_reaches_the_client_and_ends_the_session(
    make_front: FrontMaker,
) -> None:
    """C3: RamTier refuses what only it can see, such as a lease of another session."""
    refusal = m.Failed(reason="protocol", detail="nothing to fetch from 9")
    fake = FakeRamTier(lambda _: (refusal, ()))
    async with make_front(fake) as front:
        async with connected(front.path) as client:
            await client.say(m.Fetch(of=9, first=0))
            failed = await client.failed()
            assert failed.detail == "nothing to fetch from 9"
        await settled()
        assert front.endings() == {"protocol": 1}
