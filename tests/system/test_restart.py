"""What was flushed is served after kill -9, whatever kind of layer it belongs to."""

import shutil
import time
from collections.abc import Iterator

import pytest

from prefixcached.client import connect
from tests.support import derived_kv
from tests.support.daemon_process import DaemonProcess
from tests.support.until import wait_until_loaded

OPTIONS = ("--ram-bytes", "256MiB", "--ssd-bytes", "1GiB")


@pytest.fixture
def stored() -> Iterator[DaemonProcess]:
    """A daemon with both tiers."""
    with DaemonProcess(*OPTIONS) as process:
        yield process
        print(process.log())


@pytest.mark.parametrize("kinds", [derived_kv.PLAIN, derived_kv.HYBRID, derived_kv.EVERY_KIND])
def test_what_was_flushed_survives_a_kill(stored: DaemonProcess, kinds: tuple[str, ...]) -> None:
    """D1, P8: put, flush, kill -9, restart, take gives bit-identical KV of every layer kind."""
    prompt = derived_kv.tokens(700, seed=1)
    with connect(socket=stored.socket, fail_open=False) as cache:
        boundary = prompt[:500]
        assert cache.put(boundary, derived_kv.caches(boundary, kinds), namespace="n")
        assert cache.put(prompt, derived_kv.caches(prompt, kinds), namespace="n")
        assert cache.flush().failed == 0
        stored.kill()
        stored.start()
        wait_until_loaded(cache)
        for length in (500, 700):
            hit = cache.take([*prompt[:length], 7], namespace="n")
            assert hit
            assert (hit.length, hit.tier) == (length, "ssd")
            derived_kv.assert_derived(hit.kv, prompt[:length], kinds)


def test_a_flush_after_the_directory_was_deleted_writes_everything_again(
    stored: DaemonProcess,
) -> None:
    """D7, P8: whoever deletes the files of a running daemon loses nothing that RAM still has."""
    prompt = derived_kv.tokens(600, seed=3)
    with connect(socket=stored.socket, fail_open=False) as cache:
        assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
        assert cache.flush().failed == 0
        shutil.rmtree(stored.state_dir)
        assert cache.flush().written > 0
        stored.kill()
        stored.start()
        wait_until_loaded(cache)
        hit = cache.take([*prompt, 7], namespace="n")
        assert hit
        derived_kv.assert_derived(hit.kv, prompt)


def test_a_second_hit_on_ssd_brings_it_into_ram(stored: DaemonProcess) -> None:
    """T7: what is hit again on SSD is made resident, off the critical path."""
    prompt = derived_kv.tokens(600, seed=2)
    with connect(socket=stored.socket, fail_open=False) as cache:
        assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
        assert cache.flush()
        stored.kill()
        stored.start()
        wait_until_loaded(cache)
        tiers = []
        for _ in range(100):
            hit = cache.take([*prompt, 7], namespace="n")
            assert hit
            derived_kv.assert_derived(hit.kv, prompt)
            tiers.append(hit.tier)
            if tiers[-1] == "ram":
                break
            time.sleep(0.01)
        assert tiers[:2] == ["ssd", "ssd"]
        assert tiers[-1] == "ram"


def test_a_graceful_stop_writes_what_is_queued(stored: DaemonProcess) -> None:
    """P8: SIGTERM lets the writer drain, so that nothing needs a flush before a reboot."""
    prompt = derived_kv.tokens(600, seed=3)
    with connect(socket=stored.socket, fail_open=False) as cache:
        assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
        assert stored.terminate() == 0
        stored.start()
        wait_until_loaded(cache)
        hit = cache.take([*prompt, 7], namespace="n")
        assert hit
        derived_kv.assert_derived(hit.kv, prompt)


def test_a_clear_survives_a_kill(stored: DaemonProcess) -> None:
    """D11: what was cleared stays unfindable, also after kill -9 right after the reply."""
    prompt = derived_kv.tokens(600, seed=4)
    with connect(socket=stored.socket, fail_open=False) as cache:
        for namespace in ("gone", "kept"):
            assert cache.put(prompt, derived_kv.caches(prompt), namespace=namespace)
        assert cache.flush()
        cache.clear("gone")
        stored.kill()
        stored.start()
        wait_until_loaded(cache)
        assert cache.peek([*prompt, 7], namespace="gone") == 0
        assert cache.peek([*prompt, 7], namespace="kept") == 600
