"""The service on Linux: a user socket and service of systemd, spoken to through systemctl.

The templates are deploy/systemd. The socket unit listens; the service starts with the first
connection, or at login where the plan says so. In a container or under WSL there may be no manager
of the user's units: then nothing is installed, and what was is removed without it.
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Final

from prefixcached.daemon.service import running
from prefixcached.daemon.service.installed import ENABLED_LINK
from prefixcached.daemon.service.plan import UNIT, ServiceError, ServicePlan
from prefixcached.daemon.service.running import Pause

SYSTEMCTL: Final = "systemctl"
JOURNALCTL: Final = "journalctl"
SOCKET_UNIT: Final = f"{UNIT}.socket"
SERVICE_UNIT: Final = f"{UNIT}.service"

WITHOUT_A_SERVICE: Final = (
    "use `prefixcached serve`, or let clients start it (PREFIXCACHED_START=1)"
)
"""What to do where nothing can run a service."""

_ENABLED: Final = (
    Path("sockets.target.wants", SOCKET_UNIT),
    ENABLED_LINK / SERVICE_UNIT,
)
"""The links in the directory of the units by which systemd knows that they are enabled."""

_DOWN: Final = ("inactive", "failed")
"""States of a unit of which nothing runs; `is-active` knows none but "active" itself."""

_NO_JOURNAL: Final = "No journal files"
"""How journalctl begins where it can read no journal; it ends with 0 all the same."""


def render(plan: ServicePlan) -> dict[str, bytes]:
    """Return both units by name."""
    command = " ".join(quoted(argument) for argument in plan.arguments)
    socket = str(plan.socket).replace("%", "%%")
    filled = {"@COMMAND@": command, "@SOCKET@": socket}
    units: dict[str, bytes] = {}
    for name in (SOCKET_UNIT, SERVICE_UNIT):
        text = (resources.files("prefixcached.deploy") / "systemd" / name).read_text("utf-8")
        _, _, body = text.partition("\n")  # the first line speaks of the template
        for placeholder, value in filled.items():
            body = body.replace(placeholder, value)
        units[name] = body.encode()
    return units


def quoted(argument: str) -> str:
    """Return one argument of ExecStart, protected from systemd's specifiers and variables."""
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        argument = argument.replace(character, escaped)
    return f'"{argument}"'


