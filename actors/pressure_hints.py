"""Descriptors that become readable when memory pressure may have changed. Hints, not the truth.

Rule M1, PLATFORM 2: macOS tells one process at a time and only some of them; Linux permits a
trigger to the unprivileged only with windows of 2 s and newer kernels. So whoever has a hint reads
the sensors earlier, and whoever has none loses a second. A `Hint` owns its descriptors.
"""

import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

TRIGGER: Final = b"some 150000 2000000\0"
"""Told when some task waited for memory for 150 ms within 2 s. The unprivileged may only have
windows that are multiples of 2 s; `pressure_sensors.STALL_WARN` is the same share."""

EVFILT_MEMORYSTATUS: Final = -14
"""A constant of xnu that its public headers leave out."""

ALL_LEVELS: Final = 0x7
"""NOTE_MEMORYSTATUS_PRESSURE_NORMAL, _WARN and _CRITICAL."""


class Hint(Protocol):
    """Something to wait for with `trio.lowlevel.wait_readable`."""

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        ...

    def drain(self) -> bool:
        """Take what made it readable; False when it will never be of use again."""
        ...

    def close(self) -> None:
        """Close all descriptors."""
        ...


def open_hint(root: Path = Path("/")) -> Hint | None:
    """Return this platform's hint, None where it gives none; ``root`` stands for / in tests."""
    # CPython on a Mac has not been seen to take this filter: whatever it says, polling remains.
    with suppress(OSError, ValueError, AttributeError):
        if sys.platform == "darwin":
            return _KernelEvents()
        else:
            return _StallTrigger(root / "proc/pressure/memory")
    return None


if sys.platform == "darwin":

    class _KernelEvents:
        """macOS: the kernel's pressure event, in a kqueue of its own. Not yet verified on a Mac."""

        def __init__(self) -> None:
            self._queue = select.kqueue()
            event = select.kevent(
                0, EVFILT_MEMORYSTATUS, select.KQ_EV_ADD | select.KQ_EV_CLEAR, ALL_LEVELS
            )
            try:
                self._queue.control([event], 0)
            except OSError:
                self._queue.close()
                raise

        def fileno(self) -> int:
            """The kqueue's descriptor; kqueues nest."""
            return self._queue.fileno()

        def drain(self) -> bool:
            """Take the events."""
            self._queue.control([], 8, 0)
            return True

        def close(self) -> None:
            """Close the kqueue."""
            self._queue.close()

else:

    class _StallTrigger:
        """Linux: a PSI trigger behind an epoll, since POLLPRI is not readability.

        OSError where the kernel has no PSI or does not permit this trigger.
        """

        def __init__(self, file: Path) -> None:
            self._trigger = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(self._trigger, TRIGGER)
                self._epoll = select.epoll()
                self._epoll.register(self._trigger, select.EPOLLPRI | select.EPOLLERR)
            except OSError:
                os.close(self._trigger)
                raise

        def fileno(self) -> int:
            """The epoll's descriptor."""
            return self._epoll.fileno()

        def drain(self) -> bool:
            """Take the event. An error event means that the trigger is gone for good."""
            return not any(events & select.EPOLLERR for _, events in self._epoll.poll(0))

        def close(self) -> None:
            """Close both descriptors, which drops the trigger."""
            self._epoll.close()
            os.close(self._trigger)
