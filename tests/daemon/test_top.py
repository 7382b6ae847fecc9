"""`prefixcached top` in a real terminal: what it shows, its keys, and that it leaves no trace."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess
from tests.support.terminal_screen import TerminalScreen

PROMPT = list(range(1000))
COLD = list(range(5000, 8000))
COMMAND = [sys.executable, "-m", "prefixcached.daemon.cli", "top", "--interval", "0.2"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(*BOTH_TIERS) as process:
        with numpy_cache(process.socket) as cache:
            put(cache, PROMPT)
            assert cache.take([*PROMPT, 1], namespace="n", session="a chat\x1b[31m")
            assert cache.flush()
        yield process
        print(process.log())


def environment(daemon: DaemonProcess, **more: str) -> dict[str, str]:
    return {**daemon.environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8",
            "PYTHONUTF8": "1", **more}  # fmt: skip


Start = Callable[..., TerminalScreen]


@pytest.fixture
def start(daemon: DaemonProcess) -> Iterator[Start]:
    """Start the view, in 80 columns and 24 lines unless told otherwise."""
    started: list[TerminalScreen] = []

    def run(columns: int = 80, lines: int = 24, **more: str) -> TerminalScreen:
        started.append(TerminalScreen(COMMAND, environment(daemon, **more), columns, lines))
        return started[-1]

    yield run
    for one in started:
        one.__exit__(None, None, None)


def left_as_found(screen: TerminalScreen) -> bool:
    """Whether the terminal is the shell's again."""
    return (
        screen.settings() == screen.settings_before
        and not screen.is_alternate
        and not screen.is_cursor_hidden
    )


def test_everything_is_readable_at_80_by_24(start: Start, daemon: DaemonProcess) -> None:
    """Tiers, hit ratio by tokens, tokens saved, pressure, clients, sessions, writer, history."""
    with numpy_cache(daemon.socket) as cache:
        claim = cache.take(COLD, namespace="n")
        assert not claim
        screen = start()
        screen.wait_for_text("q quit")
        screen.wait_for_text("computes 2,999")
        for words in (
            "prefixcached 0.", f"pid {daemon.pid}", "pressure ", "RAM ", "of 64 MiB", "SSD ",
            "of 256 MiB", "reused: 1,000 saved", "missed 1: ", "1 claim", "waiting", "lease",
            "prefills saved", "queued", "written", "p50/p99: take", "History, last 2 min",
            "reused ", "takes/s", "write/s", "Clients 1", "sort: busy", str(os.getpid()),
            "Sessions 1", "a chat?[31m",
        ):  # fmt: skip
            assert words in screen.text, words
        assert all(len(line) <= 80 for line in screen.lines)
        assert any(block in screen.text for block in "▁▂▃▄▅▆▇█")
        screen.press(b"q")
        assert screen.wait_for_end() == 0
        assert left_as_found(screen)


@pytest.mark.parametrize("lines", [24, 16, 12])
def test_in_60_columns_nothing_is_cut_in_the_middle(
    start: Start, daemon: DaemonProcess, lines: int
) -> None:
    """What does not fit is left out whole; clients and keys stay, also in few lines."""
    with numpy_cache(daemon.socket) as cache:
        claim = cache.take(COLD, namespace="n")
        assert not claim
        screen = start(columns=60, lines=lines)
        screen.wait_for_text("q quit")
        screen.wait_for_text("computes 2,999")
        for words in (
            f"pid {daemon.pid}", "1 image", "of 256 MiB", "saved", " leases, ", "queued",
            "p50/p99: take ", "1 claim,", f"{os.getpid()} prefixcached",
        ):  # fmt: skip
            assert words in screen.text, words
        assert "1 images" not in screen.text
        assert not [line for line in screen.lines if line.endswith("…") and "missed" not in line]
        assert ("History, last 2 min" in screen.text) == (lines >= 16)
        screen.press(b"q")
        assert screen.wait_for_end() == 0


def test_keys_sort_reverse_and_change_the_span(start: Start) -> None:
    """With s it goes through the orders, with h through the spans; arrows do nothing."""
    screen = start()
    screen.wait_for_text("sort: busy")
    for key, shown in (
        (b"s", "sort: requests"), (b"r", "requests, reversed"), (b"x", "requests, reversed"),
        (b"s", "connected, reversed"), (b"rs", "sort: pid  "), (b"h", "last hour"),
        (b"h", "last day"),
        (b"h", "last 2 min"), (b"\x1b[A", "last 2 min"),
    ):  # fmt: skip
        screen.press(key)
        screen.wait_for_text(shown)
    screen.press(b"q")
    assert screen.wait_for_end() == 0


def test_it_draws_again_in_another_size(start: Start) -> None:
    """A wider window shows more, a small one does not break it."""
    screen = start()
    screen.wait_for_text("q quit")
    screen.resize(120, 40)
    screen.wait_for(lambda: any(len(line) > 100 for line in screen.lines), "wider picture")
    screen.resize(40, 10)
    screen.wait_for(
        lambda: screen.lines[0].startswith("prefixcached") and "RAM" in screen.lines[1],
        "smaller picture",
    )
    screen.press(b"q")
    assert screen.wait_for_end() == 0
    assert left_as_found(screen)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGQUIT, 131), (signal.SIGHUP, 129)],
)
def test_a_signal_leaves_the_terminal_as_it_was(start: Start, number: int, status: int) -> None:
    """Ended from outside, it still gives the terminal back."""
    screen = start()
    screen.wait_for_text("q quit")
    assert screen.is_alternate
    assert screen.settings() != screen.settings_before
    screen.process.send_signal(number)
    assert screen.wait_for_end() == status
    assert left_as_found(screen)


