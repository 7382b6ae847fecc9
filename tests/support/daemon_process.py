"""A real daemon in a process and a directory of its own, for tests from outside."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from prefixcached.protocol.paths import SOCKET_VARIABLE

START_SECONDS: Final = 60.0
"""For READY: an import of half a second on a machine that runs other tests as well."""

STOP_SECONDS: Final = 30.0

COUNTS_COVERAGE: Final = "coverage" in sys.modules
"""A process that is killed takes its figures with it, so each ends by itself: `make coverage`."""


class DaemonProcess:
    """Starts `prefixcached serve`, waits for READY, and leaves nothing behind; a context manager.

    Args:
        *options: More options of `serve`, such as ``"--ram-bytes", "64MiB"``.
        directory: Where socket, files and log lie; by default a new one that is removed at the end.
            Its path must be short enough for a socket's.
    """

    def __init__(self, *options: str, directory: Path | None = None) -> None:
        self._options = options
        self._is_own = directory is None
        # Not pytest's tmp_path, whose name may exceed what a socket's path allows.
        self.directory = directory or Path(tempfile.mkdtemp(prefix="pfxc-"))
        self.directory.chmod(0o700)
        self.socket: Final = self.directory / "s"
        self.state_dir: Final = self.directory / "state"
        self.log_file: Final = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._running.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def environment(self) -> dict[str, str]:
        """For processes that should find this daemon by themselves."""
        return {**os.environ, SOCKET_VARIABLE: str(self.socket)}

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the daemon was not started"
        return self._process

    def start(self) -> Self:
        """Start it (again) and return once it is READY; AssertionError with its log otherwise."""
        assert not self.is_running
        self._reap()
        command = [
            sys.executable, "-m", "prefixcached.daemon.cli", "serve",
            "--socket", str(self.socket), "--state-dir", str(self.state_dir),
            # The tests' prompts are shorter than what is worth a snapshot by default (E11).
            "--ssd-bytes", "0", "--checkpoint-min-tokens", "1", *self._options,
        ]  # fmt: skip
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        line = self._first_line()
        if line != f"READY {self.socket}\n":
            said = f"the daemon said {line!r} and not READY; its log:\n{self.log()}"
            self.close()
            raise AssertionError(said)
        return self

    def _first_line(self) -> str:
        stdout = self._running.stdout
        assert stdout is not None
        deadline = time.monotonic() + START_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([stdout], [], [], left)[0]:
                break
            more = os.read(stdout.fileno(), 4096)
            if not more:
                break
            line += more
        return line.decode()

    def terminate(self) -> int:
        """Ask it to stop, as launchd does, and return its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self.is_running:
            self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Freeze it: it holds its sockets and answers nobody."""
        self.signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"the daemon ended instead; its log:\n{self.log()}"

    def cont(self) -> None:
        """Let a frozen one go on."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send any signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for its end and return its exit status."""
        return self._running.wait(STOP_SECONDS)

    def log(self) -> str:
        """All that its runs logged so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def close(self) -> None:
        """End it however it stands, and remove what it left."""
        if self.is_running and COUNTS_COVERAGE:
            self._let_end()
        if self.is_running:
            self.signal(signal.SIGKILL)
        self._reap()
        if self._is_own:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _let_end(self) -> None:
        self.cont()
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait()

    def _reap(self) -> None:
        if self._process is not None:
            self.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
