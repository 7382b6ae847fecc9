"""The client for Trio programs: the calls of the blocking client, to be awaited.

    async with prefixcached.client.trio.connect() as cache:
        result = await cache.take(tokens, namespace="demo", wait=30.0)

It is for one Trio run. mlx is touched on the task's own thread alone, since mlx's streams belong to
threads: caches and arrays are looked at and made inline. Between that, copying many bytes waits in
a thread that sees memory and descriptors only, so other tasks go on; until such a call returns
they must leave its arrays alone.

A call that is cancelled closes its connection. With it end its lease, its unfinished put, and the
claims of the task; descriptors are closed at once, and a copy that is under way ends first.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import trio

from prefixcached.client import arguments, calls, programs, results
from prefixcached.client.arguments import Tokens
from prefixcached.client.calls import TIMEOUT_SECONDS, Calls
from prefixcached.client.errors import PrefixCachedError
from prefixcached.client.loans import Loan
from prefixcached.client.pins import Pin
from prefixcached.client.programs import Ask, Copy, Program, Step
from prefixcached.client.seam import Adapter
from prefixcached.client.starting import Starter, is_wanted
from prefixcached.client.trio_wire import TrioPool, TrioWire

INLINE_BYTES: Final = 1 << 20
"""Less than this is copied inline: it takes less time than a thread's round trip."""

T = TypeVar("T")


def connect(
    socket: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    fail_open: bool = True,
    minimum_gain: float = 0.0,
    start: bool | None = None,
) -> "Cache":
    """Return a cache for this Trio run. Arguments as `prefixcached.client.connect`."""
    path = calls.resolve_socket(socket)
    return Cache(
        path,
        timeout=timeout,
        fail_open=fail_open,
        minimum_gain=minimum_gain,
        starter=Starter(path) if is_wanted(start) else None,
    )


