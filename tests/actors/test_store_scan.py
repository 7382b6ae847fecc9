"""Start-up with many files (rule D10)."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash

from prefixcached.actors.storage_format import (
    encode_header,
    file_name,
    namespace_directory,
    schema_digest,
    schema_name,
)
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import SEGMENTS
from prefixcached.protocol.image import ImageKind, ImageSpec, layout
from prefixcached.protocol.schema import Kind, Schema, TensorSpec, encode_schema
from tests.support.filesystems import QuickFs, scratch_directory
from tests.support.store_samples import sample

FILES = 10_000
SECONDS = 3.0


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A quick directory."""
    with scratch_directory() as path:
        yield path


@pytest.mark.slow
def test_ten_thousand_files_are_indexed_in_three_seconds(scratch: Path) -> None:
    """D10: headers of 60 tensors, in processor time, so that other load does not count."""
    schema = Schema(
        tensors=tuple(
            TensorSpec(f"layers.{layer}.{name}", Kind.APPEND, "BF16", (1, 3, 1), 2)
            for layer in range(30)
            for name in ("keys", "values")
        )
    )
    spec = ImageSpec(ImageKind.SEGMENT, 0, 256)
    one = sample(spec, schema)
    image = layout(schema, spec)
    body = one.data + one.tokens
    store = Store(scratch / "state", QuickFs())
    store.prepare()
    directory = Path(store.directory.path, SEGMENTS, namespace_directory("demo"))
    directory.mkdir()
    encoded = encode_schema(schema)
    (directory / schema_name(schema_digest(encoded))).write_bytes(encoded)
    same = msgspec.structs.replace(
        one.header,
        checksum=xxhash.xxh3_128_hexdigest(body),
        tokens_checksum=xxhash.xxh3_128_hexdigest(one.tokens),
    )
    for number in range(FILES):
        header = msgspec.structs.replace(same, id=f"{number:032x}")
        data = encode_header(header, image, 256)
        (directory / file_name(header.id, header.kind)).write_bytes(data + body)
    started = time.process_time()
    scan = store.scan()
    entries = [entry for batch in scan for entry in batch.entries]
    assert time.process_time() - started < SECONDS
    assert len({entry.header.id for entry in entries}) == FILES
    assert scan.damaged == scan.unreadable == store.waste.foreign_files == 0
    store.reader.verify(entries[0]).close()
    store.close()
