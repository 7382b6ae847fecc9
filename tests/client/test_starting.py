"""Clients that start the daemon themselves, with real processes."""

import fcntl
import os
import pwd
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import prefixcached.client.trio as client_trio
from prefixcached.client import Cache, Miss, connect, starting
from prefixcached.client.errors import NoDaemon
from prefixcached.client.starting import PAUSE_SECONDS, Starter, is_wanted
from prefixcached.daemon.service import launch_agent, systemd_units
from prefixcached.daemon.service.plan import make_plan
from prefixcached.protocol import paths
from tests.support.until import until

START_SECONDS = 60.0
"""For a call that starts a daemon on a busy machine."""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own: log, service files and cache lie there; every daemon in it is ended."""
    with TemporaryDirectory(prefix="pfxc-") as name:
        directory = Path(name)
        monkeypatch.setenv("HOME", name)
        for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
            monkeypatch.setenv(variable, str(directory / variable.lower()))
        monkeypatch.setenv("PREFIXCACHED_STATE_DIR", str(directory / "state"))
        monkeypatch.setenv("PREFIXCACHED_SSD_BYTES", "0")
        monkeypatch.delenv(paths.START_VARIABLE, raising=False)
        yield directory
        for lock in directory.glob("*.lock"):
            pid = int(lock.read_text())
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
            until(partial(is_over, pid))


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def is_over(pid: int) -> bool:
    """Whether the process has ended."""
    return not is_alive(pid)


def miss_of(cache: Cache) -> str:
    """Why a prompt is not found."""
    result = cache.take([1, 2, 3], namespace="n")
    assert isinstance(result, Miss)
    return result.reason


def test_the_first_call_starts_a_daemon_that_outlives_its_starter(home: Path) -> None:
    """PLATFORM 6: with `start`, a missing daemon is started, detached, and logs to its file."""
    script = (
        "import os, sys; from prefixcached.client import connect\n"
        "with connect(sys.argv[1], timeout=60, fail_open=False, start=True) as cache:\n"
        "    pid = cache.stats()['daemon']['pid']\n"
        "print(pid, os.getsid(pid), os.getsid(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(home / "s")], capture_output=True, text=True, check=True
    )
    pid, session, own_session = map(int, done.stdout.split())
    assert is_alive(pid)
    assert session != own_session
    with connect(home / "s", fail_open=False) as cache:
        assert cache.stats()["daemon"]["pid"] == pid
    log = paths.log_file()
    assert log.is_relative_to(home)
    assert '"ready"' in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


def test_ten_clients_at_once_start_one_daemon(home: Path) -> None:
    """PLATFORM 6: whoever holds the lock starts it, the others wait for that one."""
    script = (
        "import sys; from prefixcached.client import connect\n"
        "with connect(sys.argv[1], timeout=100, fail_open=False, start=True) as cache:\n"
        "    print(cache.stats()['daemon']['pid'])"
    )
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(home / "s")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    answers = [client.communicate(timeout=110)[0] for client in clients]
    assert len(set(answers)) == 1, answers
    assert answers[0].strip().isdecimal()
    log = paths.log_file().read_text()
    assert log.count('"ready"') == 1
    assert "another prefixcached" not in log


def test_the_environment_asks_for_it_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PREFIXCACHED_START=1 lets a program that knows nothing of it start the daemon."""
    monkeypatch.setenv(paths.START_VARIABLE, "1")
    with connect(home / "s", timeout=START_SECONDS, fail_open=False) as cache:
        pid = cache.stats()["daemon"]["pid"]
        assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)
        until(partial(is_over, pid))
    with connect(home / "s", start=False) as cache:
        assert miss_of(cache) == "no-daemon"
    with connect(home / "s", timeout=START_SECONDS, fail_open=False) as cache:
        assert cache.stats()["daemon"]["pid"] != pid


@pytest.mark.parametrize(
    ("start", "text", "wanted"),
    [(None, "", False), (None, "1", True), (None, "0", False), (False, "1", False),
     (True, "0", True), (None, "Yes", True)],
)  # fmt: skip
def test_an_argument_wins_over_the_environment(start: bool | None, text: str, wanted: bool) -> None:
    """A program that says `start=False` never starts one."""
    assert is_wanted(start, {paths.START_VARIABLE: text}) is wanted


def test_a_bad_variable_is_named() -> None:
    """It says key, value and what is allowed."""
    with pytest.raises(ValueError, match=r"PREFIXCACHED_START = 'maybe'.*allowed: 1, 0"):
        is_wanted(None, {paths.START_VARIABLE: "maybe"})


