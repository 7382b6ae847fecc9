"""`service`, as a user meets it: real files, a real daemon, real activation."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from prefixcached.daemon.service import running
from prefixcached.daemon.service.plan import ServiceError, ServicePlan, console_script
from prefixcached.daemon.service.purge import purge as purge_plan
from tests.daemon.command_line import invoke
from tests.support.daemon_process import DaemonProcess

# Starts and ends what the socket unit would, with systemd's own tool for socket activation.
SYSTEMCTL = """#!/bin/sh
shift # --user
pid=$(cat "$0.pid" 2>/dev/null)
case "$*" in
  is-active*) test -n "$pid"; exit $? ;;
  "show --property=Version") echo Version=255 ;;
  "show --property=ActiveState"*) test -z "$pid" || echo ActiveState=active ;;
  "enable --now prefixcached.socket" | start*)
    setsid systemd-socket-activate -l "$SERVICE_SOCKET" -E HOME -E XDG_CACHE_HOME \\
      -E XDG_CONFIG_HOME -E PREFIXCACHED_RAM_BYTES -E PREFIXCACHED_SSD_BYTES \\
      "$SERVICE_PYTHON" -m prefixcached.daemon.cli serve --socket "$SERVICE_SOCKET" \\
      >"$0.log" 2>&1 </dev/null &
    echo $! > "$0.pid"
    while ! test -S "$SERVICE_SOCKET"; do :; done
    chmod 600 "$SERVICE_SOCKET" ;; # as SocketMode= says
  stop*)
    test -n "$pid" && kill "$pid"
    rm -f "$0.pid" "$SERVICE_SOCKET" ;;
esac
exit 0
"""


@pytest.fixture
def home(directory: Path) -> Iterator[dict[str, str | None]]:
    """The environment of a user with a home of their own and a fake systemctl on PATH."""
    tools = directory / "bin"
    tools.mkdir()
    systemctl = tools / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    socket = directory / "run" / "prefixcached" / "s"
    yield {
        "HOME": str(directory),
        "XDG_CONFIG_HOME": str(directory / "config"),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "XDG_STATE_HOME": str(directory / "state"),
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFIXCACHED_SOCKET": str(socket),
        "PREFIXCACHED_RAM_BYTES": "64MiB",
        "PREFIXCACHED_SSD_BYTES": "64MiB",
        "SERVICE_SOCKET": str(socket),
        "SERVICE_PYTHON": sys.executable,
    }
    subprocess.run([systemctl, "--user", "stop"], env={"SERVICE_SOCKET": str(socket)}, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="systemd")
@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="no systemd here")
def test_the_life_of_a_service(home: dict[str, str | None], directory: Path) -> None:
    """Install, status, doctor, restart, stop, purge: every verb, twice where that may be."""
    unit = directory / "config" / "systemd" / "user" / "prefixcached.service"
    installed = invoke("service", "install", environment=home)
    assert installed.exit_code == 0, installed.output
    assert f"wrote {unit}" in installed.output
    assert "answers at" in installed.output
    again = invoke("service", "install", environment=home)
    assert again.exit_code == 0, again.output
    assert "wrote" not in again.output

    shown = invoke("service", "status", environment=home)
    assert shown.exit_code == 0, shown.output
    assert "installed  yes" in shown.output
    assert "answers    yes" in shown.output
    examined = invoke("doctor", environment=home)
    assert examined.exit_code == 0, examined.output
    assert "failed" not in examined.output
    unit.write_text(f"{unit.read_text()}# changed by hand\n")
    assert "not what this version writes" in invoke("doctor", environment=home).output

    assert invoke("service", "restart", environment=home).exit_code == 0
    assert invoke("service", "stop", environment=home).exit_code == 0
    down = invoke("service", "status", environment=home)
    assert down.exit_code == 3
    assert "loaded     no" in down.output

    assert invoke("service", "start", environment=home).exit_code == 0
    purged = invoke("service", "uninstall", "--purge", environment=home)
    assert purged.exit_code == 0, purged.output
    assert f"removed {directory / 'cache' / 'prefixcached'}\n" in purged.output
    assert not unit.exists()
    assert not (directory / "run" / "prefixcached").exists()
    assert invoke("service", "uninstall", "--purge", environment=home).exit_code == 0


def plan_within(directory: Path, *, socket: Path, config_file: Path) -> ServicePlan:
    """A plan whose log is not in ``directory``."""
    return ServicePlan(
        program=directory / "p", socket=socket, home=directory,
        log_dir=directory.parent / "log", config_file=config_file,
    )  # fmt: skip


def left_by_a_daemon(directory: Path) -> ServicePlan:
    """What a daemon leaves that has everything in one directory."""
    for name in ("segments.noindex", "quarantine", "trash"):
        (directory / name / "below").mkdir(parents=True)
    for name in ("lock", "written.json", "tmp-1", "s.lock", "s.starting", "my.toml"):
        (directory / name).touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "s"))
    return plan_within(directory, socket=directory / "s", config_file=directory / "my.toml")


def test_a_purge_leaves_the_other_files_of_a_directory(directory: Path) -> None:
    """A checkout of this project is called as the daemon's own directories are."""
    checkout = directory / "prefixcached"
    (checkout / "daemon").mkdir(parents=True)
    plan = left_by_a_daemon(checkout)
    assert len(list(purge_plan(plan, checkout))) == 10
    assert list(checkout.iterdir()) == [checkout / "daemon"]


