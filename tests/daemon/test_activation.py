"""A socket that the supervisor holds is taken over, and left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixcached.client import connect
from prefixcached.daemon import activation
from prefixcached.daemon.activation import from_systemd
from prefixcached.daemon.errors import StartError

# LISTEN_PID must be the daemon's own id, which only the shell that becomes it knows.
AS_SYSTEMD = 'export LISTEN_PID=$$; exec "$@"'


def command(directory: Path) -> list[str]:
    return [
        sys.executable, "-m", "prefixcached.daemon.cli", "serve", "--socket", str(directory / "s"),
        "--state-dir", str(directory / "state"), "--ssd-bytes", "0",
    ]  # fmt: skip


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        yield sock


def start(sock: socket.socket, directory: Path, **changes: str) -> "subprocess.Popen[str]":
    """Start a daemon as systemd does: the socket is descriptor 3."""

    def move() -> None:
        os.dup2(sock.fileno(), 3)
        os.set_inheritable(3, True)

    return subprocess.Popen(
        ["sh", "-c", AS_SYSTEMD, "sh", *command(directory)],
        env={**os.environ, "LISTEN_FDS": "1", **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        close_fds=False,
        preexec_fn=move,  # noqa: PLW1509  (this process has no threads here)
    )


def test_a_connection_made_before_the_daemon_is_served(directory: Path) -> None:
    """Clients connect at once; the daemon that starts for them finds them waiting."""
    with listening(directory / "s") as sock:
        before = os.stat(directory / "s").st_ino
        process = start(sock, directory)
        with connect(directory / "s", timeout=30, fail_open=False) as cache:
            assert cache.stats()["daemon"]["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0, log
        assert os.stat(directory / "s").st_ino == before, "the supervisor's socket stays"


def test_a_socket_of_another_path_is_refused(directory: Path) -> None:
    """Service file and configuration differ: the text says how to make them agree."""
    with listening(directory / "other") as sock:
        process = start(sock, directory)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "service install" in log


def test_more_than_one_socket_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one listener."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(StartError, match="2 sockets"):
        activation.inherited_socket(directory / "s")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, []),
        ({"LISTEN_PID": "1", "LISTEN_FDS": "1"}, []),
        ({"LISTEN_PID": "self", "LISTEN_FDS": "1"}, [3]),
        ({"LISTEN_PID": "self", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}, [3, 4]),
        ({"LISTEN_PID": "self", "LISTEN_FDS": "x"}, []),
    ],
)
def test_systemds_variables_are_for_this_process_alone(
    variables: dict[str, str], found: list[int]
) -> None:
    """sd_listen_fds(3): another's are ignored, and children inherit none."""
    mine = {name: value.replace("self", str(os.getpid())) for name, value in variables.items()}
    mine["PATH"] = "/bin"
    assert from_systemd(mine) == found
    assert mine == {"PATH": "/bin"}


@pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None,
    reason="systemd-socket-activate is not installed",
)
def test_systemd_itself_hands_over_its_socket(directory: Path) -> None:
    """The real protocol, by systemd's own tool: it starts the daemon at the first connection."""
    with subprocess.Popen(
        ["systemd-socket-activate", "-l", str(directory / "s"), *command(directory)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "Listening" in line
        with connect(directory / "s", timeout=30, fail_open=False) as cache:
            assert cache.stats()["daemon"]["pid"] == process.pid
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0
