"""Shared memory of images: one interface, one small module per platform (DESIGN 3)."""

import sys

from prefixcached.actors.memory.interface import Hasher, SharedImage

__all__ = ["Hasher", "SharedImage", "create"]


def create(nbytes: int) -> SharedImage:
    """Return a new, empty, writable image of ``nbytes`` bytes (0 is allowed), zero-filled.

    Pages are allocated when they are first written, so this returns at once whatever the size.

    Raises:
        OSError: The system refused: out of descriptors (EMFILE, ENFILE) or memory (ENOMEM).
        ValueError: ``nbytes`` is negative.
    """
    if sys.platform == "linux":
        from prefixcached.actors.memory.linux import MemfdImage

        return MemfdImage(nbytes)
    from prefixcached.actors.memory.darwin import ShmImage

    return ShmImage(nbytes)
