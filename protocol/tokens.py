"""Token ids as packed little-endian uint32: the one form in which they travel and are stored."""

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prefixcached.protocol.errors import UnsupportedTokensError

TokenArray = NDArray[np.uint32]
"""One-dimensional, dtype ``<u4``, shape (tokens,)."""

_LITTLE_ENDIAN = np.dtype("<u4")

_COMPARED_FIRST: Final = 256
"""Tokens of the first block compared: two prompts mostly differ early, or not at all."""

_COMPARED_GROWTH: Final = 16
"""How much longer each further block is."""


def token_array(tokens: Sequence[int] | NDArray[Any] | bytes) -> TokenArray:
    """Return ``tokens`` as a one-dimensional uint32 array without wrapping any id.

    Args:
        tokens: Token ids as a sequence of integers, an integer array of shape (tokens,), or
            packed little-endian uint32 bytes.

    Raises:
        UnsupportedTokensError: An id is outside 0..2**32-1 (mlx_lm.server uses negative 60-bit
            ids for images).
        TypeError: The values are not integers or not one-dimensional.
    """
    if isinstance(tokens, bytes | bytearray | memoryview):
        if len(tokens) % 4:
            raise TypeError(f"packed tokens must be a multiple of 4 bytes, not {len(tokens)}")
        return np.frombuffer(tokens, dtype=_LITTLE_ENDIAN)
    if isinstance(tokens, list | tuple):
        # A tenth of numpy's time, and half of `struct.pack`'s, which copies its arguments twice.
        # What does not fit is left to the code below to explain.
        try:
            packed = struct.Struct(f"<{len(tokens)}I").pack(*tokens)
            return np.frombuffer(packed, dtype=_LITTLE_ENDIAN)
        except struct.error:
            pass
    try:
        array = np.asarray(tokens)
    except OverflowError as error:
        raise UnsupportedTokensError("a token id does not fit in 64 bits") from error
    if array.ndim != 1:
        raise TypeError(f"tokens must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=_LITTLE_ENDIAN)
    if array.dtype == object or array.dtype.kind == "f":
        if all(isinstance(token, int) for token in tokens):
            raise UnsupportedTokensError("a token id does not fit in 64 bits")
        raise TypeError("tokens must be integers")
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, not {array.dtype}")
    if array.dtype != np.uint32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > 0xFFFFFFFF:
            raise UnsupportedTokensError(
                f"token ids must lie in 0..4294967295, found {low if low < 0 else high}"
            )
    return np.ascontiguousarray(array, dtype=_LITTLE_ENDIAN)


def pack_tokens(tokens: Sequence[int] | NDArray[Any] | bytes) -> bytes:
    """Return the wire form of ``tokens``: 4 bytes a token. Errors as `token_array`."""
    return token_array(tokens).tobytes()


def common_prefix_length(left: TokenArray, right: TokenArray) -> int:
    """Return how many leading tokens of the two arrays are equal.

    Equal blocks are compared as bytes, many times as fast as an array of truth values is made.
    """
    limit = min(left.size, right.size)
    start, block = 0, _COMPARED_FIRST
    while start < limit:
        stop = min(start + block, limit)
        ours, theirs = left[start:stop], right[start:stop]
        if ours.tobytes() != theirs.tobytes():
            return start + int((ours == theirs).argmin())
        start, block = stop, block * _COMPARED_GROWTH
    return limit
