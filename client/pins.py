"""A pin: what was prefetched stays until it is released (rule F1)."""

import threading
import time
from types import TracebackType
from typing import Self

import msgspec

from prefixcached.client import arguments
from prefixcached.client.errors import PrefixCachedError
from prefixcached.client.pool import Pool
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages


class Pin:
    """Keeps ``length`` tokens in the cache until `release`, the end of its ``with`` or its process.

    It holds a connection of its own meanwhile, since pins end with their connection. An empty pin
    (``length`` 0) holds nothing; ``reason`` then says why, where the daemon was not asked.
    Release it from any thread, once or more.
    """

    def __init__(
        self,
        pool: Pool | None = None,
        wire: Wire | None = None,
        reply: messages.Pinned | None = None,
        *,
        timeout_seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        self.length = reply.length if reply is not None else 0
        self.reason = reason
        self._timeout_seconds = timeout_seconds
        self._held = (pool, wire, reply) if pool and wire and reply else None
        self._lock = threading.Lock()

    def release(self) -> None:
        """Let the daemon evict it again. Never fails: a closed connection releases as well."""
        with self._lock:
            held, self._held = self._held, None
        if held is None:
            return
        pool, wire, reply = held
        try:
            if reply.pin is not None and wire.is_open:
                unpin = messages.Unpin(reply.pin, reply.boot)
                wire.notify(unpin, time.monotonic() + self._timeout_seconds)
        except PrefixCachedError:
            # The wire is closed, which ends the pin.
            pass
        finally:
            pool.give_back(wire)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # Not through the pool, whose lock the interrupted code may hold.
        if self._held is not None:
            self._held[1].close()

    def __repr__(self) -> str:
        state = "held" if self._held is not None else "released"
        return f"<Pin of {self.length} tokens, {state}>"


def prefetch(pool: Pool, request: messages.Prefetch, timeout_seconds: float) -> Pin:
    """Ask for a pin. Errors as `Wire.request`."""
    deadline = time.monotonic() + timeout_seconds
    wire = pool.take_out(deadline)
    try:
        left_seconds = arguments.seconds_until(deadline)
        reply, _ = wire.request(
            msgspec.structs.replace(request, seconds_left=left_seconds), deadline
        )
        assert isinstance(reply, messages.Pinned), "the connection admits nothing else"
    except BaseException:
        wire.close()
        pool.give_back(wire)
        raise
    if reply.pin is None:
        pool.give_back(wire)
        return Pin()
    return Pin(pool, wire, reply, timeout_seconds=timeout_seconds)
