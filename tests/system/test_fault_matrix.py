"""The fault matrix (`fault_matrix.py`): a few of its cells, all of them, and the page."""

import sys
from collections.abc import Iterator

import pytest

from prefixcached.protocol.connection import ONE_WAY, REPLIES
from prefixcached.protocol.framing import tag_of
from tests.system.fault_cell import Fault, Matrix
from tests.system.fault_matrix import CELLS, PAGE, expected_page, page, run_all
from tests.system.fault_steps import STEPS, UNLISTED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    """One daemon for the sample."""
    with Matrix() as started:
        yield started


def run(matrix: Matrix, name: str, fault: Fault) -> None:
    """Run one cell."""
    (step,) = (step for step in STEPS if step.name == name)
    matrix.run(step, fault)


@pytest.mark.parametrize("name", ["hit copied, not released", "pin held"])
def test_a_dead_client_leaves_nothing(matrix: Matrix, name: str) -> None:
    """FIELD 3: no pin or lock is left behind: leases, pins, puts, claims, descriptors, bytes."""
    run(matrix, name, Fault.CLIENT_HUNG)


def test_an_unfinished_put_is_never_found(matrix: Matrix) -> None:
    """FIELD 3: no half store is visible: killed with all bytes written, before the commit (P4).

    `test_crash_points.py` kills the daemon at every point of a write.
    """
    run(matrix, "images written, not committed", Fault.CLIENT_KILLED)


@pytest.mark.parametrize("fault", [Fault.DAEMON_KILLED, Fault.DAEMON_FROZEN])
def test_a_client_goes_on_without_its_daemon(matrix: Matrix, fault: Fault) -> None:
    """FIELD 3: a dead daemon hangs nobody: bounded, a miss, and served again afterwards (C4)."""
    run(matrix, "put granted, nothing written", fault)


def test_all_goes_on_without_the_disk(matrix: Matrix) -> None:
    """FIELD 3: a failing disk stops nothing: RAM serves, all say so, and writing is resumed."""
    run(matrix, "stored, being written to SSD", Fault.DISK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_cell_holds_and_the_page_says_so() -> None:
    """C4, D7, L1, P4: all cells; docs/reliability.md is what the harness writes."""
    assert page(run_all()) == PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_rows_and_columns_of_the_harness() -> None:
    """`make reliability` writes the page; every cell holds, or says why it makes no sense."""
    assert PAGE.read_text(encoding="utf-8") == expected_page()
    assert len(CELLS) > 140


def test_every_message_of_a_client_is_a_row_or_has_a_reason() -> None:
    """A message that is added to the protocol gets its rows."""
    messages = {tag_of(message) for message in (*REPLIES, *ONE_WAY)}
    rows = {tag for step in STEPS for tag in step.messages}
    assert rows | UNLISTED.keys() == messages
    assert not rows & UNLISTED.keys()
