"""Claims as a client of the real daemon has them: connections, threads, forks, collections."""

import contextlib
import gc
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from prefixcached.client import Cache, Declined, Hit, Miss
from prefixcached.protocol import messages
from tests.support.daemon_process import DaemonProcess
from tests.support.descriptors import none_leaked
from tests.support.numpy_kv import NumpyAdapter, make_caches, same
from tests.support.small_daemon import BOOT, Peer, SmallDaemon
from tests.support.until import ram_tier, until

LONG_WAIT = 60.0
_salts = itertools.count(1)


@pytest.fixture(scope="module")
def daemon_process() -> Iterator[DaemonProcess]:
    """One daemon for all tests here; each uses a prompt of its own."""
    with DaemonProcess("--ram-bytes", "64MiB") as process:
        yield process


@pytest.fixture(autouse=True)
def _no_descriptor_stays(daemon_process: DaemonProcess) -> Iterator[None]:
    with none_leaked():
        yield


@pytest.fixture
def cache(daemon_process: DaemonProcess) -> Iterator[Cache]:
    """A client that raises; nobody has a claim when it begins."""
    with connected(daemon_process) as cache:
        until(lambda: ram_tier(cache)["claims"] == 0)
        yield cache


@pytest.fixture
def other(daemon_process: DaemonProcess) -> Iterator[Cache]:
    """Another client, as another process would be."""
    with connected(daemon_process) as cache:
        yield cache


@pytest.fixture
def prompt() -> list[int]:
    """A prompt that nobody has asked for, long enough for a claim."""
    return new_prompt()


def new_prompt() -> list[int]:
    salt = next(_salts)
    return [(salt * 7919 + position * 31) % 50021 for position in range(400)]


def connected(process: DaemonProcess) -> Cache:
    return Cache(process.socket, timeout=30, fail_open=False, adapter=NumpyAdapter())


def missed(cache: Cache, prompt: list[int], **options: Any) -> Miss:
    """Take a prompt that nobody knows; the miss that makes this client its claimant."""
    result = cache.take(prompt, namespace="n", **options)
    assert isinstance(result, Miss)
    assert result.claim is not None
    assert result.claim.is_alive
    return result


def store(cache: Cache, tokens: list[int]) -> None:
    assert cache.put(tokens, make_caches(tokens), namespace="n")


class Waiting:
    """A take in a thread of its own that waits for somebody's prefill."""

    def __init__(self, cache: Cache, prompt: list[int], observer: Cache) -> None:
        self._results: list[Hit | Miss] = []
        before = ram_tier(observer)["takes_waiting"]
        self._thread = threading.Thread(
            target=lambda: self._results.append(cache.take(prompt, namespace="n", wait=LONG_WAIT))
        )
        self._thread.start()
        until(lambda: ram_tier(observer)["takes_waiting"] == before + 1)

    def result(self) -> Hit | Miss:
        self._thread.join(LONG_WAIT / 2)
        assert not self._thread.is_alive(), "it still waits"
        (result,) = self._results
        return result


# -- where claims live ---------------------------------------------------------------------------


def test_a_claim_keeps_its_connection_until_a_put_covers_it(
    cache: Cache, prompt: list[int]
) -> None:
    """Q1: the connection of a claim is out of the pool, and back after the put."""
    result = missed(cache, prompt)
    assert (cache.statistics().claims, cache.statistics().lent) == (1, 1)
    store(cache, prompt[:-1])
    assert (cache.statistics().claims, cache.statistics().lent) == (0, 0)
    assert result.claim is not None
    assert not result.claim.is_alive
    assert ram_tier(cache)["claims"] == 0
    opened = cache.statistics().opened
    for _ in range(5):
        result = missed(cache, fresh := new_prompt())
        store(cache, fresh)
    assert cache.statistics().opened == opened


def test_a_shorter_put_leaves_the_claim(cache: Cache, prompt: list[int]) -> None:
    """Q1: a checkpoint on the way is not the prompt."""
    result = missed(cache, prompt)
    store(cache, prompt[:300])
    assert result.claim is not None
    assert result.claim.is_alive
    result.drop_claim()


