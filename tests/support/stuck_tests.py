"""A test that runs out of time says where each of its Trio tasks waits: a pytest hook.

pytest-timeout shows the stack of the main thread, which in a deadlock is Trio's loop and names
nobody. `tests/conftest.py` takes the hook in.
"""

import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any, Final

import pytest

from tests.support.schedules import task_tree

SECTION: Final = "Trio's tasks when time was over"
"""The heading in the report of the failed test, between "Captured" and "call"."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Have the tasks written down before pytest-timeout ends the test."""
    result = yield
    if sys.platform == "win32" or settings.method != "signal":
        return result  # its thread sees no tasks of the main one, and ends the process
    end_test = signal.getsignal(signal.SIGALRM)

    def end_with_report(number: int, frame: FrameType | None) -> None:
        item.add_report_section("call", SECTION, _tasks())
        if callable(end_test):
            end_test(number, frame)

    signal.signal(signal.SIGALRM, end_with_report)
    return result


def _tasks() -> str:
    # Signals are handled in the main thread, where most tests run Trio.
    try:
        return task_tree()
    except RuntimeError:
        return "none: the main thread does not run Trio"