def test_ctrl_c_is_a_way_to_quit(start: Start) -> None:
    """No traceback, exit code 0, the terminal as it was."""
    screen = start()
    screen.wait_for_text("q quit")
    screen.press(b"\x03")
    assert screen.wait_for_end() == 0
    assert "Traceback" not in screen.text
    assert left_as_found(screen)


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(daemon: DaemonProcess) -> None:
    """Stopped, the shell has its terminal; continued, the picture is there again."""
    job = f"set -m; {' '.join(COMMAND)}; echo stopped; read line; fg; echo status $?"
    with TerminalScreen(["bash", "--norc", "-c", job], environment(daemon)) as screen:
        screen.wait_for_text("q quit")
        screen.press(b"\x1a")
        screen.wait_for(lambda: not screen.is_alternate, "terminal given back")
        screen.wait_for_text("stopped")
        assert left_as_found(screen)
        screen.press(b"\n")
        screen.wait_for(lambda: screen.is_alternate, "picture")
        screen.wait_for_text("q quit")
        screen.press(b"q")
        screen.wait_for_text("status 0")
        assert screen.wait_for_end() == 0
        assert left_as_found(screen)


def test_a_daemon_that_goes_is_waited_for(start: Start) -> None:
    """It says so, and shows the next one when it comes."""
    with DaemonProcess() as other:
        screen = start(PREFIXCACHED_SOCKET=str(other.socket))
        screen.wait_for_text(f"pid {other.pid}")
        other.kill()
        screen.wait_for_text("Trying again")
        other.start()
        screen.wait_for_text(f"pid {other.pid}")
        screen.press(b"q")
        assert screen.wait_for_end() == 0
        assert left_as_found(screen)


def test_without_utf_8_it_draws_in_ascii(start: Start) -> None:
    """A terminal of another encoding gets characters that it has."""
    screen = start(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0")
    screen.wait_for_text("q quit")
    assert "[31m" in screen.text
    assert not any(block in screen.text for block in "▁▂▃▄▅▆▇█░")
    assert "#" in screen.text or "----" in screen.text
    screen.press(b"q")
    assert screen.wait_for_end() == 0


def test_a_waiting_take_is_shown_with_whom_it_waits_for(
    start: Start, daemon: DaemonProcess
) -> None:
    """Q2: claims and waits, as their user sees them."""
    with numpy_cache(daemon.socket) as claimant, numpy_cache(daemon.socket) as waiter:
        claimed = claimant.take(COLD, namespace="w")
        assert not claimed
        thread = threading.Thread(
            target=waiter.take, args=(COLD,), kwargs={"namespace": "w", "wait": 60.0}
        )
        thread.start()
        screen = start(columns=100)
        screen.wait_for_text(f"waits for {os.getpid()}")
        screen.wait_for_text("1 waiting")
        put(claimant, COLD, "w")
        thread.join(30)
        assert not thread.is_alive()
        screen.wait_for_text("0 waiting")


def test_without_a_daemon_it_ends_with_3(tmp_path: Path, daemon: DaemonProcess) -> None:
    """A sentence in the terminal, which was never touched."""
    variables = environment(daemon, PREFIXCACHED_SOCKET=str(tmp_path / "s"))
    with TerminalScreen(COMMAND, variables) as screen:
        assert screen.wait_for_end() == 3
        assert "no daemon" in screen.text
        assert b"\x1b[?1049h" not in screen.raw
        assert screen.settings() == screen.settings_before


@pytest.mark.parametrize("which", ["input", "output"])
def test_without_a_terminal_it_ends_with_2(daemon: DaemonProcess, which: str) -> None:
    """In a pipe it says what to use instead, in one line."""
    redirected = "</dev/null" if which == "input" else "| cat; exit ${PIPESTATUS[0]}"
    line = f"{' '.join(COMMAND)} {redirected}"
    with TerminalScreen(["bash", "-c", line], environment(daemon)) as screen:
        assert screen.wait_for_end() == 2
        assert "top needs a terminal" in screen.text
        assert "prefixcached status" in screen.text.replace("\n", "")


def test_without_any_terminal_it_ends_with_2(daemon: DaemonProcess) -> None:
    """As a cron job would call it."""
    shown = invoke("top", socket=daemon.socket)
    assert shown.exit_code == 2
    done = subprocess.run(COMMAND, env=environment(daemon), capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""


def test_a_dumb_terminal_is_told(daemon: DaemonProcess) -> None:
    """One that cannot move its cursor gets no picture."""
    with TerminalScreen(COMMAND, environment(daemon, TERM="dumb")) as screen:
        assert screen.wait_for_end() == 2
        assert "top needs a terminal" in screen.text
