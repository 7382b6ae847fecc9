"""Starting the daemon where nobody does: no service is installed, and a client may do it itself.

A `Starter` belongs to one cache and is used by whichever of its connections finds nobody at the
socket. Clients that come together start one daemon: whoever holds the lock beside the socket starts
it, the others wait for that. The daemon is nobody's child and outlives who started it; it reports
by the line that it prints when it serves, or when it cannot. Everything is bounded by the call's
deadline, and after a start that failed none is tried for a while.
"""

import fcntl
import logging
import math
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from prefixcached.protocol import paths

START_VARIABLE: Final = paths.START_VARIABLE

PAUSE_SECONDS: Final = 60.0
"""After a start that failed: what stands in its way needs a person, and each try costs a Python."""

LOCK_POLL_SECONDS: Final = 0.02
"""Between two looks whether another client's start is done; a start takes half a second."""

_READY: Final = b"READY "
_FAILED: Final = b"FAILED "
_STILL_STARTING: Final = b"\0"
"""Stands for no line yet."""

_MAX_QUOTED_BYTES: Final = 1000
"""Of what a daemon that could not start said last: one line."""

# The shell ends at once, so that the daemon belongs to nobody and leaves no zombie behind.
_DETACHED: Final = ("/bin/sh", "-c", '"$@" </dev/null &', "sh")

_logger = logging.getLogger(__name__)


def is_wanted(start: bool | None, variables: Mapping[str, str] | None = None) -> bool:
    """Return whether a client may start the daemon: ``start``, or what the environment says.

    Raises:
        ValueError: `PREFIXCACHED_START` is neither yes nor no.
    """
    if start is not None:
        return start
    text = (os.environ if variables is None else variables).get(START_VARIABLE, "").lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{START_VARIABLE} = {text!r} is not allowed; allowed: 1, 0")


class Starter:
    """Starts the daemon of one socket.

    Args:
        path: The socket.
        clock: Seconds that never go back; deadlines are on it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path.absolute()
        self._clock = clock
        self._failure = ""
        self._paused_until = -math.inf
        self.started = 0
        """Daemons that this process started."""

    def start(self, deadline: float) -> str:
        """See to it that a daemon serves, at the latest at ``deadline``. Blocks.

        Returns:
            Why none does, for people; empty where one does.
        """
        if self._is_paused:
            return self._failure
        if (file := paths.service_of(self._path)) is not None:
            return (
                f"its service is installed ({file}) and stopped; "
                "run: prefixcached service start, or uninstall to let clients start it"
            )
        try:
            return self._note(self._start_once(deadline))
        except (OSError, RuntimeError) as error:  # also: nobody says where the home directory is
            return self._note(f"it cannot be started: {error}")

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def _note(self, failure: str) -> str:
        """Begin the pause where there is a ``failure``, and return it."""
        if failure and not self._is_paused:
            self._failure = failure
            self._paused_until = self._clock() + PAUSE_SECONDS
            _logger.warning("no daemon at %s: %s", self._path, failure)
        return failure

    def _start_once(self, deadline: float) -> str:
        if refusal := paths.length_refusal(self._path):
            return refusal
        self._path.parent.mkdir(mode=paths.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        # The daemon would refuse it as well; nothing is left in it.
        if refusal := paths.directory_refusal(self._path.parent):
            return refusal
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(paths.start_lock(self._path), flags, 0o600)
        try:
            while not _lock(lock):
                # A daemon that answers is served from, whatever its starter does meanwhile.
                if self._answers():
                    return ""
                if self._clock() >= deadline:
                    return "another process has been starting it for too long"
                time.sleep(LOCK_POLL_SECONDS)
            # Whoever had the lock before may have started one,
            if self._answers():
                return ""
            # or, where that was another thread of this process, may have failed to.
            if self._is_paused:
                return self._failure
            return self._note(self._spawn(deadline))
        finally:
            # A child forked meanwhile has this descriptor too: closing alone would not unlock.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.settimeout(1.0)
                sock.connect(os.fspath(self._path))
            except OSError:
                return False
        return True

    def _spawn(self, deadline: float) -> str:
        log_file = paths.log_file()
        command = daemon_command()
        if command is None:
            return "the command `prefixcached` is not on PATH"
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not through a link, and without waiting for a pipe's reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(log_file, flags | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(log).st_mode):
                return f"its log {log_file} is no regular file"
            # Until the daemon makes the log its standard error, which others write to as well.
            with tempfile.TemporaryFile() as early:
                with subprocess.Popen(
                    [*_DETACHED, *command, "serve", "--socket", str(self._path),
                     "--log-file", str(log_file)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=early,
                    cwd="/",  # it must not hold this directory's volume
                    env=_environment(),
                    start_new_session=True,
                ) as shell:  # fmt: skip
                    assert shell.stdout is not None
                    said = self._first_line(shell.stdout.fileno(), deadline)
                early.seek(0)
                complaint = early.read()
            os.write(log, complaint)
        finally:
            os.close(log)
        if said.startswith(_READY):
            self.started += 1
            _logger.info("started the daemon at %s; its log is %s", self._path, log_file)
            return ""
        if said is _STILL_STARTING:
            return f"it is still starting; its log is {log_file}"
        # One that started meanwhile is as good as one's own.
        if self._answers():
            return ""
        last = _last_line(said.removeprefix(_FAILED) or complaint)
        return f"it was started and ended: {last or 'it said nothing'} (log: {log_file})"

    def _first_line(self, descriptor: int, deadline: float) -> bytes:
        """Return what the daemon prints when it serves; all it said where it ended before."""
        line = b""
        poller = select.poll()  # `select` knows no descriptor beyond 1,023
        poller.register(descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            left_seconds = deadline - self._clock()
            if left_seconds <= 0 or not poller.poll(1000 * left_seconds):
                return _STILL_STARTING
            more = os.read(descriptor, 4096)
            if not more:
                break
            line += more
        return line


def daemon_command() -> list[str] | None:
    """Return how to run this version's command line; None where this process cannot tell."""
    # A frozen application is its own `sys.executable`.
    if sys.executable and not getattr(sys, "frozen", False):
        return [sys.executable, "-m", "prefixcached.daemon.cli"]
    found = shutil.which("prefixcached")
    return None if found is None else [found]


def _environment() -> dict[str, str]:
    """This process's environment, for one that runs in another directory."""
    variables = dict(os.environ)
    if named := variables.get(paths.CONFIG_VARIABLE):
        variables[paths.CONFIG_VARIABLE] = str(paths.expanded(named).absolute())
    return variables


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _last_line(said: bytes) -> str:
    lines = said[-_MAX_QUOTED_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
