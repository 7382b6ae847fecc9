"""Schemas that are bombs: refused by a look at their bytes, before anything is built from them."""

import pytest

from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.schema import Kind, Schema, TensorSpec, decode_schema, encode_schema


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\xdd\x00\x0f\xff\x00" + b"\x90" * 0xFFF00, "more than"),
        (b"\xdd\x00\x0f\xff\xff" * 1000, "more than"),
        (b"\x91" * 1000 + b"\xc0", "nested deeper"),
        (b"\xc7\x05\x01hello", "begins no value"),
        (encode_schema(Schema()) + b"\xc0", "end differ"),
        (encode_schema(Schema())[:-3], "middle of a value"),
        (b"", "middle of a value"),
    ],
    ids=["a million lists", "lying lengths", "deep", "extension", "longer", "shorter", "empty"],
)
def test_what_is_no_bounded_value_is_refused_before_it_is_built(
    data: bytes, complaint: str
) -> None:
    """C3: a mebibyte of tiny values held the daemon up for half a second."""
    with pytest.raises(SchemaError, match=complaint):
        decode_schema(data)


def test_the_largest_schema_is_within_what_the_scan_allows() -> None:
    """C3: MAX_TENSORS of MAX_DIMENSIONS are no bomb: the limit of values is none for schemas."""
    schema = Schema(
        tuple(
            TensorSpec(f"{number:04x}", Kind.APPEND, "U8", (1,) * limits.MAX_DIMENSIONS, 0)
            for number in range(limits.MAX_TENSORS)
        )
    )
    assert decode_schema(encode_schema(schema)) == schema