def test_a_dropped_claim_lets_the_others_go_on(
    cache: Cache, other: Cache, prompt: list[int]
) -> None:
    """Q2: after `drop_claim` exactly one of those who wait computes the prompt."""
    result = missed(cache, prompt)
    waiting = Waiting(other, prompt, cache)
    result.drop_claim()
    result.drop_claim()
    elected = waiting.result()
    assert elected.claim is not None
    assert elected.claim.is_alive
    assert cache.statistics().lent == 0


def test_a_result_that_nobody_keeps_gives_its_claim_up(cache: Cache, prompt: list[int]) -> None:
    """Q1: the claim of a forgotten result ends with it, also in a collection of a cycle."""
    missed(cache, prompt)
    until(lambda: ram_tier(cache)["claims"] == 0)
    cycle: list[Any] = [missed(cache, prompt)]
    cycle.append(cycle)
    assert ram_tier(cache)["claims"] == 1
    del cycle
    gc.collect()
    until(lambda: ram_tier(cache)["claims"] == 0)
    assert cache.statistics().lent == 0


def test_the_claims_of_a_thread_share_one_connection(cache: Cache) -> None:
    """Q1: a client that only takes has one connection more, and a bounded number of claims."""
    results = [missed(cache, new_prompt()) for _ in range(40)]
    assert cache.statistics().lent == 1
    assert cache.statistics().opened == 1
    assert ram_tier(cache)["claims"] == 16
    results[20].drop_claim()
    assert cache.statistics().lent == 1
    del results
    until(lambda: ram_tier(cache)["claims"] == 0)


def test_closing_a_cache_ends_its_claims(
    cache: Cache, prompt: list[int], daemon_process: DaemonProcess
) -> None:
    """Q1: a result may outlive its cache, its claim does not."""
    with connected(daemon_process) as closing:
        result = missed(closing, prompt)
    assert result.claim is not None
    assert not result.claim.is_alive
    until(lambda: ram_tier(cache)["claims"] == 0)


def test_little_to_compute_is_no_claim(cache: Cache, prompt: list[int]) -> None:
    """Q1: a hit that leaves few tokens carries none, and dropping it is harmless."""
    store(cache, prompt[:-1])
    result = cache.take(prompt, namespace="n")
    assert result
    assert result.claim is None
    result.drop_claim()
    assert cache.statistics().lent == 0


def test_a_hit_may_carry_a_claim(cache: Cache, other: Cache, prompt: list[int]) -> None:
    """Q1: what is claimed is the whole prompt, whatever of it is known."""
    store(cache, prompt[:20])
    result = cache.take(prompt, namespace="n")
    assert isinstance(result, Hit)
    assert result.length == 20
    assert result.claim is not None
    waiting = Waiting(other, prompt, cache)
    store(cache, prompt[:-1])
    found = waiting.result()
    assert isinstance(found, Hit)
    assert found.length == len(prompt) - 1
    assert same(found.kv, make_caches(prompt[:-1]))


@pytest.mark.parametrize("how", ["mistake", "declined"])
def test_a_put_that_fails_ends_the_claim(
    cache: Cache, other: Cache, prompt: list[int], how: str
) -> None:
    """Q2: what could not be stored will not come: those who wait are answered."""
    missed_result = missed(cache, prompt)
    waiting = Waiting(other, prompt, cache)
    if how == "mistake":
        with pytest.raises(ValueError, match="cover"):
            cache.put(prompt, make_caches(prompt[:-2]), namespace="n")
    else:
        caches = make_caches(prompt, layers=3)
        store(cache, new_prompt())
        assert cache.put(prompt, caches, namespace="n") == Declined(reason="schema-mismatch")
    assert isinstance(waiting.result(), Miss)
    assert missed_result.claim is not None
    assert not missed_result.claim.is_alive


# -- threads -------------------------------------------------------------------------------------


