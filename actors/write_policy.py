"""What the writer does next, and how much it may write: pure decisions of `SsdTier`, their owner.

`WriteQueue` orders writes, deletions and clears; `WriteMeter` is the daily budget (rule D6);
`BackOff` spaces attempts on a disk that fails (rule D7); `FailedDeletions` are tried again (D5).
"""

from typing import Annotated, Final

import msgspec

from prefixcached.protocol.actor_messages import (
    ClearNamespace,
    DeleteFile,
    Envelope,
    WriteImage,
)

CANCELLED: Final = "cancelled"
"""`Written.error` of a write that was dropped before it started."""

BUDGET_SPENT: Final = "daily write budget spent"
"""`Written.error` of a write that rule D6 forbids."""

CLEARED: Final = "cleared"
"""`Deleted.error` of a file that could not be deleted and went into the trash by a clear."""

MOST_FAILED_DELETIONS: Final = 3
"""So many deletions fail in a row, and it is not the files: nothing is evicted to no avail (D5)."""

WINDOW_HOURS: Final = 24
"""The budget of rule D6 is for the last 24 hours, counted by the hour; the hour that is partly out
of them counts whole, so that no 24 hours ever see more."""

KEPT_HOURS: Final = 14 * 24
"""Older hours are forgotten, and none before: a clock may be days ahead for a moment."""

RETRY_FIRST_SECONDS: Final = 1.0
"""Pause after a first failure: most full or busy disks recover by themselves."""

RETRY_MOST_SECONDS: Final = 60.0
"""Longest pause: a disk that is plugged in again is noticed within a minute."""

_NO_DELAY: Final = float("-inf")


class _Item:
    __slots__ = ("envelope", "not_before")

    def __init__(self, envelope: Envelope, not_before: float) -> None:
        self.envelope = envelope
        self.not_before = not_before


class WriteQueue:
    """Work of the writer, in order.

    A write whose delay has passed may overtake one whose delay has not; nothing overtakes a
    deletion or a clear, and these wait for all writes before them.
    """

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def writes(self) -> int:
        """How many images wait to be written."""
        return sum(isinstance(item.envelope.message, WriteImage) for item in self._items)

    def add_write(self, envelope: Envelope, not_before: float) -> None:
        """Queue a `WriteImage` that should not start before a time of the monotonic clock."""
        self._items.append(_Item(envelope, not_before))

    def add_delete(self, envelope: Envelope) -> None:
        """Queue a `DeleteFile`."""
        self._items.append(_Item(envelope, _NO_DELAY))

    def add_clear(self, envelope: Envelope, namespace: str | None) -> list[WriteImage]:
        """Queue a `ClearNamespace` behind deletions, and drop the writes that it makes pointless.

        Deletions stay in front, so that no file's bytes are reported as deleted and as trash.
        Returns the writes that were dropped.
        """
        dropped = self._take_writes(namespace)
        fences = [i for i, item in enumerate(self._items) if not _is_write(item)]
        place = fences[-1] + 1 if fences else 0
        for item in self._items[:place]:
            item.not_before = _NO_DELAY
        self._items.insert(place, _Item(envelope, _NO_DELAY))
        return dropped

    def cancel(self, id: str) -> WriteImage | None:  # noqa: A002  (the field's name everywhere)
        """Drop a write that has not started. Returns it; None where there is none."""
        for item in self._items:
            message = item.envelope.message
            if isinstance(message, WriteImage) and message.header.id == id:
                self._items.remove(item)
                return message
        return None

    def take_all_writes(self) -> list[WriteImage]:
        """Drop and return every write: the disk fails."""
        return self._take_writes(None)

    def take_clears(self) -> list[Envelope]:
        """Drop and return every clear: the disk does not answer."""
        clears = [i.envelope for i in self._items if isinstance(i.envelope.message, ClearNamespace)]
        self._items = [item for item in self._items if item.envelope not in clears]
        return clears

    def hurry(self) -> None:
        """Void the delays of all that is queued."""
        for item in self._items:
            item.not_before = _NO_DELAY

    def next(self, now: float) -> Envelope | None:
        """Remove and return what to do now; None where nothing is due."""
        for position, item in enumerate(self._items):
            if not _is_write(item):
                return self._items.pop(0).envelope if position == 0 else None
            if item.not_before <= now:
                return self._items.pop(position).envelope
        return None

    @property
    def next_deadline(self) -> float | None:
        """When a delay ends next; None where nothing waits for one."""
        deadlines: list[float] = []
        for item in self._items:
            if not _is_write(item):
                break
            deadlines.append(item.not_before)
        return min(deadlines, default=None)

    def _take_writes(self, namespace: str | None) -> list[WriteImage]:
        taken: list[WriteImage] = []
        kept: list[_Item] = []
        for item in self._items:
            message = item.envelope.message
            if isinstance(message, WriteImage) and namespace in (None, message.header.namespace):
                taken.append(message)
            else:
                kept.append(item)
        self._items = kept
        return taken


