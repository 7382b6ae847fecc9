"""Where the socket is: the one rule that daemon and client must share.

`PREFIXCACHED_SOCKET` names it; else it lies where the platform keeps a user's sockets. Never /tmp
or $TMPDIR, whose files the system deletes after days (PLATFORM 1.6).
"""

import contextlib
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import platformdirs

SOCKET_VARIABLE: Final = "PREFIXCACHED_SOCKET"
"""Environment variable with the socket's path, for every command and client."""

CONFIG_VARIABLE: Final = "PREFIXCACHED_CONFIG"
"""Environment variable with the path of the daemon's configuration file."""

START_VARIABLE: Final = "PREFIXCACHED_START"
"""Environment variable: 1 lets clients start the daemon where no service does."""

SERVICE_LABEL: Final = "org.prefixcached.daemon"
"""Name of the LaunchAgent."""

MAX_SOCKET_PATH_BYTES: Final = 103
"""Longest path that fits `sun_path` on macOS (104 with its NUL); Linux has 107."""

PRIVATE_DIRECTORY: Final = 0o700
"""Mode of the socket's directory."""

_APPLICATION: Final = "prefixcached"
_SOCKET_NAME: Final = "prefixcached.sock"


def socket_path(environment: Mapping[str, str] | None = None) -> Path:
    """Return the path of the socket that ``environment`` (of this process, by default) names.

    On macOS the default is ``~/Library/Application Support/prefixcached/prefixcached.sock``. On
    Linux it is ``prefixcached/prefixcached.sock`` in ``$XDG_RUNTIME_DIR``, else in
    ``/run/user/UID`` where that exists (a job of cron or ssh has no variable and must find the
    same daemon), else in the user's state directory. Where nobody says where the user's home is, a
    place that the system would have made is named, since a client is not to end for that.
    """
    variables = os.environ if environment is None else environment
    named = variables.get(SOCKET_VARIABLE)
    if named:
        return expanded(named)
    system = f"/run/user/{os.getuid()}"
    try:
        if sys.platform == "darwin":
            return platformdirs.user_data_path(_APPLICATION) / _SOCKET_NAME
        for runtime in (variables.get("XDG_RUNTIME_DIR", ""), system):
            if os.path.isabs(runtime) and os.path.isdir(runtime):
                return Path(runtime) / _APPLICATION / _SOCKET_NAME
        return platformdirs.user_state_path(_APPLICATION) / _SOCKET_NAME
    except RuntimeError:
        return Path(system) / _APPLICATION / _SOCKET_NAME


def expanded(written: str | os.PathLike[str]) -> Path:
    """Return the path that somebody wrote, as a shell reads it: a ``~`` of nobody stays there."""
    # Path.expanduser raises then, and a client is not to end for a wrong variable.
    return Path(os.path.expanduser(written))


def length_refusal(socket: Path) -> str:
    """Return why no daemon may serve at ``socket`` on every platform; empty where it may."""
    length = len(os.fsencode(socket))
    if length <= MAX_SOCKET_PATH_BYTES:
        return ""
    return (
        f"the socket path {socket} takes {length} bytes and the system allows "
        f"{MAX_SOCKET_PATH_BYTES}; choose a shorter one with --socket or {SOCKET_VARIABLE}"
    )


def directory_refusal(directory: Path) -> str:
    """Return why no daemon may serve in ``directory`` (rule C1); empty where its user alone enters.

    Raises:
        OSError: It cannot be looked at.
    """
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid():
        return (
            f"{directory} belongs to user {found.st_uid}, not to user {os.getuid()}, who runs this "
            "daemon; name a directory of your own"
        )
    if mode != PRIVATE_DIRECTORY:
        return (
            f"{directory} has mode {mode:04o} and must be 0700, since whoever enters it reaches "
            f"the cache; run: chmod 700 '{directory}', or name a directory used for nothing else"
        )
    return ""


def start_lock(socket: Path) -> Path:
    """The file whose lock a client holds while it starts the daemon of ``socket``."""
    return socket.with_name(f"{socket.name}.starting")


def log_file() -> Path:
    """Where a daemon logs that launchd or a client started; systemd keeps a journal instead.

    On macOS ``~/Library/Logs/prefixcached/prefixcached.log``, on Linux
    ``~/.local/state/prefixcached/log/prefixcached.log``.
    """
    if sys.platform == "darwin":
        directory = Path.home() / "Library" / "Logs" / _APPLICATION
    else:
        directory = platformdirs.user_log_path(_APPLICATION)
    return directory / "prefixcached.log"


def service_files() -> tuple[Path, ...]:
    """The files whose presence says that a service holds a socket, which they name."""
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no entry of the user: nobody has installed anything there
        return ()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return (
        home / "Library" / "LaunchAgents" / f"{SERVICE_LABEL}.plist",
        config_home / "systemd" / "user" / f"{_APPLICATION}.socket",
    )


def service_of(socket: Path) -> Path | None:
    """The file of a service that holds the socket at this path; None where none is installed."""
    return next((file for file in service_files() if service_socket(file) == socket), None)


def service_socket(file: Path) -> Path | None:
    """The socket that one of the `service_files` names; None where it is not there or names none.

    Never raises: a client asks on its way to a miss.
    """
    with contextlib.suppress(LookupError, TypeError):
        if file.suffix == ".plist":
            named = [property_list(file)["Sockets"]["Listener"]["SockPathName"]]
        else:
            named = [specified(value) for value in unit_values(file, "ListenStream")]
        # Others are ports, or would lie wherever whoever asks happens to stand.
        return next((Path(path) for path in named if os.path.isabs(path)), None)
    return None


def specified(written: str) -> str:
    """What systemd reads where ``written`` is in a unit: ``%h`` the home, ``%t`` the runtime.

    Another specifier stays as it is.
    """
    stands_for = {
        "%": "%",
        "h": os.path.expanduser("~"),  # Path.home raises where nobody knows it
        "t": os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}",
    }
    return re.sub("%(.)", lambda found: stands_for.get(found[1], found[0]), written)


def property_list(file: Path) -> dict[str, Any]:
    """What the property list of an agent says; nothing where the file is not there, or none."""
    import plistlib  # which most clients never need

    # A damaged file raises whatever expat and the classes of its values do.
    with contextlib.suppress(Exception):
        found = plistlib.loads(file.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def unit_values(file: Path, name: str) -> list[str]:
    """What stands behind ``name=`` in a unit of systemd; nothing where the file is not there."""
    try:
        text = os.fsdecode(file.read_bytes())
    except OSError:
        return []
    lines = text.replace("\\\n", " ").split("\n")  # a line may go on in the next
    pairs = (line.partition("=") for line in lines)
    return [value.strip() for key, _, value in pairs if key.strip() == name]
