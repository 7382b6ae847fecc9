"""The soak (`soak.py`): two minutes of it here, as long as one likes by ``make soak``."""

import os
import sys

import pytest

from tests.system.soak import Soak, summary

SECONDS = float(os.environ.get("SOAK_SECONDS", "120"))
SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@pytest.mark.timeout(SECONDS + 900)
def test_nothing_is_wrong_lost_or_left_after_a_soak() -> None:
    """C3, D5, E2, L1: no wrong byte, no cap exceeded, memory flat, and nothing left in the end."""
    report = Soak(SECONDS, SEED).run()
    print(summary(report))
    # A run in which nothing happened would show nothing.
    for count in ("hit ram", "hit ssd", "stored", "objects", "bytes"):
        assert report.counts[count], count
    assert sum(report.troubles.values()) > SECONDS / 10
