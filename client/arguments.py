"""Checks of what callers pass in. A mistake raises at once, also with `fail_open`."""

import math
import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from prefixcached.protocol import limits
from prefixcached.protocol.tokens import TokenArray, token_array

LONGEST_SECONDS = 86400.0
"""The longest time that a message can carry, a day."""

Tokens = Sequence[int] | NDArray[Any] | bytes
"""Token ids: integers, an integer array of shape (tokens,), or packed little-endian uint32."""


def prompt(tokens: Tokens) -> TokenArray:
    """Return ``tokens`` for a look-up, cut at what one message carries: a shorter prefix may hit.

    Raises:
        UnsupportedTokensError: An id cannot be stored (rule N5).
        TypeError: They are no token ids.
    """
    return token_array(tokens)[: limits.MAX_TOKENS]


def text(name: str, value: str, most_bytes: int) -> str:
    """Return ``value`` if it is a text of at most ``most_bytes`` bytes.

    Raises:
        TypeError: It is no text.
        ValueError: It is too long, or cannot be UTF-8.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    size_bytes = len(value.encode())
    if size_bytes > most_bytes:
        raise ValueError(f"{name} takes {size_bytes} bytes; at most {most_bytes}: pass a digest")
    return value


def namespace(value: str) -> str:
    """Return a namespace. Errors as `text`."""
    return text("namespace", value, limits.MAX_NAMESPACE_BYTES)


def label(value: str | None) -> str | None:
    """Return a session's label, if there is one. Errors as `text`."""
    return None if value is None else text("session", value, limits.MAX_LABEL_BYTES)


def seconds(name: str, value: float, *, positive: bool) -> float:
    """Return a span of time as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, not finite, or longer than a day; or 0 where ``positive``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not math.isfinite(value) or not 0 <= value <= LONGEST_SECONDS or (positive and value == 0):
        least = "more than 0" if positive else "at least 0"
        raise ValueError(f"{name} must be {least} and at most {LONGEST_SECONDS:g} s, not {value}")
    return float(value)


def seconds_until(deadline: float) -> float:
    """Return the time until ``deadline`` (on `time.monotonic`), as a message carries it."""
    return min(max(deadline - time.monotonic(), 0.0), LONGEST_SECONDS)


def count(name: str, value: int) -> int:
    """Return a number of tokens.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
    return value
