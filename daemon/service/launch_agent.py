"""The service on macOS: a LaunchAgent, spoken to through launchctl (PLATFORM 1).

The property list's template is deploy/launchd. `launchctl print` is asked for its exit status
alone, since its text is no interface; only `mismatches`, a hint, looks at that. The daemon is ended
by SIGTERM and waited for before launchd is told to forget it: the loaded job may still have the
short exit time-out of an older file.
"""

import os
import plistlib
import re
import time
from importlib import resources
from pathlib import Path
from typing import Any, Final

from prefixcached.daemon.service import running
from prefixcached.daemon.service.plan import HOMEBREW_LABEL, LABEL, ServiceError, ServicePlan
from prefixcached.daemon.service.running import Pause

LAUNCHCTL: Final = "/bin/launchctl"
"""Absolute: a Python of uv may run with a PATH without /bin."""

NOT_SUPPORTED: Final = 125
"""The domain is not there: no GUI login, as over ssh."""
IO_ERROR: Final = 5
"""The label is still leaving, or is loaded already."""
NO_SUCH_PROCESS: Final = 3
"""ESRCH: not loaded."""
IN_PROGRESS: Final = 36
"""EINPROGRESS: it is leaving."""

_FACT: Final = re.compile(r"^\s*(program|exit timeout) = (.*?)\s*$", re.MULTILINE)

ATTEMPTS: Final = 30
RETRY_SECONDS: Final = 1.0
"""Homebrew's own pace: it asks each second, and a job has 30 s to end."""


def render(plan: ServicePlan) -> bytes:
    """Return the property list.

    The template holds what never changes; strings of the plan replace its placeholders.
    """
    template = resources.files("prefixcached.deploy") / "launchd" / f"{LABEL}.plist"
    agent: dict[str, Any] = plistlib.loads(template.read_bytes())
    # launchd puts what comes before the daemon's own log there too, but never rotates it.
    agent["ProgramArguments"] = [*plan.arguments, "--log-file", str(plan.log_file)]
    agent["StandardOutPath"] = agent["StandardErrorPath"] = str(plan.log_file)
    agent["Sockets"]["Listener"]["SockPathName"] = str(plan.socket)
    if plan.is_resident:
        # Any KeepAlive implies RunAtLoad; said all the same, for whoever reads the file.
        agent["RunAtLoad"] = True
        agent["KeepAlive"] = {"SuccessfulExit": False}
    return plistlib.dumps(agent, sort_keys=False)


