"""The user's terminal while a view has it: keys arrive at once and are not echoed.

`Terminal` owns the terminal's settings and the process's signal handlers from entering to leaving,
and puts both back however the view ends: by a key, an error, Ctrl-C, a signal. While the process is
stopped (Ctrl-Z) the terminal is as the shell left it.
"""

import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self

READ_BYTES: Final = 256
"""Of keys at a time: faster than anybody types."""

_SEQUENCES: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
"""What arrow and function keys send (ECMA-48)."""

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAKING: Final = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)


class Terminal:
    """Standard input, which is a terminal; a context manager.

    Args:
        pause: Called before the process stops: take the picture off the screen.
        resume: Called when it goes on.
    """

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause = pause
        self._resume = resume
        self._input = sys.stdin.fileno()
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._wakeup_before = -1
        self._wake = (-1, -1)

    def wait(self, seconds: float) -> str:
        """Wait for keys, a signal or the time to pass; return the keys, often none.

        At the end of standard input the keys are "q". Keys that are more than one byte are left
        out.
        """
        ready, _, _ = select.select([self._input, self._wake[0]], [], [], max(0.0, seconds))
        if self._wake[0] in ready:
            for number in os.read(self._wake[0], READ_BYTES):
                self._signalled(number)
        if self._input not in ready:
            return ""
        keys = os.read(self._input, READ_BYTES)
        if not keys:
            return "q"
        return _SEQUENCES.sub(b"", keys).decode("ascii", "ignore")

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCONT:  # also after a SIGSTOP, which nobody could see coming
            tty.setcbreak(self._input, termios.TCSANOW)
        elif number == signal.SIGTSTP:
            self._pause()
            self._restore()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, _only_wake)
            tty.setcbreak(self._input, termios.TCSANOW)
            self._resume()

    def _restore(self) -> None:
        termios.tcsetattr(self._input, termios.TCSANOW, self._before)

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._input)
        self._wake = os.pipe()
        for end in self._wake:
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        for number in _ENDING:
            self._handlers[number] = signal.signal(number, _end)
        for number in _WAKING:
            self._handlers[number] = signal.signal(number, _only_wake)
        tty.setcbreak(self._input, termios.TCSANOW)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._restore()
        except termios.error:
            pass  # after a hang-up there is nothing to put back
        finally:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            for end in self._wake:
                os.close(end)


def _end(number: int, _: FrameType | None) -> None:
    """Leave by way of every `finally`, with the status of a process ended by that signal."""
    sys.exit(128 + number)


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """The number arrives through the wake-up descriptor."""