class SystemdUnits:
    """The units of ``plan`` (`plan.Service`).

    Args:
        plan: What to run and where.
        systemctl: The program; a test gives its own.
        pause: Waits between two looks.
        runtime: Where the user's manager is to be found if the environment does not say.
    """

    def __init__(
        self,
        plan: ServicePlan,
        *,
        systemctl: str = SYSTEMCTL,
        pause: Pause = time.sleep,
        runtime: Path | None = None,
    ) -> None:
        self._plan = plan
        self._systemctl = systemctl
        self._pause = pause
        self._runtime = runtime or Path(f"/run/user/{os.getuid()}")

    @property
    def files(self) -> tuple[Path, ...]:
        """See `plan.Service`."""
        return tuple(self._plan.unit_dir / name for name in (SOCKET_UNIT, SERVICE_UNIT))

    def render(self) -> dict[Path, bytes]:
        """See `plan.Service`."""
        return {self._plan.unit_dir / name: text for name, text in render(self._plan).items()}

    def absence(self) -> str:
        """See `plan.Service`.

        Raises:
            ServiceError: systemctl hangs: a manager may be there.
        """
        if shutil.which(self._systemctl) is None:
            return f"no systemd user manager here ({self._systemctl} is not installed)"
        # In a chroot systemctl may do nothing and end with 0.
        status, text = self._call("show", "--property=Version")
        if not status and "Version=" in text:
            return ""
        detail = text.splitlines()[-1] if text else f"systemctl ended with {status}"
        return f"no systemd user manager here ({detail})"

    def is_loaded(self) -> bool:
        """See `plan.Service`."""
        return not self._call("is-active", "--quiet", SOCKET_UNIT)[0]

    def install(self) -> list[str]:
        """See `plan.Service`.

        Raises:
            ServiceError: There is no systemd for users, or it refuses.
        """
        self._require_manager()
        self._refuse_outsider()
        said = self.stop() if self._is_active() else []
        before = running.contents_of(self.files)
        try:
            said.extend(running.write_files(self.render()))
            self._load()
        except ServiceError as error:
            raise ServiceError(f"{error}; {self._undo(before)}") from error
        except KeyboardInterrupt:
            self._undo(before)
            raise
        return [*said, "loaded"]

    def end(self) -> list[str]:
        """See `plan.Service`."""
        if not self._is_there():
            return ["not installed"]
        reason = self.absence()
        return [reason] if reason else self.stop()

    def remove(self) -> list[str]:
        """See `plan.Service`."""
        if not self._is_there():
            return []
        if self.absence():
            paths = [*self.files, *(self._plan.unit_dir / link for link in _ENABLED)]
            return [f"removed {path}" for path in paths if running.remove(path)]
        self._call("disable", SOCKET_UNIT, SERVICE_UNIT)
        said = [f"removed {path}" for path in self.files if running.remove(path)]
        self._must("daemon-reload")
        return said

    def start(self) -> list[str]:
        """See `plan.Service`.

        Raises:
            ServiceError: It is not installed, another daemon has the socket, or systemd refuses.
        """
        if not all(path.is_file() for path in self.files):
            raise ServiceError("no service is installed; run: prefixcached service install")
        self._require_manager()
        self._refuse_outsider()
        # systemd listens nowhere for a service that still runs: one that ends, or whose socket
        # unit failed.
        said = self.stop() if self._is_active() and not self.is_loaded() else []
        self._must("start", SOCKET_UNIT, SERVICE_UNIT)
        return [*said, "started"]

    def stop(self) -> list[str]:
        """See `plan.Service`."""
        self._require_manager()
        is_active = self._is_active()
        # The socket first: a connection meanwhile would start the service again.
        self._must("stop", SOCKET_UNIT, SERVICE_UNIT)
        if is_active:  # else whoever has the lock is not systemd's to end
            running.wait_until_gone(self._installed_lock(), self._pause)
        return ["stopped"]

    def mismatches(self) -> list[str]:
        """See `plan.Service`."""
        _, text = self._call("show", "--property=NeedDaemonReload", SERVICE_UNIT)
        if text.strip() == "NeedDaemonReload=yes":
            return ["systemd has older units loaded than the files say"]
        return []

    def log_refusal(self) -> str:
        """See `plan.Service`."""
        if reason := self.absence():
            return f"there is no journal: {reason}"
        if shutil.which(JOURNALCTL) is None:
            return f"there is no journal: {JOURNALCTL} is not installed"
        _, text = running.run([JOURNALCTL, "--user", "--lines", "1", "--no-pager"])
        return (
            f"there is no journal: {text.splitlines()[0]}" if text.startswith(_NO_JOURNAL) else ""
        )

    def logs_command(self, lines: int, *, follow: bool) -> list[str]:
        """See `plan.Service`."""
        return [
            JOURNALCTL, "--user", "--unit", SERVICE_UNIT, "--lines", str(lines),
            "--no-pager", *(["--follow"] if follow else []),
        ]  # fmt: skip

    # -- inside ---------------------------------------------------------------------------------

    def _installed_lock(self) -> Path:
        return running.lock_of_installed(self._plan.unit_dir / SOCKET_UNIT, self._plan)

    def _is_there(self) -> bool:
        return any(path.exists() for path in self.files)

    def _is_active(self) -> bool:
        """Whether one of both runs, or is about to, or still ends its work.

        A service may go on after its socket unit has failed.
        """
        _, text = self._call("show", "--property=ActiveState", SOCKET_UNIT, SERVICE_UNIT)
        pairs = [line.partition("=") for line in text.splitlines()]
        return any(key == "ActiveState" and state not in _DOWN for key, _, state in pairs)

    def _refuse_outsider(self) -> None:
        if self._installed_lock() != self._plan.lock_file or not self._is_active():
            running.refuse_outsider(self._plan)

    def _require_manager(self) -> None:
        reason = self.absence()
        if not reason:
            return
        # Left there they would keep clients from starting the daemon.
        first = "run `prefixcached service uninstall`, then " if self._is_there() else ""
        raise ServiceError(f"{reason}; {first}{WITHOUT_A_SERVICE}")

    def _load(self) -> None:
        running.make_private(self._plan.socket.parent)
        self._must("daemon-reload")
        self._must("enable", "--now", SOCKET_UNIT)
        if self._plan.is_resident:
            self._must("enable", "--now", SERVICE_UNIT)
        else:
            self._call("disable", SERVICE_UNIT)

    def _undo(self, before: Mapping[Path, bytes | None]) -> str:
        # `enable --now` may have enabled it and then failed to start it.
        with suppress(ServiceError):
            self._call("stop", SOCKET_UNIT, SERVICE_UNIT)
            if all(content is None for content in before.values()):
                self._call("disable", SOCKET_UNIT, SERVICE_UNIT)
        outcome = running.restore(before)
        with suppress(ServiceError):
            self._call("daemon-reload")
        return outcome

    def _must(self, *arguments: str) -> None:
        status, text = self._call(*arguments)
        if status:
            detail = text.splitlines()[-1] if text else f"exit status {status}"
            raise ServiceError(f"systemctl --user {' '.join(arguments)} failed: {detail}")

    def _call(self, *arguments: str) -> tuple[int, str]:
        environment = dict(os.environ)
        # A job of cron or `su` has no variable, and the manager is there all the same.
        if "XDG_RUNTIME_DIR" not in environment and self._runtime.is_dir():
            environment["XDG_RUNTIME_DIR"] = str(self._runtime)
        return running.run([self._systemctl, "--user", *arguments], environment)
