"""Waiting for another process without sleeping: ask it again until it says so."""

import time
from collections.abc import Callable
from typing import Any

from prefixcached.client import Cache

PATIENCE_SECONDS = 60.0
"""For a machine that runs other tests as well."""


def until(condition: Callable[[], object]) -> None:
    """Return once ``condition`` is true; AssertionError if that takes too long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"


def ram_tier(cache: Cache) -> dict[str, Any]:
    """RamTier's statistics."""
    report: dict[str, Any] = cache.stats()["ram_tier"]
    return report
