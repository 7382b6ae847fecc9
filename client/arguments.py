"""Checks of what callers pass in. A mistake raises at once, also with `fail_open`."""

import math
import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from prefixcached.protocol import limits
from prefixcached.protocol.image import ImageSpec
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


def check_description(spec: ImageSpec, error: type[ValueError] = ValueError) -> None:
    """Raise ``error`` where no message could carry what a snapshot or an object consists of."""
    if len(spec.tensors) > limits.MAX_TENSORS:
        raise error(f"{len(spec.tensors)} tensors; at most {limits.MAX_TENSORS}")
    for tensor in spec.tensors:
        if len(tensor.shape) > limits.MAX_DIMENSIONS:
            raise error(
                f"{tensor.name} has {len(tensor.shape)} dimensions; at most {limits.MAX_DIMENSIONS}"
            )
        if not 0 < len(tensor.name) <= limits.MAX_NAME_CHARACTERS:
            raise error(
                f"{tensor.name[:80]!r} is a tensor's name of {len(tensor.name)} characters; "
                f"1 to {limits.MAX_NAME_CHARACTERS}: nest it less deep or rename it"
            )
        if any("\ud800" <= character <= "\udfff" for character in tensor.name):
            raise error(f"{tensor.name[:80]!r} cannot be a tensor's name: it is no UTF-8")
    if len(spec.metadata) > limits.MAX_METADATA_BYTES:
        raise error(
            f"metadata of {len(spec.metadata)} bytes; at most {limits.MAX_METADATA_BYTES}: "
            "store large values as tensors"
        )


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