class LaunchAgent:
    """The LaunchAgent of ``plan`` (`plan.Service`).

    Args:
        plan: What to run and where.
        launchctl: The program; a test gives its own.
        user: The user's id.
        pause: Waits between two attempts.
    """

    def __init__(
        self,
        plan: ServicePlan,
        *,
        launchctl: str = LAUNCHCTL,
        user: int | None = None,
        pause: Pause = time.sleep,
    ) -> None:
        self._plan = plan
        self._launchctl = launchctl
        self._user = os.getuid() if user is None else user
        self._pause = pause

    @property
    def files(self) -> tuple[Path, ...]:
        """See `plan.Service`."""
        return (self._plan.agent_file,)

    def render(self) -> dict[Path, bytes]:
        """See `plan.Service`."""
        return {self._plan.agent_file: render(self._plan)}

    def absence(self) -> str:
        """See `plan.Service`. launchd is always there."""
        return ""

    def is_loaded(self) -> bool:
        """See `plan.Service`."""
        return self._loaded_domain(LABEL) is not None

    def install(self) -> list[str]:
        """See `plan.Service`.

        Raises:
            ServiceError: Homebrew runs it, or launchd refuses.
        """
        self._refuse_homebrew()
        self._make_way()
        said = self.stop() if self.is_loaded() else []
        before = running.contents_of(self.files)
        try:
            return [*said, *running.write_files(self.render()), *self._load()]
        except ServiceError as error:
            raise ServiceError(f"{error}; {running.restore(before)}") from error
        except KeyboardInterrupt:
            running.restore(before)
            raise

    def end(self) -> list[str]:
        """See `plan.Service`."""
        return self.stop()

    def remove(self) -> list[str]:
        """See `plan.Service`."""
        return [f"removed {path}" for path in self.files if running.remove(path)]

    def start(self) -> list[str]:
        """See `plan.Service`.

        Raises:
            ServiceError: It is not installed, another daemon has the socket, or launchd refuses.
        """
        if not self._plan.agent_file.is_file():
            raise ServiceError("no service is installed; run: prefixcached service install")
        self._make_way()
        said = [] if self.is_loaded() else self._load()
        domain = self._loaded_domain(LABEL) or self._domain()
        # Without -k, which would be an immediate SIGKILL of one that runs.
        status, text = self._call("kickstart", f"{domain}/{LABEL}")
        if status:
            raise _refused("start", status, text)
        return [*said, "started"]

    def stop(self) -> list[str]:
        """See `plan.Service`.

        Raises:
            ServiceError: The daemon does not end, or launchd keeps it.
        """
        domain = self._loaded_domain(LABEL)
        if domain is None:
            return ["not loaded"]
        self._call("kill", "SIGTERM", f"{domain}/{LABEL}")
        said = []
        lock_file = running.lock_of_installed(self._plan.agent_file, self._plan)
        if not running.wait_until_gone(lock_file, self._pause):
            said.append("the daemon did not end in time; launchd ends it now")
        for _ in range(ATTEMPTS):
            status, text = self._call("bootout", f"{domain}/{LABEL}")
            if status not in (0, NO_SUCH_PROCESS, NOT_SUPPORTED, IN_PROGRESS, IO_ERROR):
                raise _refused("stop", status, text)
            # It returns before launchd has let go of the label, which cannot be loaded until then.
            if status in (0, NO_SUCH_PROCESS, NOT_SUPPORTED) and not self._is_known(domain, LABEL):
                return [*said, "stopped"]
            self._pause(RETRY_SECONDS)
        raise ServiceError(f"launchd is still stopping {LABEL}; try again in a minute")

    def mismatches(self) -> list[str]:
        """See `plan.Service`."""
        domain = self._loaded_domain(LABEL)
        if domain is None:
            return []
        _, text = self._call("print", f"{domain}/{LABEL}")
        agent = plistlib.loads(render(self._plan))
        expected = {
            "program": agent["ProgramArguments"][0],
            "exit timeout": str(agent["ExitTimeOut"]),
        }
        said = dict(_FACT.findall(text))
        return [
            f"launchd has {name} = {said[name]}, and the file {value}"
            for name, value in expected.items()
            if name in said and said[name] != value
        ]

    def log_refusal(self) -> str:
        """See `plan.Service`."""
        if self._plan.log_file.exists():
            return ""
        return f"no log at {self._plan.log_file}: the service never ran"

    def logs_command(self, lines: int, *, follow: bool) -> list[str]:
        """See `plan.Service`."""
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self._plan.log_file)]

    # -- inside ---------------------------------------------------------------------------------

    def _make_way(self) -> None:
        """See to it that launchd can bind the socket and log.

        Raises:
            ServiceError: A daemon that launchd did not start has the socket.
        """
        plan = self._plan
        if (
            running.lock_of_installed(plan.agent_file, plan) != plan.lock_file
            or not self.is_loaded()
        ):
            running.refuse_outsider(plan)
        # launchd creates neither: without them it would bind nowhere and log nowhere.
        running.make_private(plan.socket.parent)
        running.make_private(plan.log_dir)

    def _load(self) -> list[str]:
        domain = self._domain()
        for _ in range(ATTEMPTS):
            # A label that was once disabled cannot be loaded, for ever.
            self._call("enable", f"{domain}/{LABEL}")
            status, text = self._call("bootstrap", domain, str(self._plan.agent_file))
            if not status:
                return [f"loaded in {domain}"]
            if status == NOT_SUPPORTED and domain.startswith("gui/"):
                domain = f"user/{self._user}"
            elif status in (IO_ERROR, IN_PROGRESS):
                if self._is_known(domain, LABEL):
                    return [f"loaded in {domain}"]
                self._pause(RETRY_SECONDS)
            else:
                raise _refused("load", status, text)
        raise ServiceError(
            f"launchd does not load {self._plan.agent_file}; "
            f"see: launchctl print {domain}/{LABEL}; log show --last 5m --predicate "
            "'process == \"launchd\"'"
        )

    def _refuse_homebrew(self) -> None:
        if self._loaded_domain(HOMEBREW_LABEL) is not None:
            raise ServiceError(
                "Homebrew runs the daemon; use `brew services`, or first run: "
                "brew services stop prefixcached"
            )

    def _domain(self) -> str:
        """The user's domain: of the GUI login where there is one, else that of ssh sessions."""
        status, _ = self._call("print", f"gui/{self._user}")
        return f"gui/{self._user}" if not status else f"user/{self._user}"

    def _loaded_domain(self, label: str) -> str | None:
        for domain in (f"gui/{self._user}", f"user/{self._user}"):
            if self._is_known(domain, label):
                return domain
        return None

    def _is_known(self, domain: str, label: str) -> bool:
        status, _ = self._call("print", f"{domain}/{label}")
        return not status

    def _call(self, *arguments: str) -> tuple[int, str]:
        return running.run([self._launchctl, *arguments])


def _refused(what: str, status: int, text: str) -> ServiceError:
    detail = text.splitlines()[-1] if text else "no text"
    return ServiceError(f"launchd does not {what} {LABEL}: error {status} ({detail})")
