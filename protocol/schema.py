"""What a model's KV cache consists of: tensors, their layer kinds, and window geometry.

The daemon needs only kinds, windows and sizes; the description of the cache classes stays opaque.
"""

import math
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Final

import msgpack
import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.scan import scan

ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one item by safetensors dtype name (C64 as safetensors >= 0.6 names complex64)."""

RESERVED_NAMES: Final = frozenset({"__metadata__", "prefixcached.tokens"})
"""Tensor names that a file has another use for (docs/storage-format.md)."""

Range = tuple[int, int]
"""Half-open range of token positions [start, end)."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Shape = Annotated[tuple[Dimension, ...], msgspec.Meta(max_length=limits.MAX_DIMENSIONS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_NAME_CHARACTERS)]


class Kind(StrEnum):
    """How a tensor depends on the tokens (DESIGN 3)."""

    APPEND = "append"
    """One row a token; any slice along the token axis is usable."""
    WINDOW = "window"
    """Only the last rows exist, in temporal order, plus ``keep`` leading ones."""
    STATE = "state"
    """A snapshot at exactly one position; belongs to a checkpoint, not to the schema."""


class WindowShape(StrEnum):
    """Geometry of a window."""

    RING = "ring"
    """RotatingKVCache: the last ``size`` rows, the first ``keep`` always among them."""
    CHUNK = "chunk"
    """ChunkedKVCache: the rows since the last multiple of ``size``."""


class Window(msgspec.Struct, frozen=True):
    """Geometry shared by a group of window tensors."""

    size: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    keep: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0
    shape: WindowShape = WindowShape.RING

    def needed(self, position: int) -> tuple[Range, ...]:
        """Rows without which a cache of ``position`` tokens cannot be resumed (rule T13).

        The oldest row of a full ring is overwritten before it is read, hence ``size - keep - 1``.
        """
        if self.shape is WindowShape.CHUNK:
            start = position // self.size * self.size
            return ((start, position),) if start < position else ()
        start = max(0, position - max(self.size - self.keep - 1, 0))
        if start <= self.keep:
            return ((0, position),) if position else ()
        if start == position:
            return ((0, self.keep),) if self.keep else ()
        return ((0, self.keep), (start, position)) if self.keep else ((start, position),)


class TensorSpec(msgspec.Struct, frozen=True):
    """One ``append`` or ``window`` tensor.

    ``shape`` is the shape of one token: the tensor's shape without its token axis, which stands at
    index ``axis`` of the full shape. ``window`` indexes `Schema.windows` for window tensors.
    """

    name: Name
    kind: Kind
    dtype: str
    shape: Shape
    axis: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_DIMENSIONS)]
    window: Annotated[int, msgspec.Meta(ge=-1, lt=limits.MAX_WINDOW_GROUPS)] = -1

    def full_shape(self, rows: int) -> tuple[int, ...]:
        """The tensor's shape with ``rows`` tokens."""
        return (*self.shape[: self.axis], rows, *self.shape[self.axis :])

    @property
    def runs(self) -> int:
        """How many separate runs of rows one tensor has (heads, for keys of mlx-lm)."""
        return math.prod(self.shape[: self.axis])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row within one run."""
        return math.prod(self.shape[self.axis :]) * ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds to this tensor, over all runs."""
        return self.runs * self.row_bytes


class Schema(msgspec.Struct, frozen=True, dict=True):
    """All tensors of a namespace's caches, in image order.

    ``has_state`` says that some layer is resumable only at checkpoints. ``description`` is the
    client's own account of the cache classes (JSON), which the daemon only stores and compares.
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=limits.MAX_TENSORS)] = ()
    windows: Annotated[tuple[Window, ...], msgspec.Meta(max_length=limits.MAX_WINDOW_GROUPS)] = ()
    has_state: bool = False
    description: bytes = b""

    @cached_property
    def append_token_bytes(self) -> int:
        """Bytes that one token adds over all append tensors."""
        return sum(t.token_bytes for t in self.tensors if t.kind is Kind.APPEND)

    @property
    def is_append_only(self) -> bool:
        """Whether every position is resumable from slices alone."""
        return not self.windows and not self.has_state

    def check(self) -> None:
        """Raise SchemaError where the parts contradict each other."""
        names: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise SchemaError(f"tensor {tensor.name!r} appears twice")
            if tensor.name in RESERVED_NAMES:
                raise SchemaError(f"tensor name {tensor.name!r} is reserved by the file format")
            names.add(tensor.name)
            if tensor.dtype not in ITEM_BYTES:
                raise SchemaError(f"tensor {tensor.name!r} has unknown dtype {tensor.dtype!r}")
            if tensor.axis > len(tensor.shape):
                raise SchemaError(f"tensor {tensor.name!r} has no axis {tensor.axis}")
            if tensor.kind is Kind.STATE:
                raise SchemaError(f"tensor {tensor.name!r}: state belongs to a checkpoint")
            in_window = 0 <= tensor.window < len(self.windows)
            if in_window is not (tensor.kind is Kind.WINDOW):
                raise SchemaError(f"tensor {tensor.name!r} of kind {tensor.kind} names window "
                                  f"{tensor.window} of {len(self.windows)}")  # fmt: skip
        for window in self.windows:
            if window.keep >= window.size:
                raise SchemaError(f"a window of {window.size} rows cannot keep {window.keep}")


def encode_schema(schema: Schema) -> bytes:
    """Return the canonical bytes of ``schema``; equal schemas have equal bytes."""
    packed: bytes = msgpack.packb(
        msgspec.to_builtins(schema, builtin_types=(bytes,)), use_bin_type=True
    )
    if len(packed) > limits.MAX_SCHEMA_BYTES:
        raise SchemaError(f"schema of {len(packed)} bytes; at most {limits.MAX_SCHEMA_BYTES}")
    return packed


def decode_schema(data: bytes) -> Schema:
    """Return the schema that ``data`` encodes, checked.

    Raises:
        SchemaError: Not an encoded schema, or one that contradicts itself.
    """
    if len(data) > limits.MAX_SCHEMA_BYTES:
        raise SchemaError(f"schema of {len(data)} bytes; at most {limits.MAX_SCHEMA_BYTES}")
    try:
        scan(data, 0, len(data))
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
        schema = msgspec.convert(raw, Schema, builtin_types=(bytes,))
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise SchemaError(f"not an encoded schema: {error}") from error
    schema.check()
    return schema
