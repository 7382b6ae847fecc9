"""The LaunchAgent: its property list, and what is said to launchctl, with a fake one."""

import fcntl
import json
import plistlib
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixcached.daemon.service import launch_agent, running
from prefixcached.daemon.service.launch_agent import LaunchAgent, render
from prefixcached.daemon.service.plan import HOMEBREW_LABEL, LABEL, ServiceError, ServicePlan
from tests.deploy import fake_launchctl

USER = 501
GUI = f"gui/{USER}"
SSH = f"user/{USER}"


class Launchd:
    """The state of the fake, and a way to change it."""

    def __init__(self, directory: Path) -> None:
        self.program = directory / "launchctl"
        source = Path(fake_launchctl.__file__).read_text()
        self.program.write_text(f"#!{sys.executable}\n{source}")
        self.program.chmod(0o755)
        self._file = self.program.with_suffix(".json")
        self.set(gui=True, loaded=[], errors={}, calls=[], text="")

    def set(self, **changes: Any) -> None:
        state = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._file.write_text(json.dumps({**state, **changes}))

    @property
    def loaded(self) -> list[str]:
        found: list[str] = json.loads(self._file.read_text())["loaded"]
        return found

    def calls(self, *, but_print: bool = True) -> list[list[str]]:
        found: list[list[str]] = json.loads(self._file.read_text())["calls"]
        return [call for call in found if not (but_print and call[0] == "print")]


@pytest.fixture
def launchd(tmp_path: Path) -> Launchd:
    return Launchd(tmp_path)


def plan_in(home: Path, **changes: Any) -> ServicePlan:
    support = home / "Library" / "Application Support" / "prefixcached"
    settings: dict[str, Any] = {
        "program": home / ".local" / "bin" / "prefixcached",
        "socket": support / "prefixcached.sock",
        "home": home,
        "log_dir": home / "Library" / "Logs" / "prefixcached",
        "config_file": support / "config.toml",
    }
    return ServicePlan(**{**settings, **changes})


@pytest.fixture
def plan(tmp_path: Path) -> ServicePlan:
    return plan_in(tmp_path / "home")


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def agent(plan: ServicePlan, launchd: Launchd, pauses: list[float]) -> LaunchAgent:
    return LaunchAgent(plan, launchctl=str(launchd.program), user=USER, pause=pauses.append)


def test_the_property_list_has_what_launchd_needs(plan: ServicePlan) -> None:
    """PLATFORM 1.1, 1.2: every key, absolute paths, decimal modes, on demand."""
    agent = plistlib.loads(render(plan))
    assert agent == {
        "Label": LABEL,
        "ProgramArguments": [
            str(plan.program),
            "serve",
            "--socket",
            str(plan.socket),
            "--log-file",
            str(plan.log_file),
        ],
        "Sockets": {
            "Listener": {
                "SockType": "stream",
                "SockPathName": str(plan.socket),
                "SockPathMode": 384,
            }
        },
        "ProcessType": "Interactive",
        "ExitTimeOut": 30,
        "ThrottleInterval": 10,
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": 10240},
        "HardResourceLimits": {"NumberOfFiles": 10240},
        "LimitLoadToSessionType": ["Aqua", "Background"],
        "EnvironmentVariables": {"PYTHONUNBUFFERED": "1"},
        "StandardOutPath": str(plan.log_file),
        "StandardErrorPath": str(plan.log_file),
    }
    assert b"<integer>384</integer>" in render(plan)
    assert b"@" not in render(plan)
    assert b"~" not in render(plan)


def test_the_resident_variant_starts_at_login_and_after_a_crash(plan: ServicePlan) -> None:
    """A clean exit stays one; a crash is started again."""
    agent = plistlib.loads(render(plan_in(plan.home, is_resident=True)))
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"SuccessfulExit": False}


