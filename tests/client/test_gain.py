"""What a client restores, and what it rather computes: the minimum gain of `connect`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.client import Cache, Hit, Miss, connect
from prefixcached.client.gain import (
    LEAST_PREFILL_TOKENS,
    LEAST_RESTORED_BYTES,
    SKIPS_IN_A_ROW,
    GainMeter,
)
from prefixcached.protocol import messages
from tests.support.descriptors import none_leaked
from tests.support.numpy_kv import NumpyAdapter, make_caches
from tests.support.small_daemon import SmallDaemon

MUCH = LEAST_RESTORED_BYTES
TOKENS = 1000


def meter(
    minimum: float, *, prefill: float | None = 10.0, restore: float | None = 1.0
) -> GainMeter:
    """A meter that has measured so many seconds for `TOKENS`, and for `MUCH` bytes."""
    made = GainMeter(minimum)
    if prefill is not None:
        made.prefilled("n", TOKENS, prefill)
    if restore is not None:
        made.restored("other", TOKENS, MUCH, restore)
    return made


def test_a_hit_is_worth_what_its_prefill_takes_less_its_restore() -> None:
    """DESIGN 6: 10 s of prefill for 1 s of restoring is a gain of 9 s."""
    assert meter(8.9).is_worth("n", TOKENS, MUCH)
    assert not meter(9.1).is_worth("n", TOKENS, MUCH)
    assert meter(8.9).is_worth("n", TOKENS * 2, MUCH * 2)
    assert not meter(8.9).is_worth("n", TOKENS // 2, MUCH)


def test_without_a_minimum_everything_is_worth_restoring() -> None:
    """DESIGN 6: the default restores every hit, however slow that was."""
    assert meter(0.0, prefill=1.0, restore=100.0).is_worth("n", TOKENS, MUCH)


@pytest.mark.parametrize(("prefill", "restore"), [(None, 100.0), (0.001, None)])
def test_what_was_not_measured_is_tried(prefill: float | None, restore: float | None) -> None:
    """Both rates must be known before anything is left out; rates belong to a namespace."""
    assert meter(5.0, prefill=prefill, restore=restore).is_worth("n", TOKENS, MUCH)
    assert meter(5.0, prefill=0.001, restore=100.0).is_worth("another model", TOKENS, MUCH)


def test_small_measurements_are_no_rates() -> None:
    """A call of a few tokens or bytes measures its overhead."""
    made = GainMeter(1.0)
    made.prefilled("n", LEAST_PREFILL_TOKENS - 1, 1e-9)
    made.restored("n", TOKENS, MUCH - 1, 1000.0)
    made.prefilled("n", TOKENS, 0.0)
    assert made.is_worth("n", TOKENS, MUCH)
    assert made.slow == 0


def test_after_some_skips_a_hit_is_tried_again() -> None:
    """A slow spell of the disk does not count for ever: restoring is measured again."""
    made = meter(5.0, prefill=6.0, restore=100.0)
    for _ in range(SKIPS_IN_A_ROW):
        assert not made.is_worth("n", TOKENS, MUCH)
    assert made.is_worth("n", TOKENS, MUCH)
    assert made.skipped == SKIPS_IN_A_ROW
    for _ in range(20):
        made.restored("n", TOKENS, MUCH, 0.1)
    assert made.is_worth("n", TOKENS, MUCH)


def test_a_rate_follows_its_measurements() -> None:
    """One outlier moves a rate by a part of it, several move it there."""
    made = meter(0.5, prefill=10.0, restore=1.0)
    made.restored("n", TOKENS, MUCH, 20.0)
    assert made.is_worth("n", TOKENS, MUCH)
    for _ in range(10):
        made.restored("n", TOKENS, MUCH, 20.0)
    assert not made.is_worth("n", TOKENS, MUCH)


def test_restores_slower_than_computing_are_counted() -> None:
    """FIELD 3: a restore that took longer than the prefill it saved shows in the statistics."""
    made = meter(0.0, prefill=10.0, restore=None)
    made.restored("n", TOKENS, MUCH, 9.0)
    assert made.slow == 0
    made.restored("n", TOKENS, MUCH, 11.0)
    made.restored("n", TOKENS // 10, 10, 1.5)
    made.restored("unknown", TOKENS, MUCH, 99.0)
    assert made.slow == 2


# -- through the client --------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    """A daemon that holds one long prompt."""
    with none_leaked(), SmallDaemon(tmp_path / "socket") as daemon:
        yield daemon


PROMPT = list(range(30_000))


def test_a_hit_that_gains_too_little_is_not_read(daemon: SmallDaemon) -> None:
    """DESIGN 6: its lease ends unread, the miss says why, and the connection goes on."""
    with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter(), minimum_gain=1000.0) as cache:
        assert cache.put(PROMPT, make_caches(PROMPT), namespace="n")
        assert isinstance(cache.take(PROMPT, namespace="n"), Hit)
        cache.note_prefill(30_000, 30.0, namespace="n")
        result = cache.take(PROMPT, namespace="n")
        assert result == Miss(reason="no-gain", matched=len(PROMPT) - 1)
        assert daemon.wait_until(lambda: daemon.leases == 0)
        statistics = cache.statistics()
        assert (statistics.restores_skipped, statistics.slow_restores) == (1, 0)
        assert (statistics.opened, statistics.idle, statistics.failures) == (1, 1, {})
        cache.note_prefill(30_000, 80_000.0, namespace="n")
        assert isinstance(cache.take(PROMPT, namespace="n"), Hit)
        releases = [r for r in daemon.requests if isinstance(r, messages.Release)]
        assert daemon.wait_until(lambda: daemon.leases == 0)
        assert len(releases) >= 2


def test_slow_restores_show_in_the_statistics(daemon: SmallDaemon) -> None:
    """FIELD 3: the client knows that its hits cost more than they save."""
    with Cache(daemon.path, fail_open=False, adapter=NumpyAdapter()) as cache:
        cache.put(PROMPT, make_caches(PROMPT), namespace="n")
        cache.note_prefill(30_000, 1e-6, namespace="n")
        assert isinstance(cache.take(PROMPT, namespace="n"), Hit)
        assert cache.statistics().slow_restores == 1


@pytest.mark.parametrize("minimum", [-1.0, float("nan"), "1"])
def test_a_minimum_gain_is_a_time(minimum: float) -> None:
    """DESIGN 1.2: a caller's mistake is told at once."""
    with pytest.raises((TypeError, ValueError), match="minimum_gain"):
        connect(minimum_gain=minimum)
