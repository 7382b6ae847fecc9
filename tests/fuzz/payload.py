"""What stands in fuzzed images: `core_payload`, where that is not too much to compute."""

from typing import Final

import xxhash

from prefixcached.protocol.image import ImageSpec, layout
from prefixcached.protocol.schema import Schema

CHEAP_CELLS: Final = 4096
"""Runs of rows in one image: a schema may have a tensor of a billion empty runs."""


def is_cheap(schema: Schema, spec: ImageSpec) -> bool:
    """Whether the bytes of ``spec`` can be computed row by row."""
    cells = sum(
        extent.spec.runs * (1 + sum(end - start for start, end in extent.ranges))
        for extent in layout(schema, spec).extents
        if extent.spec is not None
    )
    return cells <= CHEAP_CELLS


def object_bytes(namespace: str, key: str, spec: ImageSpec) -> bytes | None:
    """The bytes of the object ``key``: a function of what it is called and what it says of itself.

    None for what no checking client stores.
    """
    nbytes = layout(None, spec).nbytes
    if nbytes > 1 << 20:
        return None
    seed = xxhash.xxh3_128_digest(f"{namespace}\0{key}\0{spec!r}".encode())
    return (seed * (nbytes // 16 + 1))[:nbytes]
