"""The daemon as a process: READY, signals, and what a kill leaves."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefixcached.protocol import messages as m
from prefixcached.protocol.connection import Connection, Received, Role
from prefixcached.protocol.framing import encode
from tests.daemon.clients import HELLO
from tests.support.daemon_process import DaemonProcess


@contextmanager
def greeted(daemon: DaemonProcess) -> Iterator[tuple[socket.socket, Connection]]:
    """A blocking connection to it, greeted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(str(daemon.socket))
        connection = Connection(Role.CLIENT)
        sock.sendall(connection.send(HELLO))
        assert isinstance(hear(sock, connection), m.Welcome)
        yield sock, connection


def hear(sock: socket.socket, connection: Connection) -> object:
    while not isinstance(event := connection.next_event(), Received):
        data = sock.recv(1 << 16)
        connection.receive(data)
        if not data:
            connection.receive_eof()
    return event.message


def report(daemon: DaemonProcess) -> dict[str, Any]:
    with greeted(daemon) as (sock, connection):
        sock.sendall(connection.send(m.Status()))
        reply = hear(sock, connection)
    assert isinstance(reply, m.StatusReport)
    return reply.report


def test_sigterm_ends_with_0_and_removes_the_socket(daemon: DaemonProcess) -> None:
    """A stop in good order, with a client connected, leaves only the lock file."""
    with greeted(daemon) as (sock, _):
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
        assert daemon.terminate() == 0
        assert sock.recv(1) == b""
    assert not daemon.socket.exists()
    assert daemon.socket.with_name("s.lock").exists()
    assert daemon.start().is_running


def test_after_kill_9_the_next_one_starts(daemon: DaemonProcess) -> None:
    """The socket that is left is nobody's, and the lock ended with the process."""
    before = report(daemon)["daemon"]["pid"]
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert report(daemon)["daemon"]["pid"] == daemon.pid != before


def test_a_second_signal_ends_at_once(daemon: DaemonProcess) -> None:
    """Both arrive before the daemon runs again, so it cannot have stopped in between."""
    daemon.stop()
    daemon.signal(signal.SIGTERM)
    daemon.signal(signal.SIGINT)
    daemon.cont()
    assert daemon.wait() == 1
    assert "ending at once" in daemon.log()


DIE = """
import os, signal, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(bytes.fromhex(sys.argv[2]))
sock.recv(1 << 16)
sock.sendall(bytes.fromhex(sys.argv[3]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_clients_that_are_killed_leave_nothing(daemon: DaemonProcess) -> None:
    """L1, C3: between frames, within a frame, and during a request."""
    report(daemon)
    descriptors = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for data in (b"", encode(m.Status())[:5], b"garbage!!", encode(m.Flush())):
        arguments = [str(daemon.socket), encode(HELLO).hex(), data.hex()]
        child = subprocess.run([sys.executable, "-c", DIE, *arguments], check=False)
        assert child.returncode == -signal.SIGKILL
    # Sessions end one after another; the report's own session is the one that is left.
    found = report(daemon)["listener"]
    for _ in range(100):
        if found["current"] > 1:
            found = report(daemon)["listener"]
    assert found["current"] == 1
    assert found["accepted"] >= 5
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) <= descriptors + 1


def test_a_daemon_whose_log_nobody_reads_goes_on_and_ends(daemon: DaemonProcess) -> None:
    """`prefixcached serve 2>&1 | less`, and less ended: every line it logs fails from then on."""
    reader, writer = os.pipe()
    socket_path = daemon.directory / "other"
    command = [
        sys.executable, "-m", "prefixcached.daemon.cli", "serve", "--socket", str(socket_path),
        "--state-dir", str(daemon.directory / "others"), "--ssd-bytes", "0",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer) as process:
        try:
            os.close(writer)
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"READY")
            os.close(reader)
            with socket.socket(socket.AF_UNIX) as garbage:
                garbage.settimeout(30)
                garbage.connect(str(socket_path))
                garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")  # ends a session with a log line
                assert garbage.recv(1 << 16), "it is told why"
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_task_that_fails_ends_the_daemon(daemon: DaemonProcess) -> None:
    """It does not go on serving nobody: a service manager starts it again."""
    broken = (
        "from prefixcached.daemon import app, cli; "
        "app.signal.Signals = lambda number: 1 / 0; cli.main()"
    )
    command = [
        sys.executable, "-c", broken, "serve", "--socket", str(daemon.directory / "other"),
        "--state-dir", str(daemon.directory / "others"), "--ssd-bytes", "0",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"READY")
            process.terminate()
            _, said = process.communicate(timeout=30)
            assert process.returncode == 1
            assert b"ZeroDivisionError" in said
        finally:
            process.kill()
