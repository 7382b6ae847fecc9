"""Every command as a user meets it: the console script, real processes, exit codes."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from prefixcached.daemon.cli import PLACES, main
from prefixcached.daemon.commands.service import service
from prefixcached.protocol.paths import CONFIG_VARIABLE, SOCKET_VARIABLE
from tests.daemon.command_line import BOTH_TIERS, numpy_cache, put
from tests.support.daemon_process import DaemonProcess

SCRIPT = Path(sys.executable).with_name("prefixcached")

WRONG = {
    "": ("nonsense",),
    "serve": ("serve", "--retention", "none"),
    "status": ("status", "surplus"),
    "clear": ("clear", "--namespace"),
    "ls": ("ls", "--limit", "0"),
    "explain": ("explain", "/does/not/exist"),
    "flush": ("flush", "--timeout", "-1"),
    "verify": ("verify", "--state-dir", "/does/not/exist"),
    "config": ("config", "--ram-bytes", "8 apples"),
    "doctor": ("doctor", "--nonsense"),
    "service": ("service", "nonsense"),
    "service install": ("service", "install", "--nonsense"),
    "service uninstall": ("service", "uninstall", "surplus"),
    "service start": ("service", "start", "surplus"),
    "service stop": ("service", "stop", "--nonsense"),
    "service restart": ("service", "restart", "--nonsense"),
    "service status": ("service", "status", "--nonsense"),
    "service logs": ("service", "logs", "--lines", "0"),
    "demo": ("demo", "--max-tokens", "many"),
    "dashboard": ("dashboard", "--port", "65536"),
}
"""For each command of this file a call that is wrong."""

NEED_A_DAEMON = ("status", "clear", "ls", "explain", "flush", "dashboard")

OPTIONS = ("serve", "config", "replay")
"""Commands with a flag for every option, most of which only the manual names."""


def run(
    *arguments: str, text: str = "", environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the console script off any terminal."""
    return subprocess.run(
        [SCRIPT, *arguments],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
        timeout=100,
    )


def all_commands() -> list[tuple[str, ...]]:
    """Every command; mlx-lm-server's help is mlx_lm's."""
    names = [name for name in PLACES if name != "mlx-lm-server"]
    return [(), *((name,) for name in names), *(("service", verb) for verb in service.commands)]


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_help_fits_a_screen_and_has_an_example(command: tuple[str, ...]) -> None:
    """80 columns, 24 lines, an example; where flags are left out it says where they stand."""
    shown = CliRunner().invoke(main, [*command, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert "Example" in shown.output
    assert "VALUE" not in shown.output
    if " ".join(command) in OPTIONS:
        assert "--ram-bytes" in shown.output
        assert 'docs/operations.md, "Configuration"' in " ".join(shown.output.split())


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG.keys())
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    """A script can tell its own mistake; the line says where the help is."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("Error: ")
    assert "--help`" in done.stderr


@pytest.mark.parametrize("command", NEED_A_DAEMON)
def test_without_a_daemon_it_says_what_was_tried_and_what_to_do(command: str) -> None:
    """Exit code 3, the socket, both variables, how to start one, and the section of the manual."""
    with TemporaryDirectory(prefix="pfxc-") as name:
        socket = f"{name}/s"
        done = run(
            command, text="1 2 3", environment={SOCKET_VARIABLE: socket, CONFIG_VARIABLE: ""}
        )
    assert done.returncode == 3
    for word in (
        socket, f"{SOCKET_VARIABLE} is {socket}", f"{CONFIG_VARIABLE} is not set",
        "prefixcached serve", "prefixcached service install", 'see "No daemon"',
    ):  # fmt: skip
        assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_all_of_them_against_a_real_daemon() -> None:
    """Status, ls, explain, flush, verify, config, doctor and clear do what they say; exit code 0.

    Off a terminal nothing is cut or folded, however long a name is.
    """
    long_name = "n" * 50
    with DaemonProcess(*BOTH_TIERS) as process:
        environment = {SOCKET_VARIABLE: str(process.socket), "COLUMNS": "20"}
        with numpy_cache(process.socket) as cache:
            put(cache, range(600), long_name)
        done = {
            command: run(*command.split(), text="1 2 3", environment=environment)
            for command in (
                "status", "status --json", "status --all", "ls", "ls --json", "explain",
                "flush", f"verify --state-dir {process.state_dir}", "config", "config --json",
                "doctor", "clear",
            )
        }  # fmt: skip
    for command, one in done.items():
        assert one.returncode == 0, (command, one.stdout, one.stderr)
    for command in ("status --json", "ls --json", "config --json"):
        assert json.loads(done[command].stdout)
    assert long_name in done["ls"].stdout
    assert "ram+ssd" in done["ls"].stdout or "  ram  " in done["ls"].stdout
    assert f"socket     {process.socket}\n" in done["status"].stdout
    assert f"environment {SOCKET_VARIABLE}" in done["config"].stdout
    assert "…" not in done["status"].stdout + done["ls"].stdout + done["config"].stdout
    assert done["flush"].stdout.startswith("written ")
    assert "cleared 1 piece" in done["clear"].stdout


@pytest.mark.slow
def test_a_daemon_that_hangs_gets_a_plain_message() -> None:
    """C4: a frozen daemon costs a bounded wait; the text says what to do, without a traceback."""
    with DaemonProcess() as process:
        process.stop()
        try:
            commands = [
                subprocess.Popen(
                    [SCRIPT, *command, "--socket", str(process.socket)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for command in (("status",), ("ls",), ("clear",), ("flush",), ("doctor",))
            ]
            said = [command.communicate(timeout=60)[0] for command in commands]
        finally:
            process.cont()
    assert [command.returncode for command in commands] == [1] * 5
    for text in said:
        assert "Traceback" not in text
        assert "too slow" in text
    for text in said[:-1]:
        assert text.count("\n") == 1
        assert "prefixcached service restart" in text
        assert 'see "The daemon does not answer"' in text
    assert "prefixcached serve" in said[-1], "no service is installed, so its verb does not help"


def test_a_terminal_gets_bars_and_colours() -> None:
    """On a terminal the page is in columns that fit it."""
    with DaemonProcess(*BOTH_TIERS) as process:
        master, slave = pty.openpty()
        try:
            subprocess.run(
                [SCRIPT, "status", "--socket", str(process.socket)],
                stdout=slave,
                env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
                check=True,
            )
            shown = os.read(master, 1 << 16).decode()
        finally:
            os.close(master)
            os.close(slave)
    assert "\x1b[1m" in shown, "names are bold"
    assert "░" in shown
