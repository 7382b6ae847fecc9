"""A test that hangs is ended with the names of the tasks that wait for each other."""

import subprocess
import sys
from pathlib import Path

from tests.support.stuck_tests import SECTION

ROOT = Path(__file__).parents[2]

DEADLOCK = """
import trio
import pytest

class Actor:
    def __init__(self):
        self.outbox, self.inbox = trio.open_memory_channel(0)

    async def run(self, other):
        await other.outbox.send("after you")

@pytest.mark.timeout(1)
async def test_two_actors_each_wait_for_the_other():
    first, second = Actor(), Actor()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.run, second, name="first-actor")
        nursery.start_soon(second.run, first, name="second-actor")
"""

ENDLESS = """
import pytest

@pytest.mark.timeout(1)
def test_without_trio():
    while True:
        pass
"""


def run(folder: Path, content: str) -> str:
    """Run one test under the hook in a pytest of its own; return what it said."""
    test = folder / "test_stuck.py"
    test.write_text(content)
    # The hook comes as a plugin, as the conftest of these tests takes it in.
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.support.stuck_tests", "-p", "no:cacheprovider",
        "--rootdir", str(folder), "-o", "trio_mode=true", "-o", "timeout_method=signal", str(test),
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_deadlock_names_its_tasks_and_where_they_wait(tmp_path: Path) -> None:
    """Two actors that send to each other without room: both are named, at their line."""
    said = run(tmp_path, DEADLOCK)
    assert "Timeout (>1.0s)" in said
    tree = said.split(SECTION)[1]
    for name in ("first-actor", "second-actor"):
        branch = tree.split(name)[1]
        assert 'in run: await other.outbox.send("after you")' in branch.split("actor")[0]


def test_a_stuck_test_without_trio_says_so(tmp_path: Path) -> None:
    """The hook is in nobody's way: the timeout is reported as ever."""
    said = run(tmp_path, ENDLESS)
    assert "Timeout (>1.0s)" in said
    assert "the main thread does not run Trio" in said.split(SECTION)[1]
