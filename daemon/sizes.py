"""Sizes as people write them: 8GiB, 500MB, 12%, plain bytes. Pure."""

import re
from typing import Final

_UNITS: Final = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
MAX_SIZE_BYTES: Final = (1 << 63) - 1
"""More than any machine has, and the most that `status` can say to every reader."""

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(size: str | int, whole_bytes: int) -> int:
    """Return ``size`` in bytes.

    Args:
        size: Bytes, or text such as ``"8GiB"``, ``"500MB"`` or ``"12%"``.
        whole_bytes: What a percentage is a share of.

    Raises:
        ValueError: It is no size; the message shows the forms.
    """
    if isinstance(size, int):
        number, unit = float(size), ""
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in {*_UNITS, "%"}:
            raise ValueError(f"{size!r} is no size; write it as 8GiB, 500MB, 12% or plain bytes")
        number, unit = float(match[1]), match[2].lower()
    if number < 0:
        raise ValueError(f"a size must not be negative, and {size} is")
    if unit == "%":
        if number > 100:
            raise ValueError(f"{size} is more than there is")
        return share_of(whole_bytes, number)
    if number * _UNITS[unit] > MAX_SIZE_BYTES:
        raise ValueError(f"a size must not be more than {MAX_SIZE_BYTES} bytes")
    return int(number * _UNITS[unit])


def bytes_text(count: int) -> str:
    """Bytes for people: 1.5 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def share_of(whole_bytes: int, percent: float) -> int:
    """Return ``percent`` of ``whole_bytes``."""
    return int(whole_bytes * percent / 100)


def parse_share(size: str | int) -> float | None:
    """Return the percent that ``size`` is (`parse_size`), None if it is not given as a share."""
    match = None if isinstance(size, int) else _SIZE.fullmatch(size)
    return float(match[1]) if match is not None and match[2] == "%" else None
