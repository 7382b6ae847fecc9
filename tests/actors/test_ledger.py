"""Bytes and images by state against hard caps (rules E1, E2)."""

import pytest

from prefixcached.actors.ledger import Ledger


def new_ledger() -> Ledger:
    return Ledger(("used", "leaving"), bytes_cap=100, images_cap=4)


def test_every_image_is_in_exactly_one_state() -> None:
    """E1: the sum over states is what is charged, whatever moves."""
    ledger = new_ledger()
    ledger.add("used", 60, images=2)
    ledger.move("used", "leaving", 20)
    assert ledger.bytes_by_state == {"used": 40, "leaving": 20}
    assert ledger.images_by_state == {"used": 1, "leaving": 1}
    assert (ledger.bytes, ledger.images) == (60, 2)
    ledger.remove("leaving", 20)
    assert (ledger.bytes, ledger.images, ledger.peak_bytes) == (40, 1, 60)


@pytest.mark.parametrize(
    ("nbytes", "images", "leaving", "fits"),
    [
        (40, 1, "", True),
        (41, 1, "", False),
        (41, 1, "leaving", True),
        (61, 1, "leaving", False),
        (1, 3, "", False),
        (1, 3, "leaving", True),
    ],
)
def test_both_caps_decide_what_fits(nbytes: int, images: int, leaving: str, fits: bool) -> None:
    """E2: more fits if bytes and images both do; what is leaving may be counted as gone."""
    ledger = new_ledger()
    ledger.add("used", 40)
    ledger.add("leaving", 20)
    assert ledger.fits(nbytes, images, leaving=leaving) is fits


def test_discharging_more_than_was_charged_is_a_bug() -> None:
    """An account that would go below zero raises instead of hiding the mistake."""
    ledger = new_ledger()
    ledger.add("used", 10)
    with pytest.raises(RuntimeError, match="more was discharged"):
        ledger.remove("used", 11)
    with pytest.raises(RuntimeError, match="more was discharged"):
        ledger.remove("leaving", 0)


def test_what_was_never_used_has_no_peak() -> None:
    """E1: `status` shows 0 bytes for a tier that has held nothing."""
    assert new_ledger().peak_bytes == 0


@pytest.mark.parametrize(("target", "is_reduced"), [(99, True), (100, False), (101, False)])
def test_only_a_target_below_the_cap_is_a_reduction(target: int, is_reduced: bool) -> None:
    """M2: what is within the cap anyway takes nothing away."""
    ledger = new_ledger()
    ledger.target_bytes = target
    assert ledger.is_reduced is is_reduced
    assert ledger.limit_bytes == min(target, 100)
