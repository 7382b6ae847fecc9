"""The listener: who gets a session, who does not, and what a shortage of descriptors does."""

import errno
import gc
import os
import resource
import socket
from collections.abc import Iterator

import pytest
import structlog.testing
import trio
import trio.testing

from prefixcached.daemon.listener import ACCEPT_PAUSE_SECONDS
from prefixcached.protocol import messages as m
from tests.daemon.clients import HELLO, Client, connected
from tests.daemon.conftest import Front, FrontMaker
from tests.daemon.fakes import FakeRamTier


def fresh(front: Front) -> Client:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(front.path))
    return Client(sock)


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.02)


async def test_the_listener_counts_its_sessions(front: Front) -> None:
    """C5: accepted, current, and how the others ended."""
    async with connected(front.path), connected(front.path):
        assert front.listener.statistics().current == 2
    await settled()
    found = front.listener.statistics()
    assert (found.accepted, found.current, found.accept_pauses) == (2, 0, 0)
    assert found.endings["closed"] == 2
    assert set(found.refused.values()) == {0}


async def test_a_listener_moves_to_another_socket_and_keeps_its_sessions(front: Front) -> None:
    """C4: who is connected notices nothing, and who comes is served."""
    async with connected(front.path) as client:
        front.path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(front.path))
            other.listen()
            await front.listener.move_to(other)
            async with connected(front.path) as newcomer:
                assert isinstance(await newcomer.ask(m.Clear()), m.Cleared)
                assert isinstance(await client.ask(m.Clear()), m.Cleared)
            front.scope.cancel()
            await settled()


async def test_a_process_of_another_user_is_closed_before_a_byte_is_read(
    make_front: FrontMaker,
) -> None:
    """C1: the kernel's word on who it is comes before anything it says."""
    fake = FakeRamTier()
    async with make_front(fake, user=os.getuid() + 1) as front:
        client = fresh(front)
        await client.ended()
        client.close()
        assert front.listener.statistics().refused["other-user"] == 1
        assert front.listener.statistics().accepted == 0
        assert fake.heard == []


async def test_connections_beyond_the_limit_are_told_so(make_front: FrontMaker) -> None:
    """C3: the number of connections is bounded; a place that is given up is free again."""
    async with make_front(max_connections=2) as front:
        async with connected(front.path), connected(front.path):
            client = fresh(front)
            failed = await client.failed()
            assert failed.reason == "too-many-connections"
            assert failed.detail.startswith("2 connections")
            client.close()
            assert front.listener.statistics().refused["too-many-connections"] == 1
        await settled()
        async with connected(front.path) as client:
            assert isinstance(await client.ask(m.Clear()), m.Cleared)


def descriptors_left() -> list[int]:
    """Take up every descriptor that the limit still allows."""
    taken: list[int] = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    return taken


@pytest.fixture
def descriptor_limit() -> Iterator[tuple[int, int]]:
    """The limit, put back at the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_out_of_descriptors_accepting_pauses_and_resumes(
    autojump_clock: trio.testing.MockClock, front: Front, descriptor_limit: tuple[int, int]
) -> None:
    """FIELD 3: a shortage is waited out; the sessions that run go on."""
    async with connected(front.path) as early:
        late = fresh(front)  # in the backlog, since the listener has not had its turn
        highest = max(int(name) for name in os.listdir("/dev/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, descriptor_limit[1]))
        filling = descriptors_left()
        with structlog.testing.capture_logs() as logs:
            await trio.sleep(3.5 * ACCEPT_PAUSE_SECONDS)
        assert front.listener.statistics().accept_pauses == 4
        assert [entry["log_level"] for entry in logs] == ["warning"] * 4
        assert isinstance(await early.ask(m.Clear()), m.Cleared)
        for descriptor in filling:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptor_limit)
        assert isinstance(await late.ask(HELLO), m.Welcome)
        late.close()


async def test_many_sessions_leave_no_descriptor_behind(front: Front) -> None:
    """C3: good and bad ends alike close what they opened."""
    async with connected(front.path) as client:
        await client.ask(m.Clear())
        gc.collect()  # what earlier tests left must not be closed in between
        before = len(os.listdir("/dev/fd"))
        for number in range(30):
            async with connected(front.path) as other:
                if number % 3 == 0:
                    await other.send(b"garbage!", [0, 1])
                elif number % 3 == 1:
                    await other.say(m.Flush())
        await settled()
        assert len(os.listdir("/dev/fd")) == before
        assert sorted(front.ram_tier.gone) == list(range(2, 32))
