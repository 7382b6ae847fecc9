"""The file format: one image behind a safetensors header that describes it.

Bytes in, values out, no I/O; the byte table is in docs/storage-format.md. A file is a header length
(8 bytes, little-endian), a JSON header padded with spaces so that data begins at a multiple of
`DATA_ALIGNMENT`, the image's tensors in layout order without gaps, and the tokens as one more
tensor. The self-description in `__metadata__` carries its own checksum, so that a flipped bit
cannot move an image to another position or namespace; the tensor table is computed again from
schema and description and compared, never trusted.
"""

import hashlib
import re
import struct
from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import FileHeader
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import ImageKind, ImageSpec, Layout, check_spec, layout
from prefixcached.protocol.schema import RESERVED_NAMES, Kind, Schema

FORMAT: Final = 1
"""Version of the format. Files of another version are foreign: kept apart, never read."""

DATA_ALIGNMENT: Final = 16384
"""Data begins at a multiple of it: the page of Apple silicon, so that a file's data can be mapped
and read uncached there; a multiple of Linux's 4096. Costs at most one such page a file."""

MAX_HEADER_BYTES: Final = 16 * limits.MEBIBYTE
"""The largest legal header: MAX_METADATA_BYTES in base64, and a table of MAX_TENSORS."""

LENGTH_BYTES: Final = 8
"""The header's length stands before it."""

TOKENS_NAME: Final = "prefixcached.tokens"
"""Name of the tensor that holds the tokens: U32, shape [tokens]."""

DESCRIPTION_KEY: Final = "prefixcached"
DESCRIPTION_CHECKSUM_KEY: Final = "prefixcached.xxh3"
_FILE_NAME: Final = re.compile(r"([0-9a-f]{32})\.(segment|checkpoint|object)\.safetensors")
_SCHEMA_NAME: Final = re.compile(r"([0-9a-f]{32})\.schema")
_PLAIN_NAME: Final = re.compile(r"[0-9a-f]{32}")


class DamagedFile(Exception):  # noqa: N818  (names a finding about a file, not a fault of code)
    """The file can never be served: torn, altered, or not what its place says. Permanent."""


class ForeignFile(Exception):  # noqa: N818  (as DamagedFile)
    """The file was not written by this version of the program; it is kept apart."""


class Description(msgspec.Struct, frozen=True):
    """What a file's beginning says, before its tensor table has been compared.

    ``data_offset`` is where the image begins in the file, ``data_bytes`` the image's size,
    ``tokens_count`` how many tokens follow it.
    """

    header: FileHeader
    data_offset: int
    data_bytes: int
    tokens_count: int


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Preamble(msgspec.Struct, frozen=True):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


class _Version(msgspec.Struct, frozen=True):
    format: int


_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What JSON that anybody may have written can raise; a thousand nested lists fit in any header."""

_PREAMBLE: Final = msgspec.json.Decoder(_Preamble)
_VERSION: Final = msgspec.json.Decoder(_Version)
_HEADER: Final = msgspec.json.Decoder(FileHeader)
_TABLE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR: Final = msgspec.json.Decoder(_Tensor)


# -- names ---------------------------------------------------------------------------------------


def namespace_directory(namespace: str) -> str:
    """Return the name of a namespace's directory: 32 hex digits of its SHA-256."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


def schema_digest(encoded: bytes) -> str:
    """Return the digest that names an encoded schema, 32 hex digits (XXH3-128); "" for none."""
    return xxhash.xxh3_128_hexdigest(encoded) if encoded else ""


def schema_name(digest: str) -> str:
    """Return the file name of a schema. Its name is its checksum.

    Raises:
        DamagedFile: The digest, which a file may say, is none; as part of a path it could lead out
            of the directory.
    """
    if not _PLAIN_NAME.fullmatch(digest):
        raise DamagedFile(f"{digest!r} is no digest of a schema")
    return f"{digest}.schema"


def parse_schema_name(name: str) -> str | None:
    """Return the digest that a schema's file name carries; None for other names."""
    match = _SCHEMA_NAME.fullmatch(name)
    return match[1] if match else None


def file_name(id: str, kind: ImageKind) -> str:  # noqa: A002  (the field's name everywhere)
    """Return the file name of one image.

    Raises:
        ValueError: The id is not 32 hex digits; as part of a path it could lead out of the
            directory.
    """
    if not _PLAIN_NAME.fullmatch(id):
        raise ValueError(f"{id!r} names no file: 32 lower-case hex digits do")
    return f"{id}.{kind.value}.safetensors"


