"""What holds the event loop is found, and an idle loop is left alone."""

import time

import pytest
import structlog
import trio
import trio.lowlevel

from prefixcached.daemon import stall_watch
from prefixcached.daemon.stall_watch import StallWatch


def hold_the_loop(seconds: float) -> None:
    """Something that should have run in a thread."""
    time.sleep(seconds)


def test_a_step_that_holds_the_loop_is_logged_with_its_stack() -> None:
    """C6: a step longer than 100 ms is logged with the stack of what it was doing."""

    async def main() -> None:
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        hold_the_loop(4 * stall_watch.STALL_SECONDS)
        await trio.lowlevel.checkpoint()

    with structlog.testing.capture_logs() as logs, StallWatch() as watch:
        trio.run(main, instruments=[watch])
    assert watch.stalls == 1
    assert watch.longest_seconds >= 4 * stall_watch.STALL_SECONDS
    (entry,) = [e for e in logs if e["event"] == "event loop held"]
    assert "hold_the_loop" in entry["stack"]


def test_an_idle_loop_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: while nothing happens the sampling thread sleeps, and wakes up with the loop."""
    monkeypatch.setattr(stall_watch, "IDLE_SECONDS", 0.0)

    async def main() -> None:
        for _ in range(100):
            await trio.sleep(0.02)
            if watch._is_asleep:
                break
        else:
            pytest.fail("the sampling thread never slept")
        await trio.sleep(0.01)
        hold_the_loop(4 * stall_watch.STALL_SECONDS)
        await trio.lowlevel.checkpoint()

    with structlog.testing.capture_logs() as logs, StallWatch() as watch:
        trio.run(main, instruments=[watch])
    assert [e["event"] for e in logs].count("event loop held") >= 1
