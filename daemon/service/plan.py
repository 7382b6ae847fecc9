"""What a service is to run and where its files are, per platform. Plain values."""

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from prefixcached.daemon import options
from prefixcached.protocol.paths import SERVICE_LABEL, log_file

LABEL: Final = SERVICE_LABEL
"""Name of the LaunchAgent."""

HOMEBREW_LABEL: Final = "homebrew.mxcl.prefixcached"
"""Name under which `brew services` runs the daemon."""

UNIT: Final = "prefixcached"
"""Name of the systemd units, before .socket and .service."""

_CELLAR: Final = "Cellar"


class ServiceError(Exception):
    """A service command could not do what it was asked; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServicePlan:
    """What to run, and every place that the service and the daemon use.

    Attributes:
        program: Absolute path of the console script, which people see in System Settings.
        socket: Where it listens.
        home: The user's home directory.
        log_dir: Directory of the log file (macOS; systemd keeps a journal).
        config_file: The configuration file that the daemon reads.
        extra: More arguments of `serve`.
        is_resident: Start at login and again after a crash, not at the first connection.
    """

    program: Path
    socket: Path
    home: Path
    log_dir: Path
    config_file: Path
    extra: tuple[str, ...] = ()
    is_resident: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line of the daemon."""
        return (str(self.program), "serve", "--socket", str(self.socket), *self.extra)

    @property
    def log_file(self) -> Path:
        """Where launchd puts what the daemon prints."""
        return self.log_dir / log_file().name

    @property
    def lock_file(self) -> Path:
        """Held by a running daemon."""
        return lock_of(self.socket)

    @property
    def agent_file(self) -> Path:
        """The LaunchAgent's property list."""
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    @property
    def unit_dir(self) -> Path:
        """Where systemd finds a user's units."""
        base = os.environ.get("XDG_CONFIG_HOME") or str(self.home / ".config")
        return Path(base) / "systemd" / "user"


def lock_of(socket: Path) -> Path:
    """Held by a daemon that runs at ``socket``."""
    return socket.with_name(f"{socket.name}.lock")


class Service(Protocol):
    """A service of this platform. Every verb may be repeated; each returns lines for people."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that define it, installed or not."""
        ...

    def render(self) -> dict[Path, bytes]:
        """What `install` would write."""
        ...

    def absence(self) -> str:
        """Why nothing can run it on this machine, for people; empty where something can."""
        ...

    def is_loaded(self) -> bool:
        """Whether the supervisor knows it now."""
        ...

    def install(self) -> list[str]:
        """Write its files and load it, again if it is; a failure leaves the files as they were."""
        ...

    def end(self) -> list[str]:
        """Stop it as far as it is installed and something can run it, so that it may go."""
        ...

    def remove(self) -> list[str]:
        """Remove the files of one that was ended: what it was told is known to them alone."""
        ...

    def start(self) -> list[str]:
        """Load it if it is not, and start the daemon."""
        ...

    def stop(self) -> list[str]:
        """End the daemon gracefully; it stays down until `start` or the next login."""
        ...

    def mismatches(self) -> list[str]:
        """How what is loaded differs from the files, for people; a hint."""
        ...

    def log_refusal(self) -> str:
        """Why there is no log to show, for people; empty where `logs_command` shows one."""
        ...

    def logs_command(self, lines: int, *, follow: bool) -> list[str]:
        """The command that shows its log."""
        ...


def make_plan(
    socket: Path, *, config_file: Path | None = None, is_resident: bool = False
) -> ServicePlan:
    """Return the plan for this user and machine.

    Raises:
        ServiceError: The console script cannot be found.
    """
    extra = () if config_file is None else ("--config", str(config_file.absolute()))
    return ServicePlan(
        program=console_script(sys.argv[0]),
        socket=socket.absolute(),
        home=Path.home(),
        log_dir=log_file().parent,
        config_file=config_file or options.default_file(),
        extra=extra,
        is_resident=is_resident,
    )


def console_script(invoked: str) -> Path:
    """Return the absolute path under which `prefixcached` will be found after an upgrade, too.

    Links are not resolved: the shims of uv and pipx stay while what they point to moves.

    Raises:
        ServiceError: There is none.
    """
    candidates: Iterable[str | None] = (
        invoked if Path(invoked).name == "prefixcached" and os.sep in invoked else None,
        shutil.which("prefixcached"),
        str(Path(sys.executable).with_name("prefixcached")),
    )
    for candidate in candidates:
        if candidate is not None and os.access(candidate, os.X_OK):
            return _outside_cellar(Path(candidate).absolute())
    raise ServiceError(
        "the command `prefixcached` is not on PATH; install it with "
        "`uv tool install prefixcached` or `pipx install prefixcached`"
    )


def _outside_cellar(path: Path) -> Path:
    """Return Homebrew's path that stays when the version changes."""
    parts = path.parts
    if _CELLAR not in parts:
        return path
    at = parts.index(_CELLAR)
    return Path(*parts[:at], "opt", parts[at + 1], *parts[at + 3 :])
