"""The service on Linux: a user socket and service of systemd, spoken to through systemctl.

The templates are deploy/systemd. The socket unit listens; the service starts with the first
connection, or at login where the plan says so.
"""

import time
from importlib import resources
from pathlib import Path
from typing import Final

from prefixcached.daemon.service import running
from prefixcached.daemon.service.plan import UNIT, ServiceError, ServicePlan
from prefixcached.daemon.service.running import Pause

SYSTEMCTL: Final = "systemctl"
SOCKET_UNIT: Final = f"{UNIT}.socket"
SERVICE_UNIT: Final = f"{UNIT}.service"


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
    """

    def __init__(
        self, plan: ServicePlan, *, systemctl: str = SYSTEMCTL, pause: Pause = time.sleep
    ) -> None:
        self._plan = plan
        self._systemctl = systemctl
        self._pause = pause

    @property
    def files(self) -> tuple[Path, ...]:
        """See `plan.Service`."""
        return tuple(self._plan.unit_dir / name for name in (SOCKET_UNIT, SERVICE_UNIT))

    def render(self) -> dict[Path, bytes]:
        """See `plan.Service`."""
        return {self._plan.unit_dir / name: text for name, text in render(self._plan).items()}

    def is_loaded(self) -> bool:
        """See `plan.Service`."""
        return not self._call("is-active", "--quiet", SOCKET_UNIT)[0]

    def install(self) -> list[str]:
        """See `plan.Service`.

        Raises:
            ServiceError: systemd refuses.
        """
        if not self.is_loaded():
            running.refuse_outsider(self._plan)
        said = self.stop() if self.is_loaded() else []
        for path, content in self.render().items():
            if running.write_file(path, content):
                said.append(f"wrote {path}")
        running.make_private(self._plan.socket.parent)
        self._must("daemon-reload")
        self._must("enable", "--now", SOCKET_UNIT)
        if self._plan.is_resident:
            self._must("enable", "--now", SERVICE_UNIT)
        else:
            self._call("disable", SERVICE_UNIT)
        return [*said, "loaded"]

    def uninstall(self) -> list[str]:
        """See `plan.Service`."""
        if not any(path.exists() for path in self.files):
            return ["not installed"]
        said = self.stop()
        self._call("disable", SOCKET_UNIT, SERVICE_UNIT)
        said.extend(f"removed {path}" for path in self.files if running.remove(path))
        self._must("daemon-reload")
        return said

    def start(self) -> list[str]:
        """See `plan.Service`.

        Raises:
            ServiceError: It is not installed, or systemd refuses.
        """
        if not all(path.is_file() for path in self.files):
            raise ServiceError("no service is installed; run: prefixcached service install")
        self._must("start", SOCKET_UNIT, SERVICE_UNIT)
        return ["started"]

    def stop(self) -> list[str]:
        """See `plan.Service`."""
        # The socket first: a connection meanwhile would start the service again.
        self._must("stop", SOCKET_UNIT, SERVICE_UNIT)
        running.wait_until_gone(self._plan.lock_file, self._pause)
        return ["stopped"]

    def mismatches(self) -> list[str]:
        """See `plan.Service`."""
        _, text = self._call("show", "--property=NeedDaemonReload", SERVICE_UNIT)
        if text.strip() == "NeedDaemonReload=yes":
            return ["systemd has older units loaded than the files say"]
        return []

    def logs_command(self, lines: int, *, follow: bool) -> list[str]:
        """See `plan.Service`."""
        return [
            "journalctl", "--user", "--unit", SERVICE_UNIT, "--lines", str(lines),
            "--no-pager", *(["--follow"] if follow else []),
        ]  # fmt: skip

    def _must(self, *arguments: str) -> None:
        status, text = self._call(*arguments)
        if status:
            detail = text.splitlines()[-1] if text else f"exit status {status}"
            raise ServiceError(f"systemctl --user {' '.join(arguments)} failed: {detail}")

    def _call(self, *arguments: str) -> tuple[int, str]:
        return running.run([self._systemctl, "--user", *arguments])