def test_a_purge_leaves_nothing_of_ours(directory: Path) -> None:
    """The directory of our name goes when nothing is left in it."""
    plan = left_by_a_daemon(directory / "prefixcached")
    plan.log_dir.mkdir()
    plan.log_file.touch()
    plan.log_file.with_name(f"{plan.log_file.name}.1").touch()
    assert f"removed {directory / 'prefixcached'}" in list(
        purge_plan(plan, directory / "prefixcached")
    )
    assert list(directory.iterdir()) == []


def test_a_purge_takes_nothing_where_no_daemon_worked(directory: Path) -> None:
    """A wrong state directory, --socket or --config costs nobody a file."""
    (directory / "trash" / "mine").mkdir(parents=True)
    (directory / "lock").touch()
    (directory / "s").touch()
    plan = plan_within(directory, socket=directory / "s", config_file=directory / "trash")
    assert list(purge_plan(plan, directory)) == []
    assert {path.name for path in directory.iterdir()} == {"trash", "lock", "s"}
    assert (directory / "trash" / "mine").is_dir()


def test_a_purge_that_fails_leaves_the_configuration(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says where the rest is, which the next purge must find."""

    def refused(tree: Path) -> bool:
        raise ServiceError(f"cannot remove {tree}: Input/output error")

    plan = left_by_a_daemon(directory)
    monkeypatch.setattr(running, "remove_tree", refused)
    with pytest.raises(ServiceError):
        list(purge_plan(plan, directory))
    assert plan.config_file.exists()


def test_a_purge_beside_a_running_daemon_is_refused(
    home: dict[str, str | None], daemon: DaemonProcess
) -> None:
    """Nothing is taken away from under it."""
    home["PREFIXCACHED_SOCKET"] = str(daemon.socket)
    shown = invoke("service", "uninstall", "--purge", environment=home)
    assert shown.exit_code == 1
    assert f"still runs at {daemon.socket} (process {daemon.pid})" in shown.output
    assert f"`kill {daemon.pid}`" in shown.output
    assert daemon.is_running


def test_a_purge_leaves_no_empty_directory_of_ours(
    home: dict[str, str | None], directory: Path
) -> None:
    """The log's parent goes with it, unless something else is in it."""
    ours = directory / "state" / "prefixcached"
    (ours / "log").mkdir(parents=True)
    other = ours / "other"
    other.touch()
    shown = invoke("service", "uninstall", "--purge", environment=home)
    assert shown.exit_code == 0, shown.output
    assert list(ours.iterdir()) == [other]
    other.unlink()
    shown = invoke("service", "uninstall", "--purge", environment=home)
    assert f"removed {ours}\n" in shown.output
    assert not ours.exists()
    assert ours.parent.is_dir()


def logs(home: Mapping[str, str | None], *options: str) -> tuple[int, str]:
    """Show the log in a process of its own, since the command becomes journalctl; its end."""
    environment = {name: value for name, value in home.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-m", "prefixcached.daemon.cli", "service", "logs", *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


NO_BUS = """#!/bin/sh
echo "Failed to connect to bus: No medium found" >&2
exit 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="systemd")
def test_where_no_manager_answers_every_verb_says_what_to_do(
    home: dict[str, str | None], directory: Path
) -> None:
    """A container: no file is left, and files from elsewhere are named and can be removed."""
    tools = directory / "container"
    tools.mkdir()
    (tools / "systemctl").write_text(NO_BUS)
    (tools / "systemctl").chmod(0o755)
    home["PATH"] = f"{tools}:{home['PATH']}"
    refused = invoke("service", "install", environment=home)
    assert refused.exit_code == 1
    assert "use `prefixcached serve`, or let clients start it" in refused.output
    assert refused.output.count("\n") == 1
    units = directory / "config" / "systemd" / "user"
    assert not units.exists()

    for purge in ([], ["--purge"]):
        units.mkdir(parents=True, exist_ok=True)
        for name in ("prefixcached.socket", "prefixcached.service"):
            (units / name).write_text(f"ListenStream={home['PREFIXCACHED_SOCKET']}\n")
        assert "loaded     no: no systemd" in invoke("service", "status", environment=home).output
        findings = json.loads(invoke("doctor", "--json", environment=home).output)["findings"]
        (finding,) = [one for one in findings if one["what"] == "service"]
        assert finding["fix"] == "prefixcached service uninstall"
        code, said = logs(home, "--follow")
        assert code == 1
        assert "there is no journal: no systemd user manager here" in said
        assert f"a client started logs to {directory / 'state'}" in said
        removed = invoke("service", "uninstall", *purge, environment=home)
        assert removed.exit_code == 0, removed.output
        assert f"removed {units / 'prefixcached.socket'}\n" in removed.output
        assert not list(units.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="systemd")
def test_logs_without_a_journal_say_so(home: dict[str, str | None], directory: Path) -> None:
    """Journalctl would end with 0, and wait for ever with --follow."""
    units = directory / "config" / "systemd" / "user"
    units.mkdir(parents=True)
    (units / "prefixcached.socket").write_text("")
    journalctl = directory / "bin" / "journalctl"
    journalctl.write_text("#!/bin/sh\necho No journal files were found.\n")
    journalctl.chmod(0o755)
    code, said = logs(home, "--follow")
    assert code == 1
    assert "there is no journal: No journal files were found" in said
    journalctl.unlink()
    (directory / "bin" / "systemctl").write_text("#!/bin/sh\necho Version=255\n")
    home["PATH"] = str(directory / "bin") + ":" + str(Path(sys.executable).parent)
    code, said = logs(home)
    assert code == 1
    assert "journalctl is not installed" in said


@pytest.mark.parametrize(
    ("invoked", "expected"),
    [
        ("/x/opt/Cellar/prefixcached/0.1.0/bin/prefixcached", "/x/opt/opt/prefixcached/bin"),
        ("/x/home/.local/bin/prefixcached", "/x/home/.local/bin"),
    ],
)
def test_the_service_runs_a_path_that_upgrades_keep(
    tmp_path: Path, invoked: str, expected: str
) -> None:
    """PLATFORM 6: Homebrew's opt path and the shims of uv and pipx, never what they lead to now."""
    script = tmp_path / invoked.removeprefix("/")
    script.parent.mkdir(parents=True)
    target = tmp_path / "target"
    target.write_text("")
    target.chmod(0o755)
    script.symlink_to(target)
    assert console_script(str(script)) == tmp_path / expected.removeprefix("/") / "prefixcached"


def test_a_command_that_cannot_be_found_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service of `python -m` would show as "python" in System Settings."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServiceError, match="uv tool install"):
        console_script("cli.py")


def test_logs_without_a_service_says_where_a_daemon_logs(
    home: dict[str, str | None], directory: Path
) -> None:
    """Exit code 1; of a daemon that answers it is known, of another the places are named."""
    shown = invoke("service", "logs", environment=home)
    assert shown.exit_code == 1
    assert "no service is installed" in shown.output
    assert f"a client started logs to {directory / 'state'}" in shown.output
    with DaemonProcess() as daemon:
        home["PREFIXCACHED_SOCKET"] = str(daemon.socket)
        shown = invoke("service", "logs", environment=home)
        assert shown.exit_code == 1
        assert (
            f"Process {daemon.pid}, which serves {daemon.socket}, logs to its standard"
            in shown.output
        )
    with DaemonProcess("--log-file", str(directory / "its.log")) as daemon:
        home["PREFIXCACHED_SOCKET"] = str(daemon.socket)
        assert (
            f"logs to {directory / 'its.log'}" in invoke("service", "logs", environment=home).output
        )


def all_commands() -> list[list[str]]:
    verbs = ("install", "uninstall", "start", "stop", "restart", "status", "logs")
    names = ("flush", "verify", "ls", "explain", "config", "doctor", "serve", "service")
    return [*([name] for name in names), *(["service", verb] for verb in verbs)]


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_wrong_usage_is_one_line_and_2(command: list[str]) -> None:
    """It names the mistake and where the help is."""
    shown = invoke(*command, "--no-such-option")
    assert shown.exit_code == 2
    assert shown.output.count("\n") == 1
    assert "--help" in shown.output


def test_the_console_script_is_the_same_command_line() -> None:
    """What users type: installed entry point, own process."""
    script = Path(sys.executable).with_name("prefixcached")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    for name in ("flush", "verify", "ls", "explain", "config", "doctor", "service"):
        assert f"\n  {name} " in done.stdout
    wrong = subprocess.run([script, "flush", "x"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
