"""Choices: a fuzzer's bytes read as decisions, so that mutations of them change what is done.

Everything that a target builds is drawn from here. When the bytes are used up every decision is
the plain one (0, False, the first of several), so a cut input is an input.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgpack

_Item = TypeVar("_Item")

EDGES: Final = (
    0, 1, -1, 2, 3, 7, 8, 15, 16, 17, 255, 256, 4095, 4096, 16384, 1 << 20, (1 << 21) + 1,
    (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, (1 << 40) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 63),
)  # fmt: skip
"""Numbers around which something changes; msgpack can carry all of them."""

FLOATS: Final = (0.0, -0.0, 1.5, -1.0, 86400.0, 86401.0, float("inf"), float("-inf"), float("nan"))


class Choices:
    """Reads ``data`` from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> int:
        """Bytes that no decision has used."""
        return len(self._data) - self._position

    def byte(self) -> int:
        """One byte; 0 when there is none left."""
        if not self.left:
            return 0
        self._position += 1
        return self._data[self._position - 1]

    def below(self, bound: int) -> int:
        """A number of [0, bound), from as few bytes as that takes."""
        value = self.byte()
        for _ in range((max(bound - 1, 0).bit_length() - 1) // 8):
            value = value << 8 | self.byte()
        return value % bound if bound else 0

    def one_in(self, count: int) -> bool:
        """True for one byte in ``count``; False when there is none left."""
        return self.byte() % count == count - 1

    def pick(self, items: Sequence[_Item]) -> _Item:
        """One of the items; the first when no byte is left."""
        return items[self.below(len(items))]

    def blob(self, most: int) -> bytes:
        """Up to ``most`` of the bytes themselves."""
        start = self._position
        self._position = min(len(self._data), start + self.below(most + 1))
        return self._data[start : self._position]

    def rest(self) -> bytes:
        """All bytes that are left."""
        start, self._position = self._position, len(self._data)
        return self._data[start:]

    def integer(self) -> int:
        """Any integer of 64 bits: an edge, or near one, or a small one."""
        match self.below(4):
            case 0:
                return self.byte()
            case 1:
                return self.pick(EDGES)
            case 2:
                return max(-(1 << 63), min((1 << 64) - 1, self.pick(EDGES) + self.byte() - 128))
            case _:
                return int.from_bytes(bytes(self.byte() for _ in range(self.below(8) + 1)), "big")

    def text(self) -> str:
        """A short text, perhaps of several bytes a character, or one at the limits of names."""
        if self.one_in(8):
            return self.pick("xé") * self.pick((255, 256, 257, 511, 512, 513, 4096, 4097))
        return self.blob(24).decode("utf-8", "replace")

    def value(self, depth: int = 0) -> Any:
        """Any value that msgpack can carry."""
        match self.below(9 if depth < 3 else 7):
            case 0:
                return self.integer()
            case 1:
                return None
            case 2:
                return self.one_in(2)
            case 3:
                return self.pick(FLOATS)
            case 4:
                return self.text()
            case 5:
                return self.blob(64)
            case 6:
                return bytes(self.pick((4, 15, 16, 17, 64, 1024)))
            case 7:
                return [self.value(depth + 1) for _ in range(self.below(5))]
            case _:
                return {self.text(): self.value(depth + 1) for _ in range(self.below(4))}

    def changed(self, plain: Any) -> Any:
        """``plain`` with one value replaced, left out, doubled or added somewhere within."""
        if isinstance(plain, dict) and plain and not self.one_in(6):
            name = self.pick(sorted(plain))
            match self.below(6):
                case 0:
                    return {key: value for key, value in plain.items() if key != name}
                case 1:
                    return {**plain, self.text(): self.value()}
                case 2:
                    return {**plain, name: self.value()}
                case _:
                    return {**plain, name: self.changed(plain[name])}
        if isinstance(plain, list | tuple) and plain and not self.one_in(6):
            place = self.below(len(plain))
            match self.below(6):
                case 0:
                    return [*plain[:place], *plain[place + 1 :]]
                case 1:
                    return [*plain[:place], plain[place], *plain[place:]]
                case _:
                    return [*plain[:place], self.changed(plain[place]), *plain[place + 1 :]]
        if isinstance(plain, int) and not isinstance(plain, bool) and not self.one_in(4):
            return max(-(1 << 63), min((1 << 64) - 1, plain + self.byte() - 128))
        return self.value()

    def damaged(self, data: bytes) -> bytes:
        """``data`` with bytes flipped, left out, doubled, cut off or put in between."""
        for _ in range(self.below(3) + 1):
            place = self.below(len(data) + 1)
            match self.below(6):
                case 0 if place < len(data):
                    data = data[:place] + bytes([self.byte()]) + data[place + 1 :]
                case 1:
                    data = data[:place]
                case 2:
                    data = data[:place] + self.blob(16) + data[place:]
                case 3:
                    data = data[:place] + data[place + 1 + self.below(8) :]
                case 4:
                    data = data[:place] + data[max(0, place - 1 - self.below(64)) :]
                case _ if place < len(data):
                    flipped = data[place] ^ (1 << self.below(8))
                    data = data[:place] + bytes([flipped]) + data[place + 1 :]
                case _:
                    pass
        return data


def packed(plain: Any) -> bytes:
    """``plain`` in msgpack, for bodies that no message is: nothing is checked."""
    data: bytes = msgpack.packb(plain, use_bin_type=True, unicode_errors="surrogatepass")
    return data
