"""How a replay ends when it cannot finish: it leaves nothing behind, and says why."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.daemon.commands.leaving import leaving_cleanly
from tests.daemon.command_line import numpy_cache, put
from tests.support.daemon_process import DaemonProcess
from tests.support.until import until

REPLAY = "from prefixcached.daemon.cli import main; main()"
"""The command line, after what a test does to the process first."""

HEARING = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
"""As under a terminal, also where these tests run under nohup."""

LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000)); "
"""As a full disk does, refuse what would make a file longer; the images are shorter."""

IGNORING = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
"""As a shell starts a background job."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Short, as the path of a socket has to be."""
    with tempfile.TemporaryDirectory(prefix="pfxc-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A put and some hundred requests, of a daemon without SSD."""
    path = tmp_path_factory.mktemp("trace") / "t"
    with (
        DaemonProcess("--ram-bytes", "4MiB", "--ssd-bytes", "0", "--trace", str(path)) as daemon,
        numpy_cache(daemon.socket) as cache,
    ):
        put(cache, range(20))
        for _ in range(100):
            assert cache.peek(range(21), namespace="n") == 20
        cache.close()
        assert daemon.terminate() == 0
    return path


def start(temporary: Path, before: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HEARING + before + REPLAY, "replay", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )


@pytest.mark.parametrize("before", ["", IGNORING])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_replay_that_is_ended_leaves_nothing(
    trace: Path, temporary: Path, number: signal.Signals, before: str
) -> None:
    """Neither its daemon nor its directory: the terminal was closed, or somebody's script ended."""
    # So slow that it waits when the signal comes.
    with start(temporary, before, str(trace), "--speed", "0.001") as process:
        try:
            until(lambda: list(temporary.glob("*/socket")))
            (lock,) = temporary.glob("*/socket.lock")
            daemon = int(lock.read_text())
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output.strip()) == (1, "Aborted!")
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


def test_a_second_signal_is_not_held_up() -> None:
    """The way out may hang: the first signal gives the second one back its force."""
    before = signal.getsignal(signal.SIGTERM)
    with leaving_cleanly():
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_was_ignored_stays_so() -> None:
    """`nohup`, and Ctrl-C for a background job: the block changes neither."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with leaving_cleanly():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGHUP, hang_up)


def test_half_a_trace_of_its_own_is_no_result(trace: Path, temporary: Path) -> None:
    """The numbers come from the replay's own trace: where the disk refused it there are none."""
    with start(temporary, LIMITED, str(trace)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    (line,) = output.strip().splitlines()
    assert f"no result: its own trace, in {temporary}, is not complete: " in line
    assert "File too large" in line
    assert list(temporary.iterdir()) == []


def test_a_daemon_that_does_not_start_is_heard(trace: Path, temporary: Path) -> None:
    """Also where no file can be written, so that no log could tell."""
    before = LIMITED.replace("24_000", "100")
    with start(temporary, before, str(trace)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert output.startswith("Error: the daemon did not start:\n")
    assert "File too large" in output
    assert list(temporary.iterdir()) == []
