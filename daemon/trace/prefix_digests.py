"""Token ids as digests that keep which prompts share which prefix, and nothing else. Pure numpy.

The digest of the token at position i depends on tokens 0..i and on a secret that is never stored:

    h[i] = sum over j <= i of (token[j] + 1) * factor[j]   mod 2**64, factor[j] secret and odd
    digest[i] = the low 32 bits of SipHash-2-4 of h[i] under a secret key

Equal prefixes have equal digests, prompts that part stay apart, and the same token elsewhere looks
different, so a tree built from digests has the shape of the tree built from tokens. The sums alone
would not hide anything: whoever knows one prompt could solve for the factors and read the others.
SipHash is a pseudo-random function, so a digest says no more than whether two prefixes are equal.
Two different prefixes of one length have equal digests with probability 2**-32.
"""

import secrets
from typing import Final

import numpy as np
from numpy.typing import NDArray

from prefixcached.protocol.tokens import token_array

KEY_BYTES: Final = 16

_LEAST_FACTORS: Final = 4096
"""How many positions the first factors are drawn for; later ones double them."""

_BLOCK_WORDS: Final = 8192
"""Hashed at a time: what fits into a core's nearest cache takes half the time."""

_MASK: Final = (1 << 64) - 1
_START: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_LENGTH_BLOCK: Final = np.uint64(8 << 56)
"""The last block of a message of 8 bytes: its length and no further bytes."""

Words = NDArray[np.uint64]


class PrefixDigests:
    """Turns packed tokens into packed digests under one secret, which it owns.

    Args:
        key: 16 secret bytes, drawn by default.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key
        self._factors: Words = np.empty(0, dtype=np.uint64)

    def of(self, packed: bytes) -> bytes:
        """Return the digests of packed tokens, as many, packed alike."""
        tokens = token_array(packed)
        prefixes = np.cumsum(
            (tokens.astype(np.uint64) + np.uint64(1)) * self._factors_for(tokens.size)
        )
        blocks = range(0, tokens.size, _BLOCK_WORDS)
        return b"".join(
            siphash(self._key, prefixes[start : start + _BLOCK_WORDS]).astype("<u4").tobytes()
            for start in blocks
        )

    def of_continuation(self, prefix: bytes, packed: bytes) -> bytes:
        """Return the digests of packed tokens that follow the packed tokens ``prefix``."""
        return self.of(prefix + packed)[len(prefix) :]

    def _factors_for(self, count: int) -> Words:
        have = self._factors.size
        if have < count:
            more = max(count - have, have, _LEAST_FACTORS)
            drawn = np.frombuffer(secrets.token_bytes(8 * more), dtype=np.uint64)
            self._factors = np.concatenate([self._factors, drawn | np.uint64(1)])
        return self._factors[:count]


def siphash(key: bytes, words: Words) -> Words:
    """Return SipHash-2-4 (Aumasson, Bernstein 2012) of each word as a message of 8 bytes.

    Args:
        key: 16 bytes.
        words: Shape (n,), uint64.
    """
    halves = (int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"))
    state = [
        np.full(words.shape, (start ^ halves[index % 2]) & _MASK, dtype=np.uint64)
        for index, start in enumerate(_START)
    ]
    for block in (words, _LENGTH_BLOCK):
        state[3] ^= block
        _round(state)
        _round(state)
        state[0] ^= block
    state[2] ^= np.uint64(0xFF)
    for _ in range(4):
        _round(state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _round(state: list[Words]) -> None:
    v0, v1, v2, v3 = state
    v0 += v1
    v1 = _rotated(v1, 13) ^ v0
    v0 = _rotated(v0, 32)
    v2 += v3
    v3 = _rotated(v3, 16) ^ v2
    v0 += v3
    v3 = _rotated(v3, 21) ^ v0
    v2 += v1
    v1 = _rotated(v1, 17) ^ v2
    v2 = _rotated(v2, 32)
    state[:] = [v0, v1, v2, v3]


def _rotated(words: Words, bits: int) -> Words:
    rotated: Words = (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
    return rotated
