"""The file format: what is written, what any tool reads of it, and what is refused."""

import json
import random
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.actors.storage_format import (
    DATA_ALIGNMENT,
    DESCRIPTION_CHECKSUM_KEY,
    DESCRIPTION_KEY,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    TOKENS_NAME,
    DamagedFile,
    ForeignFile,
    ImageSizes,
    decode_description,
    decode_header,
    encode_header,
    file_bytes_bound,
    file_name,
    header_bytes,
    parse_file_name,
    parse_schema_name,
    schema_digest,
    schema_name,
    tokens_count,
)
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import (
    Extent,
    ImageKind,
    ImageSpec,
    Layout,
    StateTensor,
    WindowRows,
    layout,
)
from prefixcached.protocol.schema import Kind, Schema, TensorSpec
from tests.support.store_samples import (
    PLAIN,
    WINDOWED,
    Sample,
    checkpoint,
    every_kind,
    sample,
    schema_of,
    segment,
    token_values,
)

SAMPLES = pytest.mark.parametrize("one", every_kind(), ids=lambda s: f"{s.header.kind}")


def encoded(one: Sample) -> bytes:
    return encode_header(
        one.header, layout(schema_of(one), one.header.spec), tokens_count(one.header)
    )


def whole_file(one: Sample) -> bytes:
    return encoded(one) + one.data + one.tokens


@SAMPLES
def test_header_is_read_back(one: Sample) -> None:
    """A header says of the file exactly what it was made from."""
    data = encoded(one)
    size = len(data) + len(one.data) + len(one.tokens)
    description, image = decode_header(data, schema_of(one), size)
    found = msgspec.structs.replace(description.header, checksum="", tokens_checksum="")
    assert found == one.header
    assert image == layout(schema_of(one), one.header.spec)
    assert description.data_offset == len(data) == header_bytes(data[:8], size)
    assert description.data_bytes == len(one.data)
    assert description.tokens_count == len(one.tokens) // 4


@SAMPLES
def test_data_begins_at_a_page(one: Sample) -> None:
    """Data begins at a multiple of 16,384, the page of Apple silicon."""
    assert len(encoded(one)) % DATA_ALIGNMENT == 0
    assert DATA_ALIGNMENT == 16384


@SAMPLES
def test_safetensors_opens_every_file(one: Sample, tmp_path: Path) -> None:
    """D1: `safetensors.safe_open` reads every tensor of every file, and the tokens."""
    path = tmp_path / "file.safetensors"
    path.write_bytes(whole_file(one))
    with safetensors.safe_open(path, framework="numpy") as file:
        extents = layout(schema_of(one), one.header.spec).extents
        assert set(file.keys()) == {e.name for e in extents} | {TOKENS_NAME}
        assert np.array_equal(file.get_tensor(TOKENS_NAME), token_values(one))
        for extent in extents:
            assert tuple(file.get_slice(extent.name).get_shape()) == extent.shape
        assert json.loads(file.metadata()[DESCRIPTION_KEY])["id"] == one.header.id


@SAMPLES
def test_mlx_opens_every_file(one: Sample, tmp_path: Path) -> None:
    """D1: `mx.load` reads every file, with bfloat16 and zero-size tensors, bit for bit."""
    mx = pytest.importorskip("mlx.core")
    path = tmp_path / "file.safetensors"
    path.write_bytes(whole_file(one))
    loaded = mx.load(str(path))
    for extent in layout(schema_of(one), one.header.spec).extents:
        array = loaded[extent.name]
        assert tuple(array.shape) == extent.shape
        flat = np.array(array.reshape(-1).view(mx.uint8)) if extent.nbytes else b""
        assert bytes(flat) == one.data[extent.offset : extent.offset + extent.nbytes]
    assert np.array_equal(np.array(loaded[TOKENS_NAME]), token_values(one))


def test_header_length_does_not_depend_on_the_checksum() -> None:
    """The header is written last, into the room that was left for it."""
    one = segment()
    with_checksum = msgspec.structs.replace(one.header, checksum="f" * 32)
    image = layout(PLAIN, one.header.spec)
    assert len(encode_header(with_checksum, image, 7)) == len(encoded(one))


def test_large_metadata_makes_a_large_header() -> None:
    """A header larger than one page is padded to whole pages and read back."""
    spec = ImageSpec(ImageKind.CHECKPOINT, 3, 3, metadata=random.Random(1).randbytes(100_000))
    one = sample(spec)
    data = encoded(one)
    assert len(data) > DATA_ALIGNMENT
    description, _ = decode_header(data, PLAIN, len(data) + len(one.tokens))
    assert description.header.spec.metadata == spec.metadata


