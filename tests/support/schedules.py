"""Trio's scheduler in many orders, each repeatable, and a watchdog that says where tasks hang."""

import contextlib
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import trio
from trio._core import _run as scheduler


class Hang(Exception):  # noqa: N818, it says what happened
    """Tasks were still waiting when the watchdog's time was over; the text is their tree."""


@contextlib.contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Within the block `trio.run` runs the tasks that are ready in an order drawn from ``seed``.

    Where threads work the order in which they end is still the system's.
    """
    # Trio has no public name for this; its own tests and Hypothesis's plugin do the same.
    with (
        mock.patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        mock.patch.object(scheduler, "_r", random.Random(seed)),
    ):
        yield


def run_in_order(seed: int, seconds: float, function: Callable[[], Awaitable[Any]]) -> None:
    """Run an async function under one schedule, for at most so many seconds.

    Raises:
        Hang: It did not end.
    """

    async def main() -> None:
        async with watchdog(seconds):
            await function()

    with schedule(seed):
        trio.run(main)


@contextlib.asynccontextmanager
async def watchdog(seconds: float) -> AsyncIterator[None]:
    """Raise `Hang` unless the block ends in time."""
    hang: Hang | None = None

    async def bark() -> None:
        nonlocal hang
        await trio.sleep(seconds)
        hang = Hang(f"nothing came about in {seconds:g} s:\n{task_tree()}")
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bark)
        yield
        nursery.cancel_scope.cancel()
    if hang is not None:
        raise hang


def task_tree() -> str:
    """Return all tasks of this run of Trio, each with the lines that it waits at."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return "\n".join(_branch(root, 0))


def _branch(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    indent = "  " * depth
    yield f"{indent}{task.name}"
    for frame in traceback.StackSummary.extract(task.iter_await_frames()):
        yield f"{indent}  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _branch(child, depth + 1)
