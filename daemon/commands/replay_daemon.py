"""The daemon of a replay: a child of the command, in a directory that the command made.

`ReplayDaemon` is its socket and what it says; a thread of its own reads that from a pipe, since a
file would lie on the disk that may be what fails. `replay_daemon` owns both from start to end.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket  # noqa: N812  (a path is called socket here)
from threading import Thread
from typing import IO, Final

import click

from prefixcached.daemon import options
from prefixcached.daemon.commands.common import plain
from prefixcached.protocol.paths import SOCKET_VARIABLE, length_refusal

STOP_SECONDS: Final = 30.0
"""For the daemon to write what is queued: it takes 15 s at most."""

START_SECONDS: Final = 60.0
"""For the daemon to start: it takes a second, and a loaded machine some."""

POLL_SECONDS: Final = 0.02
"""Between two attempts to connect to a daemon that starts."""

SHOWN_BYTES: Final = 2000
"""Of what it said last: an error with where it came from."""

LAST_WORD_SECONDS: Final = 1.0
"""For what it said to come through the pipe."""


class ReplayDaemon:
    """A daemon that runs, its socket, and what it says on standard error."""

    def __init__(self, home: Path, process: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
        self.socket = home / "socket"
        self._process = process
        self._said = b""
        self._end_of_trace = b""
        self._listener = Thread(target=self._listen, args=(said,), daemon=True)
        self._listener.start()

    def _listen(self, said: IO[bytes]) -> None:
        from prefixcached.daemon.trace.tracer import ENDS_HERE

        for line in said:
            self._said = (self._said + line)[-SHOWN_BYTES:]
            if ENDS_HERE.encode() in line:
                self._end_of_trace = line

    def last_words(self) -> str:
        """Return what it said last, for people."""
        self._listener.join(LAST_WORD_SECONDS)
        lines = self._said.decode(errors="replace").strip().splitlines()
        return "\n".join(plain(line) for line in lines)

    @property
    def trace_failure(self) -> str:
        """Why it could not write its trace to the end; empty where it could."""
        self._listener.join(LAST_WORD_SECONDS)
        if not self._end_of_trace:
            return ""
        return plain(str(json.loads(self._end_of_trace)["reason"]))

    def serves(self) -> bool:
        """Wait until it takes connections; say whether it ever does."""
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with Socket(AF_UNIX) as probe:
                if probe.connect_ex(str(self.socket)) == 0:
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def end(self) -> None:
        """Let it write its files.

        Raises:
            ClickException: It failed, or does not end.
        """
        self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise click.ClickException(
                f"the daemon of the replay has not ended for {STOP_SECONDS:g} s\n"
                f"{self.last_words()}"
            ) from None
        self._listener.join(LAST_WORD_SECONDS)
        if code:
            raise click.ClickException(f"the daemon of the replay failed:\n{self.last_words()}")

    def kill(self) -> None:
        """Leave nothing of it, if it still runs. A second call does nothing."""
        self._process.kill()
        self._process.wait()
        self._listener.join()


@contextmanager
def replay_daemon(
    home: Path, chosen: Mapping[str, str], follow: Path | None, follow_bytes: int
) -> Iterator[ReplayDaemon]:
    """A daemon of its own; after the block it has written its trace.

    It serves connections before it is READY, which it may only be once requests have come: a record
    that it follows may have them first.
    """
    socket = home / "socket"
    if length_refusal(socket):
        raise click.ClickException(
            f"{home} is too long a path for a socket to lie in; name a shorter directory with "
            "TMPDIR"
        )
    (home / "config.toml").touch()
    followed = ("--follow", str(follow), "--follow-bytes", str(follow_bytes))
    command = [
        sys.executable, "-m", "prefixcached.daemon.cli", "serve",
        "--socket", str(socket), "--config", str(home / "config.toml"),
        "--state-dir", str(home / "state"), "--trace", str(home / "trace"),
        *(() if follow is None else followed),
        *(f"{options.flag_of(name)}={value}" for name, value in chosen.items()),
    ]  # fmt: skip
    # The user's own settings are for the user's own daemon.
    environment = {n: v for n, v in os.environ.items() if not n.startswith(options.PREFIX)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment | {SOCKET_VARIABLE: str(socket)},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        daemon = ReplayDaemon(home, process, process.stderr)
        try:
            if not daemon.serves():
                raise click.ClickException(f"the daemon did not start:\n{daemon.last_words()}")
            yield daemon
            daemon.end()
        finally:
            daemon.kill()  # where it has not ended by itself, nothing of it is wanted