@pytest.mark.parametrize("name", [TOKENS_NAME, "__metadata__"])
def test_reserved_tensor_names_are_refused(name: str) -> None:
    """A tensor that would stand in the place of the format's own is not written."""
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor(name, "U8", (1,)),))
    with pytest.raises(SchemaError, match="reserved"):
        encoded(sample(spec, None))


@SAMPLES
def test_every_flipped_bit_of_a_header_is_found(one: Sample) -> None:
    """D3: no single flipped bit of a header passes, wherever it is."""
    data = encoded(one)
    size = len(data) + len(one.data) + len(one.tokens)
    used = len(data.rstrip(b" "))
    source = random.Random(4)
    places = [*range(used), *source.sample(range(used, len(data)), 50)]
    original = decode_header(data, schema_of(one), size)
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << source.randrange(8)
        try:
            found = decode_header(bytes(flipped), schema_of(one), size)
        except DamagedFile:
            continue
        # Only what the format does not use may change unnoticed.
        assert found == original
        assert b'"format":"mlx"' not in flipped


@SAMPLES
def test_every_other_file_size_is_refused(one: Sample) -> None:
    """D3: extents are checked against the size of the file."""
    data = encoded(one)
    size = len(data) + len(one.data) + len(one.tokens)
    for wrong in (size - 1, size + 1, len(data), len(data) - 1, 0):
        if wrong != size:
            with pytest.raises(DamagedFile):
                decode_header(data, schema_of(one), wrong)


def test_another_schema_is_refused() -> None:
    """D3: the tensor table is computed from the schema, not believed."""
    one = segment()
    data = encoded(one)
    size = len(data) + len(one.data) + len(one.tokens)
    first = PLAIN.tensors[0]
    for changed in (
        msgspec.structs.replace(first, dtype="F16"),
        msgspec.structs.replace(first, shape=(1, 4, 2)),
        msgspec.structs.replace(first, axis=1),
        msgspec.structs.replace(first, name="other"),
    ):
        other = msgspec.structs.replace(PLAIN, tensors=(changed, *PLAIN.tensors[1:]))
        with pytest.raises(DamagedFile):
            decode_header(data, other, size)


@pytest.mark.parametrize("change", ["gap", "swap", "extra", "missing"])
def test_a_table_that_lies_is_refused(change: str) -> None:
    """D3: a table that leaves a gap, or swaps, adds or omits tensors, is damage."""
    one = segment()
    data = encoded(one)
    size = len(data) + len(one.data) + len(one.tokens)
    table = json.loads(data[LENGTH_BYTES:])
    keys, values = table["0.keys"], table["0.values"]
    if change == "gap":
        keys["data_offsets"][0] += 2
    elif change == "swap":
        table["0.keys"], table["0.values"] = values, keys
    elif change == "extra":
        table["more"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    else:
        del table["1.values"]
    forged = struct.pack("<Q", len(data) - LENGTH_BYTES) + json.dumps(table).encode().ljust(
        len(data) - LENGTH_BYTES
    )
    with pytest.raises(DamagedFile, match="tensor"):
        decode_header(forged, PLAIN, size)


def rewrite_description(data: bytes, **changes: object) -> bytes:
    """Return a header whose description was changed and signed again."""
    table = json.loads(data[LENGTH_BYTES:])
    description = json.loads(table["__metadata__"][DESCRIPTION_KEY]) | changes
    text = json.dumps(description)
    table["__metadata__"][DESCRIPTION_KEY] = text
    table["__metadata__"][DESCRIPTION_CHECKSUM_KEY] = schema_digest(text.encode())
    body = json.dumps(table).encode().ljust(len(data) - LENGTH_BYTES)
    return struct.pack("<Q", len(body)) + body


def test_another_format_version_is_foreign() -> None:
    """D10: a whole file of a later format is foreign, not damaged."""
    data = rewrite_description(encoded(segment()), format=2, new_field=1)
    with pytest.raises(ForeignFile, match="format 2"):
        decode_description(data, 1 << 20)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": 8},
        {"position": -1},
        {"kind": "object"},
        {"id": "../x"},
        {"checksum": "00"},
        {"checksum": "0" * 33},
    ],
)
def test_a_description_that_contradicts_itself_is_damage(changes: dict[str, object]) -> None:
    """D3: a description is believed only where its parts agree."""
    data = rewrite_description(encoded(segment()), **changes)
    with pytest.raises(DamagedFile):
        decode_description(data, 1 << 20)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "object"}, "object that describes a checkpoint"),
        ({"spec": {"kind": "checkpoint", "start": 6, "end": 5}}, "position 5 contradicts 6..5"),
        ({"spec": {"kind": "checkpoint", "start": 4, "end": 5}}, "position 5 contradicts 4..5"),
        ({"position": 4}, "position 4 contradicts 5..5"),
    ],
)
def test_a_checkpoint_stands_at_one_position(changes: dict[str, object], complaint: str) -> None:
    """D3: what else a checkpoint says of where it belongs is damage."""
    data = rewrite_description(encoded(checkpoint(5)), **changes)
    with pytest.raises(DamagedFile, match=complaint):
        decode_description(data, 1 << 20)


