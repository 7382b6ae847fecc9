"""Where the socket is: one rule for daemon and clients."""

import os
import plistlib
import pwd
import sys
from pathlib import Path

import pytest

from prefixcached.protocol.paths import (
    MAX_SOCKET_PATH_BYTES,
    SOCKET_VARIABLE,
    directory_refusal,
    length_refusal,
    log_file,
    service_files,
    service_of,
    service_socket,
    socket_path,
    start_lock,
)


def test_the_variable_names_the_socket(tmp_path: Path) -> None:
    """DESIGN 6: every command and client honours PREFIXCACHED_SOCKET, home directory included."""
    named = tmp_path / "named.sock"
    assert socket_path({SOCKET_VARIABLE: str(named)}) == named
    assert socket_path({SOCKET_VARIABLE: "~/s"}) == Path.home() / "s"
    assert socket_path({SOCKET_VARIABLE: ""}) == socket_path({})


def test_a_home_directory_of_nobody_stays_as_it_is_written() -> None:
    """C4: a wrong variable means that no daemon is found, and ends no client."""
    assert socket_path({SOCKET_VARIABLE: "~no-such-user/s"}) == Path("~no-such-user/s")


def test_the_default_fits_a_socket_and_no_cleaner_deletes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PLATFORM 1.6: never in a temporary directory, and short enough for macOS."""
    monkeypatch.setenv("HOME", "/home/somebody-with-a-long-name")
    path = socket_path({})
    assert path.is_absolute()
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    assert path.parts[1] not in {"tmp", "var", "private"}
    assert path.parent.name == "prefixcached"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no runtime directory")
def test_linux_prefers_the_users_runtime_directory(tmp_path: Path) -> None:
    """A runtime directory that is there is used; a relative or missing one is not."""
    used = socket_path({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert used == tmp_path / "prefixcached" / "prefixcached.sock"
    for unusable in ("relative", str(tmp_path / "missing")):
        assert socket_path({"XDG_RUNTIME_DIR": unusable}) == socket_path({})


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no runtime directory")
def test_a_job_without_the_variable_finds_the_same_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of cron or ssh looks where the system keeps a user's sockets, if that exists."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runtime = Path(f"/run/user/{os.getuid()}")
    found = runtime if runtime.is_dir() else tmp_path
    assert socket_path({}) == found / "prefixcached" / "prefixcached.sock"


def test_the_process_own_variables_count_where_none_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 6: PREFIXCACHED_SOCKET in the environment is honoured."""
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "here"))
    assert socket_path() == tmp_path / "here"


def test_whoever_starts_the_daemon_of_a_socket_locks_the_same_file(tmp_path: Path) -> None:
    """Two clients that start one daemon must meet at one lock, beside the socket."""
    lock = start_lock(tmp_path / "a.sock")
    assert lock.parent == tmp_path
    assert lock != start_lock(tmp_path / "b.sock")
    assert lock == start_lock(tmp_path / "a.sock")


@pytest.mark.skipif(sys.platform == "darwin", reason="the paths of Linux")
def test_files_lie_where_the_desktop_specification_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is state, a unit is configuration; both follow the user's variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert log_file() == tmp_path / "state/prefixcached/log/prefixcached.log"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    agent, unit = service_files()
    assert agent == tmp_path / "Library/LaunchAgents/org.prefixcached.daemon.plist"
    assert unit == tmp_path / "config/systemd/user/prefixcached.socket"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert service_files()[1] == tmp_path / ".config/systemd/user/prefixcached.socket"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where an agent and a unit of this user would be."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    agent, unit = service_files()
    for file in (agent, unit):
        file.parent.mkdir(parents=True)
    return agent, unit


def test_a_service_is_found_by_a_path_that_its_file_must_escape(
    places: tuple[Path, Path],
) -> None:
    """PLATFORM 1.3: a daemon started by hand would remove the supervisor's socket."""
    agent, unit = places
    unit.write_text("[Socket]\nListenStream=/100%%/s\n")
    agent.write_bytes(plistlib.dumps({"Sockets": {"Listener": {"SockPathName": "/a&b<c>/s"}}}))
    assert service_of(Path("/100%/s")) == unit
    assert service_of(Path("/a&b<c>/s")) == agent
    assert service_of(Path("/a/s")) is None


