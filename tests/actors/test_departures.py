"""Departures alone: what is on its way off the SSD, and what cannot leave (rules D5, D10, D11)."""

import math

import pytest

from prefixcached.actors.departures import OTHERS_RETRY_SECONDS, Departures
from prefixcached.actors.index import SSD_STATES
from prefixcached.actors.ledger import Ledger
from prefixcached.actors.write_policy import CLEARED, MOST_FAILED_DELETIONS

PAGE = 16384
ERRORS = ("[Errno 1] Operation not permitted", "not permitted")
"""Words of the system, before and behind `CLEARED` in the alphabet."""


def with_charged(**pages: int) -> tuple[Ledger, Departures]:
    """A ledger of so many files of one page in each state."""
    ssd = Ledger(SSD_STATES, 100 * PAGE, 1 << 62)
    for state, count in pages.items():
        ssd.add(state, count * PAGE, count)
    return ssd, Departures(ssd)


def fail(departures: Departures, *names: str) -> None:
    """None of these files can be deleted."""
    for name in names:
        departures.deleted(name, PAGE, "not permitted", is_anew=False)


def test_at_first_nothing_leaves_and_nothing_stays() -> None:
    """D5: what entries have is neither, and nothing is known yet beside them."""
    _, departures = with_charged(durable=3, trash=0)
    assert (departures.leaving_bytes, departures.staying_bytes) == (0, 0)
    assert departures.others_to_drop(PAGE) == 0
    assert departures.most_deletions == math.inf
    assert not departures.is_outcome_awaited


def test_trash_is_room_to_come_until_it_is_stuck() -> None:
    """D11: what cannot be emptied for now makes no room, and is waited for by nobody."""
    ssd, departures = with_charged(deleting=1, undeletable=2, trash=4)
    assert (departures.leaving_bytes, departures.staying_bytes) == (5 * PAGE, 2 * PAGE)
    departures.trash_emptied(0, done=False, is_stuck=True)
    assert (departures.leaving_bytes, departures.staying_bytes) == (PAGE, 6 * PAGE)
    departures.trash_emptied(0, done=False)
    assert (departures.leaving_bytes, departures.staying_bytes) == (5 * PAGE, 2 * PAGE)
    assert (ssd.bytes, ssd.images) == (7 * PAGE, 7)


@pytest.mark.parametrize("error", ERRORS)
def test_a_file_that_cannot_be_deleted_stays_whatever_the_reason(error: str) -> None:
    """D5: only what went with its namespace is in the trash."""
    ssd, departures = with_charged(deleting=1)
    departures.deleted("a", PAGE, error, is_anew=False)
    assert ssd.bytes_by_state["undeletable"] == departures.staying_bytes == PAGE
    departures.deleted("a", PAGE, CLEARED, is_anew=False)
    assert ssd.bytes_by_state["trash"] == departures.leaving_bytes == PAGE


def test_the_outcome_of_a_deletion_after_one_that_failed_is_awaited() -> None:
    """D5: one at a time from then on, as long as the last one is under way."""
    _, departures = with_charged(deleting=2)
    fail(departures, "a")
    assert departures.most_deletions == 1
    assert departures.is_outcome_awaited
    fail(departures, "b")
    assert not departures.is_outcome_awaited


@pytest.mark.parametrize("is_anew", [True, False])
def test_a_deletion_that_works_lets_others_be_tried(is_anew: bool) -> None:
    """D5: whether or not the same file is written again meanwhile."""
    names = [str(number) for number in range(MOST_FAILED_DELETIONS)]
    _, departures = with_charged(deleting=MOST_FAILED_DELETIONS + 1)
    fail(departures, *names)
    assert departures.most_deletions == 0
    departures.deleted("other", PAGE, "", is_anew=is_anew)
    assert departures.most_deletions == math.inf


@pytest.mark.parametrize(("is_anew", "most"), [(True, 1), (False, math.inf)])
def test_a_failed_deletion_that_works_later_tells_of_others_too(is_anew: bool, most: float) -> None:
    """D5: unless a write took its place, which shows nothing of deletions."""
    ssd, departures = with_charged(deleting=MOST_FAILED_DELETIONS)
    fail(departures, *(str(number) for number in range(MOST_FAILED_DELETIONS)))
    departures.deleted("0", PAGE, "", is_anew=is_anew)
    assert departures.most_deletions == most
    assert ssd.bytes == (MOST_FAILED_DELETIONS - 1) * PAGE


def test_what_could_not_be_dropped_stays_no_longer_than_it_is_there() -> None:
    """D10: somebody else deletes it, and its bytes are in nobody's way any more."""
    _, departures = with_charged()
    departures.set_other_bytes(10)
    assert departures.others_to_drop(4) == 4
    departures.set_other_bytes(10, 0)
    assert departures.staying_bytes == 10
    departures.set_other_bytes(3)
    assert departures.staying_bytes == 3


def test_what_could_not_be_dropped_is_tried_again_after_a_while() -> None:
    """D10, D4: a volume that was read-only for a moment keeps nothing out for good."""
    _, departures = with_charged()
    departures.forget_kept(0.0)
    departures.set_other_bytes(10)
    assert departures.others_to_drop(4) == 4
    departures.set_other_bytes(10, 0)
    departures.forget_kept(OTHERS_RETRY_SECONDS - 1.0)
    assert departures.others_to_drop(4) == 0
    departures.forget_kept(OTHERS_RETRY_SECONDS)
    assert departures.others_to_drop(4) == 4


def test_others_of_which_more_went_than_was_wanted_can_all_be_dropped() -> None:
    """D10: files go whole, so mostly a little more is free."""
    _, departures = with_charged()
    departures.set_other_bytes(10)
    assert departures.others_to_drop(4) == 4
    departures.set_other_bytes(4, 6)
    assert departures.others_to_drop(4) == 4


def test_what_came_while_others_were_dropped_can_be_dropped_too() -> None:
    """D10: a file went into the quarantine meanwhile; all that was wanted is free."""
    _, departures = with_charged()
    departures.set_other_bytes(10)
    assert departures.others_to_drop(4) == 4
    departures.set_other_bytes(9, 4)
    assert departures.staying_bytes == 0
    assert departures.others_to_drop(9) == 9


def test_what_goes_before_a_clear_needs_no_trash() -> None:
    """D11: where the disk will tell of no trash, a file that is gone is discharged at once."""
    ssd, departures = with_charged(lingering=1)
    departures.cleared("lingering", PAGE)
    assert ssd.bytes == 0


def test_a_report_that_is_partly_of_files_charged_elsewhere_discharges_the_rest() -> None:
    """D11, L2: one slice of the trash may have a lent file and others that nobody read."""
    ssd, departures = with_charged(durable=2)
    departures.expect_trash()
    ssd.move("durable", "lingering", PAGE)
    departures.lent_at_clear(PAGE)
    departures.cleared("durable", PAGE)
    departures.trash_emptied(2 * PAGE, done=False)
    assert (ssd.bytes_by_state["lingering"], ssd.bytes_by_state["trash"]) == (PAGE, 0)
