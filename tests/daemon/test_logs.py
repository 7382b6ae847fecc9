"""Log lines: their form, their bounds in number and size."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from structlog.typing import EventDict

from prefixcached.client import connect
from prefixcached.client.wire import Wire
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.log_streams import LogFile
from prefixcached.daemon.logs import (
    LINES_A_WINDOW,
    MAX_EVENTS,
    MAX_FIELD_CHARACTERS,
    WINDOW_SECONDS,
    Limiter,
)
from tests.support.daemon_process import DaemonProcess

LOGGING = """
import sys
from pathlib import Path
from prefixcached.daemon import logs
import structlog
logs.configure(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
log = structlog.get_logger()
log.info("ready", socket="/s", bytes=7, ram_bytes=3 << 30)
try:
    prompt = "secret"
    raise ValueError("no")
except ValueError:
    log.exception("a session failed", session=3)
"""


def test_off_a_terminal_each_event_is_one_json_object() -> None:
    """One line an event, with its fields; a traceback is a field, without values of variables."""
    done = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, text=True, check=True
    )
    first, second = map(json.loads, done.stderr.splitlines())
    assert first.items() >= {"event": "ready", "level": "info", "socket": "/s", "bytes": 7}.items()
    assert first["ram_bytes"] == 3 << 30
    assert first["timestamp"]
    assert (second["event"], second["level"], second["session"]) == (
        "a session failed", "error", 3,
    )  # fmt: skip
    assert "ValueError: no" in second["exception"]
    assert "secret" not in done.stderr


def test_no_field_of_a_line_is_longer_than_the_bound() -> None:
    """Neither what a client said nor an error's text: the middle of it is left out."""
    script = (
        "from prefixcached.daemon import logs; import structlog\n"
        "logs.configure(); log = structlog.get_logger()\n"
        "log.info('said', detail='a' * 1_000_000 + 'z')\n"
        "try: raise ValueError('b' * 1_000_000 + 'the end')\n"
        "except ValueError: log.exception('failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    said, failed = map(json.loads, done.stderr.splitlines())
    assert len(said["detail"]) == MAX_FIELD_CHARACTERS + len(" [...] ")
    assert said["detail"].endswith("az")
    assert failed["exception"].startswith("Traceback")
    assert failed["exception"].endswith("the end")
    assert len(done.stderr) < 3 * MAX_FIELD_CHARACTERS


def test_on_a_terminal_it_is_for_people() -> None:
    """No JSON where a person looks, and sizes as people write them."""
    master, slave = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", LOGGING], stderr=slave, check=True)
        said = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert "ready" in said
    assert "{" not in said.splitlines()[0]
    assert "3 GiB" in said
    assert str(3 << 30) not in said


def test_a_log_file_is_rotated_by_size(tmp_path: Path) -> None:
    """It and the one before it are kept, neither beyond the bound, private, and no line is torn."""
    script = (
        "import sys; from pathlib import Path\n"
        "from prefixcached.daemon.log_streams import LogFile\n"
        "log = LogFile(Path(sys.argv[1]), max_bytes=1000)\n"
        "for number in range(100): log.write(f'{number:03} ' + 'x' * 46 + '\\n')\n"
        "raise SystemExit('the last words')"
    )
    file = tmp_path / "new" / "log"
    done = subprocess.run([sys.executable, "-c", script, str(file)], check=False)
    assert done.returncode == 1
    assert sorted(path.name for path in file.parent.iterdir()) == ["log", "log.1"]
    old, new = file.with_name("log.1").read_text(), file.read_text()
    assert old.count("\n") == 1000 // 51
    assert "099 x" in new
    assert new.endswith("the last words\n"), "standard error goes there as well"
    assert all(len(line) == 50 for line in old.splitlines())
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trouble", ["directory", "removed"])
def test_a_log_file_stays_bounded_whatever_stands_in_its_way(tmp_path: Path, trouble: str) -> None:
    """With a directory where the old file goes, or the file removed under it, it goes on."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from prefixcached.daemon.log_streams import LogFile\n"
        "log = LogFile(Path(sys.argv[1]), max_bytes=1000)\n"
        "log.write('first\\n'); sys.argv[2] == 'removed' and os.unlink(sys.argv[1])\n"
        "for number in range(100): log.write(f'{number:03} ' + 'x' * 46 + '\\n')\n"
    )
    file = tmp_path / "log"
    if trouble == "directory":
        (tmp_path / "log.1").mkdir()
    done = subprocess.run([sys.executable, "-c", script, str(file), trouble], check=False)
    assert done.returncode == 0
    assert "099 x" in file.read_text()
    assert file.stat().st_size <= 1000


def test_a_log_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """The next line is found where `status` says that the log is, whatever took it away."""
    script = (
        "import shutil, sys; from pathlib import Path\n"
        "from prefixcached.daemon.log_streams import LogFile\n"
        "file = Path(sys.argv[1]); log = LogFile(file)\n"
        "log.write('first\\n'); shutil.rmtree(file.parent); log.write('second\\n')\n"
        "assert file.read_text() == 'second\\n'\n"
        "file.rename(file.with_name('moved')); log.write('third\\n')\n"
        "assert file.read_text() == 'third\\n' and log.lost == 0\n"
    )
    file = tmp_path / "logs" / "log"
    subprocess.run([sys.executable, "-c", script, str(file)], check=True)


SHORT_OF_DISK = """
import os, sys
from pathlib import Path
from prefixcached.daemon.log_streams import LogFile
log = LogFile(Path(sys.argv[1]))
write, room = os.write, [4]
def write_some(where, data):
    if not room:
        raise OSError(28, "no space")
    return write(where, data[: room.pop()])
os.write = write_some
log.write('"the first"\\n')
log.write('"the second"\\n')
os.write = write
log.write('"the third"\\n')
assert log.lost == 2, log.lost
"""


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    """What a full disk took in part, this daemon's or an earlier one's, ends where it was cut."""
    file = tmp_path / "log"
    file.write_text('"cut by an ear')
    subprocess.run([sys.executable, "-c", SHORT_OF_DISK, str(file)], check=True)
    assert file.read_text().splitlines() == ['"cut by an ear', '"th', '"the third"']


UNREAD = """
import time
from prefixcached.daemon import logs
import structlog
limiter = logs.configure()
log = structlog.get_logger()
started = time.monotonic()
for number in range(1000):
    log.info(f"event {number}", text="x" * 200)
print(time.monotonic() - started, limiter.statistics()["lost"])
"""


def test_a_log_that_nobody_reads_holds_nobody() -> None:
    """A full pipe: the program goes on and ends, and counts the lines that it lost."""
    with subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.wait(30) == 0
        assert process.stdout is not None
        seconds, lost = process.stdout.read().split()
    assert float(seconds) < 1
    assert int(lost) > 0


def test_a_slow_reader_hears_how_many_lines_it_missed() -> None:
    """The first line that is written again says so."""
    lost = 0
    limiter = Limiter(lost=lambda: lost)
    assert "lost" not in limiter(None, "info", {"event": "ready"})
    lost = 3
    assert limiter(None, "info", {"event": "ready"})["lost"] == 3
    assert "lost" not in limiter(None, "info", {"event": "ready"})


def test_a_line_is_out_before_the_program_goes_on() -> None:
    """What was logged is there however the process ends after that."""
    script = (
        "import os; from prefixcached.daemon.log_streams import StandardError\n"
        "StandardError().write('the last word\\n'); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.stderr == b"the last word\n"


def test_a_log_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe that nobody reads would stop the daemon."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartError, match="cannot log to"):
        LogFile(tmp_path / "pipe")
    done = subprocess.run(
        [sys.executable, "-m", "prefixcached.daemon.cli", "serve", "--log-file",
         str(tmp_path / "pipe"), "--socket", str(tmp_path / "s")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr[:20]) == (1, "Error: cannot log to")


def test_serve_logs_to_a_file_that_it_is_given() -> None:
    """What launchd's and a client's daemon do: standard error stays silent."""
    with DaemonProcess() as process:
        file = process.directory / "own.log"
        process.kill()
        process._options = ("--log-file", str(file))
        process.start()
        assert process.terminate() == 0
        events = [json.loads(line)["event"] for line in file.read_text().splitlines()]
        assert events == ["ready", "stopping", "stopped"]
        assert '"stopped"' not in process.log()


def test_a_log_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    """It says which file and why."""
    done = subprocess.run(
        [sys.executable, "-m", "prefixcached.daemon.cli", "serve", "--log-file",
         "/dev/null/log", "--socket", str(tmp_path / "s")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cannot log to /dev/null/log: ")


def test_an_event_that_floods_is_counted_instead() -> None:
    """A client that fails in a loop cannot fill the disk; the next window says what is missing."""
    now = 0.0
    limiter = Limiter(lambda: now)

    def passes(event: str) -> EventDict | None:
        try:
            return limiter(None, "info", {"event": event})
        except structlog.DropEvent:
            return None

    passed = [passes("ended a session") for _ in range(500)]
    assert sum(line is not None for line in passed) == LINES_A_WINDOW
    assert passes("ready") is not None, "another event is not held back"
    now = WINDOW_SECONDS
    assert passes("ended a session") == {
        "event": "ended a session", "suppressed": 500 - LINES_A_WINDOW,
    }  # fmt: skip
    assert limiter.statistics() == {
        "lines": LINES_A_WINDOW + 2, "suppressed": 500 - LINES_A_WINDOW, "lost": 0, "file": None,
    }  # fmt: skip
    for number in range(2 * MAX_EVENTS):
        passes(f"event {number}")
    assert len(limiter._windows) <= MAX_EVENTS


def test_bad_sessions_leave_a_bounded_log() -> None:
    """C3: clients that break the protocol, over and over; `status` counts the unwritten lines."""
    with DaemonProcess() as process:
        for _ in range(100):
            wire = Wire(process.socket)
            wire._socket.connect(str(process.socket))
            wire._socket.sendall(b"\xff" * 64)
            assert wire._socket.recv(4096)
            wire.close()
        with connect(process.socket, fail_open=False) as cache:
            report = cache.stats()
        lines = [line for line in process.log().splitlines() if "ended a session" in line]
    assert len(lines) == LINES_A_WINDOW
    assert report["log"]["suppressed"] == 100 - LINES_A_WINDOW
    assert report["listener"]["endings"]["protocol"] == 100
