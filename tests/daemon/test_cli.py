"""The command line, as a user or a script meets it: output, exit codes, real processes."""

import json
import pwd
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from prefixcached import __version__
from prefixcached.daemon.cli import PLACES, main
from prefixcached.protocol.paths import SOCKET_VARIABLE
from tests.support.daemon_process import DaemonProcess
from tests.support.until import until


def invoke(*arguments: str, socket: Path | None = None) -> Result:
    environment = None if socket is None else {SOCKET_VARIABLE: str(socket)}
    return CliRunner().invoke(main, arguments, env=environment)


def test_version_and_help() -> None:
    """Both end with 0, and the help names every command."""
    assert invoke("--version").output.strip().endswith(__version__)
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert "..." not in shown.output.partition("Commands:")[2], "a summary is cut"
    for command in ("serve", "status", "clear"):
        assert command in shown.output
        assert invoke(command, "-h").exit_code == 0


@pytest.mark.parametrize("arguments", [("--version",), ("ls", "--help"), ("status", "--help")])
def test_who_asks_does_not_wait_for_the_modules_of_the_daemon(arguments: tuple[str, ...]) -> None:
    """A command imports what it needs itself: no event loop, no actors, no mlx."""
    script = (
        "import sys; from prefixcached.daemon.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'trio', 'structlog', 'mlx.core', 'prefixcached.actors'} & {*sys.modules}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", PLACES)
def test_every_command_is_known_by_its_name(name: str) -> None:
    """What is imported late is what the name says."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("status", "--nonsense"),
        ("serve", "--ram-bytes", "8 apples"),
        ("serve", "--ssd-bytes", "101%"),
        ("serve", "--socket"),
        ("flush", "--timeout", "nan"),
        ("top", "--interval", "nan"),
        ("replay", "--speed", "nan", __file__),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], directory: Path) -> None:
    """A script can tell its own mistake from the daemon's."""
    shown = invoke(*arguments, socket=directory / "s")
    assert shown.exit_code == 2, shown.output


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("clear",)])
def test_no_daemon_ends_with_3(arguments: tuple[str, ...], directory: Path) -> None:
    """A script can tell that nobody answers; a person reads what to do."""
    shown = invoke(*arguments, socket=directory / "s")
    assert shown.exit_code == 3
    assert str(directory / "s") in shown.output
    assert "prefixcached serve" in shown.output


def test_a_daemon_that_cannot_start_ends_with_1(directory: Path) -> None:
    """The text says what is in the way."""
    directory.chmod(0o755)
    shown = invoke("serve", "--socket", str(directory / "s"))
    directory.chmod(0o700)
    assert shown.exit_code == 1
    assert "chmod 700" in shown.output
    shown = invoke("serve", "--socket", str(directory / ("x" * 104)))
    assert shown.exit_code == 1
    assert "allows 103" in shown.output


def test_a_start_that_fails_is_told_to_the_starter_too(directory: Path) -> None:
    """With --log-file standard error is the log: FAILED and why stand on standard output."""
    (directory / "s").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "prefixcached.daemon.cli", "serve", "--socket", str(directory / "s"),
         "--log-file", str(directory / "log")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"FAILED {directory / 's'} exists and is no socket")
    assert "exists and is no socket" in (directory / "log").read_text()


def test_status_and_clear_speak_to_a_real_daemon(daemon: DaemonProcess) -> None:
    """`status --json` is one object with a section for each part; `clear` says what it did."""
    report = json.loads(invoke("status", "--json", socket=daemon.socket).output)
    assert report["daemon"]["pid"] == daemon.pid
    assert report["listener"]["accepted"] >= 1
    assert report["ram_tier"]["leases"] == 0
    assert report["schema"] == 1
    page = invoke("status", "--socket", str(daemon.socket))
    assert page.exit_code == 0
    assert f"process {daemon.pid}" in page.output
    lines = invoke("status", "--all", socket=daemon.socket).output.splitlines()
    assert "ram_tier.takes.tokens_reused  0" in lines
    assert invoke("clear", socket=daemon.socket).output == "nothing is cached\n"


def test_a_second_daemon_for_the_same_socket_ends_with_1(daemon: DaemonProcess) -> None:
    """It names the first one, which goes on."""
    shown = invoke("serve", "--socket", str(daemon.socket))
    assert shown.exit_code == 1
    assert f"process {daemon.pid}" in shown.output
    assert invoke("status", socket=daemon.socket).exit_code == 0


def redirected(arguments: str, redirection: str) -> list[str]:
    """The command line as a process whose standard streams the shell redirects."""
    command = f"{shlex.quote(sys.executable)} -m prefixcached.daemon.cli"
    return ["sh", "-c", f"exec {command} {arguments} {redirection}"]


def test_a_daemon_whose_standard_streams_are_closed_serves(directory: Path) -> None:
    """Its starter may have closed them; the log file takes what it says all the same."""
    log = directory / "log"
    serve = f"serve --ssd-bytes 0 --socket {directory / 's'} --log-file {log}"
    with subprocess.Popen(redirected(serve, "<&- >&- 2>&-")) as process:
        until(lambda: process.poll() is not None or (log.exists() and '"ready"' in log.read_text()))
        process.terminate()
    assert process.returncode == 0
    assert '"stopped"' in log.read_text()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_with_closed_streams_does_its_work(daemon: DaemonProcess, closed: str) -> None:
    """What it says is lost, as its caller wants it; what it does is not."""
    done = subprocess.run(
        redirected(f"clear --socket {daemon.socket}", closed),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    """It says what is wrong and ends with 1, without a traceback."""
    done = subprocess.run(
        redirected("--help", ">/dev/full"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


@pytest.mark.parametrize("command", ["config", "doctor", "verify", "service status"])
def test_a_command_that_needs_a_home_says_so_in_one_line(
    command: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose user has neither HOME nor an entry: 1, and what to set."""
    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    shown = invoke(*command.split(), socket=directory / "s")
    assert shown.exit_code == 1, shown.output
    assert shown.output.count("\n") == 1
    assert "home directory" in shown.output
    assert shown.output.endswith(": set HOME\n")
    assert invoke("status", socket=directory / "s").exit_code == 3, "which needs none"


LIST_IMPORTS = """
import sys
import prefixcached.daemon.cli, prefixcached.daemon.storage
print(*sorted(sys.modules))
"""


def test_serving_imports_neither_mlx_nor_the_client() -> None:
    """DESIGN 1: the daemon moves bytes and never sees a tensor."""
    listed = subprocess.run(
        [sys.executable, "-c", LIST_IMPORTS], capture_output=True, text=True, check=True
    ).stdout.split()
    unwanted = [name for name in listed if name.startswith(("mlx", "prefixcached.client"))]
    assert not unwanted
    assert "prefixcached.actors.ram_tier" in listed