@pytest.mark.skipif(
    not (shutil.which("plutil") or shutil.which("plistutil")),
    reason="neither plutil nor plistutil (Debian: libplist-utils) is installed",
)
def test_another_implementation_reads_the_property_list(plan: ServicePlan, tmp_path: Path) -> None:
    """PLATFORM 1.1: Apple's plutil or libplist's plistutil finds the same in it as plistlib."""
    file, binary = tmp_path / "agent.plist", tmp_path / "binary"
    file.write_bytes(render(plan))
    if tool := shutil.which("plutil"):
        command = [tool, "-convert", "binary1", "-o", str(binary), str(file)]
    else:
        command = ["plistutil", "-f", "bin", "-i", str(file), "-o", str(binary)]
    subprocess.run(command, check=True)
    assert binary.read_bytes().startswith(b"bplist00"), "it was read and written anew"
    assert plistlib.loads(binary.read_bytes()) == plistlib.loads(render(plan))


KEYS = {
    "Label": str, "ProgramArguments": list, "Sockets": dict, "ProcessType": str,
    "ExitTimeOut": int, "ThrottleInterval": int, "Umask": int, "SoftResourceLimits": dict,
    "HardResourceLimits": dict, "LimitLoadToSessionType": list, "EnvironmentVariables": dict,
    "StandardOutPath": str, "StandardErrorPath": str, "RunAtLoad": bool, "KeepAlive": dict,
}  # fmt: skip


@pytest.mark.parametrize("is_resident", [False, True])
def test_every_key_is_launchds_and_of_its_type(plan: ServicePlan, is_resident: bool) -> None:
    """PLATFORM 1.1: no key that launchd would ignore, none of another type, paths absolute."""
    agent = plistlib.loads(render(plan_in(plan.home, is_resident=is_resident)))
    assert {key for key, value in agent.items() if type(value) is not KEYS.get(key)} == set()
    (listener,) = agent["Sockets"].values()
    assert listener.keys() == {"SockType", "SockPathName", "SockPathMode"}
    program = agent["ProgramArguments"][0]
    for path in (listener["SockPathName"], agent["StandardErrorPath"], program):
        assert Path(path).is_absolute()
    assert agent["ExitTimeOut"] <= 60, "launchd clamps a longer one in the gui domain"
    assert all(isinstance(value, str) for value in agent["EnvironmentVariables"].values())


def test_install_makes_directories_writes_the_file_and_loads_it(
    agent: LaunchAgent, plan: ServicePlan, launchd: Launchd
) -> None:
    """Launchd makes no directory; the label is enabled before it is loaded."""
    agent.install()
    assert launchd.calls() == [
        ["enable", f"{GUI}/{LABEL}"],
        ["bootstrap", GUI, str(plan.agent_file)],
    ]
    assert stat.S_IMODE(plan.socket.parent.stat().st_mode) == 0o700
    assert plan.log_dir.is_dir()
    assert stat.S_IMODE(plan.agent_file.stat().st_mode) == 0o644
    assert plistlib.loads(plan.agent_file.read_bytes())["Label"] == LABEL
    assert not list(plan.agent_file.parent.glob(".*"))
    assert agent.is_loaded()


def test_install_again_stops_gracefully_and_loads_anew(
    agent: LaunchAgent, launchd: Launchd
) -> None:
    """Idempotent: SIGTERM, then bootout, then bootstrap; never kickstart -k, which is SIGKILL."""
    agent.install()
    launchd.set(calls=[])
    agent.install()
    assert [call[:2] for call in launchd.calls()] == [
        ["kill", "SIGTERM"],
        ["bootout", f"{GUI}/{LABEL}"],
        ["enable", f"{GUI}/{LABEL}"],
        ["bootstrap", GUI],
    ]
    assert launchd.loaded == [f"{GUI}/{LABEL}"]


def test_without_a_gui_login_the_users_own_domain_serves(
    agent: LaunchAgent, launchd: Launchd
) -> None:
    """PLATFORM 1.4: over ssh the gui domain is not there."""
    launchd.set(gui=False)
    assert f"loaded in {SSH}" in agent.install()
    assert launchd.loaded == [f"{SSH}/{LABEL}"]
    assert agent.stop()[-1] == "stopped"
    assert launchd.loaded == []


def test_error_125_changes_the_domain(agent: LaunchAgent, launchd: Launchd) -> None:
    """The domain is printed and yet refuses."""
    launchd.set(errors={"bootstrap": [125]})
    assert f"loaded in {SSH}" in agent.install()


