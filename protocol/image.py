"""Layout of one image: which tensor lies where, computed alike by both sides.

An image is tensor data alone, without gaps or header: the tensors of `ImageSpec` in schema order,
then the snapshot tensors, each in C order with its own shape. Behind a safetensors header the same
bytes are a file (docs/storage-format.md).
"""

import math
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.schema import (
    ITEM_BYTES,
    RESERVED_NAMES,
    Count,
    Kind,
    Name,
    Range,
    Schema,
    Shape,
    TensorSpec,
)


class ImageKind(StrEnum):
    """What an image holds."""

    SEGMENT = "segment"
    CHECKPOINT = "checkpoint"
    OBJECT = "object"


class WindowRows(msgspec.Struct, frozen=True):
    """Rows of one window group: sorted, disjoint, non-empty ranges of token positions.

    ``phase`` is the ring's write index at the end of the put that stored it (rule T12), -1 where
    the rows were in temporal order.
    """

    ranges: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=16)] = ()
    phase: Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)] = -1

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(end - start for start, end in self.ranges)


class StateTensor(msgspec.Struct, frozen=True):
    """One snapshot tensor of a checkpoint or object, with its full shape."""

    name: Name
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class ImageSpec(msgspec.Struct, frozen=True):
    """What one image holds, apart from its bytes.

    A segment has the append slices of tokens [start, end), and on the last segment of a put window
    rows. A checkpoint stands at ``start == end``, its position; it carries window rows only where
    no segment of its put could (the put had no new append slices). An object has no tokens.
    ``metadata`` is opaque to the daemon.
    """

    kind: ImageKind
    start: Count = 0
    end: Count = 0
    windows: Annotated[
        tuple[WindowRows, ...], msgspec.Meta(max_length=limits.MAX_WINDOW_GROUPS)
    ] = ()
    tensors: Annotated[tuple[StateTensor, ...], msgspec.Meta(max_length=limits.MAX_TENSORS)] = ()
    metadata: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_METADATA_BYTES)] = b""

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a checkpoint with state or attachments, not one of window rows alone."""
        return self.kind is ImageKind.CHECKPOINT and bool(self.tensors or self.metadata)


class Extent(msgspec.Struct, frozen=True):
    """Where one tensor lies in its image.

    ``spec`` is the schema's tensor for append slices and window rows, None for snapshot tensors.
    ``ranges`` are the token positions of the rows, in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    spec: TensorSpec | None = None
    ranges: tuple[Range, ...] = ()


class Layout(msgspec.Struct, frozen=True):
    """All extents of one image, in order, without gaps."""

    extents: tuple[Extent, ...]
    nbytes: int


def layout(schema: Schema | None, spec: ImageSpec) -> Layout:
    """Return the layout of ``spec`` under ``schema`` (None for objects).

    Raises:
        SchemaError: The description contradicts the schema or itself.
    """
    check_spec(schema, spec)
    extents: list[Extent] = []
    offset = 0
    for tensor in schema.tensors if schema is not None else ():
        ranges: tuple[Range, ...]
        if tensor.kind is Kind.APPEND:
            ranges = ((spec.start, spec.end),) if spec.end > spec.start else ()
        else:
            ranges = spec.windows[tensor.window].ranges if spec.windows else ()
        if not ranges:
            continue
        rows = sum(end - start for start, end in ranges)
        nbytes = rows * tensor.token_bytes
        shape = tensor.full_shape(rows)
        extents.append(Extent(tensor.name, tensor.dtype, shape, offset, nbytes, tensor, ranges))
        offset += nbytes
    for state in spec.tensors:
        extents.append(Extent(state.name, state.dtype, state.shape, offset, state.nbytes))
        offset += state.nbytes
    return Layout(tuple(extents), offset)


def check_spec(schema: Schema | None, spec: ImageSpec) -> None:
    """Raise SchemaError where ``spec`` contradicts ``schema`` or itself."""
    if spec.end < spec.start:
        raise SchemaError(f"image ends at {spec.end} before it starts at {spec.start}")
    if spec.kind is not ImageKind.SEGMENT and spec.end != spec.start:
        raise SchemaError(f"a {spec.kind} stands at one position, not {spec.start}..{spec.end}")
    if spec.kind is ImageKind.SEGMENT and spec.tensors:
        raise SchemaError("snapshot tensors belong to a checkpoint, not to a segment")
    groups = len(schema.windows) if schema is not None else 0
    if spec.windows and len(spec.windows) != groups:
        raise SchemaError(f"{len(spec.windows)} window groups described, the schema has {groups}")
    for rows in spec.windows:
        check_ranges(rows.ranges, spec.end)
    names = {tensor.name for tensor in schema.tensors} if schema is not None else set()
    for state in spec.tensors:
        if state.dtype not in ITEM_BYTES:
            raise SchemaError(f"tensor {state.name!r} has unknown dtype {state.dtype!r}")
        if state.name in RESERVED_NAMES:
            raise SchemaError(f"tensor name {state.name!r} is reserved by the file format")
        if state.name in names:
            raise SchemaError(f"tensor {state.name!r} appears twice")
        names.add(state.name)


def check_ranges(ranges: tuple[Range, ...], end: int) -> None:
    """Raise SchemaError unless ``ranges`` are sorted, disjoint, non-empty and within [0, end)."""
    previous = 0
    for start, stop in ranges:
        if start < previous or stop <= start or stop > end:
            raise SchemaError(f"window rows {ranges} are not sorted disjoint ranges below {end}")
        previous = stop


def segment_lengths(schema: Schema, start: int, end: int, max_bytes: int) -> list[Range]:
    """Cut tokens [start, end) into segments of at most ``max_bytes`` of append slices each.

    The pieces have equal length but for rounding, so that none is a sliver.
    """
    total = end - start
    if total <= 0:
        return []
    per_token = schema.append_token_bytes
    most = total if per_token == 0 else max(1, max_bytes // per_token)
    pieces = -(-total // most)
    bounds = [start + total * i // pieces for i in range(pieces + 1)]
    return list(pairwise(bounds))


def allocated_bytes(nbytes: int) -> int:
    """Bytes that an image of ``nbytes`` is charged: whole pages (rule E1)."""
    return -(-nbytes // limits.PAGE_BYTES) * limits.PAGE_BYTES