def parse_file_name(name: str) -> tuple[str, ImageKind] | None:
    """Return id and kind that an image's file name carries; None for other names."""
    match = _FILE_NAME.fullmatch(name)
    return (match[1], ImageKind(match[2])) if match else None


# -- sizes ---------------------------------------------------------------------------------------


def tokens_count(header: FileHeader) -> int:
    """Return how many tokens a file carries.

    A segment carries [position, end), a checkpoint [0, position), an object none.
    """
    match header.kind:
        case ImageKind.SEGMENT:
            return header.spec.end - header.position
        case ImageKind.CHECKPOINT:
            return header.position
        case ImageKind.OBJECT:
            return 0


class ImageSizes:
    """Image sizes under one schema by arithmetic alone, for thousands of headers at start-up."""

    def __init__(self, schema: Schema | None) -> None:
        self._schema = schema
        self._append_token_bytes = schema.append_token_bytes if schema is not None else 0
        self._window_row_bytes = [0] * (len(schema.windows) if schema is not None else 0)
        for tensor in schema.tensors if schema is not None else ():
            if tensor.kind is Kind.WINDOW:
                self._window_row_bytes[tensor.window] += tensor.token_bytes

    def image_bytes(self, spec: ImageSpec) -> int:
        """Return ``layout(schema, spec).nbytes``.

        Raises:
            SchemaError: The description contradicts the schema or itself.
        """
        check_spec(self._schema, spec)
        rows = zip(spec.windows, self._window_row_bytes, strict=False)
        return (
            (spec.end - spec.start) * self._append_token_bytes
            + sum(window.count * row_bytes for window, row_bytes in rows)
            + sum(tensor.nbytes for tensor in spec.tensors)
        )


