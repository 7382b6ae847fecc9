"""A listener with a fake RamTier behind it, in the test's own event loop."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

from prefixcached.daemon.listener import Listener
from prefixcached.daemon.session import SessionSettings
from prefixcached.daemon.socket_file import SocketFile
from tests.daemon.fakes import FakeRamTier


class Front:
    """What stands between clients and RamTier, running."""

    def __init__(self, path: Path, ram_tier: FakeRamTier, listener: Listener) -> None:
        self.path = path
        self.ram_tier = ram_tier
        self.listener = listener
        self.scope = trio.CancelScope()

    def endings(self) -> dict[str, int]:
        """How sessions ended, without the kinds that did not occur."""
        return {kind: count for kind, count in self.listener.statistics().endings.items() if count}

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            await self.listener.run(task_status=task_status)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory whose path leaves room for a socket's name."""
    with TemporaryDirectory(prefix="pfxc-") as name:
        yield Path(name)


FrontMaker = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def make_front(directory: Path) -> FrontMaker:
    """Run a front with other arguments than the usual ones."""

    @asynccontextmanager
    async def make(
        ram_tier: FakeRamTier | None = None,
        *,
        max_connections: int = 100,
        user: int | None = None,
    ) -> AsyncIterator[Front]:
        fake = ram_tier or FakeRamTier()
        settings = SessionSettings(boot=fake.boot, daemon="prefixcached test")
        with SocketFile(directory / "s") as socket_file:
            listener = Listener(
                socket_file.socket, fake.mailbox, settings, max_connections, user=user
            )
            front = Front(directory / "s", fake, listener)
            async with trio.open_nursery() as nursery:
                await nursery.start(fake.run)
                await nursery.start(front.run)
                yield front
                nursery.cancel_scope.cancel()

    return make


@pytest.fixture
async def front(make_front: FrontMaker) -> AsyncIterator[Front]:
    """The usual front."""
    async with make_front() as made:
        yield made
