"""What a model's caches consist of: sizes, windows, and descriptions that contradict themselves."""

import math

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.ranges import merge
from prefixcached.protocol.schema import (
    ITEM_BYTES,
    Kind,
    Schema,
    TensorSpec,
    Window,
    WindowShape,
    decode_schema,
    encode_schema,
)

KEYS = TensorSpec("keys", Kind.APPEND, "BF16", (1, 4, 64), axis=2)
RING = TensorSpec("ring", Kind.WINDOW, "F32", (1, 2, 8), axis=2, window=0)


def test_the_bytes_of_a_row_follow_from_shape_and_dtype() -> None:
    """One token of mlx-lm's keys is one row in each head's run."""
    assert KEYS.full_shape(10) == (1, 4, 10, 64)
    assert KEYS.runs == 4
    assert KEYS.row_bytes == 64 * 2
    assert KEYS.token_bytes == 4 * 64 * 2
    leading = msgspec.structs.replace(KEYS, axis=0)
    assert leading.full_shape(10) == (10, 1, 4, 64)
    assert (leading.runs, leading.row_bytes) == (1, 4 * 64 * 2)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_an_item_has_the_bits_of_its_name(dtype: str) -> None:
    """The sizes are those of safetensors' dtypes: U8 has 8 bits, BOOL a whole byte."""
    bits = int(dtype.strip("BFIUOCL") or 8)
    assert ITEM_BYTES[dtype] * 8 == bits
    assert TensorSpec("x", Kind.APPEND, dtype, (5,), axis=0).token_bytes * 8 == 5 * bits


def test_only_slices_grow_with_the_prompt() -> None:
    """E1: windows have a size of their own, so a token costs what the append tensors take."""
    schema = Schema((KEYS, msgspec.structs.replace(KEYS, name="values"), RING), (Window(8),))
    assert schema.append_token_bytes == 2 * KEYS.token_bytes
    assert not schema.is_append_only


def test_every_position_of_plain_attention_can_be_resumed() -> None:
    """T5: windows and states limit where, slices alone do not."""
    assert Schema((KEYS,)).is_append_only
    assert not Schema((KEYS,), has_state=True).is_append_only
    assert not Schema((KEYS, RING), (Window(8),)).is_append_only


@given(
    size=st.integers(1, 12),
    keep=st.integers(0, 11),
    position=st.integers(0, 40),
)
@example(size=8, keep=2, position=7)  # the newest rows begin where the sinks end
@example(size=8, keep=2, position=8)
@example(size=3, keep=2, position=9)  # sinks alone
@example(size=1, keep=0, position=9)  # nothing at all
def test_a_ring_needs_its_sinks_and_its_newest_rows(size: int, keep: int, position: int) -> None:
    """T13: P is usable with the rows of [0, keep) and [P-(max_size-keep-1), P)."""
    keep = min(keep, size - 1)
    needed = Window(size, keep).needed(position)
    rows = [row for start, end in needed for row in range(start, end)]
    sinks = set(range(min(keep, position)))
    newest = set(range(max(0, position - (size - keep - 1)), position))
    assert rows == sorted(sinks | newest)
    assert needed == merge(needed), "rows that touch are one range"


@given(size=st.integers(1, 12), position=st.integers(0, 40))
def test_a_chunk_needs_its_rows_since_it_began(size: int, position: int) -> None:
    """T13: chunked layers need [P//chunk*chunk, P)."""
    needed = Window(size, shape=WindowShape.CHUNK).needed(position)
    start = position // size * size
    assert needed == (((start, position),) if start < position else ())


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        (Schema((KEYS, KEYS)), "'keys' appears twice"),
        (Schema((msgspec.structs.replace(KEYS, name="__metadata__"),)), "reserved"),
        (Schema((msgspec.structs.replace(KEYS, name="prefixcached.tokens"),)), "reserved"),
        (Schema((msgspec.structs.replace(KEYS, dtype="F4"),)), "unknown dtype 'F4'"),
        (Schema((msgspec.structs.replace(KEYS, axis=4),)), "has no axis 4"),
        (Schema((msgspec.structs.replace(KEYS, kind=Kind.STATE),)), "belongs to a checkpoint"),
        (Schema((RING,)), "names window 0 of 0"),
        (Schema((msgspec.structs.replace(RING, window=1),), (Window(8),)), "window 1 of 1"),
        (Schema((msgspec.structs.replace(RING, window=-1),), (Window(8),)), "window -1 of 1"),
        (Schema((msgspec.structs.replace(KEYS, window=0),), (Window(8),)), "names window 0"),
        (Schema((), (Window(4, keep=4),)), "4 rows cannot keep 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schema_that_contradicts_itself_is_refused(schema: Schema, complaint: str) -> None:
    """C3: a lie in a schema is told at once, not when its sizes are used."""
    with pytest.raises(SchemaError, match=complaint):
        schema.check()
    with pytest.raises(SchemaError, match=complaint):
        decode_schema(encode_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        Schema(),
        Schema((msgspec.structs.replace(KEYS, axis=3),)),
        Schema((msgspec.structs.replace(KEYS, axis=0),)),
        Schema((KEYS, RING), (Window(4, keep=3),), has_state=True, description=b"{}"),
        Schema((KEYS, msgspec.structs.replace(RING, window=1)), (Window(4), Window(1))),
    ],
)
def test_a_schema_survives_its_encoding(schema: Schema) -> None:
    """What one process stored is what another one reads, at the limits of what is legal too."""
    assert decode_schema(encode_schema(schema)) == schema
    assert encode_schema(decode_schema(encode_schema(schema))) == encode_schema(schema)


