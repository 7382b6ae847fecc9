"""The daemon dies at every named point of the write order; nothing confirmed is lost or wrong."""

import os
from unittest import mock

import pytest

from prefixcached.actors.crash_points import VARIABLE, CrashPoint
from prefixcached.client import connect
from tests.support import derived_kv
from tests.support.daemon_process import DaemonProcess
from tests.support.until import wait_until_loaded
from tests.system.test_restart import OPTIONS

pytestmark = pytest.mark.slow

KINDS = derived_kv.EVERY_KIND
CLEAR_POINTS = (CrashPoint.BEFORE_CLEAR, CrashPoint.AFTER_CLEAR)
DELETE_POINTS = (CrashPoint.BEFORE_DELETE, CrashPoint.AFTER_DELETE)


@pytest.mark.parametrize(
    "point", [p for p in CrashPoint if p not in (*CLEAR_POINTS, *DELETE_POINTS)]
)
def test_a_crash_while_writing_loses_nothing_that_was_flushed(point: CrashPoint) -> None:
    """FIELD 3: no half store is visible: killed at any point of a write, what was flushed stays.

    Rules D2, P8.
    """
    prompt = derived_kv.tokens(900, seed=5)
    with DaemonProcess(*OPTIONS) as daemon, connect(socket=daemon.socket) as cache:
        flushed = prompt[:400]
        assert cache.put(flushed, derived_kv.caches(flushed, KINDS), namespace="n")
        assert cache.flush()
        daemon.terminate()
        with mock.patch.dict(os.environ, {VARIABLE: point.value}):
            daemon.start()
        wait_until_loaded(cache)
        assert cache.put(prompt, derived_kv.caches(prompt, KINDS), namespace="n")
        cache.flush()
        daemon.wait()
        daemon.start()
        wait_until_loaded(cache)
        hit = cache.take([*prompt, 7], namespace="n")
        assert hit
        assert hit.length in (400, 900)
        derived_kv.assert_derived(hit.kv, prompt[: hit.length], KINDS)


@pytest.mark.parametrize("point", DELETE_POINTS)
def test_a_crash_while_deleting_an_absorbed_tail_serves_its_successor(point: CrashPoint) -> None:
    """D8: the file of an absorbed tail goes only after its successor's is durable."""
    prompt = derived_kv.tokens(400, seed=6)
    with DaemonProcess(*OPTIONS) as daemon, connect(socket=daemon.socket) as cache:
        tail = prompt[:200]  # shorter than segment_min_tokens: the next put absorbs it
        assert cache.put(tail, derived_kv.caches(tail), namespace="n")
        assert cache.flush()
        daemon.terminate()
        with mock.patch.dict(os.environ, {VARIABLE: point.value}):
            daemon.start()
        wait_until_loaded(cache)
        assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
        cache.flush()
        daemon.wait()
        daemon.start()
        wait_until_loaded(cache)
        hit = cache.take([*prompt, 7], namespace="n")
        assert hit
        assert hit.length == 400
        derived_kv.assert_derived(hit.kv, prompt)


@pytest.mark.parametrize("point", CLEAR_POINTS)
def test_a_crash_while_clearing_serves_all_or_nothing(point: CrashPoint) -> None:
    """D11: a clear is one rename; before it everything is there, after it nothing."""
    prompt = derived_kv.tokens(400, seed=7)
    with DaemonProcess(*OPTIONS) as daemon, connect(socket=daemon.socket) as cache:
        assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
        assert cache.flush()
        daemon.terminate()
        with mock.patch.dict(os.environ, {VARIABLE: point.value}):
            daemon.start()
        wait_until_loaded(cache)
        cache.clear("n")
        daemon.wait()
        daemon.start()
        wait_until_loaded(cache)
        length = cache.peek([*prompt, 7], namespace="n")
        assert length == (400 if point is CrashPoint.BEFORE_CLEAR else 0)
