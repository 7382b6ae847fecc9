"""Whether restoring a prefix is worth it, from what this client measured of both ways to get it.

A `GainMeter` owns the rates. A restore takes time by bytes, a prefill by tokens and namespace (that
is, by model). Until both were measured every hit is restored. A caller that sets no minimum gain
gets every hit; slow restores are counted all the same.
"""

from typing import Final

SMOOTHING: Final = 0.3
"""Weight of a new measurement: a rate follows a change within a few, and one outlier fades."""

LEAST_PREFILL_TOKENS: Final = 64
"""A shorter prefill measures the overhead of a call, not a rate."""

LEAST_RESTORED_BYTES: Final = 1 << 20
"""A smaller restore measures the overhead of a call, not a rate; and says nothing of large ones."""

SKIPS_IN_A_ROW: Final = 16
"""Then one hit is restored all the same: else a slow spell of the disk would count for ever."""

MAX_NAMESPACES: Final = 64
"""A process uses a handful of models; beyond that the oldest is measured anew."""


class GainMeter:
    """Predicts what a hit saves.

    Args:
        minimum_seconds: Least time to be saved; 0 restores every hit.
    """

    def __init__(self, minimum_seconds: float) -> None:
        self._minimum_seconds = minimum_seconds
        self._seconds_per_byte: float | None = None
        self._seconds_per_token: dict[str, float] = {}
        self._skips_in_a_row = 0
        self.skipped = 0
        """Hits that were not restored."""
        self.slow = 0
        """Restores that took longer than computing the same tokens."""

    def prefilled(self, namespace: str, tokens: int, seconds: float) -> None:
        """Learn that a prefill of so many tokens took so long."""
        if tokens < LEAST_PREFILL_TOKENS or seconds <= 0:
            return
        rate = _smooth(self._seconds_per_token.pop(namespace, None), seconds / tokens)
        self._seconds_per_token[namespace] = rate
        for oldest in list(self._seconds_per_token)[:-MAX_NAMESPACES]:
            self._seconds_per_token.pop(oldest, None)

    def restored(self, namespace: str, tokens: int, nbytes: int, seconds: float) -> bool:
        """Learn how long restoring so many tokens and bytes took; return whether it was slow."""
        self._skips_in_a_row = 0
        if nbytes >= LEAST_RESTORED_BYTES:
            self._seconds_per_byte = _smooth(self._seconds_per_byte, seconds / nbytes)
        per_token = self._seconds_per_token.get(namespace)
        is_slow = per_token is not None and seconds > per_token * tokens
        self.slow += is_slow
        return is_slow

    def is_worth(self, namespace: str, tokens: int, nbytes: int) -> bool:
        """Whether restoring saves at least the minimum, or must be tried to know."""
        per_token, per_byte = self._seconds_per_token.get(namespace), self._seconds_per_byte
        if not self._minimum_seconds or per_token is None or per_byte is None:
            return True
        saved_seconds = per_token * tokens - per_byte * nbytes
        if saved_seconds >= self._minimum_seconds or self._skips_in_a_row >= SKIPS_IN_A_ROW:
            return True
        self._skips_in_a_row += 1
        self.skipped += 1
        return False


def _smooth(rate: float | None, measured: float) -> float:
    return measured if rate is None else rate + SMOOTHING * (measured - rate)
