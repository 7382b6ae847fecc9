"""Waiting for another process without sleeping: ask it again until it says so."""

import time
from collections.abc import Callable
from typing import Any

from prefixcached.client import Cache

PATIENCE_SECONDS = 60.0
"""For a machine that runs other tests as well."""


PAUSE_SECONDS = 0.005
"""Between two questions, so that whoever is waited for gets the processor."""


def until(condition: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    """Return once ``condition`` is true; AssertionError with ``what`` if that takes too long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about: {what()}"
        time.sleep(PAUSE_SECONDS)


def wait_until_loaded(cache: Cache) -> dict[str, Any]:
    """Wait for the daemon's index; return the statistics then."""
    until(lambda: not ram_tier(cache)["loading"])
    return cache.stats()


def ram_tier(cache: Cache) -> dict[str, Any]:
    """RamTier's statistics."""
    report: dict[str, Any] = cache.stats()["ram_tier"]
    return report
