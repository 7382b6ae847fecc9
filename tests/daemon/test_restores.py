"""What clients report of their restores, in `status`."""

from prefixcached.client import Hit
from prefixcached.daemon.restores import RestoreMeter
from prefixcached.protocol.messages import Release
from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess
from tests.support.until import until


def test_reports_are_added_up() -> None:
    """A lease that was given back unread, or by an older client, is no restore."""
    meter = RestoreMeter()
    meter.note(Release(1))
    meter.note(Release(2, seconds=0.5, restored_bytes=100))
    meter.note(Release(3, seconds=2.0, restored_bytes=300, is_slow=True))
    said = meter.statistics()
    assert (said.restores, said.slow, said.bytes) == (2, 1, 400)
    assert (said.seconds, said.longest_seconds) == (2.5, 2.0)


def test_a_slow_restore_shows_in_status() -> None:
    """FIELD 3: a restore slower than computing shows in `status`, whoever's it was."""
    tokens = list(range(5000))
    with DaemonProcess(*BOTH_TIERS) as process, numpy_cache(process.socket) as cache:
        put(cache, tokens)
        assert isinstance(cache.take([*tokens, 7], namespace="n"), Hit)
        until(lambda: cache.stats()["restores"]["restores"] == 1)
        assert cache.stats()["restores"]["slow"] == 0
        assert "slower than computing" not in invoke("status", socket=process.socket).output
        cache.note_prefill(5000, 1e-9, namespace="n")
        assert isinstance(cache.take([*tokens, 7], namespace="n"), Hit)
        until(lambda: cache.stats()["restores"]["restores"] == 2)
        report = cache.stats()["restores"]
        assert report["slow"] == 1
        assert report["bytes"] > 0
        assert report["longest_seconds"] > 0
        assert "1 slower than computing" in invoke("status", socket=process.socket).output