def test_error_5_is_tried_again(agent: LaunchAgent, launchd: Launchd, pauses: list[float]) -> None:
    """PLATFORM 1.4: the label is still leaving."""
    launchd.set(errors={"bootstrap": [5, 5, 5]})
    assert f"loaded in {GUI}" in agent.install()
    assert len(pauses) == 3


def test_error_5_of_a_label_that_is_loaded_is_success(
    agent: LaunchAgent, launchd: Launchd, plan: ServicePlan
) -> None:
    """Somebody else loaded it meanwhile."""
    agent.install()
    launchd.set(errors={"print": [113, 113, 0]})
    assert agent.start()[-1] == "started"


def test_a_label_that_never_leaves_is_an_error(
    agent: LaunchAgent,
    launchd: Launchd,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gives up after a while and says what to look at."""
    monkeypatch.setattr(launch_agent, "ATTEMPTS", 3)
    launchd.set(errors={"bootstrap": [5] * 100})
    with pytest.raises(ServiceError, match="launchctl print"):
        agent.install()
    assert len(pauses) == 3
    assert not any(path.exists() for path in agent.files)


@pytest.mark.parametrize(("codes", "waits"), [([36, 36], 2), ([3], 0), ([125], 0), ([5], 1)])
def test_bootout_takes_its_time(
    agent: LaunchAgent, launchd: Launchd, pauses: list[float], codes: list[int], waits: int
) -> None:
    """PLATFORM 1.4: 36 is to be waited for, 3 and 125 mean that it is gone."""
    agent.install()
    launchd.set(errors={"bootout": codes})
    assert agent.stop() == ["stopped"]
    assert len(pauses) == waits


def test_bootout_returns_before_the_label_is_free(
    agent: LaunchAgent, launchd: Launchd, pauses: list[float]
) -> None:
    """PLATFORM 1.4: while launchd drains, loading says EIO, as it does of what is loaded."""
    agent.install()
    launchd.set(draining=6)
    assert agent.stop() == ["stopped"]
    assert pauses
    assert not agent.is_loaded()
    agent.install()
    launchd.set(draining=6)
    agent.install()
    assert agent.is_loaded()


def test_any_other_error_is_told(agent: LaunchAgent, launchd: Launchd) -> None:
    """With its number and launchctl's text."""
    launchd.set(errors={"bootstrap": [78]})
    with pytest.raises(ServiceError, match="error 78"):
        agent.install()


def test_an_install_that_fails_leaves_no_file(
    agent: LaunchAgent, plan: ServicePlan, launchd: Launchd
) -> None:
    """It would keep clients from starting the daemon; one that stood there before stands again."""
    launchd.set(errors={"bootstrap": [78]})
    with pytest.raises(ServiceError, match="nothing of it stays installed"):
        agent.install()
    assert not plan.agent_file.exists()
    agent.install()
    older = plan.agent_file.read_bytes().replace(b"<integer>30<", b"<integer>20<")
    plan.agent_file.write_bytes(older)
    launchd.set(errors={"bootstrap": [78]})
    with pytest.raises(ServiceError, match="its files are as they were and it is stopped"):
        agent.install()
    assert plan.agent_file.read_bytes() == older
    assert agent.start()[-1] == "started"


def test_homebrews_service_is_left_alone(
    agent: LaunchAgent, launchd: Launchd, plan: ServicePlan
) -> None:
    """PLATFORM 6: two supervisors of one socket would fight."""
    launchd.set(loaded=[f"{GUI}/{HOMEBREW_LABEL}"])
    with pytest.raises(ServiceError, match="brew services stop"):
        agent.install()
    assert not plan.agent_file.exists()
    assert launchd.calls() == []


def test_a_daemon_outside_the_service_is_named(agent: LaunchAgent, plan: ServicePlan) -> None:
    """Launchd would take its socket away from under it."""
    plan.lock_file.parent.mkdir(parents=True)
    with plan.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ServiceError, match="no service runs at"):
            agent.install()
    assert not plan.agent_file.exists()


