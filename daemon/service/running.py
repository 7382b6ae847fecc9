"""Doing things to the system around the daemon: programs, files, and whether it lives."""

import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from prefixcached.daemon.service.plan import ServiceError, ServicePlan, lock_of
from prefixcached.protocol.paths import service_socket

STOP_SECONDS: Final = 30.0
"""For the daemon to finish its writes: twice its own deadline, and what launchd gives it."""

START_SECONDS: Final = 20.0
"""For the daemon to answer: launchd may hold a crashed job back for 10 s."""

POLL_SECONDS: Final = 0.1
"""Between two looks: nobody waits for it but a person."""

PROGRAM_SECONDS: Final = 45.0
"""For launchctl or systemctl, which answer at once unless the system hangs; `systemctl stop` only
after the 30 s of TimeoutStopSec where the daemon must be killed."""

Pause = Callable[[float], None]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a program to its end, by default in this environment; return its status and words.

    Raises:
        ServiceError: There is no such program, or it hangs.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PROGRAM_SECONDS,
            env=environment,
            check=False,
        )
    except OSError as error:
        raise ServiceError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{' '.join(command)} does not end") from error
    return done.returncode, done.stdout.strip()


def is_gone(file: Path) -> bool:
    """Whether there is no such file; one that cannot be looked at is there."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def write_file(path: Path, content: bytes) -> bool:
    """Put ``content`` in place whole, readable by all as launchd wants it; False if it stood there.

    Raises:
        ServiceError: It cannot be written.
    """
    try:
        if path.is_file() and path.read_bytes() == content:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from error
    return True


def write_files(contents: Mapping[Path, bytes]) -> list[str]:
    """`write_file` each; return a line for people on each that was written."""
    return [f"wrote {path}" for path, content in contents.items() if write_file(path, content)]


def contents_of(paths: Iterable[Path]) -> dict[Path, bytes | None]:
    """Return what is in each file; None where there is none.

    Raises:
        ServiceError: One cannot be read.
    """
    try:
        return {path: path.read_bytes() if path.is_file() else None for path in paths}
    except OSError as error:
        raise ServiceError(f"cannot read {error.filename}: {error.strerror}") from error


def restore(contents: Mapping[Path, bytes | None]) -> str:
    """Put back what `contents_of` found; return what that means, for people.

    Raises:
        ServiceError: A file cannot be written or removed.
    """
    for path, content in contents.items():
        if content is None:
            remove(path)
        else:
            write_file(path, content)
    if all(content is None for content in contents.values()):
        return "nothing of it stays installed"
    return (
        "its files are as they were and it is stopped; "
        "run: prefixcached service start, or uninstall"
    )


def make_private(directory: Path) -> None:
    """Create a directory that only its user may enter (rules C1, D9)."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"cannot create {directory}: {error.strerror}") from error


def remove(path: Path) -> bool:
    """Remove a file, never a directory; False if there was none.

    A link is removed, never what it leads to.

    Raises:
        ServiceError: It stays.
    """
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            return False
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ServiceError(f"cannot remove {path}: {error.strerror}") from error
    return True


def remove_tree(directory: Path) -> bool:
    """Remove a directory with all in it; False if there was none, or a link to one.

    Raises:
        ServiceError: Something of it stays.
    """
    try:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            return False
        shutil.rmtree(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ServiceError(f"cannot remove {directory}: {error.strerror}") from error
    return True


def remove_empty(directory: Path) -> bool:
    """Remove a directory in which nothing is; False if it stays."""
    try:
        directory.rmdir()
    except OSError:
        return False
    return True


def is_locked(lock_file: Path) -> bool:
    """Whether a daemon holds the lock: it lives, whatever its socket says."""
    try:
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # on a volume without locks no daemon can hold one
        return False
    finally:
        os.close(descriptor)
    return False


def lock_of_installed(file: Path, plan: ServicePlan) -> Path:
    """The lock of the daemon whose service ``file`` defines: ``plan`` may be for another socket."""
    return lock_of(service_socket(file) or plan.socket)


def refuse_outsider(plan: ServicePlan) -> None:
    """Raise ServiceError where a daemon that no service started has the socket."""
    if is_locked(plan.lock_file):
        raise ServiceError(
            f"a daemon that is no service runs at {plan.socket}{how_to_end(plan.lock_file)}, "
            "then run this again"
        )


def how_to_end(lock_file: Path) -> str:
    """Say which process holds the lock and how it ends, as the rest of a sentence."""
    try:
        text = lock_file.read_text(errors="replace").strip()
    except OSError:
        text = ""
    # It stands there as soon as the lock is held, or an instant later.
    process, pid = (f" (process {text})", text) if text.isdecimal() else ("", "PID")
    return f"{process}; end it with `kill {pid}`, which lets it finish its writes"


def wait_until_gone(lock_file: Path, pause: Pause = time.sleep) -> bool:
    """Wait for a daemon to end, at most `STOP_SECONDS`; False if it lives then."""
    for _ in range(round(STOP_SECONDS / POLL_SECONDS)):
        if not is_locked(lock_file):
            return True
        pause(POLL_SECONDS)
    return not is_locked(lock_file)
