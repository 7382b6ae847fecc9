"""The pool of connections: reuse, back-off, threads and forks."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.client.errors import CallTimeout, NoDaemon, ProtocolFailure, UseAfterClose
from prefixcached.client.loans import Hold, Loan
from prefixcached.client.pins import Pin
from prefixcached.client.pool import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MAX_IDLE_WIRES,
    Pool,
)
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages
from prefixcached.protocol.messages import AnyRequest
from tests.support.small_daemon import Peer, SmallDaemon

pytestmark = pytest.mark.usefixtures("no_descriptor_stays")

PEEK = messages.Peek("n", bytes(8))
SOON = 0.1


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    """A daemon that behaves until told otherwise."""
    with SmallDaemon(tmp_path / "socket") as daemon:
        yield daemon


@pytest.fixture
def clock() -> Clock:
    """The pool's clock."""
    return Clock()


@pytest.fixture
def pool(daemon: SmallDaemon, clock: Clock) -> Iterator[Pool]:
    """A pool of connections to the daemon."""
    pool = Pool(daemon.path, clock)
    yield pool
    pool.close()


def within(seconds: float) -> float:
    """The deadline in so many seconds."""
    return time.monotonic() + seconds


def ask(pool: Pool, seconds: float = 5.0) -> Wire:
    """Make one call and return the wire that carried it."""
    deadline = within(seconds)
    wire = pool.take_out(deadline)
    try:
        wire.request(PEEK, deadline)
    finally:
        pool.give_back(wire)
    return wire


def test_connections_are_made_when_needed_and_used_again(pool: Pool, daemon: SmallDaemon) -> None:
    """DESIGN 6: connecting is lazy, and calls in a row share one connection."""
    assert pool.statistics().opened == 0
    assert len({ask(pool) for _ in range(5)}) == 1
    statistics = pool.statistics()
    assert (statistics.opened, statistics.reused) == (1, 4)
    assert (statistics.lent, statistics.idle) == (0, 1)
    assert daemon.accepted == 1


def test_a_daemon_that_restarted_costs_nothing_when_idle(pool: Pool, daemon: SmallDaemon) -> None:
    """C4: an idle connection whose daemon went is replaced before the next call uses it."""
    ask(pool)
    daemon.stop()
    daemon.start()
    ask(pool)
    statistics = pool.statistics()
    assert statistics.opened == 2
    assert statistics.failures == {}


def test_each_thread_gets_a_connection_of_its_own(pool: Pool, daemon: SmallDaemon) -> None:
    """Q3: one request in flight a connection, so nobody waits for another's reply."""
    count = MAX_IDLE_WIRES + 4
    together = threading.Barrier(count)
    wires: list[Wire] = []

    def call() -> None:
        deadline = within(30)
        wire = pool.take_out(deadline)
        wires.append(wire)
        together.wait()
        wire.request(PEEK, deadline)
        together.wait()
        pool.give_back(wire)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(wires)) == count
    # What exceeds the bound is closed as it comes back.
    assert pool.statistics().idle == MAX_IDLE_WIRES
    assert daemon.wait_until(lambda: daemon.connections == MAX_IDLE_WIRES)


def test_failures_pause_calls_without_touching_the_socket(
    pool: Pool, daemon: SmallDaemon, clock: Clock
) -> None:
    """C4: after a failure calls fail at once, for a time that doubles up to its bound."""
    daemon.stop()
    pauses = [min(FIRST_PAUSE_SECONDS * 2**n, LONGEST_PAUSE_SECONDS) for n in range(8)]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    for tried, pause in enumerate(pauses):
        with pytest.raises(NoDaemon, match="prefixcached serve"):
            ask(pool)
        assert pool.statistics().failures == {"no-daemon": tried + 1}
        clock.now += 0.99 * pause
        with pytest.raises(NoDaemon, match="not tried again for another"):
            ask(pool)
        assert pool.statistics().backed_off == tried + 1
        clock.now += 0.02 * pause


def test_a_pause_outlasts_the_daemons_return_and_one_success_ends_the_series(
    pool: Pool, daemon: SmallDaemon, clock: Clock
) -> None:
    """C4: during a pause not even a daemon that is back is asked; after it all is as before."""
    daemon.stop()
    for _ in range(5):
        with pytest.raises(NoDaemon):
            ask(pool)
        clock.now += LONGEST_PAUSE_SECONDS
    with pytest.raises(NoDaemon):
        ask(pool)
    daemon.start()
    with pytest.raises(NoDaemon, match="not tried again"):
        ask(pool)
    assert daemon.accepted == 0
    clock.now += LONGEST_PAUSE_SECONDS
    ask(pool)
    daemon.stop()
    with pytest.raises(NoDaemon):
        ask(pool)
    daemon.start()
    clock.now += 1.01 * FIRST_PAUSE_SECONDS
    ask(pool)


