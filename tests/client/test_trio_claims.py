"""Claims of Trio tasks, against the real daemon (rules Q1 to Q3)."""

import gc
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
import trio
import trio.testing

from prefixcached.client import Hit, Miss
from prefixcached.client.trio import Cache
from tests.support.daemon_process import DaemonProcess
from tests.support.descriptors import none_leaked
from tests.support.numpy_kv import NumpyAdapter, make_caches, same

LONG_WAIT = 60.0
_salts = itertools.count(1)


@pytest.fixture(scope="module")
def daemon_process() -> Iterator[DaemonProcess]:
    """One daemon for all tests here; each uses a prompt of its own."""
    with DaemonProcess("--ram-bytes", "64MiB") as process:
        yield process


@pytest.fixture
async def cache(daemon_process: DaemonProcess) -> AsyncIterator[Cache]:
    """A client that raises; nobody has a claim when it begins."""
    with none_leaked():
        async with Cache(
            daemon_process.socket, timeout=30, fail_open=False, adapter=NumpyAdapter()
        ) as cache:
            await state(cache, claims=0)
            yield cache


@pytest.fixture
def prompt() -> list[int]:
    """A prompt that nobody has asked for, long enough for a claim."""
    salt = next(_salts)
    return [(salt * 7919 + position * 31) % 50021 for position in range(400)]


async def state(cache: Cache, **wanted: int) -> None:
    """Wait until the daemon's counters are these; each question is a checkpoint."""
    with trio.fail_after(LONG_WAIT):
        while True:
            found = (await cache.stats())["ram_tier"]
            if all(found[name] == value for name, value in wanted.items()):
                return


async def missed(cache: Cache, prompt: list[int], wait: float = 0.0) -> Miss:
    result = await cache.take(prompt, namespace="n", wait=wait)
    assert isinstance(result, Miss)
    assert result.claim is not None
    return result


async def store(cache: Cache, tokens: list[int]) -> None:
    assert await cache.put(tokens, make_caches(tokens), namespace="n")


async def test_tasks_wait_for_each_other(cache: Cache, prompt: list[int]) -> None:
    """Q2, Q3: three tasks wait while a fourth computes and stores, and share its prefill."""
    found: list[Hit | Miss] = []

    async def wait() -> None:
        found.append(await cache.take(prompt, namespace="n", wait=LONG_WAIT))

    result = await missed(cache, prompt)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await state(cache, takes_waiting=3, claims=1)
        await store(cache, prompt[:-1])
    assert all(isinstance(hit, Hit) and same(hit.kv, make_caches(prompt[:-1])) for hit in found)
    assert result.claim is not None
    assert not result.claim.is_alive
    assert cache.statistics().lent == 0


async def test_a_task_does_not_wait_for_its_own_claim(cache: Cache, prompt: list[int]) -> None:
    """Q3: the claims of one task share a connection, and its own takes go there."""
    with trio.fail_after(LONG_WAIT / 2):
        first = await missed(cache, prompt)
        second = await missed(cache, prompt, wait=LONG_WAIT)
    assert cache.statistics().lent == 1
    for result in (first, second):
        result.drop_claim()
    assert cache.statistics().lent == 0
    await state(cache, claims=0)


async def test_a_cancelled_wait_is_no_wait(cache: Cache, prompt: list[int]) -> None:
    """Q2: a task that gave up waits for nothing, claims nothing, and cost nobody anything."""
    result = await missed(cache, prompt)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(missed, cache, prompt, LONG_WAIT)
        await state(cache, takes_waiting=1)
        nursery.cancel_scope.cancel()
    await state(cache, takes_waiting=0, claims=1)
    result.drop_claim()
    await state(cache, claims=0)


async def test_a_task_that_ends_in_mid_prefill_is_followed_by_one(
    cache: Cache, prompt: list[int]
) -> None:
    """Q2: the claim of a cancelled task ends with its result, and a waiting one takes over."""
    elected: list[Miss] = []

    async def prefill() -> None:
        result = await missed(cache, prompt)
        await trio.sleep_forever()
        result.drop_claim()

    async def take_over() -> None:
        elected.append(await missed(cache, prompt, wait=LONG_WAIT))

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(prefill)
                await state(cache, claims=1)
                nursery.start_soon(take_over)
                await state(cache, takes_waiting=1)
                scope.cancel()
        # What was raised through the frame of the task may keep it for a moment.
        gc.collect()
    (result,) = elected
    assert result.claim is not None
    assert result.claim.is_alive
    await state(cache, claims=1, takes_waiting=0)
