"""A pin: what was prefetched stays until it is released (rule F1)."""

from types import TracebackType
from typing import Self

from prefixcached.client.loans import Hold
from prefixcached.client.programs import OnLoan, Program, ask
from prefixcached.protocol import messages


class Pin:
    """Keeps ``length`` tokens in the cache until `release`, the end of its ``with`` or its process.

    It holds a connection of its own meanwhile, since pins end with their connection. An empty pin
    (``length`` 0) holds nothing; ``reason`` then says why, where the daemon was not asked.
    Release it from any thread, once or more.
    """

    def __init__(self, hold: Hold | None = None, length: int = 0, *, reason: str = "") -> None:
        self.length = length
        self.reason = reason
        self._hold = hold

    def release(self) -> None:
        """Let the daemon evict it again. Never waits and never fails."""
        if self._hold is not None:
            self._hold.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        is_held = self._hold is not None and self._hold.is_alive
        return f"<Pin of {self.length} tokens, {'held' if is_held else 'released'}>"


def prefetch(request: messages.Prefetch) -> Program[Pin]:
    """Ask for a pin. Raises PrefixCachedError of any kind."""
    reply, _ = yield from ask(request)
    assert isinstance(reply, messages.Pinned), "the connection admits nothing else"
    if reply.pin is None:
        return Pin()
    message = messages.Unpin(reply.pin, reply.boot)
    hold: Hold = yield OnLoan(lambda loan: Hold(loan, message))
    return Pin(hold, reply.length)
