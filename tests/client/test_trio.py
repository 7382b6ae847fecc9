"""The client for Trio programs, against a small daemon in a thread: results and cancellation."""

import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from prefixcached.client import (
    CallTimeout,
    Declined,
    Flushed,
    Hit,
    Miss,
    NoDaemon,
    RestoreFailed,
    Stored,
    UseAfterClose,
    programs,
    trio_wire,
)
from prefixcached.client.trio import INLINE_BYTES, Cache
from prefixcached.client.trio_wire import TrioWire
from prefixcached.protocol import messages
from prefixcached.protocol.messages import AnyRequest
from tests.support.numpy_kv import NumpyAdapter, NumpyRestoration, make_caches, same
from tests.support.small_daemon import Peer, SmallDaemon

pytestmark = pytest.mark.usefixtures("no_descriptor_stays")

TOKENS = list(range(100, 400))
SOON = 0.2


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    """A daemon whose images are so small that 300 tokens need three batches of descriptors."""
    with SmallDaemon(tmp_path / "socket", segment_max_bytes=1024) as daemon:
        yield daemon


def client(daemon: SmallDaemon, **options: Any) -> Cache:
    """A client that raises."""
    return Cache(daemon.path, **{"fail_open": False, "adapter": NumpyAdapter(), **options})


async def store(cache: Cache, tokens: list[int] = TOKENS) -> Stored:
    stored = await cache.put(tokens, make_caches(tokens), namespace="n")
    assert isinstance(stored, Stored)
    return stored


async def hit(cache: Cache, tokens: list[int] = TOKENS) -> Hit:
    result = await cache.take(tokens, namespace="n")
    assert isinstance(result, Hit)
    assert same(result.kv, make_caches(tokens[: result.length]))
    return result


def quiet(daemon: SmallDaemon, condition: Callable[[], bool]) -> bool:
    """Wait for the daemon's thread; nothing else runs meanwhile."""
    return daemon.wait_until(condition)


async def test_what_was_put_is_taken(daemon: SmallDaemon) -> None:
    """DESIGN 6: the same calls with the same results, over one connection in a row."""
    async with client(daemon) as cache:
        stored = await store(cache)
        assert stored.length == len(TOKENS)
        assert (await hit(cache)).length == len(TOKENS) - 1
        assert (await store(cache)).new_bytes == 0
        assert await cache.peek(TOKENS, namespace="n") == len(TOKENS) - 1
        assert await cache.contains(TOKENS, namespace="n")
        assert await cache.stats() == {"ram": {"hits": 1}}
        assert await cache.flush() == Flushed(written=3, skipped=2, failed=0, complete=True)
        assert await cache.clear("n")
        with await cache.prefetch(TOKENS, namespace="n") as pin:
            assert pin.length == len(TOKENS) - 1
            assert daemon.pins == 1
        assert quiet(daemon, lambda: daemon.pins == 0 and daemon.leases == 0)
        statistics = cache.statistics()
        assert (statistics.opened, statistics.lent) == (1, 0)
    assert quiet(daemon, lambda: daemon.connections == 0)


async def test_without_a_daemon_every_call_fails_open(tmp_path: Path) -> None:
    """DESIGN 1.2: no daemon costs a miss, and an exception only where it was asked for."""
    async with Cache(tmp_path / "socket", adapter=NumpyAdapter()) as cache:
        assert await cache.take(TOKENS, namespace="n", wait=600) == Miss(reason="no-daemon")
        result = await cache.put(TOKENS, make_caches(TOKENS), namespace="n")
        assert result == Declined(reason="no-daemon")
        assert await cache.put_object("k", {}, namespace="n") == Declined(reason="no-daemon")
        assert await cache.take_object("k", namespace="n") == Miss(reason="no-daemon")
        assert await cache.close_session("s") == 0
        assert await cache.stats() == {}
    async with Cache(tmp_path / "socket", adapter=NumpyAdapter(), fail_open=False) as cache:
        with pytest.raises(NoDaemon, match="prefixcached serve"):
            await cache.peek(TOKENS, namespace="n")
    with pytest.raises(UseAfterClose):
        await cache.peek(TOKENS, namespace="n")


async def test_a_silent_daemon_costs_the_timeout(daemon: SmallDaemon) -> None:
    """C4: a call is bounded by its timeout plus its wait."""
    daemon.on_request = lambda peer, request: isinstance(request, messages.Take)
    async with client(daemon, timeout=SOON) as cache:
        began = time.monotonic()
        with pytest.raises(CallTimeout):
            await cache.take(TOKENS, namespace="n", wait=SOON)
        assert 2 * SOON <= time.monotonic() - began < 20 * SOON
        assert cache.statistics().failures == {"timeout": 1}
    assert quiet(daemon, lambda: daemon.connections == 0)