@pytest.mark.parametrize("position", [0, 3, 6])
def test_an_image_may_start_before_its_own_tokens(position: int) -> None:
    """D1: a segment with a surplus head carries the tokens from where it attaches."""
    one = sample(ImageSpec(ImageKind.SEGMENT, 0, 7), position=position)
    data = whole_file(one)
    description, _ = decode_header(encoded(one), PLAIN, len(data))
    assert description.header.position == position
    assert description.tokens_count == 7 - position


def test_tokens_that_do_not_fit_in_the_file_are_damage() -> None:
    """D3: a file cannot say that it has more tokens than bytes."""
    start = encoded(checkpoint(5))
    assert decode_description(start, len(start) + 4 * 5).data_bytes == 0
    with pytest.raises(DamagedFile, match="5 tokens do not fit"):
        decode_description(start, len(start) + 4 * 5 - 1)


@given(st.binary(max_size=200))
def test_garbage_is_damage(garbage: bytes) -> None:
    """D3: arbitrary bytes raise DamagedFile and nothing else."""
    padded = struct.pack("<Q", DATA_ALIGNMENT - 8) + garbage.ljust(DATA_ALIGNMENT - 8)
    for data in (garbage, padded):
        with pytest.raises(DamagedFile):
            decode_description(data, len(data))