def test_a_thread_does_not_wait_for_its_own_claim(cache: Cache, prompt: list[int]) -> None:
    """Q3: asking for the same prompt twice is answered at once, with two claims."""
    began = time.monotonic()
    first, second = missed(cache, prompt), missed(cache, prompt, wait=LONG_WAIT)
    assert time.monotonic() - began < LONG_WAIT / 2
    assert cache.statistics().lent == 1
    store(cache, prompt)
    assert [r.claim and r.claim.is_alive for r in (first, second)] == [False, False]


def test_threads_of_one_process_wait_for_each_other(cache: Cache, prompt: list[int]) -> None:
    """Q2, Q3: a waiting take blocks neither the put it waits for nor another call."""
    result = missed(cache, prompt)
    waiting = [Waiting(cache, prompt, cache) for _ in range(3)]
    store(cache, prompt[:-1])
    assert [bool(w.result()) for w in waiting] == [True, True, True]
    assert result.claim is not None
    assert not result.claim.is_alive


def test_two_clients_that_would_wait_for_each_other_do_not(cache: Cache, other: Cache) -> None:
    """Q3: a server with several prompts in flight never waits for who waits for it."""
    one, two = new_prompt(), new_prompt()
    of_other: list[Miss] = []

    def take_one() -> None:
        of_other.append(missed(other, two))
        claimed.set()
        go_on.wait()
        other.take(one, namespace="n", wait=LONG_WAIT)

    claimed, go_on = threading.Event(), threading.Event()
    own = missed(cache, one)
    thread = threading.Thread(target=take_one)
    thread.start()
    claimed.wait()
    go_on.set()
    with connected_to(cache) as observer:
        until(lambda: ram_tier(observer)["takes_waiting"] == 1)
    began = time.monotonic()
    missed(cache, two, wait=LONG_WAIT)
    assert time.monotonic() - began < LONG_WAIT / 2
    store(cache, one)
    thread.join()
    assert own.claim is not None


def connected_to(cache: Cache) -> Cache:
    return Cache(cache._pool.path, timeout=30, fail_open=False, adapter=NumpyAdapter())


def test_a_claim_may_be_dropped_by_another_thread(
    cache: Cache, other: Cache, prompt: list[int]
) -> None:
    """Q1: while its own thread waits for a reply over that connection, it is dropped afterwards."""
    second = new_prompt()
    theirs = missed(other, second)
    results: list[Any] = []
    claimed = threading.Event()

    def take_both() -> None:
        results.append(missed(cache, prompt))
        claimed.set()
        results.append(cache.take(second, namespace="n", wait=LONG_WAIT))

    thread = threading.Thread(target=take_both)
    thread.start()
    claimed.wait()
    until(lambda: ram_tier(other)["takes_waiting"] == 1)
    results[0].drop_claim()
    assert not results[0].claim.is_alive
    assert ram_tier(other)["claims"] == 2
    theirs.drop_claim()
    thread.join()
    until(lambda: ram_tier(other)["claims"] == 1)


def test_a_thread_that_ended_leaves_its_claim_to_its_result(
    cache: Cache, prompt: list[int]
) -> None:
    """Q1: a claim belongs to its result, not to the thread that asked."""
    results: list[Miss] = []
    thread = threading.Thread(target=lambda: results.append(missed(cache, prompt)))
    thread.start()
    thread.join()
    assert ram_tier(cache)["claims"] == 1
    store(cache, prompt)
    assert cache.statistics().lent == 0
    assert results[0].claim is not None
    assert not results[0].claim.is_alive


