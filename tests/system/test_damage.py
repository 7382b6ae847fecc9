"""Damaged files under a running daemon: a miss each time, and traffic goes on."""

import random
from pathlib import Path

import pytest

from prefixcached.client import Cache, connect
from tests.support import derived_kv
from tests.support.daemon_process import DaemonProcess
from tests.support.until import wait_until_loaded
from tests.system.test_restart import OPTIONS

LENGTHS = 8
"""Lengths that the file is cut to, and bits that are flipped; the store's own tests try all."""


def only_file(daemon: DaemonProcess) -> Path:
    """The one segment on SSD."""
    segments = daemon.state_dir / "segments.noindex"
    (path,) = segments.glob("[0-9a-f]*/*.segment.safetensors")
    return path


def on_ssd_only(daemon: DaemonProcess, cache: Cache, prompt: list[int]) -> None:
    """Store ``prompt`` and let a new daemon find it on SSD."""
    assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
    assert cache.flush()
    daemon.terminate()
    daemon.start()
    wait_until_loaded(cache)


@pytest.mark.slow
def test_damage_of_any_kind_is_a_miss_and_the_daemon_goes_on() -> None:
    """FIELD 3: a torn file is a miss: cut anywhere, any bit flipped; it is quarantined (D3)."""
    prompt = derived_kv.tokens(40, seed=11)
    choose = random.Random(12)
    with DaemonProcess(*OPTIONS) as daemon, connect(socket=daemon.socket) as cache:
        on_ssd_only(daemon, cache, prompt)
        whole = only_file(daemon).read_bytes()
        for turn in range(2 * LENGTHS):
            path = only_file(daemon)
            if turn % 2:
                with path.open("r+b") as file:
                    file.truncate(choose.randrange(len(whole)))
            else:
                at = choose.randrange(len(whole))
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([whole[at] ^ (1 << choose.randrange(8))]))
            found = cache.take([*prompt, 7], namespace="n")
            if found:  # a flip in padding that no reader looks at
                derived_kv.assert_derived(found.kv, prompt)
                path.write_bytes(whole)
                continue
            assert found.reason in ("restore-failed", "empty", "evicted")
            # What was damaged is forgotten: the same prompt is stored and written again.
            assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
            assert cache.flush()
            daemon.kill()
            daemon.start()
            wait_until_loaded(cache)
            whole = only_file(daemon).read_bytes()
        report = cache.stats()
        assert report["ram_tier"]["leases"] == 0
