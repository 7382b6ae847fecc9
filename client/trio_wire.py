"""One connection to the daemon for a Trio task, and the pool of such connections."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

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

THREADS: Final = 8
"""Copies of one cache at a time, which have helpers of their own: more share the same memory bus.
Not Trio's own threads: the program may keep all of those busy for longer than a call may take."""

T = TypeVar("T")


class TrioWire(BaseWire):
    """A wire of one task at a time. A cancelled call leaves it half-way: then it must be closed.

    Args:
        path: As `BaseWire`'s.
        starter: As `BaseWire`'s.
        threads: Shared by all wires of a pool.
    """

    def __init__(
        self,
        path: Path,
        starter: Starter | None = None,
        threads: trio.CapacityLimiter | None = None,
    ) -> None:
        super().__init__(path, starter)
        self._threads = trio.CapacityLimiter(THREADS) if threads is None else threads
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
                failure = await self.in_thread(
                    starter.start, deadline, deadline=deadline, abandon_on_cancel=True
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

    async def in_thread(
        self,
        work: Callable[..., T],
        *arguments: Any,
        deadline: float,
        abandon_on_cancel: bool = False,
    ) -> T:
        """Return what ``work`` returns in a thread, once one is free.

        Args:
            work: Ends by itself about at the deadline.
            arguments: Of ``work``.
            deadline: When a free thread is not waited for any longer.
            abandon_on_cancel: Whether a cancelled call leaves the thread alone.

        Raises:
            CallTimeout: No thread was free at the deadline.
        """
        limiter = _BoundedLimiter(self._threads, self._check_time(deadline))
        return await trio.to_thread.run_sync(
            work,
            *arguments,
            abandon_on_cancel=abandon_on_cancel,
            # Trio takes all that acts like one.
            limiter=cast("trio.CapacityLimiter", limiter),
        )

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


class _BoundedLimiter:
    """A limiter for one call, which raises `CallTimeout` after so many ``seconds``."""

    def __init__(self, limiter: trio.CapacityLimiter, seconds: float) -> None:
        self._limiter = limiter
        self._seconds = seconds

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        with trio.move_on_after(self._seconds):
            await self._limiter.acquire_on_behalf_of(borrower)
            return
        raise CallTimeout("no thread was free to work in at the deadline")

    def release_on_behalf_of(self, borrower: object) -> None:
        self._limiter.release_on_behalf_of(borrower)


class TrioPool(BasePool[TrioWire]):
    """Lends wires to tasks."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        starter: Starter | None = None,
    ) -> None:
        threads = trio.CapacityLimiter(THREADS)
        super().__init__(path, clock, functools.partial(TrioWire, starter=starter, threads=threads))

    async def take_out(self, deadline: float) -> TrioWire:
        """Return a greeted wire, for a `Loan`. Errors as `Pool`'s."""
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