ROWS = st.lists(st.integers(0, 30), max_size=6, unique=True).map(
    lambda ends: tuple((a, b) for a, b in zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(st.integers(0, 30), st.integers(0, 30), ROWS, st.booleans())
def test_sizes_by_arithmetic_equal_the_layout(
    start: int, length: int, rows: tuple[tuple[int, int], ...], windowed: bool
) -> None:
    """The sizes that the scan computes are those of the layout."""
    schema = WINDOWED if windowed else PLAIN
    windows = (WindowRows(rows),) if windowed and rows else ()
    end = max([start + length, *(stop for _, stop in rows)])
    spec = ImageSpec(ImageKind.SEGMENT, start, end, windows)
    assert ImageSizes(schema).image_bytes(spec) == layout(schema, spec).nbytes


def test_sizes_of_every_kind_equal_the_layout() -> None:
    """C3: snapshots count beside window rows, and without a schema there is nothing else."""
    tensors = (StateTensor("s.0", "F32", (3, 5)),)
    snapshot = ImageSpec(ImageKind.CHECKPOINT, 9, 9, (WindowRows(((4, 9),)),), tensors)
    cases = [(schema_of(one), one.header.spec) for one in every_kind()]
    cases += [(WINDOWED, snapshot), (None, ImageSpec(ImageKind.SEGMENT, 2, 7))]
    for schema, spec in cases:
        assert ImageSizes(schema).image_bytes(spec) == layout(schema, spec).nbytes


@pytest.mark.parametrize(
    "one", [*every_kind(), segment(0, 342), checkpoint(5000)], ids=lambda s: f"{s.header.kind}"
)
def test_bound_holds_what_a_file_takes(one: Sample) -> None:
    """D5: what is reserved for a file before its write is enough, and whole pages."""
    bound = file_bytes_bound(one.header, schema_of(one))
    assert bound % DATA_ALIGNMENT == 0
    assert DATA_ALIGNMENT <= bound - len(whole_file(one)) < 2 * DATA_ALIGNMENT


def test_names_are_read_back() -> None:
    """A file's name gives its id and kind, and nothing else looks like one."""
    for kind in ImageKind:
        assert parse_file_name(file_name("0" * 32, kind)) == ("0" * 32, kind)
    for name in (
        "x.safetensors",
        "0" * 32 + ".segment",
        "../" + file_name("0" * 32, ImageKind.OBJECT),
    ):
        assert parse_file_name(name) is None
    assert parse_schema_name(schema_name("a" * 32)) == "a" * 32
    assert parse_schema_name("a.schema") is None


def test_large_tables_fit() -> None:
    """A model with thousands of tensors has a header that is read back."""
    tensors = tuple(
        TensorSpec(f"layers.{i}.self_attn.keys", Kind.APPEND, "BF16", (1, 8, 64), 2)
        for i in range(2000)
    )
    schema = Schema(tensors=tensors)
    spec = ImageSpec(ImageKind.SEGMENT, 0, 1)
    image = layout(schema, spec)
    header = msgspec.structs.replace(segment(0, 1).header, spec=spec)
    data = encode_header(header, image, 1)
    description, found = decode_header(data, schema, len(data) + image.nbytes + 4)
    assert found == image
    assert description.data_bytes == image.nbytes


def test_a_header_takes_no_more_pages_than_it_needs() -> None:
    """D5: the padding before the data is less than one page."""
    long = sample(ImageSpec(ImageKind.OBJECT, metadata=bytes(3 * DATA_ALIGNMENT)), None)
    for one in (*every_kind(), long):
        data = encoded(one)
        assert len(data) - len(data.rstrip(b" ")) < DATA_ALIGNMENT


def test_a_header_larger_than_any_reader_takes_is_not_written() -> None:
    """D3: a header of 16 MiB is written, as it is read, and a larger one is refused."""

    def header_of(metadata_bytes: int) -> bytes:
        return encoded(sample(ImageSpec(ImageKind.OBJECT, metadata=bytes(metadata_bytes)), None))

    in_base64 = 3 * MAX_HEADER_BYTES // 4
    assert len(header_of(in_base64 - DATA_ALIGNMENT // 2)) == MAX_HEADER_BYTES
    with pytest.raises(SchemaError, match="at most"):
        header_of(in_base64)


@pytest.mark.parametrize(
    ("data_offset", "is_possible"),
    [
        (0, True),
        (DATA_ALIGNMENT, True),
        (4 * DATA_ALIGNMENT, True),
        (5 * DATA_ALIGNMENT, False),
        (DATA_ALIGNMENT + 1, False),
        (DATA_ALIGNMENT - 1, False),
        (MAX_HEADER_BYTES, False),
    ],
)
def test_a_header_ends_at_a_page_within_its_file(data_offset: int, is_possible: bool) -> None:
    """D3: a length that no header of this format has is refused before anything is read for it."""
    start = struct.pack("<Q", (data_offset - LENGTH_BYTES) % (1 << 64))
    if data_offset == 0:
        with pytest.raises(DamagedFile, match="impossible"):
            header_bytes(start, 4 * DATA_ALIGNMENT)
    elif is_possible:
        assert header_bytes(start, 4 * DATA_ALIGNMENT) == data_offset
    else:
        with pytest.raises(DamagedFile, match="impossible"):
            header_bytes(start, 4 * DATA_ALIGNMENT)


def test_the_largest_header_is_read_where_the_file_has_room() -> None:
    """D3: the bound of a header is one of the format, whatever the file's size."""
    for data_offset, is_possible in (
        (MAX_HEADER_BYTES, True),
        (MAX_HEADER_BYTES + DATA_ALIGNMENT, False),
    ):
        start = struct.pack("<Q", data_offset - LENGTH_BYTES)
        if is_possible:
            assert header_bytes(start, 1 << 40) == data_offset
        else:
            with pytest.raises(DamagedFile, match="impossible"):
                header_bytes(start, 1 << 40)
    for length in range(LENGTH_BYTES):
        with pytest.raises(DamagedFile, match="ends within"):
            header_bytes(bytes(length), 1 << 40)


def test_a_header_that_is_cut_or_longer_than_it_says_is_damage() -> None:
    """D3: the description is read from exactly the bytes before the data."""
    one = segment()
    data = whole_file(one)
    start = encoded(one)
    for wrong in (start[:-1], start + b" "):
        with pytest.raises(DamagedFile, match=f"{len(wrong)} bytes of a header"):
            decode_description(wrong, len(data))


def test_a_description_that_its_schema_denies_is_damage() -> None:
    """C3: windows that the schema does not have make no layout."""
    one = segment()
    lying = msgspec.structs.replace(
        one.header, spec=msgspec.structs.replace(one.header.spec, windows=(WindowRows(),))
    )
    start = encode_header(lying, layout(PLAIN, one.header.spec), len(one.tokens) // 4)
    with pytest.raises(DamagedFile, match="contradicts its schema"):
        decode_header(start, PLAIN, len(start) + len(one.data) + len(one.tokens))


@pytest.mark.parametrize(
    ("names", "complaint"),
    [(("x", "x"), "'x' is reserved or appears twice"), (("__metadata__",), "reserved")],
)
def test_names_that_a_file_cannot_hold_are_not_written(
    names: tuple[str, ...], complaint: str
) -> None:
    """D1: two tensors of one name would be one tensor to every tool."""
    extents = tuple(Extent(name, "U8", (1,), n, 1) for n, name in enumerate(names))
    header = sample(ImageSpec(ImageKind.OBJECT), None).header
    with pytest.raises(SchemaError, match=complaint):
        encode_header(header, Layout(extents, len(names)), 0)
