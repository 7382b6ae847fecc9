"""Bytes that say whose they are: every row is a function of namespace, path tokens and position.

So a hit can be checked byte for byte without remembering what was put: `verify_hit` assembles what
a client would from the lent parts and compares it with `expected`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor, WindowRows, layout
from prefixcached.protocol.messages import Hit, Part
from prefixcached.protocol.ranges import clip, covers, merge
from prefixcached.protocol.schema import (
    Kind,
    Range,
    Schema,
    TensorSpec,
    Window,
    WindowShape,
    encode_schema,
)

Tokens = tuple[int, ...]
Bytes = NDArray[np.uint8]

_KEYS = TensorSpec("keys", Kind.APPEND, "BF16", (2, 3), 1)
_VALUES = TensorSpec("values", Kind.APPEND, "U8", (700,), 0)
_RING = TensorSpec("ring", Kind.WINDOW, "U16", (2, 4), 1, window=0)
_SINKS = TensorSpec("sinks", Kind.WINDOW, "U8", (40,), 0, window=0)
_CHUNK = TensorSpec("chunk", Kind.WINDOW, "F32", (3,), 0, window=0)
_SECOND = TensorSpec("second", Kind.WINDOW, "U16", (5,), 0, window=1)

SCHEMAS: dict[str, Schema] = {
    "plain": Schema((_KEYS, _VALUES)),
    "ring": Schema((_KEYS, _RING), (Window(8),)),
    "sinks": Schema((_SINKS,), (Window(7, keep=2),)),
    "chunk": Schema((_VALUES, _CHUNK), (Window(4, shape=WindowShape.CHUNK),)),
    "mixed": Schema((_KEYS, _CHUNK, _SECOND), (Window(5, shape=WindowShape.CHUNK), Window(6))),
    "hybrid": Schema((_KEYS, _VALUES), has_state=True),
    "hybrid-ring": Schema((_KEYS, _RING), (Window(6),), has_state=True),
    "state": Schema(has_state=True),
}
"""One schema for each way in which the kinds combine. The names serve as namespaces' prefixes."""

STATE = StateTensor("state", "U8", (50,))
HEAVY_STATE = StateTensor("state", "U8", (40000,))
"""Three pages: images of different sizes are what budgets have to deal with."""


def encoded(name: str) -> bytes:
    """The encoded schema called ``name``."""
    return encode_schema(SCHEMAS[name])


@lru_cache(maxsize=1024)
def path_digests(namespace: str, tokens: Tokens) -> tuple[int, ...]:
    """For each position what its row depends on: the namespace and all tokens up to it."""
    digest = xxhash.xxh3_64_digest(namespace.encode())
    found: list[int] = []
    for token in tokens:
        digest = xxhash.xxh3_64_digest(digest + token.to_bytes(4, "little"))
        found.append(int.from_bytes(digest, "little"))
    return tuple(found)


def rows(tensor: TensorSpec, namespace: str, tokens: Tokens, positions: Sequence[int]) -> Bytes:
    """The rows of one tensor, shape (runs, positions, row bytes)."""
    digests = path_digests(namespace, tokens)
    found = np.empty((tensor.runs, len(positions), tensor.row_bytes), dtype=np.uint8)
    for run in range(tensor.runs):
        name = f"{tensor.name}{run}"
        for index, position in enumerate(positions):
            found[run, index] = _pattern(digests[position], name, tensor.row_bytes)
    return found


def state(name: str, nbytes: int, namespace: str, tokens: Tokens, metadata: bytes) -> bytes:
    """The snapshot tensor ``name`` at the end of ``tokens``."""
    digest = path_digests(namespace, tokens)[-1] ^ xxhash.xxh3_64_intdigest(metadata)
    return _pattern(digest, name, nbytes).tobytes()


