"""Sessions, pins and clears through the client and the real daemon, with an SSD tier."""

import threading
from collections.abc import Iterator

import pytest

from prefixcached.client import Cache, Declined, Hit, Miss
from tests.support.daemon_process import DaemonProcess
from tests.support.descriptors import none_leaked
from tests.support.numpy_kv import NumpyAdapter, make_caches, same
from tests.support.until import ram_tier, until

TOKENS = [(7919 * position) % 50021 for position in range(2000)]


@pytest.fixture
def process() -> Iterator[DaemonProcess]:
    """A daemon with both tiers."""
    with (
        none_leaked(),
        DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "256MiB") as process,
    ):
        yield process


@pytest.fixture
def cache(process: DaemonProcess) -> Iterator[Cache]:
    """A client that raises, of a daemon whose index is complete."""
    with connected(process) as cache:
        yield cache


def connected(process: DaemonProcess) -> Cache:
    cache = Cache(process.socket, timeout=30, fail_open=False, adapter=NumpyAdapter())
    until(lambda: not ram_tier(cache)["loading"])
    return cache


def store(cache: Cache, tokens: list[int], namespace: str = "n") -> None:
    assert cache.put(tokens, make_caches(tokens), namespace=namespace)


def hit(cache: Cache, tokens: list[int], namespace: str = "n") -> Hit:
    result = cache.take(tokens, namespace=namespace)
    assert isinstance(result, Hit)
    assert same(result.kv, make_caches(tokens[: result.length]))
    return result


def restarted(process: DaemonProcess, cache: Cache) -> Cache:
    """Make everything durable, end the daemon and start it again: all is on SSD only."""
    assert cache.flush(timeout=60)
    process.kill()
    process.start()
    return connected(process)


def test_a_prefetch_makes_what_is_on_ssd_resident(process: DaemonProcess, cache: Cache) -> None:
    """F1: the prefix that take would choose is read, verified, made resident and pinned."""
    store(cache, TOKENS)
    with restarted(process, cache) as again:
        before = ram_tier(again)
        assert before["ram_bytes_by_state"]["resident"] == 0
        with again.prefetch([*TOKENS, 1], namespace="n") as pin:
            assert pin.length == len(TOKENS)
            state = ram_tier(again)
            assert state["pins"] == 1
            assert state["ram_bytes_by_state"]["resident"] > 0
            assert hit(again, [*TOKENS, 1]).tier == "ram"
        until(lambda: ram_tier(again)["pins"] == 0)


def test_a_pin_ends_with_its_client(process: DaemonProcess, cache: Cache) -> None:
    """F1: the entry stays until the pin is released or its client goes."""
    store(cache, TOKENS)
    other = connected(process)
    pin = other.prefetch([*TOKENS, 1], namespace="n")
    assert ram_tier(cache)["pins"] == 1
    other.close()
    assert ram_tier(cache)["pins"] == 1
    del pin, other
    until(lambda: ram_tier(cache)["pins"] == 0)


def test_many_who_prefetch_one_prefix_read_it_once(process: DaemonProcess, cache: Cache) -> None:
    """F2: identical reads are made once, and each asker has a pin of its own."""
    store(cache, TOKENS)
    with restarted(process, cache) as again:
        pins = []
        together = threading.Barrier(8)

        def ask() -> None:
            together.wait()
            pins.append(again.prefetch([*TOKENS, 1], namespace="n"))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [pin.length for pin in pins] == [len(TOKENS)] * 8
        assert ram_tier(again)["pins"] == 8
        on_ssd = ram_tier(again)["ssd_bytes_by_state"]["durable"]
        assert ram_tier(again)["disk"]["read_bytes"] <= on_ssd
        for pin in pins:
            pin.release()
        until(lambda: ram_tier(again)["pins"] == 0)
        hit(again, [*TOKENS, 1])


def test_what_ram_holds_is_only_pinned(cache: Cache) -> None:
    """F3: nothing is read for what is resident, and an unknown prompt gives an empty pin."""
    store(cache, TOKENS)
    with cache.prefetch([*TOKENS, 1], namespace="n") as pin:
        assert pin.length == len(TOKENS)
        assert ram_tier(cache)["disk"]["read_bytes"] == 0
    empty = cache.prefetch([5, 6, 7], namespace="n")
    assert (empty.length, empty.reason) == (0, "")
    assert cache.statistics().lent == 0


def test_a_pin_keeps_its_bytes_and_shows_nothing_after_a_clear(cache: Cache) -> None:
    """F4, D11, L2: after a clear nothing old is found; what is pinned is freed with the pin."""
    store(cache, TOKENS)
    with cache.prefetch([*TOKENS, 1], namespace="n"):
        assert cache.clear("n")
        result = cache.take([*TOKENS, 1], namespace="n")
        assert isinstance(result, Miss)
        assert result.reason == "empty"
        assert ram_tier(cache)["ram_bytes_by_state"]["lingering"] > 0
    until(lambda: ram_tier(cache)["ram_bytes"] == 0)


def test_a_clear_during_restores_puts_and_waits_leaves_nothing_old(
    process: DaemonProcess, cache: Cache
) -> None:
    """D11, Q2, P6: whatever is under way, nothing of before the clear appears after it."""
    store(cache, TOKENS)
    with restarted(process, cache) as again:
        last_put, last_clear = threading.Event(), threading.Event()
        found: list[Hit | Miss] = []

        def take() -> None:
            with connected(process) as own:
                left = 3
                while left:
                    is_late = last_clear.is_set()
                    result = own.take([*TOKENS, 1], namespace="n", wait=0.2)
                    if is_late:
                        found.append(result)
                        left -= 1

        def put() -> None:
            with connected(process) as own:
                caches = make_caches(TOKENS)
                while not last_put.is_set():
                    result = own.put(TOKENS, caches, namespace="n")
                    assert result or result == Declined(reason="cleared")

        takers = [threading.Thread(target=take) for _ in range(3)]
        putter = threading.Thread(target=put)
        for thread in (*takers, putter):
            thread.start()
        for _ in range(20):
            assert again.clear("n")
        last_put.set()
        putter.join()
        assert again.clear("n")
        last_clear.set()
        for thread in takers:
            thread.join()
        assert len(found) == 9
        assert not any(found)
        until(lambda: ram_tier(again)["ram_bytes"] == 0 and not ram_tier(again)["leases"])


def test_sessions_are_closed_by_name(cache: Cache) -> None:
    """S4: in one namespace or in all; the number says how many there were."""
    for namespace in ("a", "b", "c"):
        tokens = TOKENS[:300]
        assert cache.put(tokens, make_caches(tokens), namespace=namespace, session="talk")
    assert ram_tier(cache)["labels"] == 3
    assert cache.close_session("talk", "a") == 1
    assert cache.close_session("talk", "a") == 0
    assert cache.close_session("talk") == 2
    assert cache.close_session("talk") == 0
    assert cache.take([*TOKENS[:300], 1], namespace="a", session="talk")
    assert ram_tier(cache)["labels"] == 1
    assert cache.take([*TOKENS[:300], 1], namespace="a", session="talk")
    assert ram_tier(cache)["label_takes"] == {"label_hits": 1, "label_misses": 0}