def test_a_start_that_fails_costs_a_miss_and_is_not_repeated(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: the error says why; the next calls do not start another one for a minute."""
    monkeypatch.setenv("PREFIXCACHED_RAM_BYTES", "8 apples")
    with connect(home / "s", timeout=START_SECONDS, start=True) as cache:
        began = time.monotonic()
        assert miss_of(cache) == "no-daemon"
        assert time.monotonic() - began < START_SECONDS
    now = 1000.0
    starter = Starter(home / "s", lambda: now)
    failure = starter.start(now + START_SECONDS)
    assert "8 apples" in failure
    assert str(paths.log_file()) in failure
    size = paths.log_file().stat().st_size
    now += PAUSE_SECONDS - 1
    assert starter.start(now + START_SECONDS) == failure
    assert paths.log_file().stat().st_size == size, "nothing was started again"
    now += 2
    assert "8 apples" in starter.start(now + START_SECONDS)
    assert paths.log_file().stat().st_size > size


def test_threads_that_find_none_together_start_one_that_fails(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: those that waited for it take its failure for theirs, and start none after it."""
    script = f"echo tried >>'{home}/tries'; sleep 0.3; echo no >&2"
    monkeypatch.setattr(starting, "daemon_command", lambda: ["/bin/sh", "-c", script])
    starter, said = Starter(home / "s"), list[str]()
    together = threading.Barrier(3)

    def start() -> None:
        together.wait()
        said.append(starter.start(time.monotonic() + START_SECONDS))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (home / "tries").read_text().split() == ["tried"]
    assert len(set(said)) == 1
    assert said[0].startswith("it was started and ended: no")


def test_only_what_the_started_process_said_is_quoted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another daemon that writes to the same log meanwhile is not taken for it."""
    log = paths.log_file()
    command = ["/bin/sh", "-c", f"echo another daemon >>'{log}'; $SAY"]
    monkeypatch.setattr(starting, "daemon_command", lambda: command)
    for say, quoted in (("", "it said nothing"), ("no-such-command-7", "no-such-command-7")):
        monkeypatch.setenv("SAY", say)
        failure = Starter(home / "s").start(time.monotonic() + START_SECONDS)
        assert failure.startswith("it was started and ended: ")
        assert quoted in failure
        assert "another daemon" not in failure
        assert quoted in log.read_text() or not say, "the log has it as well"


def test_a_process_with_many_files_can_start_a_daemon(home: Path) -> None:
    """C4: a descriptor beyond 1,023 is one like any other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)), hard))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 1500)
    try:
        os.write(writer, b"READY here\n")
        line = Starter(home / "s")._first_line(high, time.monotonic() + START_SECONDS)
        assert line == b"READY here\n"
    finally:
        for descriptor in (reader, writer, high):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_daemon_that_refuses_is_quoted(home: Path) -> None:
    """Also what it says when its standard error is the log already."""
    (home / "s").write_text("mine")
    failure = Starter(home / "s").start(time.monotonic() + START_SECONDS)
    assert failure.startswith(f"it was started and ended: {home / 's'} exists and is no socket")


def test_a_path_too_long_for_a_socket_starts_nothing(home: Path) -> None:
    """The client knows it before a process says so, and nothing is left beside it."""
    socket = home / ("s" * (paths.MAX_SOCKET_PATH_BYTES - len(str(home))))
    failure = Starter(socket).start(time.monotonic() + START_SECONDS)
    assert "takes 104 bytes and the system allows 103" in failure
    assert not list(home.glob("s*"))
    assert not paths.log_file().exists(), "none was started"


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_nothing_is_left_in_a_directory_that_others_may_enter(home: Path, mode: int) -> None:
    """C1: no daemon would serve there, so none is started and no file is made."""
    place = home / "shared"
    place.mkdir()
    place.chmod(mode)
    failure = Starter(place / "s").start(time.monotonic() + START_SECONDS)
    assert f"{place} has mode {mode:04o} and must be 0700" in failure
    assert f"chmod 700 '{place}'" in failure
    assert not list(place.iterdir())
    assert not paths.log_file().exists(), "none was started"


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_log_that_is_no_file_fails_the_start_at_once(home: Path, kind: str) -> None:
    """C4: nothing waits for a pipe's reader, and nothing is written through a link."""
    log, elsewhere = paths.log_file(), home / "elsewhere"
    log.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to(elsewhere)
    began = time.monotonic()
    assert "cannot be started" in Starter(home / "s").start(began + START_SECONDS)
    assert time.monotonic() - began < START_SECONDS
    assert not elsewhere.exists()


def test_the_wait_for_a_daemon_that_never_gets_ready_is_bounded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: a start that hangs ends with the call's time-out, and with an error that says so."""
    monkeypatch.setattr(starting, "daemon_command", lambda: ["/bin/sh", "-c", "sleep 3"])
    with connect(home / "s", timeout=0.5, fail_open=False, start=True) as cache:
        began = time.monotonic()
        with pytest.raises(NoDaemon, match="still starting"):
            cache.stats()
    assert time.monotonic() - began < 3


def test_where_no_home_is_known_a_start_is_a_miss(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: a container whose user has neither HOME nor an entry has no place for the log."""
    for variable in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    with connect(home / "s", start=True) as cache:
        assert isinstance(cache.take(list(range(100)), namespace="n"), Miss)
    assert "home directory" in Starter(home / "s").start(time.monotonic() + 5)


def test_a_stopped_service_is_not_started_behind_its_back(home: Path) -> None:
    """PLATFORM 6: clients start a daemon only where no service is installed for that socket."""
    plan = make_plan(home / "s")
    # What `install` writes on this platform, at the place that the client looks at.
    files = {
        plan.agent_file: launch_agent.render(plan),
        plan.unit_dir / systemd_units.SOCKET_UNIT: systemd_units.render(plan)[
            systemd_units.SOCKET_UNIT
        ],
    }
    assert set(files) == set(paths.service_files())
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        with (
            connect(home / "s", fail_open=False, start=True) as cache,
            pytest.raises(NoDaemon, match="prefixcached service start"),
        ):
            cache.stats()
        file.unlink()
    assert not (home / "s.starting").exists()


def test_without_start_nothing_is_started(home: Path) -> None:
    """The default: a missing daemon is a miss at once."""
    with connect(home / "s") as cache:
        assert miss_of(cache) == "no-daemon"
    assert not list(home.iterdir())


async def test_a_trio_program_starts_it_as_well(home: Path) -> None:
    """The event loop goes on meanwhile: the start waits in a thread."""
    async with client_trio.connect(
        home / "s", timeout=START_SECONDS, fail_open=False, start=True
    ) as cache:
        report = await cache.stats()
    assert is_alive(report["daemon"]["pid"])
