"""A wire on loan from the pool: for one call, and beyond it while a claim or a pin holds it.

Claims and pins end with their connection (rules F1, Q1), so the wire of one stays out of the pool.
A `Loan` owns its wire until it gives it back; whoever converses over the wire has `Loan._in_use`.
Nothing here waits for it, so that a `Hold` may end on any thread, and in a garbage collection that
interrupts code which holds any lock.
"""

import threading
from collections import deque
from typing import Any

from prefixcached.client.pool import BasePool
from prefixcached.client.wire import BaseWire
from prefixcached.protocol.messages import OneWay


class Loan:
    """One wire, in use by a call from the beginning.

    Args:
        pool: Lent the wire and takes it back.
        wire: Greeted.
    """

    # Until it has a wire: Ctrl-C may end `__init__` anywhere, and `__del__` comes nevertheless.
    _is_back = True
    _ticket: object = None

    def __init__(self, pool: BasePool[Any], wire: BaseWire) -> None:
        self.wire = wire
        self._pool = pool
        self._is_back = False
        self._in_use = threading.Lock()
        self._in_use.acquire()
        self._holds: set[OneWay] = set()
        self._unsent: deque[OneWay] = deque()
        self._ticket = object()
        pool.lend(wire, self._ticket)

    def begin(self) -> bool:
        """Use the wire for another call; False where it cannot serve one."""
        if not self._in_use.acquire(blocking=False):
            return False
        if not self._is_back and self.wire.is_quiet():
            return True
        self.end()
        return False

    def end(self) -> None:
        """The call is over; the wire goes back unless something holds it."""
        self._in_use.release()
        self._settle()

    def add(self, message: OneWay) -> None:
        """Keep the wire until `let_go` of the message that ends what the daemon keeps for it."""
        self._holds.add(message)

    def let_go(self, message: OneWay, *, tell: bool = True, may_block: bool = True) -> None:
        """End a hold, once.

        Args:
            message: As for `add`.
            tell: Whether the daemon has to be told.
            may_block: False in a garbage collection, which may have interrupted anything.
        """
        try:
            self._holds.remove(message)
        except KeyError:
            return
        if tell:
            self._unsent.append(message)
        self._settle(may_block=may_block)

    def holds(self, message: OneWay) -> bool:
        """Whether a hold lasts."""
        return message in self._holds and self.wire.is_open

    def _settle(self, *, may_block: bool = True) -> None:
        """Do what has to wait until nobody uses the wire; whoever uses it does it afterwards."""
        while self._unsent or self._is_free:
            if not self._in_use.acquire(blocking=False):
                return
            try:
                while self._unsent:
                    self.wire.tell(self._unsent.popleft())
                if self._is_free:
                    self._is_back = True
                    self._pool.give_back(self.wire, may_block=may_block)
            except BaseException:
                # Ctrl-C: it may have gone back, and cannot go back twice.
                self._pool.abandon(self.wire, self._ticket)
                raise
            finally:
                self._in_use.release()

    @property
    def _is_free(self) -> bool:
        return not self._is_back and (not self._holds or not self.wire.is_open)

    def __del__(self) -> None:
        if not self._is_back:
            self._pool.abandon(self.wire, self._ticket)


class Hold:
    """What the daemon keeps for this client until `end`, the last reference, or the connection."""

    _loan: Loan | None = None  # see `Loan._is_back`

    def __init__(self, loan: Loan, message: OneWay) -> None:
        self._message = message
        self._loan = loan
        loan.add(message)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, as far as this side knows."""
        return self._loan is not None and self._loan.holds(self._message)

    def end(self, *, tell: bool = True) -> None:
        """End it; ``tell`` the daemon unless it knows. Idempotent, from any thread, never fails."""
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.let_go(self._message, tell=tell)

    def __del__(self) -> None:
        if self._loan is not None:
            self._loan.let_go(self._message, may_block=False)
