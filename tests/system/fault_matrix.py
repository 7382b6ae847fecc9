"""The fault matrix: each step of the protocol x each fault, and what must hold afterwards.

    python -m tests.system.fault_matrix         runs all of it and writes docs/reliability.md

`fault_steps.py` has the rows, `fault_cell.py` what one cell is.
"""

import concurrent.futures
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.system.fault_cell import Fault, Matrix, applies
from tests.system.fault_steps import STEPS, Step
from tests.system.reliability_page import render

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
WORKERS: Final = 4
"""Daemons at a time: most cells wait for a time-out."""
STALL: Final = "event loop held"
"""What the daemon logs on a machine that is too busy; it explains no failure."""

Cell = tuple[Step, Fault]
CELLS: Final[tuple[Cell, ...]] = tuple(
    (step, fault) for step in STEPS for fault in Fault if not applies(step, fault)
)


def run_all(cells: Sequence[Cell] = CELLS) -> dict[tuple[str, str], str]:
    """Run cells on several daemons; return for each "holds" or what does not."""
    outcomes: dict[tuple[str, str], str] = {}
    pending = list(reversed(cells))

    def work() -> None:
        while pending:
            with Matrix() as matrix:
                while pending:
                    step, fault = pending.pop()
                    began = time.monotonic()
                    try:
                        matrix.run(step, fault)
                    except Exception as error:  # noqa: BLE001, it is the cell's outcome
                        outcomes[step.name, fault.value] = f"FAILS: {error!r}"
                        log = [m for m in matrix.daemon.log().splitlines() if STALL not in m]
                        print(f"{step.name} x {fault.value}: {error!r}", *log[-20:], sep="\n")
                        break  # the next cells get a fresh daemon
                    outcomes[step.name, fault.value] = "holds"
                    seconds = time.monotonic() - began
                    print(f"{step.name} x {fault.value}: holds, {seconds:.1f} s", flush=True)
                else:
                    matrix.quiet_threads()

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for future in [pool.submit(work) for _ in range(WORKERS)]:
            future.result()
    return outcomes


def page(outcomes: dict[tuple[str, str], str]) -> str:
    """Return docs/reliability.md for these outcomes."""
    rows = [
        (step.name, [applies(step, f) or outcomes[step.name, f.value] for f in Fault])
        for step in STEPS
    ]
    return render([fault.value for fault in Fault], rows)


def expected_page() -> str:
    """What the page says when every cell holds."""
    return page({(step.name, fault.value): "holds" for step, fault in CELLS})


def main() -> int:
    """Run the matrix and write the page."""
    outcomes = run_all()
    PAGE.write_text(page(outcomes))
    failed = [cell for cell, outcome in outcomes.items() if outcome != "holds"]
    print(f"{len(outcomes)} cells, {len(failed)} do not hold; wrote docs/reliability.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