def _is_write(item: _Item) -> bool:
    message = item.envelope.message
    assert isinstance(message, WriteImage | DeleteFile | ClearNamespace)
    return isinstance(message, WriteImage)


class _StoredMeter(msgspec.Struct, frozen=True):
    hours: dict[int, Annotated[int, msgspec.Meta(ge=0)]]


class WriteMeter:
    """Bytes written in the last 24 hours, up to 25 of them, by hour of the wall clock.

    Args:
        budget_bytes: The most that may be written in that time; None for no limit.
        stored: What `encode` gave earlier. Anything else counts as nothing written.
    """

    def __init__(self, budget_bytes: int | None, stored: bytes = b"") -> None:
        self.budget_bytes = budget_bytes
        self._hours: dict[int, int] = {}
        if stored:
            try:
                self._hours = msgspec.json.decode(stored, type=_StoredMeter).hours
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._hours = {}

    def written_bytes(self, now_seconds: float) -> int:
        """Bytes written in the 24 hours before ``now_seconds`` (wall clock), and up to one more."""
        hour = int(now_seconds // 3600)
        self._settle(hour)
        return sum(nbytes for found, nbytes in self._hours.items() if found >= hour - WINDOW_HOURS)

    def allows(self, nbytes: int, now_seconds: float) -> bool:
        """Whether so much more is within the budget."""
        if self.budget_bytes is None:
            return True
        return self.written_bytes(now_seconds) + nbytes <= self.budget_bytes

    def record(self, nbytes: int, now_seconds: float) -> None:
        """Count bytes that go to the disk, whatever becomes of them: they wear it."""
        hour = int(now_seconds // 3600)
        self._settle(hour)
        self._hours[hour] = self._hours.get(hour, 0) + nbytes

    def encode(self) -> bytes:
        """Return the meter for storage."""
        return msgspec.json.encode(_StoredMeter(self._hours))

    def _settle(self, hour: int) -> None:
        """Drop what is very old. What a clock set back left in the future was written just now."""
        future = sum(nbytes for found, nbytes in self._hours.items() if found > hour)
        self._hours = {
            found: nbytes
            for found, nbytes in self._hours.items()
            if hour - KEPT_HOURS <= found <= hour
        }
        if future:
            self._hours[hour] = self._hours.get(hour, 0) + future


class BackOff:
    """When a failing disk is tried again: ever later, until a write succeeds."""

    def __init__(
        self, first_seconds: float = RETRY_FIRST_SECONDS, most_seconds: float = RETRY_MOST_SECONDS
    ) -> None:
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._next_seconds = first_seconds

    def failed(self, now: float) -> float:
        """Return when to try again."""
        pause = self._next_seconds
        self._next_seconds = min(2 * pause, self._most_seconds)
        return now + pause

    def succeeded(self) -> None:
        """Begin with the shortest pause next time."""
        self._next_seconds = self._first_seconds


class FailedDeletions:
    """Files that could not be deleted, and when that is tried again: all of them in one round."""

    def __init__(self, back_off: BackOff) -> None:
        self.in_a_row = 0
        """Files whose first try failed since a deletion worked."""
        self._back_off = back_off
        self._messages: dict[str, DeleteFile] = {}
        self._retry_at = 0.0
        self._error = ""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def error(self) -> str:
        """What the system said last; empty where no file is left behind."""
        return self._error if self._messages else ""

    @property
    def next_deadline(self) -> float | None:
        """When they are tried again; None where there are none."""
        return self._retry_at if self._messages else None

    def add(self, message: DeleteFile, error: str, now: float, *, is_retry: bool = False) -> None:
        """Keep what failed. The first of a round says when the next one is, for all that join."""
        if not self._messages:
            self._retry_at = self._back_off.failed(now)
        self._messages[message.path] = message
        self._error = error
        self.in_a_row += not is_retry

    def take_due(self, now: float) -> list[DeleteFile]:
        """Remove and return all that is to be tried now."""
        if now < self._retry_at:
            return []
        due, self._messages = list(self._messages.values()), {}
        return due

    def retire(self, path: str) -> DeleteFile | None:
        """A write took the file's place, and a retry would delete the new one; return the order."""
        return self._messages.pop(path, None)

    def retire_below(self, directory: str | None) -> list[DeleteFile]:
        """A clear moved ``directory`` (all when None) away; return the orders it made void."""
        paths = [
            path for path in self._messages
            if directory is None or path.startswith(f"{directory}/")
        ]  # fmt: skip
        return [self._messages.pop(path) for path in paths]

    def succeeded(self) -> None:
        """A file was deleted: begin with the shortest pause next time."""
        self.in_a_row = 0
        self._back_off.succeeded()
