"""The systemd units: what they say, checked by systemd itself, and what systemctl is told."""

import fcntl
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcached.daemon.service import running
from prefixcached.daemon.service.plan import ServiceError, ServicePlan
from prefixcached.daemon.service.systemd_units import SystemdUnits, quoted, render

FAKE = """#!/bin/sh
shift # --user
echo "$*" >> "$0.calls"
case "$*" in
  is-active*) test -e "$0.active"; exit $? ;;
  "show --property=ActiveState"*)
    cat "$0.states" 2>/dev/null || { test ! -e "$0.active" || echo ActiveState=active; }; exit ;;
  show*) test ! -e "$0.absent" && echo "Version=255"; echo "$XDG_RUNTIME_DIR" > "$0.runtime" ;;
  "enable --now prefixcached.socket" | start*) touch "$0.active" ;;
  stop*) rm -f "$0.active" ;;
esac
test -e "$0.absent" && echo "Failed to connect to bus: No medium found" && exit 1
test ! -e "$0.broken" || test "$*" != "$(cat "$0.broken")"
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServicePlan:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    program = tmp_path / "bin" / "prefixcached"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return ServicePlan(
        program=program,
        socket=tmp_path / "run" / "prefixcached.sock",
        home=tmp_path,
        log_dir=tmp_path / "log",
        config_file=tmp_path / "config" / "prefixcached" / "config.toml",
    )


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    path = tmp_path / "systemctl"
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


@pytest.fixture
def units(plan: ServicePlan, systemctl: Path) -> SystemdUnits:
    return SystemdUnits(plan, systemctl=str(systemctl), pause=lambda seconds: None)


def calls(systemctl: Path) -> list[str]:
    file = Path(f"{systemctl}.calls")
    return file.read_text().splitlines() if file.exists() else []


def test_the_units_carry_the_plan(plan: ServicePlan) -> None:
    """Absolute program and socket, private modes, and no placeholder left."""
    units = render(plan)
    assert (
        f'ExecStart="{plan.program}" "serve" "--socket" "{plan.socket}"'.encode()
        in (units["prefixcached.service"])
    )
    assert (
        f"ListenStream={plan.socket}\nSocketMode=0600\n".encode() in (units["prefixcached.socket"])
    )
    assert b"@" not in b"".join(units.values())


def test_arguments_are_protected_from_systemd() -> None:
    """Blanks, quotes, specifiers and variables reach the daemon as they are."""
    assert quoted('/a b/%h/$x"\\') == '"/a b/%%h/$$x\\"\\\\"'


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_finds_nothing_wrong(plan: ServicePlan, tmp_path: Path) -> None:
    """`systemd-analyze verify` accepts both files."""
    for name, text in render(plan).items():
        (tmp_path / name).write_bytes(text)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", tmp_path / "prefixcached.socket",
         tmp_path / "prefixcached.service"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "prefixcached" in line]
    assert not ours, done.stderr


def test_install_enables_the_socket_only(
    units: SystemdUnits, plan: ServicePlan, systemctl: Path
) -> None:
    """On demand: the service starts with the first connection."""
    units.install()
    assert calls(systemctl)[-3:] == [
        "daemon-reload",
        "enable --now prefixcached.socket",
        "disable prefixcached.service",
    ]
    assert all(path.is_file() for path in units.files)
    assert units.is_loaded()


def test_the_resident_variant_enables_the_service_too(plan: ServicePlan, systemctl: Path) -> None:
    """It starts at login."""
    resident = ServicePlan(
        program=plan.program, socket=plan.socket, home=plan.home, log_dir=plan.log_dir,
        config_file=plan.config_file, is_resident=True,
    )  # fmt: skip
    SystemdUnits(resident, systemctl=str(systemctl), pause=lambda seconds: None).install()
    assert "enable --now prefixcached.service" in calls(systemctl)


def test_verbs_may_be_repeated(units: SystemdUnits, systemctl: Path) -> None:
    """Install twice, stop, start, uninstall twice."""
    units.install()
    units.install()
    assert "stop prefixcached.socket prefixcached.service" in calls(systemctl)
    units.stop()
    assert not units.is_loaded()
    units.start()
    assert units.is_loaded()
    assert units.end() == ["stopped"]
    assert units.remove() == [f"removed {path}" for path in units.files]
    assert units.end() == ["not installed"]
    assert units.remove() == []
    assert not any(path.exists() for path in units.files)


def test_what_systemd_refuses_is_told(units: SystemdUnits, systemctl: Path) -> None:
    """With the command that failed; start before install says what to do."""
    with pytest.raises(ServiceError, match="service install"):
        units.start()
    Path(f"{systemctl}.broken").write_text("daemon-reload")
    with pytest.raises(ServiceError, match="daemon-reload failed"):
        units.install()
    missing = SystemdUnits(units._plan, systemctl="/nonexistent/systemctl")
    with pytest.raises(ServiceError, match="systemctl is not installed"):
        missing.stop()


def test_where_no_manager_answers_nothing_is_installed(
    units: SystemdUnits, plan: ServicePlan, systemctl: Path
) -> None:
    """It is asked before anything is written, and the error says what works instead."""
    Path(f"{systemctl}.absent").touch()
    for lacking in (units, SystemdUnits(plan, systemctl="/nonexistent/systemctl")):
        with pytest.raises(ServiceError, match="no systemd user manager here") as refused:
            lacking.install()
        assert "`prefixcached serve`, or let clients start it" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert not plan.unit_dir.exists()
    assert not plan.socket.parent.exists()
    assert set(calls(systemctl)) == {"show --property=Version"}


def test_a_systemctl_that_does_nothing_is_no_manager(units: SystemdUnits, systemctl: Path) -> None:
    """In a chroot it ignores what it is told and ends with 0."""
    systemctl.write_text("#!/bin/sh\necho Running in chroot, ignoring command\n")
    assert units.absence() == ("no systemd user manager here (Running in chroot, ignoring command)")


def test_a_manager_is_found_without_the_variable(
    plan: ServicePlan, systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell of `su` lacks XDG_RUNTIME_DIR: what runs there must not pass for gone."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    units = SystemdUnits(plan, systemctl=str(systemctl), runtime=tmp_path)
    assert not units.absence()
    assert Path(f"{systemctl}.runtime").read_text() == f"{tmp_path}\n"


@pytest.mark.parametrize("command", ["daemon-reload", "enable --now prefixcached.socket"])
def test_an_install_that_fails_leaves_nothing(
    units: SystemdUnits, systemctl: Path, command: str
) -> None:
    """Its files would keep clients from starting the daemon; systemd forgets it, too."""
    Path(f"{systemctl}.broken").write_text(command)
    with pytest.raises(ServiceError, match="nothing of it stays installed"):
        units.install()
    assert not any(path.exists() for path in units.files)
    assert calls(systemctl)[-2:] == [
        "disable prefixcached.socket prefixcached.service",
        "daemon-reload",
    ]
    assert not units.is_loaded()


def test_an_install_again_that_fails_puts_the_old_files_back(
    units: SystemdUnits, systemctl: Path
) -> None:
    """What worked before can be started again, and the error says so."""
    units.install()
    older = b"[Socket]\n"
    units.files[0].write_bytes(older)
    Path(f"{systemctl}.broken").write_text("daemon-reload")
    with pytest.raises(ServiceError, match="prefixcached service start"):
        units.install()
    assert units.files[0].read_bytes() == older
    assert units.files[1].is_file()
    assert "disable prefixcached.socket prefixcached.service" not in calls(systemctl)


def test_uninstall_needs_no_manager(
    units: SystemdUnits, plan: ServicePlan, systemctl: Path
) -> None:
    """Nothing runs without one: files and links are removed and named; start points to it."""
    units.install()
    link = plan.unit_dir / "sockets.target.wants" / "prefixcached.socket"
    link.parent.mkdir()
    link.symlink_to(units.files[0])
    Path(f"{systemctl}.absent").touch()
    with pytest.raises(ServiceError, match="run `prefixcached service uninstall`"):
        units.start()
    (said,) = units.end()
    assert said.startswith("no systemd user manager here")
    assert units.remove() == [f"removed {path}" for path in (*units.files, link)]
    assert not any(path.exists() for path in units.files)
    assert not link.is_symlink()


def test_a_start_leaves_another_daemon_its_socket(
    units: SystemdUnits, plan: ServicePlan, systemctl: Path
) -> None:
    """Systemd would bind over that of a daemon started by hand while the service was stopped."""
    units.install()
    units.stop()
    with plan.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ServiceError, match="no service runs at"):
            units.start()
    assert "start prefixcached.socket prefixcached.service" not in calls(systemctl)


@pytest.mark.parametrize(
    "states", [("inactive", "deactivating"), ("failed", "active"), ("inactive", "activating")]
)
@pytest.mark.parametrize("verb", ["start", "install"])
def test_a_service_that_still_runs_is_ended_first(
    units: SystemdUnits, plan: ServicePlan, systemctl: Path, verb: str, states: tuple[str, str]
) -> None:
    """It is no outsider, and systemd starts no socket of a service that runs or still ends."""
    units.install()
    units.stop()
    Path(f"{systemctl}.states").write_text("\n\n".join(f"ActiveState={one}" for one in states))
    Path(f"{systemctl}.calls").unlink()
    with plan.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "stopped" in getattr(units, verb)()
    both = "prefixcached.socket prefixcached.service"
    acting = [call for call in calls(systemctl) if call.startswith(("stop", "start", "enable"))]
    assert acting == [
        f"stop {both}",
        f"start {both}" if verb == "start" else "enable --now prefixcached.socket",
    ]


def test_stop_waits_for_the_service_alone(plan: ServicePlan, systemctl: Path) -> None:
    """For the daemon of the installed socket, and for nobody's where systemd runs none."""
    pauses: list[float] = []
    units = SystemdUnits(plan, systemctl=str(systemctl), pause=pauses.append)
    units.install()
    elsewhere = replace(plan, socket=plan.home / "elsewhere")
    with plan.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        SystemdUnits(elsewhere, systemctl=str(systemctl), pause=pauses.append).stop()
        assert len(pauses) == running.STOP_SECONDS / running.POLL_SECONDS
        units.stop()
        assert len(pauses) == running.STOP_SECONDS / running.POLL_SECONDS


def test_systemctl_has_the_time_that_a_daemon_has_to_end(plan: ServicePlan) -> None:
    """`restart` is for a daemon that hangs, which systemd kills after TimeoutStopSec."""
    found = re.search(
        rb"^TimeoutStopSec=(\d+)$", render(plan)["prefixcached.service"], re.MULTILINE
    )
    assert found is not None
    assert int(found[1]) + 10 <= running.PROGRAM_SECONDS


def test_logs_are_in_the_journal(units: SystemdUnits) -> None:
    """Journalctl shows them, and follows."""
    command = units.logs_command(7, follow=True)
    assert command[:2] == ["journalctl", "--user"]
    assert "--follow" in command
    assert "7" in command
