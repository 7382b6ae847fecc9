"""What clients say of their restores: how long a hit took, and whether computing is faster.

One `RestoreMeter` belongs to the listener's sessions. The daemon cannot see either: bytes are
copied and prompts computed in the client, which tells both when it gives a lease back.
"""

from dataclasses import dataclass

from prefixcached.protocol.messages import Release


@dataclass(frozen=True, slots=True)
class RestoreStatistics:
    """Counts since the start, of clients that report them.

    ``slow`` restores took longer than the client would have needed to compute the same tokens.
    """

    restores: int
    slow: int
    bytes: int
    seconds: float
    longest_seconds: float


class RestoreMeter:
    """Adds up the reports."""

    def __init__(self) -> None:
        self._restores = 0
        self._slow = 0
        self._bytes = 0
        self._seconds = 0.0
        self._longest_seconds = 0.0

    def note(self, release: Release) -> None:
        """Count a lease that was given back, if something was restored from it."""
        if not release.restored_bytes:
            return
        self._restores += 1
        self._slow += release.is_slow
        self._bytes += release.restored_bytes
        self._seconds += release.seconds
        self._longest_seconds = max(self._longest_seconds, release.seconds)

    def statistics(self) -> RestoreStatistics:
        """Return what was reported so far."""
        return RestoreStatistics(
            restores=self._restores,
            slow=self._slow,
            bytes=self._bytes,
            seconds=round(self._seconds, 6),
            longest_seconds=round(self._longest_seconds, 6),
        )