def test_failures_side_by_side_are_one(pool: Pool, daemon: SmallDaemon, clock: Clock) -> None:
    """C4: eight threads that lose one daemon do not wait eight times as long for the next."""
    wires = [pool.take_out(within(5)) for _ in range(8)]
    daemon.stop()
    for wire in wires:
        with pytest.raises(NoDaemon):
            wire.request(PEEK, within(5))
        pool.give_back(wire)
    assert pool.statistics().failures == {"no-daemon": 8}
    daemon.start()
    clock.now += FIRST_PAUSE_SECONDS * 1.01
    ask(pool)


@pytest.mark.parametrize("kind", [CallTimeout, ProtocolFailure])
def test_a_pause_repeats_what_went_wrong(
    pool: Pool, daemon: SmallDaemon, clock: Clock, kind: type[Exception]
) -> None:
    """T9: the reason of a refused call is the one that started the pause."""

    def misbehave(peer: Peer, request: AnyRequest) -> bool:
        if kind is ProtocolFailure:
            peer.send_raw(b"x" * 100, [])
        return True

    daemon.on_request = misbehave
    with pytest.raises(kind):
        ask(pool, SOON)
    with pytest.raises(kind, match="not tried again"):
        ask(pool, SOON)
    daemon.on_request = None
    clock.now += 1
    ask(pool)
    assert daemon.accepted == 2


def test_a_caller_without_time_pauses_nobody(pool: Pool, daemon: SmallDaemon) -> None:
    """C4: a call whose own deadline was over says nothing about the daemon."""
    with pytest.raises(CallTimeout):
        ask(pool, -1)
    ask(pool)
    assert pool.statistics().failures == {}


def test_a_wire_that_still_holds_descriptors_is_not_reused(pool: Pool, daemon: SmallDaemon) -> None:
    """What a call forgot to close is closed with its connection."""

    def lend(peer: Peer, request: AnyRequest) -> bool:
        if not isinstance(request, messages.Fetch):
            return False
        with open(os.devnull) as lent:
            peer.send(messages.Descriptors(first=0, count=1), [lent.fileno()])
        return True

    daemon.on_request = lend
    wire = pool.take_out(within(5))
    wire.request(messages.Fetch(1, 0), within(5))
    pool.give_back(wire)
    assert not wire.is_open
    assert pool.statistics().idle == 0


def test_a_closed_pool_is_closed(pool: Pool, daemon: SmallDaemon) -> None:
    """Closing ends idle connections at once, and those in use as they come back."""
    ask(pool)
    in_use, deadline = pool.take_out(within(5)), within(5)
    pool.close()
    pool.close()
    in_use.request(PEEK, deadline)
    pool.give_back(in_use)
    assert not in_use.is_open
    with pytest.raises(UseAfterClose, match=r"connect\(\) a new one"):
        ask(pool)


def pinned(pool: Pool) -> tuple[Pin, Wire]:
    """Return a pin as `prefetch` makes it, and its wire."""
    wire = pool.take_out(within(5))
    loan = Loan(pool, wire)
    pin = Pin(Hold(loan, messages.Unpin(1)), 7)
    loan.end()
    assert pool.statistics().lent == 1
    return pin, wire


@pytest.mark.parametrize("forget", [False, True])
def test_a_pin_keeps_its_connection_until_released(
    pool: Pool, daemon: SmallDaemon, forget: bool
) -> None:
    """F1: a pin ends with its release, or with its last reference; once."""
    pin, wire = pinned(pool)
    if not forget:
        pin.release()
        pin.release()
    del pin
    gc.collect()
    assert (pool.statistics().lent, pool.statistics().idle) == (0, 1)
    assert wire.is_open
    assert daemon.wait_until(lambda: messages.Unpin(1) in daemon.requests)
    assert daemon.requests.count(messages.Unpin(1)) == 1


def test_a_collection_within_the_pool_closes_a_forgotten_pins_connection(
    pool: Pool, daemon: SmallDaemon
) -> None:
    """F1: a collection never waits for the lock that the interrupted code holds."""
    pin, wire = pinned(pool)
    cycle: list[object] = [pin]
    cycle.append(cycle)
    with pool._lock:
        del pin, cycle
        gc.collect()
    assert not wire.is_open
    assert (pool.statistics().lent, pool.statistics().idle) == (0, 0)
    assert daemon.wait_until(lambda: daemon.connections == 0)


