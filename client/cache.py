"""The blocking client: `connect` returns a `Cache`, whose calls any thread of any process may make.

A `Cache` owns its pool of connections. Every call is bounded by ``timeout`` (rule C4), and with
``fail_open`` a daemon that is absent, slow or broken costs a miss. mlx is used only inside the
calls that move arrays, on the calling thread.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from prefixcached.client import arguments, calls, programs, results
from prefixcached.client.arguments import Tokens
from prefixcached.client.calls import TIMEOUT_SECONDS, Calls
from prefixcached.client.errors import PrefixCachedError
from prefixcached.client.loans import Loan
from prefixcached.client.pins import Pin
from prefixcached.client.pool import Pool
from prefixcached.client.programs import Program
from prefixcached.client.seam import Adapter
from prefixcached.client.starting import Starter, is_wanted

T = TypeVar("T")


def connect(
    socket: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    fail_open: bool = True,
    minimum_gain: float = 0.0,
    start: bool | None = None,
) -> "Cache":
    """Return a cache. Nothing is connected before the first call.

    Args:
        socket: The daemon's socket; by default what `PREFIXCACHED_SOCKET` names, else the user's.
        timeout: Seconds that one call may take, besides its ``wait``.
        fail_open: Turn every trouble with the daemon into a miss or a decline. False raises
            `PrefixCachedError` instead.
        minimum_gain: Seconds that restoring a prefix must save over computing it, by what this
            client measured of both; else `take` gives a miss, "no-gain". 0 restores every hit.
        start: Start the daemon, detached, where none runs and no service is installed; by default
            what `PREFIXCACHED_START` says, else no. Within ``timeout``; a start that fails costs a
            miss.

    Raises:
        TypeError, ValueError: An argument is unusable.
    """
    path = calls.resolve_socket(socket)
    return Cache(
        path,
        timeout=timeout,
        fail_open=fail_open,
        minimum_gain=minimum_gain,
        starter=Starter(path) if is_wanted(start) else None,
    )


class Cache:
    """One shared prompt cache, as one process sees it. Use `connect`; it is a context manager.

    Safe to use from any thread and after a fork (mlx itself is not: a child forked after its
    parent used mlx must not take or put). Bad arguments raise TypeError or ValueError, and
    a closed cache `UseAfterClose`, also with ``fail_open``.
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
        self._pool = Pool(path, clock, starter)
        self._calls = Calls(
            self._pool,
            threading.current_thread,
            timeout=timeout,
            adapter=adapter,
            minimum_gain=minimum_gain,
        )

    # -- prefixes -------------------------------------------------------------------------------

    def take(
        self,
        tokens: Tokens,
        *,
        namespace: str,
        session: str | None = None,
        wait: float = 0.0,
    ) -> results.Hit | results.Miss:
        """Return the KV of the longest known prefix of ``tokens`` that can be resumed (rule T1).

        Where much is left to compute, the result makes this client the claimant of the prompt:
        other processes may wait for what it will `put`. Who does not compute it calls
        `drop_claim` on the result, or lets go of it (rule Q1).

        Args:
            tokens: The prompt. A hit leaves at least its last token to be computed (rule T3).
            namespace: What the KV depends on beside the tokens: model, adapter, KV format.
            session: A name for the conversation (rule S1).
            wait: Seconds to wait, beyond ``timeout``, for a process that is computing this prefix
                right now (rule Q2).

        Returns:
            A `Hit`, which is true, or a `Miss`, which is false and says why.
        """
        arguments.seconds("wait", wait, positive=False)
        program = self._calls.take(tokens, namespace, session, wait)
        return self._run(program, lambda reason: results.Miss(reason=reason), wait=wait)

    def put(
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

        Args:
            tokens: What ``kv`` was computed from. Tokens beyond its offset are not stored.
            kv: The model's caches, unchanged by this call and not kept.
            namespace: As for `take`; the very same, or nothing will be found.
            session: A name for the conversation (rule S1).
            attachments: Named tensors and JSON that belong to this very position (rule A1), as
                `prefixcached.client.kv.Attachment` by name.
            minimum_length: Shortest prefix of this entry worth reusing (rule T6).

        Returns:
            `Stored`, which is true, or `Declined`, which is false and says why (rule P10).

        Raises:
            ValueError: The caches and tokens do not belong together, also with ``fail_open``
                (rule P1).
        """
        program = self._calls.put(tokens, kv, namespace, session, attachments, minimum_length)
        return self._run(program, lambda reason: results.Declined(reason=reason))

    def peek(self, tokens: Tokens, *, namespace: str) -> int:
        """Return how many tokens `take` would reuse now, reading and changing nothing (rule T11).

        0 where it would miss, for whatever reason.
        """
        return self._run(self._calls.peek(tokens, namespace), lambda _: 0)

    def contains(self, tokens: Tokens, *, namespace: str) -> bool:
        """Return whether exactly these tokens are known and can be resumed at their end."""
        return self._run(self._calls.contains(tokens, namespace), lambda _: False)

    def prefetch(self, tokens: Tokens, *, namespace: str, session: str | None = None) -> Pin:
        """Bring what `take` would choose into RAM and keep it there (rules F1 to F4).

        Returns:
            A `Pin`, a context manager; its ``length`` is 0 where nothing was found.
        """
        program = self._calls.prefetch(tokens, namespace, session)
        return self._run(program, lambda reason: Pin(reason=reason))

    def close_session(self, session: str, namespace: str | None = None) -> int:
        """Forget what a conversation used last, in every namespace when that is None (rule S4).

        Returns:
            In how many namespaces the daemon knew it.
        """
        return self._run(self._calls.close_session(session, namespace), lambda _: 0)

    # -- objects --------------------------------------------------------------------------------

    def put_object(
        self, key: str, tensors: Mapping[str, Any], metadata: Any = None, *, namespace: str
    ) -> results.Stored | results.Declined:
        """Share an immutable set of arrays under ``key``, replacing an older one (rules O1, P3).

        Args:
            key: Its name, exactly; a digest of what the arrays were computed from, for example.
            tensors: Arrays of mlx or numpy, of any shape, by name. Not kept.
            metadata: What `json` can write.
            namespace: What the arrays depend on beside the key, such as the model.

        Returns:
            `Stored`, or `Declined` with a reason of rule P10.

        Raises:
            TypeError, ValueError: Something cannot be stored, also with ``fail_open``.
        """
        program = self._calls.put_object(key, tensors, metadata, namespace)
        return self._run(program, lambda reason: results.Declined(reason=reason))

    def take_object(self, key: str, *, namespace: str) -> results.ObjectHit | results.Miss:
        """Return the arrays that were put under ``key``, bit for bit, as copies of one's own.

        Returns:
            An `ObjectHit`, which is true, or a `Miss`, which is false and says why.
        """
        program = self._calls.take_object(key, namespace)
        return self._run(program, lambda reason: results.Miss(reason=reason))

    # -- housekeeping ---------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the daemon's statistics, by actor (rule C5); empty without a daemon."""
        return self._run(self._calls.stats(), lambda _: {})

    def statistics(self) -> results.CacheStatistics:
        """Return what this client did: its connections, failures, claims and restores."""
        return self._calls.statistics()

    def note_prefill(self, tokens: int, seconds: float, *, namespace: str) -> None:
        """Tell how long computing ``tokens`` took, for ``minimum_gain`` and slow restores."""
        self._calls.note_prefill(tokens, seconds, namespace)

    def flush(self, timeout: float | None = None) -> results.Flushed:
        """Wait until all that is visible now is on SSD (rule P8), at most ``timeout`` seconds."""
        if timeout is not None:
            arguments.seconds("timeout", timeout, positive=True)
        return self._run(
            self._calls.flush(), lambda reason: results.Flushed(reason=reason), timeout=timeout
        )

    def clear(self, namespace: str | None = None) -> results.Cleared:
        """Forget one namespace, or everything, for all processes and for good (rule D11)."""
        return self._run(
            self._calls.clear(namespace), lambda reason: results.Cleared(reason=reason)
        )

    def close(self) -> None:
        """End all claims and connections. Idempotent; calls under way in other threads end first.

        Pins are released by their owners.
        """
        self._calls.claims.end_all()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Cache at {str(self._pool.path)!r}>"

    # -- inside ---------------------------------------------------------------------------------

    def _run(
        self,
        program: Program[T],
        otherwise: Callable[[str], T],
        *,
        timeout: float | None = None,
        wait: float = 0.0,
    ) -> T:
        """Carry ``program`` out; with `fail_open` its failure becomes ``otherwise(reason)``."""
        try:
            return self._carry_out(program, timeout or self._calls.timeout_seconds, wait)
        except PrefixCachedError as error:
            self._pool.count_refusal(error.reason)
            if not self._fail_open:
                raise
            return otherwise(error.reason)
        finally:
            program.close()

    def _carry_out(self, program: Program[T], timeout: float, wait: float) -> T:
        """Carry ``program`` out, over a connection that is there within ``timeout``.

        A daemon that is not there must not be waited for: ``wait`` is for a prefill.
        """
        try:
            step = next(program)
        except StopIteration as end:
            answered: T = end.value
            return answered
        # From here on: what mlx had still to compute of the caller's KV is not the daemon's time.
        found_by = time.monotonic() + timeout
        loan = self._calls.claims.own_loan() if programs.is_take(step) else None
        if loan is None:
            loan = Loan(self._pool, self._pool.take_out(found_by))
        try:
            return programs.run(program, step, loan, found_by + wait)
        except BaseException:
            # A half-done conversation must not be continued by the next call.
            loan.wire.close()
            raise
        finally:
            loan.end()