async def test_tasks_do_not_wait_for_each_other(daemon: SmallDaemon) -> None:
    """Q3: a task that waits for a reply keeps no other task from its own."""
    released = threading.Event()

    def late(peer: Peer, request: AnyRequest) -> bool:
        if isinstance(request, messages.Take):
            released.wait()
        return False

    async with client(daemon, timeout=60) as cache:
        await store(cache)
        daemon.on_request = late
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hit, cache)
            await trio.testing.wait_all_tasks_blocked()
            assert await cache.peek(TOKENS, namespace="n") == len(TOKENS) - 1
            released.set()
        assert cache.statistics().opened == 2


CALLS: dict[str, Callable[[Cache], Awaitable[object]]] = {
    "take": lambda cache: cache.take(TOKENS, namespace="n"),
    "put": lambda cache: cache.put(
        [*TOKENS[:10], 1], make_caches([*TOKENS[:10], 1]), namespace="n"
    ),
    "peek": lambda cache: cache.peek(TOKENS, namespace="n"),
    "prefetch": lambda cache: cache.prefetch(TOKENS, namespace="n"),
    "flush": lambda cache: cache.flush(),
}
SILENT_AT: list[tuple[str, type[AnyRequest]]] = [
    ("take", messages.Hello),
    ("take", messages.Take),
    ("take", messages.Fetch),
    ("put", messages.Offer),
    ("put", messages.Commit),
    ("peek", messages.Peek),
    ("prefetch", messages.Prefetch),
    ("flush", messages.Flush),
]


@pytest.mark.parametrize(("call", "request_type"), SILENT_AT)
async def test_a_cancelled_call_leaves_nothing(
    daemon: SmallDaemon, call: str, request_type: type[AnyRequest]
) -> None:
    """L1, P4: cancelling at any request closes the connection: no lease, put, pin, descriptor."""
    async with client(daemon, timeout=60) as cache:
        await store(cache)
    assert quiet(daemon, lambda: daemon.connections == 0)
    arrived = threading.Event()

    def silence(peer: Peer, request: AnyRequest) -> bool:
        if isinstance(request, request_type):
            arrived.set()
            return True
        return False

    async with client(daemon, timeout=60) as cache:
        daemon.on_request = silence
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                await CALLS[call](cache)
                raise AssertionError("it was not cancelled")

            nursery.start_soon(run)
            await trio.to_thread.run_sync(arrived.wait)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert cache.statistics().lent == 0
        assert cache.statistics().idle == 0
        assert cache.statistics().failures == {}
        assert quiet(daemon, lambda: daemon.connections == 0)
        assert (daemon.leases, daemon.pins) == (0, 0)
        daemon.on_request = None
        await hit(cache)


@pytest.mark.parametrize("call", CALLS)
async def test_every_checkpoint_may_cancel(daemon: SmallDaemon, call: str) -> None:
    """L1: wherever a call is cancelled, the next one finds everything in order."""
    async with client(daemon, timeout=60) as cache:
        await store(cache)
        checkpoint = 0
        while await _is_cancelled_at(checkpoint, CALLS[call](cache)):
            await hit(cache)
            assert cache.statistics().failures == {}
            checkpoint += 1
        assert checkpoint > 1
    assert quiet(daemon, lambda: daemon.connections == 0)


