"""Target `layout`: schemas and image descriptions that lie about sizes, axes, windows and rows."""

import math
from typing import Any

import msgspec

from prefixcached.actors.put_policy import check_offer
from prefixcached.actors.storage_format import ImageSizes
from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import (
    ImageKind,
    ImageSpec,
    StateTensor,
    WindowRows,
    layout,
    segment_lengths,
)
from prefixcached.protocol.messages import Offer
from prefixcached.protocol.ranges import clip, covers, merge, subtract
from prefixcached.protocol.schema import ITEM_BYTES, Schema, Window, decode_schema, encode_schema
from tests.fuzz.choices import Choices, packed
from tests.support.core_payload import SCHEMAS

_KNOWN = tuple(SCHEMAS.values())
_SPECS = (
    ImageSpec(ImageKind.SEGMENT, 3, 12, (WindowRows(((0, 2), (5, 12))), WindowRows(((6, 12),)))),
    ImageSpec(ImageKind.SEGMENT, 0, 9),
    ImageSpec(
        ImageKind.CHECKPOINT, 7, 7, tensors=(StateTensor("s", "U8", (5, 2)),), metadata=b"{}"
    ),
    ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("o", "C64", (0, 3)),)),
)


def run(data: bytes) -> None:
    """Read a schema and a description, and compute everything that follows from them."""
    choices = Choices(data)
    schema = _schema(choices)
    spec = _spec(choices)
    if schema is None or spec is None:
        return
    assert decode_schema(encode_schema(schema)) == schema
    assert schema.append_token_bytes >= 0
    for one in (schema, None):
        _check_layout(one, spec)
    _check_offer(choices, schema, spec)
    for window in schema.windows:
        _check_window(window, choices.integer() % (1 << 40))
    start = choices.integer() % limits.MAX_TOKENS
    end = start + choices.below(5000)
    pieces = segment_lengths(schema, start, end, max(1, choices.integer()))
    assert sum(stop - begin for begin, stop in pieces) == end - start
    assert all(begin < stop for begin, stop in pieces)
    assert merge(pieces) == (((start, end),) if start < end else ())


def _schema(choices: Choices) -> Schema | None:
    plain: Any = msgspec.to_builtins(choices.pick(_KNOWN), builtin_types=(bytes,))
    for _ in range(choices.below(6)):
        plain = choices.changed(plain)
    encoded = packed(plain)
    if choices.one_in(5):
        encoded = choices.damaged(encoded)
    try:
        return decode_schema(encoded)
    except SchemaError:
        return None


def _spec(choices: Choices) -> ImageSpec | None:
    plain: Any = msgspec.to_builtins(choices.pick(_SPECS), builtin_types=(bytes,))
    for _ in range(choices.below(6)):
        plain = choices.changed(plain)
    try:
        return msgspec.convert(plain, ImageSpec, builtin_types=(bytes,))
    except msgspec.ValidationError:
        return None


def _check_layout(schema: Schema | None, spec: ImageSpec) -> None:
    """Extents follow each other without gaps, and arithmetic alone gives the same size."""
    try:
        image = layout(schema, spec)
    except SchemaError:
        image = None
    try:
        nbytes = ImageSizes(schema).image_bytes(spec)
    except SchemaError:
        assert image is None
        return
    assert image is not None
    assert image.nbytes == nbytes
    offset = 0
    for extent in image.extents:
        assert extent.offset == offset
        if extent.spec is not None:
            rows = sum(end - start for start, end in extent.ranges)
            assert extent.shape[extent.spec.axis] == rows > 0
        assert extent.nbytes == math.prod(extent.shape) * ITEM_BYTES[extent.dtype]
        offset += extent.nbytes
    assert offset == nbytes >= 0
    assert len({extent.name for extent in image.extents}) == len(image.extents)


def _check_offer(choices: Choices, schema: Schema, spec: ImageSpec) -> None:
    length = choices.integer() % limits.MAX_TOKENS
    windows = spec.windows
    if choices.one_in(2):
        windows = tuple(_rows(choices) for _ in range(len(schema.windows)))
    offer = Offer("n", b"", b"", windows=windows, checkpoint=spec if choices.one_in(2) else None)
    try:
        check_offer(schema, offer, length)
    except SchemaError:
        return
    for window, rows in zip(schema.windows, offer.windows, strict=True):
        held = clip(rows.ranges, 0, length)
        assert held == rows.ranges, "rows beyond the prompt's end"
        wanted = window.needed(length)
        missing = subtract(wanted, held)
        assert covers(merge(held), wanted) is not bool(missing)


def _rows(choices: Choices) -> WindowRows:
    """Ranges that may be empty, overlap, or run backwards."""
    ends = [choices.below(12) for _ in range(2 * choices.below(4))]
    if choices.one_in(2):
        ends.sort()
    return WindowRows(tuple(zip(ends[::2], ends[1::2], strict=True)))


def _check_window(window: Window, position: int) -> None:
    """T13: what is needed are sorted rows below the position."""
    needed = window.needed(position)
    assert needed == merge(needed)
    assert all(0 <= start < end <= position for start, end in needed)
