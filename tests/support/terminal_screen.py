"""A program in a real pseudo-terminal, and what its user sees."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import pyte

DRAW_SECONDS: Final = 30.0
"""For a picture to come: imports on a machine that runs other tests as well."""


class TerminalScreen:
    """Runs ``command`` in a terminal of its own; a context manager.

    Args:
        command: The program and its arguments.
        environment: All of it, but for what would override the terminal's size.
        columns: Of the terminal.
        lines: Of the terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        columns: int = 80,
        lines: int = 24,
    ) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._master, self._slave = pty.openpty()
        self.resize(columns, lines)
        self.settings_before = self.settings()
        self.raw = b""
        slave = self._slave
        own = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, env=own, preexec_fn=lambda: os.login_tty(slave),  # noqa: PLW1509
            close_fds=True, pass_fds=(slave,),
        )  # fmt: skip

    def settings(self) -> list[object]:
        """The terminal's settings, as the kernel has them."""
        return termios.tcgetattr(self._slave)

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size; the program gets SIGWINCH."""
        self._screen.resize(lines, columns)
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self._master, keys)

    @property
    def lines(self) -> list[str]:
        """What is on the screen now."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """The same in one piece."""
        return "\n".join(self.lines)

    @property
    def is_cursor_hidden(self) -> bool:
        return bool(self._screen.cursor.hidden)

    @property
    def is_alternate(self) -> bool:
        """Whether a full-screen program has the terminal."""
        entered, left = self.raw.rfind(b"\x1b[?1049h"), self.raw.rfind(b"\x1b[?1049l")
        return entered > left

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Let it draw until ``is_there``; AssertionError with the picture otherwise."""
        deadline = time.monotonic() + DRAW_SECONDS
        while not is_there():
            left = deadline - time.monotonic()
            assert left > 0, f"no {what} on the screen:\n{self.text}"
            self._read(min(left, 0.1))

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.text, repr(text))

    def wait_for_end(self) -> int:
        """Return the exit status."""
        self.wait_for(lambda: self.process.poll() is not None, "end")
        self._read(0.0)
        status = self.process.returncode
        assert status is not None
        return status

    def _read(self, seconds: float) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            data = os.read(self._master, 65536)
            self.raw += data
            self._stream.feed(data)
            seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)
