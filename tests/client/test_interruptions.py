"""What may come between any two steps of a call: Ctrl-C, a collection, a handler of the log."""

import dis
import gc
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from prefixcached.client import Cache, CallTimeout, Declined, transfer
from prefixcached.client.loans import Hold, Loan
from prefixcached.client.pins import Pin
from prefixcached.client.pool import Pool
from prefixcached.protocol import messages
from prefixcached.protocol.messages import AnyRequest
from tests.support.numpy_kv import NumpyAdapter, make_caches
from tests.support.small_daemon import Peer, SmallDaemon

pytestmark = pytest.mark.usefixtures("no_descriptor_stays")

TOKENS = list(range(100, 400))
SOON = 0.1
LONG = 10.0
"""Seconds after which something hangs."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    """A daemon that behaves until told otherwise."""
    with SmallDaemon(tmp_path / "socket") as daemon:
        yield daemon


def ends(work: Callable[[], object]) -> bool:
    """Whether ``work`` ends, in a thread, since it may hang for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LONG)
    return not thread.is_alive()


def silence(peer: Peer, request: AnyRequest) -> bool:
    """Do not answer an offer."""
    return isinstance(request, messages.Offer)


def garbage(peer: Peer, request: AnyRequest) -> bool:
    """Answer an offer with what is no message."""
    if isinstance(request, messages.Offer):
        peer.send_raw(b"\0" * 64, [])
        return True
    return False


def full_disk(*_: object) -> None:
    raise OSError("no more")


@pytest.mark.parametrize("trouble", [silence, garbage, full_disk])
def test_a_failed_put_keeps_nothing_of_its_callers(
    daemon: SmallDaemon, monkeypatch: pytest.MonkeyPatch, trouble: Any
) -> None:
    """C4: the KV goes with its last reference, however the call failed, without a collection."""
    if trouble is full_disk:
        monkeypatch.setattr(transfer, "write_rows", trouble)
    else:
        daemon.on_request = trouble
    with Cache(daemon.path, timeout=SOON, adapter=NumpyAdapter()) as cache:
        kv = make_caches(TOKENS)
        kept = weakref.ref(kv[0]["keys"])
        gc.collect()
        gc.disable()
        try:
            assert isinstance(cache.put(TOKENS, kv, namespace="n"), Declined)
            del kv
            assert kept() is None
        finally:
            gc.enable()


def test_a_collection_may_end_a_pin_while_its_thread_is_in_the_pool(daemon: SmallDaemon) -> None:
    """F1: what a collected generator does at its end does not wait for the code it interrupted."""
    pool = Pool(daemon.path)

    def holding() -> Iterator[None]:
        loan = Loan(pool, pool.take_out(time.monotonic() + LONG))
        with Pin(Hold(loan, messages.Unpin(1)), 7):
            loan.end()
            yield

    def collect_within() -> None:
        cycle: list[object] = [holding()]
        cycle.append(cycle)
        next(cycle[0])  # type: ignore[call-overload]
        with pool._lock:
            del cycle
            gc.collect()

    assert ends(collect_within)
    assert pool.statistics().lent == 0
    pool.close()


def test_a_handler_of_the_log_may_use_the_cache(daemon: SmallDaemon) -> None:
    """C4: a failure is logged when nobody is kept out of the pool, so other threads go on."""
    cache = Cache(daemon.path, timeout=SOON, fail_open=False)
    went_on: list[bool] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            went_on.append(ends(cache.statistics))

    handler, logger = Handler(), logging.getLogger("prefixcached.client.pool")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    daemon.on_request = lambda peer, request: isinstance(request, messages.Peek)
    try:
        with pytest.raises(CallTimeout):
            cache.peek(TOKENS, namespace="n")
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    assert went_on == [True]
    cache.close()


class CtrlC:
    """Raises KeyboardInterrupt at one of the places in some files where Python may do so.

    That is behind a call, at the beginning of a function, and where a loop goes back.
    """

    def __init__(self, place: int, files: set[str]) -> None:
        self.place: str | None = None
        self._left = place
        self._files = files
        self._before: dict[CodeType, dict[int, str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        """Trace a frame, unless it belongs to a finaliser, whose errors Python only prints."""
        if os.path.basename(frame.f_code.co_filename) not in self._files:
            return None
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_name == "__del__":
                return None
            caller = caller.f_back
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and self.place is None and self._may_come(frame):
            self._left -= 1
            if self._left < 0:
                self.place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._step

    def _may_come(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code not in self._before:
            steps = list(dis.get_instructions(code))
            self._before[code] = {
                step.offset: last.opname for last, step in itertools.pairwise(steps)
            }
        last = self._before[code].get(frame.f_lasti, "")
        return last.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))


# A connection that nobody had yet is closed as its last reference goes.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("is_connected", [False, True])
def test_ctrl_c_anywhere_leaves_the_pool_in_order(daemon: SmallDaemon, is_connected: bool) -> None:
    """C4: wherever it ends a call, the next one is served and no connection is lent for ever."""
    with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter()) as cache:
        cache.put(TOKENS, make_caches(TOKENS), namespace="n")
    places: list[str] = []
    tracer = sys.gettrace()
    while len(places) < 1000:
        cache = Cache(daemon.path, fail_open=False, adapter=NumpyAdapter())
        if is_connected:
            cache.stats()
        ctrl_c = CtrlC(len(places), {"pool.py", "loans.py", "pins.py", "cache.py"})
        sys.settrace(ctrl_c)
        try:
            cache.prefetch(TOKENS, namespace="n").release()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        if ctrl_c.place is not None:
            places.append(ctrl_c.place)
            assert ends(cache.statistics), ctrl_c.place
            assert cache.statistics().lent == 0, ctrl_c.place
            assert cache.peek(TOKENS, namespace="n") == len(TOKENS) - 1, ctrl_c.place
        cache.close()
        if ctrl_c.place is None:
            break
    assert 50 < len(places) < 1000