def file_bytes_bound(header: FileHeader, schema: Schema | None) -> int:
    """Return the most bytes that the file of ``header`` will occupy, in whole pages.

    For reservations before the write. One page is for the file system's own records of where a
    fragmented file lies, which POSIX counts as the file's. Raises SchemaError as `layout`.
    """
    image = layout(schema, header.spec)
    count = tokens_count(header)
    total = len(encode_header(header, image, count)) + image.nbytes + 4 * count
    return (-(-total // DATA_ALIGNMENT) + 1) * DATA_ALIGNMENT


# -- encoding ------------------------------------------------------------------------------------


def encode_header(header: FileHeader, image: Layout, count: int) -> bytes:
    """Return all bytes of the file before its data. Their number does not depend on the checksum.

    Args:
        header: The self-description. Until the checksum is known, any 32 characters stand for it.
        image: Layout of the image.
        count: Number of tokens behind the image.

    Raises:
        SchemaError: A tensor has a name that the format reserves, or the header is too large.
    """
    placeholder = "0" * 32
    header = msgspec.structs.replace(
        header,
        checksum=header.checksum or placeholder,
        tokens_checksum=header.tokens_checksum or placeholder,
    )
    description = msgspec.json.encode(header)
    table: dict[str, object] = {
        "__metadata__": {
            "format": "mlx",
            DESCRIPTION_KEY: description.decode(),
            DESCRIPTION_CHECKSUM_KEY: xxhash.xxh3_128_hexdigest(description),
        }
    }
    for name, dtype, shape, start, end in _expected_table(image, count):
        if name in table:
            raise SchemaError(f"tensor name {name!r} is reserved or appears twice")
        table[name] = _Tensor(dtype, shape, (start, end))
    encoded = msgspec.json.encode(table)
    padded = -(-(LENGTH_BYTES + len(encoded)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    if padded > MAX_HEADER_BYTES:
        raise SchemaError(f"a file header of {padded} bytes; at most {MAX_HEADER_BYTES}")
    length = padded - LENGTH_BYTES
    return struct.pack("<Q", length) + encoded.ljust(length)


def _expected_table(
    image: Layout, count: int
) -> Iterable[tuple[str, str, tuple[int, ...], int, int]]:
    """Name, dtype, shape, first and last byte of every tensor of a file."""
    for extent in image.extents:
        if extent.name in RESERVED_NAMES:
            raise SchemaError(f"tensor name {extent.name!r} is reserved by the file format")
        yield extent.name, extent.dtype, extent.shape, extent.offset, extent.offset + extent.nbytes
    yield TOKENS_NAME, "U32", (count,), image.nbytes, image.nbytes + 4 * count


# -- decoding ------------------------------------------------------------------------------------


def header_bytes(start: bytes, file_bytes: int) -> int:
    """Return how many bytes of the file come before its data, from its first 8 bytes.

    Raises:
        DamagedFile: No header of this format can have that length in a file of that size.
    """
    if len(start) < LENGTH_BYTES:
        raise DamagedFile(f"the file ends within its first {LENGTH_BYTES} bytes")
    data_offset = LENGTH_BYTES + int(struct.unpack_from("<Q", start)[0])
    if data_offset % DATA_ALIGNMENT or data_offset > min(MAX_HEADER_BYTES, file_bytes):
        raise DamagedFile(f"data at byte {data_offset} is impossible in {file_bytes} bytes")
    return data_offset


def decode_description(data: bytes, file_bytes: int) -> Description:
    """Return what the beginning of a file says of it, without its tensor table.

    Args:
        data: The first `header_bytes` bytes of the file.
        file_bytes: Size of the whole file.

    Raises:
        DamagedFile: The header is torn or altered, or contradicts itself or the file's size.
        ForeignFile: A whole description of another format version.
    """
    data_offset = header_bytes(data, file_bytes)
    if len(data) != data_offset:
        raise DamagedFile(f"{len(data)} bytes of a header of {data_offset}")
    try:
        metadata = _PREAMBLE.decode(data[LENGTH_BYTES:]).metadata
    except _UNREADABLE as error:
        raise DamagedFile(f"the header is not JSON of safetensors: {error}") from error
    if DESCRIPTION_KEY not in metadata:
        raise DamagedFile("a safetensors file without a self-description")
    description = metadata[DESCRIPTION_KEY].encode()
    if xxhash.xxh3_128_hexdigest(description) != metadata.get(DESCRIPTION_CHECKSUM_KEY):
        raise DamagedFile("the self-description does not match its checksum")
    try:
        version = _VERSION.decode(description).format
        if version != FORMAT:
            raise ForeignFile(f"format {version}; this version reads format {FORMAT}")
        header = _HEADER.decode(description)
    except _UNREADABLE as error:
        raise DamagedFile(f"the self-description is invalid: {error}") from error
    count = _checked_tokens_count(header)
    data_bytes = file_bytes - data_offset - 4 * count
    if data_bytes < 0:
        raise DamagedFile(f"{count} tokens do not fit in {file_bytes} bytes")
    return Description(header, data_offset, data_bytes, count)


def decode_header(
    data: bytes, schema: Schema | None, file_bytes: int
) -> tuple[Description, Layout]:
    """Return what a file says of itself, with its tensor table compared to the computed layout.

    Arguments as `decode_description`; ``schema`` is the one that the description names, None for an
    object.

    Raises:
        DamagedFile: As `decode_description`, or the table or the sizes are not what schema and
            description say.
        ForeignFile: As `decode_description`.
    """
    description = decode_description(data, file_bytes)
    try:
        image = layout(schema, description.header.spec)
        expected = {
            name: _Tensor(dtype, shape, (start, end))
            for name, dtype, shape, start, end in _expected_table(image, description.tokens_count)
        }
    except SchemaError as error:
        raise DamagedFile(f"the file contradicts its schema: {error}") from error
    if description.data_bytes != image.nbytes:
        raise DamagedFile(f"{description.data_bytes} bytes of data, {image.nbytes} expected")
    try:
        table = _TABLE.decode(data[LENGTH_BYTES:])
        table.pop("__metadata__", None)
        found = {name: _TENSOR.decode(raw) for name, raw in table.items()}
    except _UNREADABLE as error:
        raise DamagedFile(f"the tensor table is invalid: {error}") from error
    if found != expected:
        names = sorted(n for n in found | expected if found.get(n) != expected.get(n))
        raise DamagedFile(f"tensor {names[0]!r} does not lie where the description says")
    return description, image


def _checked_tokens_count(header: FileHeader) -> int:
    spec = header.spec
    if spec.kind is not header.kind:
        raise DamagedFile(f"a {header.kind} that describes a {spec.kind}")
    if header.kind is ImageKind.SEGMENT:
        consistent = spec.start <= header.position <= spec.end
    else:
        consistent = spec.start == spec.end == header.position
    if not consistent or header.position < 0 or len(header.checksum) != 32:
        raise DamagedFile(f"position {header.position} contradicts {spec.start}..{spec.end}")
    return tokens_count(header)
