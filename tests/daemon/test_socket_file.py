"""The socket's place in the file system: private, single, and cleared of what a crash left."""

import errno
import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import structlog.testing

from prefixcached.daemon.errors import StartError
from prefixcached.daemon.service.running import is_locked
from prefixcached.daemon.socket_file import (
    InstanceLock,
    SocketFile,
    check_path,
    prepare_directory,
)


def test_socket_and_directory_are_the_users_alone(directory: Path) -> None:
    """C1: 0600 in 0700, whatever the umask says."""
    before = os.umask(0)
    try:
        prepare_directory(directory / "new" / "deep")
        with SocketFile(directory / "new" / "deep" / "s"):
            assert stat.S_IMODE((directory / "new" / "deep").stat().st_mode) == 0o700
            assert stat.S_IMODE((directory / "new" / "deep" / "s").stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o500])
def test_a_directory_that_others_may_enter_is_refused(directory: Path, mode: int) -> None:
    """C1: the text names the directory, its mode, and the command that mends it."""
    directory.chmod(mode)
    with pytest.raises(StartError, match=f"{directory} has mode {mode:04o} .*chmod 700"):
        prepare_directory(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == mode
    directory.chmod(0o700)


def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    """C1: nobody else's directory is used, nor changed."""
    if os.getuid() == 0:
        os.chown(directory, 12345, -1)
        other = directory
    else:
        other = Path("/")
    with pytest.raises(StartError, match="belongs to user"):
        prepare_directory(other)


def test_a_directory_that_cannot_be_made_is_an_error_with_its_path(directory: Path) -> None:
    """The user learns what is in the way."""
    (directory / "file").touch()
    with pytest.raises(StartError, match=f"cannot create the directory {directory}/file"):
        prepare_directory(directory / "file" / "below")
    with pytest.raises(StartError, match=f"cannot create the directory {directory}/file"):
        prepare_directory(directory / "file")


def test_a_path_too_long_for_a_socket_is_refused_with_its_length(directory: Path) -> None:
    """PLATFORM 1.6: 103 bytes, also where Linux would take 107, and never cut short."""
    room = 103 - len(os.fsencode(directory)) - 1
    check_path(directory / ("x" * room))
    with pytest.raises(StartError, match="104 bytes and the system allows 103"):
        check_path(directory / ("x" * (room + 1)))
    with pytest.raises(StartError, match="shorter one with --socket"):
        SocketFile(directory / ("é" * room))


def test_a_socket_left_by_a_killed_daemon_is_replaced(directory: Path) -> None:
    """The holder of the lock owns the path."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "s"))
    with SocketFile(directory / "s"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(directory / "s"))
    assert not (directory / "s").exists()


def test_the_socket_of_a_service_is_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PLATFORM 1.3: the supervisor makes it once; a daemon started by hand says so and ends."""
    unit = directory / "systemd" / "user" / "prefixcached.socket"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"[Socket]\nListenStream={directory / 's'}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(directory))
    with socket.socket(socket.AF_UNIX) as supervised:
        supervised.bind(str(directory / "s"))
        with (
            pytest.raises(StartError, match="prefixcached service start"),
            SocketFile(directory / "s"),
        ):
            pass
        assert (directory / "s").is_socket()
    # Another path, and one that the stopped service has given up, are free.
    with SocketFile(directory / "other"):
        (directory / "s").unlink()
    with SocketFile(directory / "s"):
        pass


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(directory: Path, kind: str) -> None:
    """A wrong --socket must not cost anybody a file."""
    path = directory / "s"
    if kind == "file":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(directory / "elsewhere")
    with pytest.raises(StartError, match="exists and is no socket"), SocketFile(path):
        pass
    assert path.is_symlink() or path.exists()


def test_a_socket_that_another_put_there_is_not_removed(directory: Path) -> None:
    """At the end only our own file goes."""
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as other:
        with SocketFile(path):
            path.unlink()
            other.bind(str(path))
        assert path.exists()


def test_closing_twice_is_closing_once(directory: Path) -> None:
    """The socket goes when the front does; the context ends later."""
    path = directory / "s"
    with SocketFile(path) as socket_file:
        socket_file.remove().close()
        path.touch()
    assert path.exists()


def test_a_file_that_cannot_be_removed_ends_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D5: a file system that became read-only keeps no daemon from writing what is queued."""

    def refused(_path: Path, *, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with structlog.testing.capture_logs() as logged, monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with SocketFile(directory / "s") as socket_file:
            socket_file.remove().close()
    assert socket_file.socket.fileno() == -1
    assert [line["error"] for line in logged] == ["Read-only file system"]


def test_a_socket_is_in_place_until_its_file_is_removed(directory: Path) -> None:
    """C4: the daemon learns when clients cannot find it any more."""
    with SocketFile(directory / "s") as socket_file:
        assert socket_file.is_in_place
        (directory / "s").unlink()
        assert not socket_file.is_in_place
        socket_file.socket.close()
        socket_file.bind()
        assert socket_file.is_in_place
        assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600
    assert not (directory / "s").exists()


def test_what_took_the_sockets_place_is_left_alone(directory: Path) -> None:
    """Only a path that is free is bound again."""
    with SocketFile(directory / "s") as socket_file:
        (directory / "s").unlink()
        (directory / "s").write_text("somebody else's")
        with pytest.raises(StartError, match="Address already in use"):
            socket_file.bind()
    assert (directory / "s").read_text() == "somebody else's"


HOLD = """
import sys
from pathlib import Path
from prefixcached.daemon.socket_file import InstanceLock
with InstanceLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_daemon_is_refused_and_told_who_the_first_is(directory: Path) -> None:
    """D9: one daemon for one socket, also when the first was killed with -9."""
    lock = directory / "s.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(StartError, match=f"process {first.pid}"), InstanceLock(lock):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        with InstanceLock(lock):
            assert lock.read_text() == f"{os.getpid()}\n"
            assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_a_volume_without_locks_is_named_and_nobody_is_blamed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9: no daemon can hold a lock there, so there is none to stop."""

    def without_locks(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with (
        pytest.raises(StartError, match=r"cannot lock .*: No locks available"),
        InstanceLock(directory / "lock"),
    ):
        pass
    assert not is_locked(directory / "lock")


def test_a_lock_file_that_was_removed_is_taken_again(directory: Path) -> None:
    """D9: whoever holds the file at the path is the one daemon."""
    path = directory / "lock"
    with InstanceLock(path) as lock:
        path.unlink()
        lock.hold()
        with pytest.raises(StartError, match=f"process {os.getpid()}"), InstanceLock(path):
            pass


def test_a_lock_that_another_daemon_took_is_not_taken_again(directory: Path) -> None:
    """D9: the first one learns that the path is not its any more."""
    path = directory / "lock"
    with InstanceLock(path) as first:
        path.unlink()
        with InstanceLock(path) as second:
            with pytest.raises(StartError, match="another prefixcached"):
                first.hold()
            second.hold()


def test_a_lock_file_that_is_a_link_is_refused(directory: Path) -> None:
    """D9: no symbolic link is followed to a file of somebody else's choice."""
    (directory / "victim").write_text("precious")
    (directory / "s.lock").symlink_to(directory / "victim")
    with pytest.raises(StartError, match="cannot open the lock file"):
        InstanceLock(directory / "s.lock").__enter__()
    assert (directory / "victim").read_text() == "precious"


def test_a_full_disk_keeps_no_daemon_from_starting(directory: Path) -> None:
    """The lock holds although its file cannot say whose it is."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with InstanceLock(directory / "lock"):
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            with (
                pytest.raises(StartError, match="process unknown"),
                InstanceLock(directory / "lock"),
            ):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (directory / "lock").read_bytes()