@pytest.mark.parametrize("close", [False, True])
def test_a_forgotten_pin_waits_for_nobody_in_the_pool(
    pool: Pool, daemon: SmallDaemon, close: bool
) -> None:
    """F1: it ends at once while another thread is in the pool; its connection is used again."""
    pin, wire = pinned(pool)
    if close:
        pool.close()
    is_in, may_go = threading.Event(), threading.Event()

    def stay() -> None:
        with pool._lock:
            is_in.set()
            may_go.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    is_in.wait()
    del pin
    assert thread.is_alive()
    assert daemon.wait_until(lambda: messages.Unpin(1) in daemon.requests)
    assert wire.is_open is not close
    may_go.set()
    thread.join()
    assert (pool.statistics().lent, pool.statistics().idle) == (0, 0 if close else 1)


def test_a_loan_that_is_over_leaves_its_connection_alone(pool: Pool, daemon: SmallDaemon) -> None:
    """Q3: Ctrl-C in the moment of giving it back does not close what another thread uses by now."""
    wire = pool.take_out(time.monotonic() + SOON)
    first, second = object(), object()
    pool.lend(wire, first)
    pool.give_back(wire)
    assert pool.take_out(time.monotonic() + SOON) is wire
    pool.lend(wire, second)
    pool.abandon(wire, first)
    assert wire.is_open
    pool.abandon(wire, second)
    assert not wire.is_open


def test_the_end_of_a_pin_ends_no_pause(pool: Pool, daemon: SmallDaemon) -> None:
    """C4: what has no reply says nothing about a daemon that answers nobody."""
    pin, _ = pinned(pool)
    daemon.on_request = lambda peer, request: isinstance(request, messages.Peek)
    with pytest.raises(CallTimeout):
        ask(pool, SOON)
    pin.release()
    assert daemon.wait_until(lambda: messages.Unpin(1) in daemon.requests)
    with pytest.raises(CallTimeout, match="not tried again"):
        ask(pool, SOON)


def run_in_child(work: object) -> tuple[int, int]:
    """Fork; the child calls ``work`` and waits; return its process id and what lets it go."""
    assert callable(work)
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(go_write)
            work()
            os.write(ready_write, b"x")
            os.read(go_read, 1)
            status = 0
        finally:
            os._exit(status)
    os.close(go_read)
    os.close(ready_write)
    done = os.read(ready_read, 1)
    os.close(ready_read)
    assert done == b"x", "the child failed"
    return child, go_write


def let_go(child: int, go_write: int) -> None:
    """End the child of `run_in_child`."""
    os.close(go_write)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# Python 3.12 and later warn of any fork beside threads; that is what this is about.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_connections_alone(
    pool: Pool, daemon: SmallDaemon
) -> None:
    """C4: a child forgets what it inherited, opens its own, and the parent notices nothing."""
    idle = ask(pool)
    in_use = pool.take_out(within(5))
    other = pool.take_out(within(5))
    pool.give_back(other)
    before = daemon.accepted

    def in_the_child() -> None:
        assert not idle.is_open
        assert not in_use.is_open
        assert not other.is_open
        with pytest.raises(NoDaemon):
            in_use.request(PEEK, within(5))
        ask(pool)
        assert pool.statistics().idle == 1
        pool.give_back(in_use)
        assert pool.statistics().idle == 1

    child, go_write = run_in_child(in_the_child)
    assert daemon.accepted == before + 1
    in_use.request(PEEK, within(5))
    pool.give_back(in_use)
    assert pool.statistics().opened == before
    # L1: the parent's end is the end of its connections, though the child lives on.
    pool.close()
    assert daemon.wait_until(lambda: daemon.connections == 1)
    let_go(child, go_write)
    assert daemon.wait_until(lambda: daemon.connections == 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_a_thread_holds_the_pool_does_not_hang_the_child(
    pool: Pool, daemon: SmallDaemon
) -> None:
    """C4: the parent's lock may be taken at the fork; the child has a lock of its own."""
    ask(pool)
    with pool._lock:
        child, go_write = run_in_child(lambda: ask(pool))
    let_go(child, go_write)
    ask(pool)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_a_thread_looks_at_an_idle_connection_leaves_the_child_none(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: between idle and lent, a connection is known to the pool nevertheless."""
    wire = ask(pool)
    children: list[tuple[int, int]] = []

    def in_the_child() -> None:
        assert not wire.is_open

    def fork_meanwhile() -> bool:
        children.append(run_in_child(in_the_child))
        return True

    monkeypatch.setattr(wire, "is_quiet", fork_meanwhile)
    assert ask(pool) is wire
    let_go(*children[0])


def test_a_pool_registers_nothing_for_forks(
    daemon: SmallDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: what is registered stays until the process ends, so it is once for all pools."""
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    Pool(daemon.path).close()
    assert registered == []


def test_a_pool_that_is_gone_is_not_kept_alive_for_forks(daemon: SmallDaemon) -> None:
    """What is registered for forks does not keep pools, and with them sockets, alive."""
    pool = Pool(daemon.path)
    ask(pool)
    pool.close()
    alive = weakref.ref(pool)
    del pool
    gc.collect()
    assert alive() is None
