"""Child processes with limits: a mutant may loop, eat memory, fill the disk or leave processes."""

import contextlib
import os
import resource
import select
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

Outcome = Literal["survived", "killed", "timed out"]
MOST_MEMORY_BYTES: Final = 8 << 30
"""Of address space, of which threads and arenas take gigabytes that are never used."""
MOST_FILE_BYTES: Final = 1 << 30


class Limit(NamedTuple):
    """How long a child may take: other work on the machine stretches only the time by the clock."""

    processor_seconds: int
    wall_seconds: float


def outcome_of(tests: Callable[[], bool], limit: Limit) -> Outcome:
    """Whether ``tests`` notice something, in a fork of this process with a folder of its own.

    Args:
        tests: Says whether all passed. The child ends when it returns.
        limit: Beyond it the child is killed, with all that it started.

    A child that ends without an answer has noticed something as well.
    """
    folder = tempfile.mkdtemp(prefix="mutant-")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"killed"
        with contextlib.suppress(BaseException):
            _enter(folder, limit)
            if tests():
                answer = b"survived"
        os.write(write_end, answer)
        os._exit(0)
    os.close(write_end)
    answered, status = False, 0
    try:
        answered = bool(select.select([read_end], [], [], limit.wall_seconds)[0])
        answer = os.read(read_end, 64) if answered else b""
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # before it had a group of its own
        status = os.waitpid(child, 0)[1]
        shutil.rmtree(folder, ignore_errors=True)
    if answer == b"survived":
        return "survived"
    ran_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    return "timed out" if ran_out or not answered else "killed"


def _enter(folder: str, limit: Limit) -> None:
    os.setpgid(0, 0)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    seconds = limit.processor_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
    with contextlib.suppress(ValueError, OSError):
        # macOS knows this limit and refuses to set it.
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def in_parallel(tasks: list[Callable[[], None]]) -> None:
    """Run each task in a fork of this process, all at once, and wait for all.

    Raises:
        RuntimeError: One of them failed; what it printed says why.
    """
    children = []
    for task in tasks:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                task()
                status = 0
            except BaseException:  # noqa: BLE001, whatever it was is told here, and only here
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(children)} processes failed")
