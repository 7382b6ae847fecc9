"""A clean way out for commands that own processes and a directory, whatever ends them.

The handlers of this process are its main thread's; `leaving_cleanly` changes them for a block.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
"""What a service manager and a closed terminal send. Unhandled, they end a process as it stands."""


@contextmanager
def leaving_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does; a second one ends the process at once.

    Raises:
        KeyboardInterrupt: One of them came.
    """

    def leave(_number: int, frame: FrameType | None) -> None:
        for one in _ENDING:
            signal.signal(one, signal.SIG_DFL)
        # Whose it is now: trio lets it come where its own code can bear it.
        interrupt = signal.getsignal(signal.SIGINT)
        assert callable(interrupt)
        interrupt(signal.SIGINT, frame)

    with ExitStack() as stack:
        if not callable(signal.getsignal(signal.SIGINT)):
            # A shell's background job ignores Ctrl-C, and so it does here: it is never delivered.
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(
                signal.SIG_BLOCK, (signal.SIGINT,)
            ))  # fmt: skip
            _handle(stack, signal.SIGINT, signal.default_int_handler)
        for one in _ENDING:
            if signal.getsignal(one) == signal.SIG_DFL:  # else nohup, or somebody who knows better
                _handle(stack, one, leave)
        yield


def _handle(stack: ExitStack, number: signal.Signals, handler: "signal._HANDLER") -> None:
    stack.callback(signal.signal, number, signal.signal(number, handler))