async def _is_cancelled_at(checkpoint: int, call: Awaitable[object]) -> bool:
    """Await ``call`` and cancel it while it waits for the so-many-th time, if it ever does."""
    steps, scope = 0, trio.CancelScope()

    class Counter(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            nonlocal steps
            if task is own:
                steps += 1
                if steps == checkpoint + 1:
                    scope.cancel()

    own = trio.lowlevel.current_task()
    counter = Counter()
    trio.lowlevel.add_instrument(counter)
    try:
        with scope:
            await call
    finally:
        trio.lowlevel.remove_instrument(counter)
    return scope.cancelled_caught


async def test_much_is_copied_in_a_thread_that_ends_before_the_call(daemon: SmallDaemon) -> None:
    """DESIGN 1.7: a copy lets other tasks run; a cancelled call waits for the end of its copy."""
    tokens = list(range(INLINE_BYTES // 64))
    daemon.segment_max_bytes = 1 << 30
    copying, go_on = threading.Event(), threading.Event()
    threads: list[int] = []

    class SlowRestoration(NumpyRestoration):
        """Its buffers are in reach of the copying thread until the test says so."""

        def finish(self) -> Any:
            threads.append(threading.get_ident())
            return super().finish()

    class SlowAdapter(NumpyAdapter):
        def restoration(self, *arguments: Any) -> NumpyRestoration:
            threads.append(threading.get_ident())
            return SlowRestoration(*arguments)

    async with client(daemon, timeout=60, adapter=SlowAdapter()) as cache:
        await store(cache, tokens)
        real_copy = programs.copy

        def slow_copy(*arguments: Any) -> None:
            threads.append(threading.get_ident())
            copying.set()
            go_on.wait()
            real_copy(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(programs, "copy", slow_copy)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hit, cache, tokens)
                await trio.to_thread.run_sync(copying.wait)
                # This task runs while the other one copies.
                assert await cache.peek(tokens, namespace="n") == len(tokens) - 1
                nursery.cancel_scope.cancel()
                go_on.set()
        here = threading.get_ident()
        assert threads[0] == here
        assert threads[1] != here
        assert cache.statistics().lent == 0
        assert quiet(daemon, lambda: daemon.leases == 0)


async def test_a_copy_waits_for_no_thread_of_the_programs(daemon: SmallDaemon) -> None:
    """C4: a program that keeps all of Trio's threads busy is served in time."""
    tokens = list(range(INLINE_BYTES // 64))
    daemon.segment_max_bytes = 1 << 30
    threads = trio.to_thread.current_default_thread_limiter()
    async with client(daemon) as cache:
        for _ in range(int(threads.total_tokens)):
            await threads.acquire_on_behalf_of(object())
        with trio.fail_after(10):
            await store(cache, tokens)
            await hit(cache, tokens)


async def test_a_copy_that_finds_no_thread_costs_the_timeout(
    daemon: SmallDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: where many calls copy at once, the wait for a turn is bounded as well."""
    monkeypatch.setattr(trio_wire, "THREADS", 1)
    tokens = list(range(INLINE_BYTES // 64))
    daemon.segment_max_bytes = 1 << 30
    async with client(daemon, timeout=SOON) as cache:
        wire = await cache._pool.take_out(time.monotonic() + 5)
        cache._pool.give_back(wire)
        await wire._threads.acquire_on_behalf_of("another call")
        with trio.fail_after(10), pytest.raises(CallTimeout, match="no thread was free"):
            await store(cache, tokens)
        wire._threads.release_on_behalf_of("another call")
        assert cache.statistics().failures == {}
        assert quiet(daemon, lambda: daemon.connections == 0)


async def test_what_the_callers_kv_takes_is_not_the_daemons_time(daemon: SmallDaemon) -> None:
    """C4: KV that mlx computes only when it is looked at is stored all the same."""

    class LazyAdapter(NumpyAdapter):
        def snapshot(self, *arguments: Any) -> Any:
            time.sleep(1.5 * SOON)  # longer than the call may take
            return super().snapshot(*arguments)

    async with client(daemon, timeout=SOON, adapter=LazyAdapter()) as cache:
        await store(cache)


async def test_what_cannot_be_restored_is_a_miss(daemon: SmallDaemon) -> None:
    """T8: whatever a class of caches raises while it is restored costs a miss."""

    class BrokenAdapter(NumpyAdapter):
        def restoration(self, *arguments: Any) -> Any:
            raise ZeroDivisionError("no such class")

    async with client(daemon) as cache:
        await store(cache)
    async with client(daemon, adapter=BrokenAdapter()) as cache:
        with pytest.raises(RestoreFailed, match="no such class"):
            await cache.take(TOKENS, namespace="n")
    assert quiet(daemon, lambda: daemon.leases == 0)


async def test_a_daemon_that_hangs_up_is_known_at_once(daemon: SmallDaemon) -> None:
    """C4: the end of the connection ends the call."""

    def hang_up(peer: Peer, request: AnyRequest) -> bool:
        if isinstance(request, messages.Peek):
            peer.socket.shutdown(2)
            return True
        return False

    daemon.on_request = hang_up
    async with client(daemon, timeout=60) as cache:
        with pytest.raises(NoDaemon):
            await cache.peek(TOKENS, namespace="n")


async def test_a_wire_without_time_asks_nobody(daemon: SmallDaemon) -> None:
    """C4: a call whose deadline is over says nothing about the daemon."""
    wire = TrioWire(daemon.path)
    with pytest.raises(CallTimeout):
        await wire.open(time.monotonic() - 1)
    assert not wire.is_open


async def test_a_full_queue_of_connections_is_waited_out(tmp_path: Path) -> None:
    """C4: a daemon that accepts late costs time within the timeout, not a failure."""
    import socket

    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.ExitStack() as context:
            while True:
                waiting = context.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting.setblocking(False)
                try:
                    waiting.connect(os.fspath(path))
                except BlockingIOError:
                    break
            async with Cache(path, timeout=SOON, fail_open=False) as cache:
                with pytest.raises(CallTimeout):
                    await cache.peek(TOKENS, namespace="n")
