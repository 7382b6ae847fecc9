"""Every call of a cache as a program: what the blocking and the Trio client have in common.

`Calls` owns what one cache knows between calls: schemas, claims, measured rates. It neither waits
nor connects; `Cache` and `prefixcached.client.trio.Cache` carry its programs out and turn failures
into results.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from prefixcached.client import arguments, lending, objects, pins, results
from prefixcached.client.arguments import Tokens
from prefixcached.client.claims import ClaimBook
from prefixcached.client.gain import GainMeter
from prefixcached.client.pins import Pin
from prefixcached.client.pool import BasePool
from prefixcached.client.programs import Program, ask
from prefixcached.client.schemas import SchemaBook
from prefixcached.client.seam import Adapter, MlxAdapter, Snapshot
from prefixcached.client.wire import BaseWire
from prefixcached.protocol import limits, messages, paths
from prefixcached.protocol.errors import UnsupportedTokensError
from prefixcached.protocol.tokens import TokenArray, token_array

TIMEOUT_SECONDS: Final = 5.0
"""Default bound of a call: a prefill that the cache saves takes longer."""

UNSUPPORTED_TOKENS: Final = "unsupported-tokens"

W = TypeVar("W", bound=BaseWire)
T = TypeVar("T")


def resolve_socket(socket: Any) -> Path:
    """Return the daemon's socket: ``socket``, or what the environment or the platform names.

    Raises:
        ValueError: It cannot be a path.
    """
    path = paths.socket_path() if socket is None else paths.expanded(socket)
    if "\0" in str(path):
        raise ValueError("a socket's path cannot contain a NUL character")
    return path


class Calls(Generic[W]):
    """The programs of one cache.

    Args:
        pool: Its connections.
        owner: Returns the running thread or task, whose claims share a connection.
        timeout: Seconds that a call may take, besides its ``wait``.
        adapter: Knows the caches; by default mlx-lm's.
        minimum_gain: Seconds that a hit must save; 0 restores every hit.

    Raises:
        TypeError, ValueError: An argument is unusable.
    """

    def __init__(
        self,
        pool: BasePool[W],
        owner: Callable[[], object],
        *,
        timeout: float,
        adapter: Adapter | None,
        minimum_gain: float,
    ) -> None:
        self.timeout_seconds = arguments.seconds("timeout", timeout, positive=True)
        self.claims = ClaimBook(owner)
        self._pool = pool
        self._adapter = MlxAdapter() if adapter is None else adapter
        self._schemas = SchemaBook()
        self._gain = GainMeter(arguments.seconds("minimum_gain", minimum_gain, positive=False))

    def statistics(self) -> results.CacheStatistics:
        """Return what this client did."""
        return results.CacheStatistics(
            **msgspec.structs.asdict(self._pool.statistics()),
            claims=self.claims.count,
            restores_skipped=self._gain.skipped,
            slow_restores=self._gain.slow,
        )

    def note_prefill(self, tokens: int, seconds: float, namespace: str) -> None:
        """Learn how long computing takes."""
        arguments.namespace(namespace)
        arguments.count("tokens", tokens)
        arguments.seconds("seconds", seconds, positive=False)
        self._gain.prefilled(namespace, tokens, seconds)

    # -- prefixes -------------------------------------------------------------------------------

    def take(
        self, tokens: Tokens, namespace: str, session: str | None, wait: float
    ) -> Program[results.Hit | results.Miss]:
        """See `Cache.take`."""
        arguments.namespace(namespace)
        arguments.label(session)
        try:
            prompt = arguments.prompt(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return results.Miss(reason=UNSUPPORTED_TOKENS)
        request = messages.Take(namespace, prompt.tobytes(), session, wait)
        return (
            yield from lending.take(request, self._schemas, self._adapter, self.claims, self._gain)
        )

    def put(
        self,
        tokens: Tokens,
        kv: list[Any],
        namespace: str,
        session: str | None,
        attachments: Any,
        minimum_length: int,
    ) -> Program[results.Stored | results.Declined]:
        """See `Cache.put`."""
        arguments.namespace(namespace)
        arguments.label(session)
        arguments.count("minimum_length", minimum_length)
        try:
            packed = token_array(tokens)
        except UnsupportedTokensError:
            return self._decline(UNSUPPORTED_TOKENS)
        is_stored, covered = False, packed.tobytes()
        try:
            if len(packed) > limits.MAX_TOKENS:
                return self._decline("too-large")
            if not len(packed):
                return self._decline("too-short")
            with contextlib.ExitStack() as context:
                snapshot = self._look_at(context, kv, packed, attachments)
                if isinstance(snapshot, str):
                    return self._decline(snapshot)
                stored = covered[: 4 * snapshot.length]
                offer = messages.Offer(
                    namespace=namespace,
                    tokens=stored,
                    schema=b"",
                    windows=snapshot.windows,
                    checkpoint=snapshot.checkpoint,
                    attachments=snapshot.attachments,
                    minimum=min(minimum_length, limits.MAX_TOKENS),
                    label=session,
                )
                result = yield from lending.put(snapshot, offer, self._schemas)
            if result:
                is_stored, covered = True, stored
            return result
        finally:
            # Whoever waits for these tokens has them now, or should not wait any longer.
            self.claims.put_ended(namespace, covered, is_stored=is_stored)

    def peek(self, tokens: Tokens, namespace: str) -> Program[int]:
        """See `Cache.peek`."""
        arguments.namespace(namespace)
        try:
            prompt = arguments.prompt(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return 0
        return (yield from self._length(messages.Peek(namespace, prompt.tobytes())))

    def contains(self, tokens: Tokens, namespace: str) -> Program[bool]:
        """See `Cache.contains`."""
        arguments.namespace(namespace)
        try:
            packed = token_array(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return False
        if not 0 < len(packed) <= limits.MAX_TOKENS:
            return False
        length = yield from self._length(messages.Contains(namespace, packed.tobytes()))
        return length == len(packed)

    def prefetch(self, tokens: Tokens, namespace: str, session: str | None) -> Program[Pin]:
        """See `Cache.prefetch`."""
        arguments.namespace(namespace)
        arguments.label(session)
        try:
            prompt = arguments.prompt(tokens)
        except UnsupportedTokensError:
            self._pool.count_refusal(UNSUPPORTED_TOKENS)
            return Pin(reason=UNSUPPORTED_TOKENS)
        return (yield from pins.prefetch(messages.Prefetch(namespace, prompt.tobytes(), session)))

    # -- objects --------------------------------------------------------------------------------

    def put_object(
        self, key: str, tensors: Mapping[str, Any], metadata: Any, namespace: str
    ) -> Program[results.Stored | results.Declined]:
        """See `Cache.put_object`."""
        arguments.namespace(namespace)
        arguments.text("key", key, limits.MAX_KEY_BYTES)
        with objects.pack(tensors, metadata) as packed:
            return (yield from objects.put(packed, namespace, key))

    def take_object(self, key: str, namespace: str) -> Program[results.ObjectHit | results.Miss]:
        """See `Cache.take_object`."""
        arguments.namespace(namespace)
        arguments.text("key", key, limits.MAX_KEY_BYTES)
        return (yield from objects.take(namespace, key))

    # -- housekeeping ---------------------------------------------------------------------------

    def stats(self) -> Program[dict[str, Any]]:
        """See `Cache.stats`."""
        reply, _ = yield from ask(messages.Status())
        assert isinstance(reply, messages.StatusReport), "the connection admits nothing else"
        return reply.report

    def flush(self) -> Program[results.Flushed]:
        """See `Cache.flush`."""
        reply, _ = yield from ask(messages.Flush())
        assert isinstance(reply, messages.Flushed), "the connection admits nothing else"
        return results.Flushed(
            written=reply.written,
            skipped=reply.skipped,
            failed=reply.failed,
            complete=reply.complete,
        )

    def clear(self, namespace: str | None) -> Program[results.Cleared]:
        """See `Cache.clear`."""
        if namespace is not None:
            arguments.namespace(namespace)
        reply, _ = yield from ask(messages.Clear(namespace))
        assert isinstance(reply, messages.Cleared), "the connection admits nothing else"
        return results.Cleared(images=reply.images, ram_bytes=reply.ram_bytes)

    def close_session(self, session: str, namespace: str | None) -> Program[int]:
        """See `Cache.close_session`."""
        arguments.text("session", session, limits.MAX_LABEL_BYTES)
        if namespace is not None:
            arguments.namespace(namespace)
        reply, _ = yield from ask(messages.CloseLabel(session, namespace))
        assert isinstance(reply, messages.LabelClosed), "the connection admits nothing else"
        return reply.labels

    def _look_at(
        self, context: contextlib.ExitStack, kv: list[Any], packed: TokenArray, attachments: Any
    ) -> Snapshot | str:
        """Return a snapshot of ``kv`` within ``context``, or why it cannot be stored."""
        try:
            return context.enter_context(self._adapter.snapshot(kv, packed, attachments))
        except Exception as error:
            reason = getattr(error, "reason", None)
            # That of a UnicodeError is a sentence of Python's, about a text of the caller's.
            if isinstance(reason, str) and not isinstance(error, UnicodeError):
                return reason
            raise

    def _length(self, request: messages.Peek | messages.Contains) -> Program[int]:
        reply, _ = yield from ask(request)
        assert isinstance(reply, messages.Length), "the connection admits nothing else"
        return reply.length

    def _decline(self, reason: str) -> results.Declined:
        self._pool.count_refusal(reason)
        return results.Declined(reason=reason)
