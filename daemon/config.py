"""What the daemon is told at its start, and the defaults per platform.

`Config` is complete and plain: everything later reads it and nobody changes it.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from prefixcached.daemon import resources
from prefixcached.protocol import limits

DEFAULT_RAM_SIZE: Final = "12%"
"""Of the machine's memory: a fixed size that suits a large Mac makes a small one swap."""

DEFAULT_SSD_SIZE: Final = "0"
"""The SSD tier is off unless asked for."""

SEGMENT_MIN_TOKENS: Final = 256
"""A tail segment shorter than this is absorbed by the put that extends it (DESIGN 3)."""

PUT_MIN_TOKENS: Final = 16
"""A shorter put is declined `too-short`: computing it again costs less than storing it."""

_APPLICATION: Final = "prefixcached"
_UNITS: Final = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
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
    return int(number * _UNITS[unit])


def share_of(whole_bytes: int, percent: float) -> int:
    """Return ``percent`` of ``whole_bytes``."""
    return int(whole_bytes * percent / 100)


def parse_share(size: str | int) -> float | None:
    """Return the percent that ``size`` is (`parse_size`), None if it is not given as a share."""
    match = None if isinstance(size, int) else _SIZE.fullmatch(size)
    return float(match[1]) if match is not None and match[2] == "%" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that the daemon is told.

    Attributes:
        socket: Absolute path of the socket; its directory is the user's alone.
        state_dir: Directory of what is on SSD.
        ram_bytes: Cap of the RAM tier (rule E1).
        ram_share: The share of the machine's memory that this cap is, in percent, or None where it
            was given as a size: a share follows the machine's limit (rule M5).
        ssd_bytes: Cap of the SSD tier (rule D5); 0 turns it off.
        max_images: Cap on images in RAM, from the descriptor limit (rule E1).
        max_connections: Sessions at a time.
        segment_max_bytes: Most bytes of one segment image.
        segment_min_tokens: Shorter tails are absorbed.
        put_min_tokens: Shorter puts are declined.
    """

    socket: Path
    state_dir: Path
    ram_bytes: int
    ssd_bytes: int
    max_images: int
    max_connections: int
    ram_share: float | None = None
    segment_max_bytes: int = limits.SEGMENT_MAX_BYTES
    segment_min_tokens: int = SEGMENT_MIN_TOKENS
    put_min_tokens: int = PUT_MIN_TOKENS

    @property
    def lock_file(self) -> Path:
        """The single-instance lock, beside the socket."""
        return self.socket.with_name(f"{self.socket.name}.lock")

    @property
    def segments_dir(self) -> Path:
        """Where the SSD tier's files are; the ending keeps Spotlight out (PLATFORM 1.6)."""
        return self.state_dir / "segments.noindex"


def default_state_dir() -> Path:
    """Where files that may be lost at any moment belong: Caches on macOS, the XDG cache here."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / _APPLICATION
    return platformdirs.user_cache_path(_APPLICATION)


def load(
    *,
    socket: Path,
    state_dir: Path | None = None,
    ram_size: str | int = DEFAULT_RAM_SIZE,
    ssd_size: str | int = DEFAULT_SSD_SIZE,
) -> Config:
    """Return the configuration for this machine, and raise the descriptor limit on the way.

    Args:
        socket: Path of the socket, as `protocol.paths.socket_path` finds it.
        state_dir: Directory of what is on SSD, or None for the platform's.
        ram_size: A share is of the machine's memory.
        ssd_size: A share is of the volume of ``state_dir``.

    Raises:
        ValueError: A size is none.
    """
    directory = (state_dir or default_state_dir()).absolute()
    descriptors = resources.raise_descriptor_limit()
    return Config(
        socket=socket.absolute(),
        state_dir=directory,
        ram_bytes=parse_size(ram_size, resources.memory_bytes()),
        ram_share=parse_share(ram_size),
        ssd_bytes=parse_size(ssd_size, resources.volume_bytes(directory)),
        max_images=resources.image_limit(descriptors),
        max_connections=resources.connection_limit(descriptors),
    )