class Cache:
    """One shared prompt cache, as one Trio program sees it. Use `connect`.

    An asynchronous context manager. Any number of tasks may call it at once. Each call is described
    where the blocking `prefixcached.client.Cache` has it; every one is a checkpoint but for
    `statistics`, `note_prefill` and `close`.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeout: float = TIMEOUT_SECONDS,
        fail_open: bool = True,
        minimum_gain: float = 0.0,
        starter: Starter | None = None,
        adapter: Adapter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fail_open = fail_open
        self._pool = TrioPool(path, clock, starter)
        self._calls = Calls(
            self._pool,
            trio.lowlevel.current_task,
            timeout=timeout,
            adapter=adapter,
            minimum_gain=minimum_gain,
        )

    # -- prefixes -------------------------------------------------------------------------------

    async def take(
        self,
        tokens: Tokens,
        *,
        namespace: str,
        session: str | None = None,
        wait: float = 0.0,
    ) -> results.Hit | results.Miss:
        """Return the KV of the longest known prefix that can be resumed (rule T1)."""
        arguments.seconds("wait", wait, positive=False)
        program = self._calls.take(tokens, namespace, session, wait)
        return await self._run(program, lambda reason: results.Miss(reason=reason), wait=wait)

    async def put(
        self,
        tokens: Tokens,
        kv: list[Any],
        *,
        namespace: str,
        session: str | None = None,
        attachments: Any = None,
        minimum_length: int = 0,
    ) -> results.Stored | results.Declined:
        """Share the KV of ``tokens`` with every process of this user.

        No task may change ``kv`` meanwhile.
        """
        program = self._calls.put(tokens, kv, namespace, session, attachments, minimum_length)
        return await self._run(program, lambda reason: results.Declined(reason=reason))

    async def peek(self, tokens: Tokens, *, namespace: str) -> int:
        """Return how many tokens `take` would reuse now (rule T11)."""
        return await self._run(self._calls.peek(tokens, namespace), lambda _: 0)

    async def contains(self, tokens: Tokens, *, namespace: str) -> bool:
        """Return whether exactly these tokens are known and can be resumed at their end."""
        return await self._run(self._calls.contains(tokens, namespace), lambda _: False)

    async def prefetch(self, tokens: Tokens, *, namespace: str, session: str | None = None) -> Pin:
        """Bring what `take` would choose into RAM and keep it there (rules F1 to F4).

        The `Pin` is a plain context manager: releasing it waits for nothing.
        """
        program = self._calls.prefetch(tokens, namespace, session)
        return await self._run(program, lambda reason: Pin(reason=reason))

    async def close_session(self, session: str, namespace: str | None = None) -> int:
        """Forget what a conversation used last (rule S4)."""
        return await self._run(self._calls.close_session(session, namespace), lambda _: 0)

    # -- objects --------------------------------------------------------------------------------

    async def put_object(
        self, key: str, tensors: Mapping[str, Any], metadata: Any = None, *, namespace: str
    ) -> results.Stored | results.Declined:
        """Share an immutable set of arrays under ``key`` (rules O1, P3)."""
        program = self._calls.put_object(key, tensors, metadata, namespace)
        return await self._run(program, lambda reason: results.Declined(reason=reason))

    async def take_object(self, key: str, *, namespace: str) -> results.ObjectHit | results.Miss:
        """Return the arrays that were put under ``key``, bit for bit."""
        program = self._calls.take_object(key, namespace)
        return await self._run(program, lambda reason: results.Miss(reason=reason))

    # -- housekeeping ---------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """Return the daemon's statistics, by actor (rule C5); empty without a daemon."""
        return await self._run(self._calls.stats(), lambda _: {})

    def statistics(self) -> results.CacheStatistics:
        """Return what this client did."""
        return self._calls.statistics()

    def note_prefill(self, tokens: int, seconds: float, *, namespace: str) -> None:
        """Tell how long computing ``tokens`` took, for ``minimum_gain`` and slow restores."""
        self._calls.note_prefill(tokens, seconds, namespace)

    async def flush(
        self,
        timeout: float | None = None,  # noqa: ASYNC109, the interface of the blocking client
    ) -> results.Flushed:
        """Wait until all that is visible now is on SSD (rule P8), at most ``timeout`` seconds."""
        if timeout is not None:
            arguments.seconds("timeout", timeout, positive=True)
        return await self._run(
            self._calls.flush(), lambda reason: results.Flushed(reason=reason), timeout=timeout
        )

    async def clear(self, namespace: str | None = None) -> results.Cleared:
        """Forget one namespace, or everything, for all processes and for good (rule D11)."""
        return await self._run(
            self._calls.clear(namespace), lambda reason: results.Cleared(reason=reason)
        )

    def close(self) -> None:
        """End all claims and idle connections; those in use end with their calls. Idempotent."""
        self._calls.claims.end_all()
        self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<trio Cache at {str(self._pool.path)!r}>"

    # -- inside ---------------------------------------------------------------------------------

    async def _run(
        self,
        program: Program[T],
        otherwise: Callable[[str], T],
        *,
        timeout: float | None = None,  # noqa: ASYNC109, every program has a deadline of its own
        wait: float = 0.0,
    ) -> T:
        """Carry ``program`` out; with `fail_open` its failure becomes ``otherwise(reason)``."""
        try:
            await trio.lowlevel.checkpoint()
            return await self._carry_out(program, timeout or self._calls.timeout_seconds, wait)
        except PrefixCachedError as error:
            self._pool.count_refusal(error.reason)
            if not self._fail_open:
                raise
            return otherwise(error.reason)
        finally:
            program.close()

    async def _carry_out(
        self,
        program: Program[T],
        timeout: float,  # noqa: ASYNC109, as `_run`
        wait: float,
    ) -> T:
        """As `prefixcached.client.Cache._carry_out`."""
        try:
            step = next(program)
        except StopIteration as end:
            answered: T = end.value
            return answered
        # Not before: what mlx had still to compute of the caller's KV is not the daemon's time.
        found_by = time.monotonic() + timeout
        loan = self._calls.claims.own_loan() if programs.is_take(step) else None
        if loan is None:
            loan = Loan(self._pool, await self._pool.take_out(found_by))
        try:
            return await _converse(program, step, loan, found_by + wait)
        except BaseException:
            # Cancelled or failed half-way: must not be continued by the next call.
            loan.wire.close()
            raise
        finally:
            loan.end()


async def _converse(program: Program[T], step: Step, loan: Loan, deadline: float) -> T:
    """As `programs.run`, but waiting lets other tasks go on."""
    wire = loan.wire
    assert isinstance(wire, TrioWire), "a cache for Trio has wires for Trio"
    try:
        while True:
            outcome: Any = None
            try:
                match step:
                    case Ask(message):
                        outcome = await wire.request(programs.timed(message, deadline), deadline)
                    case Copy() if step.nbytes >= INLINE_BYTES:
                        await wire.in_thread(programs.copy, step, loan, deadline, deadline=deadline)
                    case Copy():
                        programs.copy(step, loan, deadline)
                    case _:
                        outcome = programs.at_once(step, loan)
            except BaseException as error:  # noqa: BLE001, the program decides
                step = program.throw(error)
            else:
                step = program.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
