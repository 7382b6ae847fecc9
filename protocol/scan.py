"""The scan: untrusted msgpack is looked at before anything is built from it.

A map of sixteen million empty lists fits into a legal frame and would become a gigabyte; a million
of them in a schema would hold up everybody for half a second. Pure.
"""

from typing import Final

from prefixcached.protocol import limits


class ScanError(ValueError):
    """A value that must not be unpacked; whoever had it scanned says whose fault that is."""


def _scalar_widths() -> tuple[int, ...]:
    """By first byte: how many bytes the whole value takes, 0 where that needs a closer look."""
    widths = [0] * 256
    for code in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
        widths[code] = 1  # small integers, nil, false, true
    for code in range(0xA0, 0xC0):
        widths[code] = 1 + (code & 0x1F)  # short strings
    for code, payload in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        widths[code] = 1 + payload  # floats, unsigned integers
    for code, payload in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        widths[code] = 1 + payload  # signed integers
    return tuple(widths)


_SCALAR_WIDTHS: Final = _scalar_widths()
_BLOB_LENGTH_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of bin and str: how many bytes their length takes."""
_CONTAINER: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte of long arrays and maps: bytes of their length, values per entry."""


def scan(data: bytes | bytearray, start: int, end: int) -> None:
    """Check that ``data[start:end]`` is one msgpack value of bounded depth and size.

    It visits each value once and builds nothing.

    Raises:
        ScanError: It is none: too deep, too many values, an extension type, or of another length.
    """
    widths = _SCALAR_WIDTHS
    position = start
    values = left = 1
    outer: list[int] = []
    while left or outer:
        if not left:
            left = outer.pop()
            continue
        if position >= end:
            raise ScanError("the body ends in the middle of a value")
        left -= 1
        code = data[position]
        width = widths[code]
        if width:
            position += width
            continue
        position += 1
        if code in _BLOB_LENGTH_BYTES:
            digits = _BLOB_LENGTH_BYTES[code]
            position += digits + int.from_bytes(data[position : position + digits], "big")
            continue
        if 0x80 <= code < 0x90:
            count = 2 * (code & 0x0F)
        elif 0x90 <= code < 0xA0:
            count = code & 0x0F
        elif code in _CONTAINER:
            digits, each = _CONTAINER[code]
            count = each * int.from_bytes(data[position : position + digits], "big")
            position += digits
        else:
            raise ScanError(f"byte 0x{code:02x} begins no value that messages use")
        values += count
        if values > limits.MAX_VALUES:
            raise ScanError(f"more than {limits.MAX_VALUES} values")
        outer.append(left)
        if len(outer) > limits.MAX_NESTING:
            raise ScanError(f"nested deeper than {limits.MAX_NESTING}")
        left = count
    if position != end:
        raise ScanError("the body's length and its value's end differ")