def test_a_service_does_not_hold_a_socket_whose_path_its_own_begins_with(
    places: tuple[Path, Path],
) -> None:
    """PLATFORM 1.3: the daemon of `sock` starts beside a service at `sock.work`."""
    agent, unit = places
    unit.write_text("[Socket]\nListenStream = /run/sock.work\n")
    agent.write_bytes(plistlib.dumps({"Sockets": {"Listener": {"SockPathName": "/mac/sock.work"}}}))
    assert service_of(Path("/run/sock.work")) == unit
    assert service_of(Path("/mac/sock.work")) == agent
    assert service_of(Path("/run/sock")) is None
    assert service_of(Path("/mac/sock")) is None


@pytest.mark.parametrize("runtime", ["/runtime", None])
def test_a_unit_of_somebodys_own_names_the_socket_as_systemd_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str | None
) -> None:
    """PLATFORM 1.3: `%t` and `%h` stand for the user's directories, `%%t` for itself."""
    monkeypatch.setenv("HOME", "/home/%t")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    unit = tmp_path / "unit.socket"
    runtime = runtime or f"/run/user/{os.getuid()}"
    for written, read in (
        ("%t/s", f"{runtime}/s"),
        ("%h/s", "/home/%t/s"),
        ("/%%t/s", "/%t/s"),
        ("/%Y/s", "/%Y/s"),
    ):
        unit.write_text(f"[Socket]\nAccept=/no\nListenStream={written}\n")
        assert service_socket(unit) == Path(read)


def test_a_unit_that_is_not_there_names_no_socket(tmp_path: Path) -> None:
    """DESIGN 1.2: somebody may remove it at any time."""
    assert service_socket(tmp_path / "unit.socket") is None


@pytest.mark.parametrize("written", ["s", "8080", "%Y/s", "%", ""])
def test_a_socket_of_no_absolute_path_is_none(tmp_path: Path, written: str) -> None:
    """PLATFORM 1.3: it would be another file in each directory in which somebody asks."""
    unit = tmp_path / "unit.socket"
    unit.write_text(f"[Socket]\nListenStream={written}\n")
    assert service_socket(unit) is None
    agent = tmp_path / "agent.plist"
    agent.write_bytes(plistlib.dumps({"Sockets": {"Listener": {"SockPathName": written}}}))
    assert service_socket(agent) is None


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\0", b"<plist><dict><key>Sockets", b"<plist><key>a</key></plist>",
        b"<plist><date>now</date></plist>", plistlib.dumps([]), plistlib.dumps({"Sockets": [1]}),
        plistlib.dumps({"Sockets": {"Listener": {"SockPathName": 1}}}),
    ],
)  # fmt: skip
def test_a_damaged_file_holds_no_socket(tmp_path: Path, content: bytes) -> None:
    """C4: a client asks for it on its way to a miss, which is to end in no error."""
    for name in ("agent.plist", "unit.socket"):
        (tmp_path / name).write_bytes(content)
        assert service_socket(tmp_path / name) is None


def test_where_no_home_is_known_no_daemon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4: neither HOME nor an entry of the user, as in a container, ends no client."""
    monkeypatch.delenv("HOME", raising=False)
    for variable in ("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    assert service_files() == ()
    assert service_of(Path("/s")) is None
    assert socket_path({}).is_absolute()


def test_a_path_that_does_not_fit_a_socket_is_refused_by_its_bytes() -> None:
    """PLATFORM 1.6: 103 bytes fit on every platform; one more is refused, with the remedy."""
    assert length_refusal(Path("/" + "x" * 102)) == ""
    refusal = length_refusal(Path("/" + "x" * 101 + "é"))
    assert "takes 104 bytes" in refusal
    assert SOCKET_VARIABLE in refusal


@pytest.mark.parametrize("mode", [0o600, 0o701, 0o750, 0o755, 0o1700, 0o770])
def test_a_directory_that_others_enter_is_refused(tmp_path: Path, mode: int) -> None:
    """C1: nothing but 0700 will do, and the refusal says how to make it so."""
    tmp_path.chmod(0o700)
    assert directory_refusal(tmp_path) == ""
    tmp_path.chmod(mode)
    refusal = directory_refusal(tmp_path)
    assert f"has mode {mode:04o} and must be 0700" in refusal
    assert f"chmod 700 '{tmp_path}'" in refusal


@pytest.mark.parametrize("distance", [1, -1])
def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distance: int
) -> None:
    """C1: whoever owns the directory could put another socket there, whatever its mode."""
    tmp_path.chmod(0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + distance)
    assert f"belongs to user {owner}, not to user {owner + distance}" in directory_refusal(tmp_path)
