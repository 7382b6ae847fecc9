"""One connection to the daemon for a Trio task, and the pool of such connections."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import trio

from prefixcached.client.errors import CallTimeout
from prefixcached.client.pool import BasePool
from prefixcached.client.starting import Starter
from prefixcached.client.wire import (
    ANCILLARY_BYTES,
    CONNECT_RETRY_SECONDS,
    RECEIVE_BYTES,
    RECEIVE_FLAGS,
    BaseWire,
    hello,
)
from prefixcached.protocol.messages import AnyRequest, Reply


class TrioWire(BaseWire):
    """A wire of one task at a time. A cancelled call leaves it half-way: then it must be closed."""

    def __init__(self, path: Path, starter: Starter | None = None) -> None:
        super().__init__(path, starter)
        self._trio_socket = trio.socket.from_stdlib_socket(self._socket)

    async def open(self, deadline: float) -> None:
        """Connect, and exchange versions and capabilities. Errors as `Wire.open`."""
        while True:
            self._check_time(deadline, waiting=True)
            try:
                # A Unix socket connects at once or not at all, and Trio would take a full queue
                # of new connections for one that is on its way.
                self._socket.connect(str(self._path))
                break
            except BlockingIOError:
                await trio.sleep(CONNECT_RETRY_SECONDS)
            except OSError as error:
                starter = self._take_starter(error)
                if starter is None:
                    self._fail(self._not_connected(error), error)
                failure = await trio.to_thread.run_sync(
                    starter.start, deadline, abandon_on_cancel=True
                )
                if failure:
                    self._fail(self._not_connected(error, failure), error)
        await self.request(hello(), deadline)

    async def request(self, message: AnyRequest, deadline: float) -> tuple[Reply, list[int]]:
        """Send ``message`` and wait for its one reply. Returns and errors as `Wire.request`."""
        answer = None
        with trio.move_on_after(self._check_time(deadline)):
            await self._send(self._encode(message))
            while answer is None:
                await self._receive()
                answer = self._reply_to(message)
        if answer is None:
            self._fail(CallTimeout(f"the daemon at {self._path} is too slow"))
        return answer

    async def _send(self, data: bytes) -> None:
        unsent = memoryview(data)
        try:
            while unsent:
                unsent = unsent[await self._trio_socket.send(unsent) :]
        except OSError as error:
            self._fail(self._explain(error, "sending"), error)

    async def _receive(self) -> None:
        try:
            data, ancillary, flags, _ = await self._trio_socket.recvmsg(
                RECEIVE_BYTES, ANCILLARY_BYTES, RECEIVE_FLAGS
            )
        except OSError as error:
            self._fail(self._explain(error, "waiting for a reply"), error)
        # No checkpoint in between: what was received is never lost.
        self._take_in(data, ancillary, flags)


class TrioPool(BasePool[TrioWire]):
    """Lends wires to tasks."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        starter: Starter | None = None,
    ) -> None:
        super().__init__(path, clock, functools.partial(TrioWire, starter=starter))

    async def take_out(self, deadline: float) -> TrioWire:
        """Return a greeted wire, which is the caller's until `give_back`. Errors as `Pool`'s."""
        wire, is_new = self.reserve()
        if is_new:
            try:
                await wire.open(deadline)
            except BaseException:
                wire.close()
                self.give_back(wire)
                raise
            self.count_opened()
        return wire