def _pattern(digest: int, name: str, nbytes: int) -> Bytes:
    seed = xxhash.xxh3_128_digest(name.encode() + digest.to_bytes(8, "little"))
    return np.frombuffer((seed * (nbytes // 16 + 1))[:nbytes], dtype=np.uint8)


def image_bytes(schema: Schema, spec: ImageSpec, namespace: str, tokens: Tokens) -> bytes:
    """What a client writes into the image of a grant."""
    pieces: list[bytes] = []
    for extent in layout(schema, spec).extents:
        if extent.spec is None:
            pieces.append(
                state(extent.name, extent.nbytes, namespace, tokens[: spec.end], spec.metadata)
            )
        else:
            positions = [p for start, end in extent.ranges for p in range(start, end)]
            pieces.append(rows(extent.spec, namespace, tokens, positions).tobytes())
    return b"".join(pieces)


def offered_rows(window: Window, length: int, extra: int = 0) -> WindowRows:
    """What a client's buffers hold at ``length`` tokens: what is needed, and ``extra`` older."""
    needed = window.needed(length)
    if not needed:
        return WindowRows()
    oldest = max(0, needed[-1][0] - extra)
    return WindowRows(merge((*needed, (oldest, length))))


Read = Callable[[int, int, int], bytes]
"""Descriptor, offset, bytes."""


def verify_hit(
    schema: Schema, namespace: str, tokens: Tokens, hit: Hit, descriptors: Sequence[int], read: Read
) -> ImageSpec | None:
    """Assemble a hit as a client does and compare every byte; return its snapshot's spec."""
    length = hit.length
    assert len(descriptors) == len(hit.parts)
    slices: list[Range] = []
    window_rows: list[list[Range]] = [[] for _ in schema.windows]
    snapshot: ImageSpec | None = None
    for part, descriptor in zip(hit.parts, descriptors, strict=True):
        spec = part.spec
        limit = part.use_end if spec.kind is ImageKind.SEGMENT else spec.end
        assert part.use_end <= length
        if part.use_start < part.use_end:
            assert part.use_start >= spec.start
            slices.append((part.use_start, part.use_end))
        for group, held in enumerate(spec.windows):
            window_rows[group].extend(clip(held.ranges, 0, min(limit, length)))
        if spec.kind is ImageKind.CHECKPOINT and spec.end == length:
            snapshot = spec if spec.tensors or spec.metadata else snapshot
        _verify_part(schema, namespace, tokens, part, limit, descriptor, read)
    if schema.append_token_bytes:
        assert sorted(slices) == slices
        assert merge(slices) == ((0, length),)
        assert sum(end - start for start, end in slices) == length, "slices overlap"
    for window, held_rows in zip(schema.windows, window_rows, strict=True):
        assert covers(merge(held_rows), window.needed(length)), (window, held_rows, length)
    assert snapshot is not None or not schema.has_state
    return snapshot


def _verify_part(
    schema: Schema, namespace: str, tokens: Tokens, part: Part, limit: int, descriptor: int,
    read: Read,
) -> None:  # fmt: skip
    for extent in layout(schema, part.spec).extents:
        data = read(descriptor, part.data_offset + extent.offset, extent.nbytes)
        assert len(data) == extent.nbytes
        if extent.spec is None:
            if part.spec.end <= len(tokens):
                path = tokens[: part.spec.end]
                expected = state(extent.name, extent.nbytes, namespace, path, part.spec.metadata)
                assert data == expected, f"wrong snapshot at {part.spec.end}"
            continue
        positions = [p for start, end in extent.ranges for p in range(start, end)]
        usable = [
            i for i, p in enumerate(positions)
            if p < limit and (extent.spec.kind is Kind.WINDOW or part.use_start <= p)
        ]  # fmt: skip
        found = np.frombuffer(data, dtype=np.uint8).reshape(
            extent.spec.runs, len(positions), extent.spec.row_bytes
        )
        wanted = rows(extent.spec, namespace, tokens, [positions[i] for i in usable])
        assert np.array_equal(found[:, usable], wanted), f"wrong bytes of {extent.name}"