def test_a_schema_has_at_most_its_bytes() -> None:
    """C3: exactly the limit is accepted, one more byte is refused by whoever meets it first."""
    room = limits.MAX_SCHEMA_BYTES - len(encode_schema(Schema(description=bytes(1 << 16))))
    fits = Schema(description=bytes((1 << 16) + room))
    assert len(encode_schema(fits)) == limits.MAX_SCHEMA_BYTES
    assert decode_schema(encode_schema(fits)) == fits
    with pytest.raises(SchemaError, match=f"{limits.MAX_SCHEMA_BYTES + 1} bytes"):
        encode_schema(Schema(description=bytes((1 << 16) + room + 1)))
    with pytest.raises(SchemaError, match=f"{limits.MAX_SCHEMA_BYTES + 1} bytes"):
        decode_schema(encode_schema(fits) + b"x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80\x80",
        msgpack.packb([]),
        msgpack.packb({"tensors": [{"name": "x"}]}),
        msgpack.packb({"windows": [{"size": 0}]}),
        msgpack.packb({"windows": [{"size": (1 << 32) + 1}]}),
        msgpack.packb({"windows": [{"size": 8, "keep": -1}]}),
        msgpack.packb({1: 2}),
        msgpack.packb({"x": {1: 2}}),
        b"\x81\xa1x" + b"\x91" * 5000 + b"\xc0",
        b"\x81\xa1x\xd4\x01\x00",
    ],
    ids=lambda data: f"{data!r:.30}",
)
def test_bytes_that_are_no_schema_are_refused(data: bytes) -> None:
    """C3: whatever stands where a schema should, the error says that it is none."""
    with pytest.raises(SchemaError, match="not an encoded schema"):
        decode_schema(data)


def test_windows_of_up_to_four_thousand_million_rows_are_legal() -> None:
    """C3: the limits of a window are where the code says, both of them included."""
    for window in (Window(1), Window(1 << 32, keep=(1 << 32) - 1)):
        schema = Schema((), (window,))
        assert decode_schema(encode_schema(schema)).windows == (window,)


def test_a_tensor_without_tokens_has_no_bytes() -> None:
    """A dimension of 0 is legal and makes everything 0."""
    empty = msgspec.structs.replace(KEYS, shape=(1, 0, 64))
    assert empty.token_bytes == 0
    assert math.prod(empty.full_shape(7)) == 0


def encoded(**changes: object) -> bytes:
    """A schema of one tensor, with whatever values."""
    tensor = {"name": "x", "kind": "append", "dtype": "F32", "shape": [1], "axis": 0}
    return bytes(msgpack.packb({"tensors": [tensor | changes]}))


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ({"name": "x"}, {"name": ""}),
        ({"name": "x" * 256}, {"name": "x" * 257}),
        ({"shape": [0]}, {"shape": [-1]}),
        ({"shape": [1 << 40]}, {"shape": [(1 << 40) + 1]}),
        ({"shape": [1] * 8, "axis": 8}, {"shape": [1] * 9, "axis": 8}),
        ({"axis": 0}, {"axis": -1}),
        ({"window": -1}, {"window": -2}),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_a_tensor_is_held_to_exactly_its_limits(
    within: dict[str, object], beyond: dict[str, object]
) -> None:
    """C3: the first value that docs/protocol.md does not allow makes it no schema."""
    assert len(decode_schema(encoded(**within)).tensors) == 1
    with pytest.raises(SchemaError, match="not an encoded schema"):
        decode_schema(encoded(**beyond))


def test_a_schema_that_is_shared_cannot_be_changed() -> None:
    """N4: all caches of a namespace have one schema, which threads that read share as well."""
    schema = decode_schema(encode_schema(Schema((KEYS, RING), (Window(8),))))
    for part, field in ((schema, "has_state"), (KEYS, "axis"), (schema.windows[0], "size")):
        with pytest.raises(AttributeError):
            setattr(part, field, 1)