def test_stop_waits_for_the_daemon_before_launchd_forgets_it(
    agent: LaunchAgent, plan: ServicePlan, launchd: Launchd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PLATFORM 1.4: bootout kills after the loaded job's exit time-out, which may be 5 s."""
    agent.install()
    launchd.set(calls=[])
    with plan.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def ends_at_the_third_look(seconds: float) -> None:
            looks.append(seconds)
            assert [call[0] for call in launchd.calls()] == ["kill"]
            if len(looks) == 3:
                fcntl.flock(lock, fcntl.LOCK_UN)

        looks: list[float] = []
        monkeypatch.setattr(agent, "_pause", ends_at_the_third_look)
        assert agent.stop() == ["stopped"]
    assert looks == [running.POLL_SECONDS] * 3
    assert [call[0] for call in launchd.calls()] == ["kill", "bootout"]


def test_stop_waits_for_the_daemon_of_the_installed_socket(
    agent: LaunchAgent, plan: ServicePlan, launchd: Launchd, pauses: list[float]
) -> None:
    """PLATFORM 1.4: a shell that names another socket must not cost the queued writes."""
    agent.install()
    elsewhere = replace(plan, socket=plan.home / "elsewhere")
    with plan.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = LaunchAgent(
            elsewhere, launchctl=str(launchd.program), user=USER, pause=pauses.append
        ).stop()
    assert said == ["the daemon did not end in time; launchd ends it now", "stopped"]
    assert len(pauses) == running.STOP_SECONDS / running.POLL_SECONDS


def test_a_start_leaves_another_daemon_its_socket(
    agent: LaunchAgent, plan: ServicePlan, launchd: Launchd
) -> None:
    """Launchd would bind over that of a daemon started by hand while the service was stopped."""
    agent.install()
    agent.stop()
    launchd.set(calls=[])
    with plan.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ServiceError, match="no service runs at"):
            agent.start()
    assert launchd.calls() == []


def test_an_install_at_another_socket_leaves_it_its_daemon(
    agent: LaunchAgent, plan: ServicePlan, launchd: Launchd
) -> None:
    """That a service is loaded says nothing of who runs at the new place."""
    agent.install()
    moved = replace(plan, socket=plan.home / "elsewhere")
    with moved.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ServiceError, match="no service runs at"):
            LaunchAgent(moved, launchctl=str(launchd.program), user=USER).install()
    assert agent.is_loaded()


def test_a_start_makes_the_directories_again(agent: LaunchAgent, plan: ServicePlan) -> None:
    """Launchd makes none: it would bind nowhere and log nowhere."""
    agent.install()
    agent.stop()
    shutil.rmtree(plan.socket.parent)
    plan.log_dir.rmdir()
    agent.start()
    assert plan.socket.parent.is_dir()
    assert plan.log_dir.is_dir()


def test_start_and_uninstall_may_be_repeated(
    agent: LaunchAgent, plan: ServicePlan, launchd: Launchd
) -> None:
    """Start never kills; the end of nothing says so."""
    with pytest.raises(ServiceError, match="service install"):
        agent.start()
    agent.install()
    agent.start()
    agent.stop()
    agent.start()
    assert ["kickstart", f"{GUI}/{LABEL}"] in launchd.calls()
    assert agent.end() == ["stopped"]
    assert agent.remove() == [f"removed {plan.agent_file}"]
    assert agent.end() == ["not loaded"]
    assert agent.remove() == []
    assert launchd.loaded == []


def test_a_loaded_job_that_differs_from_the_file_is_named(
    agent: LaunchAgent, launchd: Launchd, plan: ServicePlan
) -> None:
    """PLATFORM 1.1: the loaded job's exit time-out counts, not the file's."""
    agent.install()
    launchd.set(text=f"\tprogram = {plan.program}\n\texit timeout = 5\n")
    assert agent.mismatches() == ["launchd has exit timeout = 5, and the file 30"]
    launchd.set(text="another text in another release")
    assert agent.mismatches() == []


def test_logs_are_the_file_that_launchd_writes(agent: LaunchAgent, plan: ServicePlan) -> None:
    """Tail shows it, and follows it by name through a rotation."""
    assert "the service never ran" in agent.log_refusal()
    plan.log_dir.mkdir(parents=True)
    plan.log_file.touch()
    assert not agent.log_refusal()
    assert agent.logs_command(5, follow=True) == ["tail", "-n", "5", "-F", str(plan.log_file)]
