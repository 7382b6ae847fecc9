"""The blocking client: `connect` returns a `Cache`, whose calls any thread of any process may make.

A `Cache` owns its pool of connections and its book of schemas. Every call is bounded by ``timeout``
(rule C4), and with ``fail_open`` a daemon that is absent, slow or broken costs a miss. mlx is used
only inside `take` and `put`, on the calling thread.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from prefixcached.client import arguments, lending, pins, results
from prefixcached.client.arguments import Tokens
from prefixcached.client.errors import PrefixCachedError
from prefixcached.client.pins import Pin
from prefixcached.client.pool import Pool, PoolStatistics
from prefixcached.client.schemas import SchemaBook
from prefixcached.client.seam import Adapter, MlxAdapter
from prefixcached.protocol import limits, messages, paths
from prefixcached.protocol.errors import UnsupportedTokensError
from prefixcached.protocol.messages import AnyRequest, Reply
from prefixcached.protocol.tokens import token_array

TIMEOUT_SECONDS: Final = 5.0
"""Default bound of a call: a prefill that the cache saves takes longer."""

UNSUPPORTED_TOKENS: Final = "unsupported-tokens"

T = TypeVar("T")


def connect(
    socket: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    fail_open: bool = True,
) -> "Cache":
    """Return a cache. Nothing is connected before the first call.

    Args:
        socket: The daemon's socket; by default what `PREFIXCACHED_SOCKET` names, else the user's.
        timeout: Seconds that one call may take, besides its ``wait``.
        fail_open: Turn every trouble with the daemon into a miss or a decline. False raises
            `PrefixCachedError` instead.

    Raises:
        TypeError, ValueError: An argument is unusable.
    """
    path = paths.socket_path() if socket is None else Path(socket).expanduser()
    if "\0" in str(path):
        raise ValueError("a socket's path cannot contain a NUL character")
    return Cache(path, timeout=timeout, fail_open=fail_open)


class Cache:
    """One shared prompt cache, as one process sees it. Use `connect`; it is a context manager.

    Safe to use from any thread and after a fork. Bad arguments raise TypeError or ValueError, and
    a closed cache `UseAfterClose`, also with ``fail_open``.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeout: float = TIMEOUT_SECONDS,
        fail_open: bool = True,
        adapter: Adapter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_seconds = arguments.seconds("timeout", timeout, positive=True)
        self._fail_open = fail_open
        self._adapter = MlxAdapter() if adapter is None else adapter
        self._pool = Pool(path, clock)
        self._schemas = SchemaBook()

    # -- take -----------------------------------------------------------------------------------

    def take(
        self,
        tokens: Tokens,
        *,
        namespace: str,
        session: str | None = None,
        wait: float = 0.0,
    ) -> results.Hit | results.Miss:
        """Return the KV of the longest known prefix of ``tokens`` that can be resumed (rule T1).

        Args:
            tokens: The prompt. A hit leaves at least its last token to be computed (rule T3).
            namespace: What the KV depends on beside the tokens: model, adapter, KV format.
            session: A name for the conversation (rule S1).
            wait: Seconds to wait, beyond ``timeout``, for a process that is computing this prefix
                right now (rule Q2).

        Returns:
            A `Hit`, which is true, or a `Miss`, which is false and says why.
        """
        arguments.namespace(namespace)
        arguments.label(session)
        arguments.seconds("wait", wait, positive=False)
        try:
            prompt = arguments.prompt(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return results.Miss(reason=UNSUPPORTED_TOKENS)
        request = messages.Take(namespace, prompt.tobytes(), session, wait)
        deadline = self._deadline(wait)
        return self._guard(
            lambda: lending.take(self._pool, self._schemas, self._adapter, request, deadline),
            lambda reason: results.Miss(reason=reason),
        )

    # -- put ------------------------------------------------------------------------------------

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
            attachments: Named tensors and JSON that belong to this very position (rule A1).
            minimum_length: Shortest prefix of this entry worth reusing (rule T6).

        Returns:
            `Stored`, which is true, or `Declined`, which is false and says why (rule P10).

        Raises:
            ValueError: The caches and tokens do not belong together, also with ``fail_open``
                (rule P1).
        """
        arguments.namespace(namespace)
        arguments.label(session)
        arguments.count("minimum_length", minimum_length)
        try:
            packed = token_array(tokens)
        except UnsupportedTokensError:
            return self._decline(UNSUPPORTED_TOKENS)
        if len(packed) > limits.MAX_TOKENS:
            return self._decline("too-large")
        if not len(packed):
            return self._decline("too-short")
        deadline = self._deadline()
        with contextlib.ExitStack() as context:
            try:
                snapshot = context.enter_context(self._adapter.snapshot(kv, packed, attachments))
            except Exception as error:
                reason = getattr(error, "reason", None)
                if isinstance(reason, str):
                    return self._decline(reason)
                raise
            offer = messages.Offer(
                namespace=namespace,
                tokens=packed[: snapshot.length].tobytes(),
                schema=b"",
                windows=snapshot.windows,
                checkpoint=snapshot.checkpoint,
                attachments=snapshot.attachments,
                minimum=minimum_length,
                label=session,
            )
            return self._guard(
                lambda: lending.put(self._pool, self._schemas, snapshot, offer, deadline),
                lambda reason: results.Declined(reason=reason),
            )

    # -- questions ------------------------------------------------------------------------------

    def peek(self, tokens: Tokens, *, namespace: str) -> int:
        """Return how many tokens `take` would reuse now, reading and changing nothing (rule T11).

        0 where it would miss, for whatever reason.
        """
        arguments.namespace(namespace)
        try:
            prompt = arguments.prompt(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return 0
        return self._ask_length(messages.Peek(namespace, prompt.tobytes()))

    def contains(self, tokens: Tokens, *, namespace: str) -> bool:
        """Return whether exactly these tokens are known and can be resumed at their end."""
        arguments.namespace(namespace)
        try:
            packed = token_array(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return False
        if not 0 < len(packed) <= limits.MAX_TOKENS:
            return False
        return self._ask_length(messages.Contains(namespace, packed.tobytes())) == len(packed)

    def stats(self) -> dict[str, Any]:
        """Return the daemon's statistics, by actor (rule C5); empty without a daemon."""

        def ask() -> dict[str, Any]:
            reply = self._request(messages.Status(), self._deadline())
            assert isinstance(reply, messages.StatusReport), "the connection admits nothing else"
            return reply.report

        return self._guard(ask, lambda _: {})

    def statistics(self) -> PoolStatistics:
        """Return what this client did: its connections and failures."""
        return self._pool.statistics()

    # -- housekeeping ---------------------------------------------------------------------------

    def prefetch(self, tokens: Tokens, *, namespace: str, session: str | None = None) -> Pin:
        """Bring what `take` would choose into RAM and keep it there (rules F1 to F4).

        Returns:
            A `Pin`, a context manager; its ``length`` is 0 where nothing was found.
        """
        arguments.namespace(namespace)
        arguments.label(session)
        try:
            prompt = arguments.prompt(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return Pin(reason=UNSUPPORTED_TOKENS)
        request = messages.Prefetch(namespace, prompt.tobytes(), session)
        return self._guard(
            lambda: pins.prefetch(self._pool, request, self._timeout_seconds),
            lambda reason: Pin(reason=reason),
        )

    def flush(self, timeout: float | None = None) -> results.Flushed:
        """Wait until all that is visible now is on SSD (rule P8), at most ``timeout`` seconds."""
        if timeout is not None:
            arguments.seconds("timeout", timeout, positive=True)

        def ask() -> results.Flushed:
            deadline = time.monotonic() + (timeout or self._timeout_seconds)
            reply = self._request(messages.Flush(arguments.seconds_until(deadline)), deadline)
            assert isinstance(reply, messages.Flushed), "the connection admits nothing else"
            return results.Flushed(
                written=reply.written,
                skipped=reply.skipped,
                failed=reply.failed,
                complete=reply.complete,
            )

        return self._guard(ask, lambda reason: results.Flushed(reason=reason))

    def clear(self, namespace: str | None = None) -> results.Cleared:
        """Forget one namespace, or everything, for all processes and for good (rule D11)."""
        if namespace is not None:
            arguments.namespace(namespace)

        def ask() -> results.Cleared:
            reply = self._request(messages.Clear(namespace), self._deadline())
            assert isinstance(reply, messages.Cleared), "the connection admits nothing else"
            return results.Cleared(images=reply.images, ram_bytes=reply.ram_bytes)

        return self._guard(ask, lambda reason: results.Cleared(reason=reason))

    def close(self) -> None:
        """Close all connections. Idempotent; calls under way in other threads end first."""
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

    def _ask_length(self, request: messages.Peek | messages.Contains) -> int:
        def ask() -> int:
            reply = self._request(request, self._deadline())
            assert isinstance(reply, messages.Length), "the connection admits nothing else"
            return reply.length

        return self._guard(ask, lambda _: 0)

    def _request(self, request: AnyRequest, deadline: float) -> Reply:
        with self._pool.lend(deadline) as wire:
            reply, _ = wire.request(request, deadline)
            return reply

    def _guard(self, call: Callable[[], T], otherwise: Callable[[str], T]) -> T:
        """Make ``call``; with ``fail_open`` its failure becomes ``otherwise(reason)``."""
        try:
            return call()
        except PrefixCachedError as error:
            self._pool.count_refusal(error.reason)
            if not self._fail_open:
                raise
            return otherwise(error.reason)

    def _decline(self, reason: str) -> results.Declined:
        self._pool.count_refusal(reason)
        return results.Declined(reason=reason)

    def _deadline(self, wait: float = 0.0) -> float:
        return time.monotonic() + self._timeout_seconds + wait