def test_threads_that_claim_and_let_go_in_every_way_leave_nothing(cache: Cache) -> None:
    """Q1, L1: taking, storing, dropping, forgetting and handing results over, all at once."""
    prompts = [new_prompt() for _ in range(6)]
    handed: deque[Hit | Miss] = deque(maxlen=10)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(60):
                result = cache.take(random.choice(prompts), namespace="n", wait=0.01)
                match random.randrange(6):
                    case 0:
                        result.drop_claim()
                    case 1:
                        handed.append(result)
                    case 2:
                        with contextlib.suppress(IndexError):
                            handed.pop().drop_claim()
                    case 3:
                        tokens = random.choice(prompts)[: random.randrange(100, 400)]
                        # A clear of another thread may cost this put its namespace.
                        cache.put(tokens, make_caches(tokens), namespace="n")
                    case 4:
                        cache.clear("n")
                    case _:
                        result = cache.take(new_prompt(), namespace="n")
        except BaseException as error:  # noqa: BLE001, the main thread reports it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    handed.clear()
    gc.collect()
    assert (cache.statistics().claims, cache.statistics().lent) == (0, 0)
    assert cache.statistics().failures == {}
    until(lambda: ram_tier(cache)["claims"] == 0)


# Python 3.12 and later warn of any fork beside threads; that is what this is about.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_claim_alone(cache: Cache, prompt: list[int]) -> None:
    """Q1, C4: what the child drops or collects is its copy; the claim ends with the parent's."""
    result = missed(cache, prompt)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert result.claim is not None
            assert not result.claim.is_alive
            result.drop_claim()
            assert ram_tier(cache)["claims"] == 1
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert ram_tier(cache)["claims"] == 1
    assert result.claim is not None
    assert result.claim.is_alive


# -- a daemon that fails -------------------------------------------------------------------------


def claiming(claim: int) -> Callable[[Peer, Any], bool]:
    """Answer every take with a miss and a claim."""

    def behave(peer: Peer, request: Any) -> bool:
        if isinstance(request, messages.Take):
            peer.send(messages.Miss(reason="empty", claim=claim, boot=BOOT))
            return True
        return isinstance(request, messages.DropClaim)

    return behave


def test_a_claim_ends_with_its_daemon(tmp_path: Any) -> None:
    """Q1, C4: a claim whose connection broke is over, and the next take opens another."""
    with SmallDaemon(tmp_path / "socket") as daemon:
        daemon.on_request = claiming(7)
        with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter()) as cache:
            first = missed(cache, [1, 2, 3])
            daemon.drop_all()
            assert daemon.wait_until(lambda: daemon.connections == 0)
            second = missed(cache, [1, 2, 3])
            first.drop_claim()
            second.drop_claim()
            assert daemon.wait_until(lambda: messages.DropClaim(7, BOOT) in daemon.requests)
            assert daemon.requests.count(messages.DropClaim(7, BOOT)) == 1
            assert cache.statistics().lent == 0
            assert cache.statistics().opened == 2


def test_a_failed_call_ends_the_claims_of_its_connection(tmp_path: Any) -> None:
    """C4: a connection that broke off half-way is closed, whoever has claims on it."""
    with SmallDaemon(tmp_path / "socket") as daemon:
        daemon.on_request = claiming(7)
        with Cache(daemon.path, timeout=0.2, adapter=NumpyAdapter()) as cache:
            first = missed(cache, [1, 2, 3])
            daemon.on_request = lambda peer, request: True
            assert cache.take([1, 2, 3], namespace="n") == Miss(reason="timeout")
            assert first.claim is not None
            assert not first.claim.is_alive
            assert cache.statistics().lent == 0
            assert cache.statistics().failures == {"timeout": 1}
        assert daemon.wait_until(lambda: daemon.connections == 0)


def test_a_claim_of_a_hit_that_cannot_be_restored_is_given_up(tmp_path: Any) -> None:
    """T8: the caller gets a miss without a claim, so nobody waits for it."""
    with SmallDaemon(tmp_path / "socket") as daemon:

        def lie(peer: Peer, request: Any) -> bool:
            if isinstance(request, messages.Take):
                peer.send(messages.Hit(lease=1, length=2, tier="ram", parts=(), claim=9, boot=BOOT))
                return True
            return False

        daemon.on_request = lie
        with Cache(daemon.path, adapter=NumpyAdapter()) as cache:
            result = cache.take([1, 2, 3], namespace="n")
            assert isinstance(result, Miss)
            assert result.claim is None
        assert daemon.wait_until(lambda: daemon.connections == 0)
        assert cache.statistics().claims == 0
