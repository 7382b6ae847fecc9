"""What a call does, apart from waiting: a generator of steps, the same for threads and for Trio.

A `Program` yields what is to be carried out over its connection, is sent the outcome, and returns
the call's result. It raises `PrefixCachedError` where the cache could not serve. Until its first
step nothing is connected. Programs touch mlx; whoever runs one does so on the caller's own thread.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from prefixcached.client import arguments
from prefixcached.client.errors import CallTimeout
from prefixcached.client.loans import Loan
from prefixcached.client.transfer import Move
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages
from prefixcached.protocol.messages import AnyRequest, OneWay, Reply

T = TypeVar("T")

_TIMED: Final = (
    messages.Take,
    messages.Offer,
    messages.OfferObject,
    messages.TakeObject,
    messages.Prefetch,
    messages.Flush,
)


class Ask(NamedTuple):
    """Send a request; the outcome is its reply and the descriptors that came with it."""

    message: AnyRequest


class Tell(NamedTuple):
    """Send a message that has no reply."""

    message: OneWay


class Copy(NamedTuple):
    """Move bytes, then close the descriptors. Touches memory and descriptors alone, never mlx.

    ``moves`` is emptied: mlx would copy what its views keep alive at the first append.
    """

    transfer: Callable[[Sequence[Move], Callable[[], None]], None]
    moves: list[Move]
    descriptors: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return sum(view.nbytes for move in self.moves for view in move.views)


class OnLoan(NamedTuple):
    """Call a function with the loan of the wire; the outcome is what it returns."""

    function: Callable[[Loan], Any]


Step = Ask | Tell | Copy | OnLoan
Program = Generator[Step, Any, T]


def ask(message: AnyRequest) -> Program[tuple[Reply, list[int]]]:
    """Ask, with the type of the outcome."""
    outcome: tuple[Reply, list[int]] = yield Ask(message)
    return outcome


def run(program: Program[T], step: Step, loan: Loan, deadline: float) -> T:
    """Carry ``program`` out from its first ``step`` on, by blocking.

    Args:
        program: Advanced to its first step.
        step: That step.
        loan: Of a `Wire`.
        deadline: End of the call, on `time.monotonic`.
    """
    wire = loan.wire
    assert isinstance(wire, Wire), "a blocking cache has blocking wires"
    try:
        while True:
            outcome: Any = None
            try:
                match step:
                    case Ask(message):
                        outcome = wire.request(timed(message, deadline), deadline)
                    case Copy():
                        copy(step, loan, deadline)
                    case _:
                        outcome = at_once(step, loan)
            except BaseException as error:  # noqa: BLE001, the program decides
                step = program.throw(error)
            else:
                step = program.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result


def is_take(step: Step) -> bool:
    """Whether a program looks a prompt up: it goes where its owner's claims are (rule Q3)."""
    return isinstance(step, Ask) and isinstance(step.message, messages.Take)


def timed(message: AnyRequest, deadline: float) -> AnyRequest:
    """Return ``message`` with the seconds that remain, where it carries them (rule C4)."""
    if isinstance(message, _TIMED):
        left_seconds = arguments.seconds_until(deadline)
        return msgspec.structs.replace(message, seconds_left=left_seconds)
    return message


def copy(step: Copy, loan: Loan, deadline: float) -> None:
    """Carry out a `Copy`. On any thread, while its call waits for it."""

    def check_time() -> None:
        if time.monotonic() >= deadline:
            raise CallTimeout("not everything was copied at the deadline")

    try:
        step.transfer(step.moves, check_time)
    finally:
        step.moves.clear()
        for fd in step.descriptors:
            loan.wire.close_descriptor(fd)


def at_once(step: Tell | OnLoan, loan: Loan) -> Any:
    """Carry out a step that never waits; return its outcome."""
    match step:
        case Tell(message):
            return loan.wire.tell(message)
        case OnLoan(function):
            return function(loan)
