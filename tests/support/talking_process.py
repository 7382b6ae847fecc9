"""A Python process of a test that says what it does, a JSON object a line, and waits for lines.

The process calls `say` and `heard`; its parent has a `TalkingProcess`, which can freeze and kill it
and leaves nothing behind.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

PATIENCE_SECONDS = 300.0
"""For what a process says next, on a machine that runs other tests as well."""

ENDED = "it ended"
"""Event of a process that will say no more."""


def say(**what: Any) -> None:
    """In the process: tell the parent."""
    print(json.dumps(what), flush=True)


def heard() -> str:
    """In the process: wait for the parent's next line; empty when there will be none."""
    return sys.stdin.readline().removesuffix("\n")


class TalkingProcess:
    """Such a process, seen from its parent; a context manager.

    Args:
        module: The module that it runs.
        *arguments: Its arguments.
        environment: Its environment; by default this process's.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(json.dumps({"event": ENDED}))

    def expect(self, event: str, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """The next thing that the process says, which must be this event."""
        said: dict[str, Any] = json.loads(self._lines.get(timeout=seconds))
        assert said["event"] == event, said
        return said

    def said(self) -> list[dict[str, Any]]:
        """What it said since the last look, without waiting; its end is told by `wait` alone."""
        found: list[dict[str, Any]] = []
        while not self._lines.empty():
            found.append(json.loads(self._lines.get()))
        return [said for said in found if said["event"] != ENDED]

    def tell(self, line: str = "go") -> None:
        """Say a line; let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Freeze it; it keeps its sockets and does nothing."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def kill(self) -> None:
        """End it as the kernel would when memory runs out."""
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for its end, and for all that it said, and return its exit status."""
        status = self._process.wait(seconds)
        self._reader.join()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
