"""What the daemon is told at its start, and the defaults per platform.

`Config` is complete and plain: everything later reads it and nobody changes it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from prefixcached.actors.store_directory import SEGMENTS
from prefixcached.daemon import resources
from prefixcached.daemon.options import AUTO, Options
from prefixcached.daemon.sizes import parse_share, parse_size, share_of
from prefixcached.protocol import limits

AUTOMATIC_SSD_PERCENT: Final = 10.0
"""Of the volume's free space: a cache must not be what fills a disk."""

AUTOMATIC_SSD_MOST_BYTES: Final = 100 << 30
"""More than a farm of agents reads again in a week."""

SEGMENT_MIN_TOKENS: Final = 256
"""A tail segment shorter than this is absorbed by the put that extends it (DESIGN 3)."""

_APPLICATION: Final = "prefixcached"


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
        options: What else the user may set, for the actors.
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
    options: Options = Options()  # noqa: RUF009  (frozen)

    @property
    def lock_file(self) -> Path:
        """The single-instance lock, beside the socket."""
        return self.socket.with_name(f"{self.socket.name}.lock")

    @property
    def segments_dir(self) -> Path:
        """Where the SSD tier's files are; the ending keeps Spotlight out (PLATFORM 1.6)."""
        return self.state_dir / SEGMENTS


def default_state_dir() -> Path:
    """Where files that may be lost at any moment belong: Caches on macOS, the XDG cache here."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / _APPLICATION
    return platformdirs.user_cache_path(_APPLICATION)


def load(options: Options, *, socket: Path) -> Config:
    """Return the configuration for this machine, and raise the descriptor limit on the way.

    Args:
        options: What the user set. A share is of memory, or of the volume of ``state_dir``.
        socket: Path of the socket, as `protocol.paths.socket_path` finds it.

    Raises:
        ValueError: A size is none.
    """
    directory = (options.state_dir or default_state_dir()).absolute()
    descriptors = resources.raise_descriptor_limit()
    return Config(
        socket=socket.absolute(),
        state_dir=directory,
        ram_bytes=parse_size(options.ram_bytes, resources.memory_bytes()),
        ram_share=parse_share(options.ram_bytes),
        ssd_bytes=ssd_bytes(options.ssd_bytes, directory),
        max_images=resources.image_limit(descriptors),
        max_connections=resources.connection_limit(descriptors),
        options=options,
    )


def ssd_bytes(size: str | int, directory: Path) -> int:
    """Return the cap of the SSD tier in ``directory``."""
    if size == AUTO:
        free = resources.free_bytes(directory)
        if share_of(free, AUTOMATIC_SSD_PERCENT) < AUTOMATIC_SSD_MOST_BYTES:
            # What the tier has would be free without it: it is not to shrink for its own files.
            free += resources.held_bytes(directory / SEGMENTS)
        return min(AUTOMATIC_SSD_MOST_BYTES, share_of(free, AUTOMATIC_SSD_PERCENT))
    return parse_size(size, resources.volume_bytes(directory))
