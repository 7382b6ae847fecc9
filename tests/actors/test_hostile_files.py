"""Files that somebody made to fit, checksums and all: findings of the fuzzer (tests/fuzz)."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from prefixcached.actors.storage_format import (
    DATA_ALIGNMENT,
    DESCRIPTION_CHECKSUM_KEY,
    DESCRIPTION_KEY,
    LENGTH_BYTES,
)
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import METER_NAME, SEGMENTS
from prefixcached.actors.write_policy import WriteMeter
from tests.support.filesystems import QuickFs, scratch_directory
from tests.support.store_samples import segment

DEEP = "[" * 5000 + "]" * 5000
"""More lists in each other than a parser goes down."""


@pytest.fixture
def store() -> Iterator[Store]:
    """A store with two segments."""
    with scratch_directory() as root:
        opened = Store(root / "state", QuickFs(), min_free_bytes=0)
        opened.prepare()
        for seed in (1, 2):
            one = segment(seed=seed)
            image = one.image()
            opened.write(one.header, one.tokens, one.schema, image)
            image.free()
        yield opened
        opened.close()


def forged(content: bytes, description: str) -> bytes:
    """A file with another description, whose checksum is right."""
    (length,) = struct.unpack_from("<Q", content)
    table = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length])
    table["__metadata__"][DESCRIPTION_KEY] = description
    table["__metadata__"][DESCRIPTION_CHECKSUM_KEY] = xxhash.xxh3_128_hexdigest(
        description.encode()
    )
    header = json.dumps(table)
    whole = -(-(LENGTH_BYTES + len(header)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    start = struct.pack("<Q", whole - LENGTH_BYTES) + header.encode()
    return start.ljust(whole) + content[LENGTH_BYTES + length :]


@pytest.mark.parametrize(
    "description", [DEEP, f'{{"format":1,"unknown":{DEEP}}}', f'{{"format":1,"spec":{DEEP}}}']
)
def test_a_description_deeper_than_any_parser_goes_ends_no_scan(
    store: Store, description: str
) -> None:
    """D3: it is damage of that file, which is put aside; a daemon that met it could not start."""
    victim, other = sorted(Path(store.directory.path, SEGMENTS).glob("*/*.safetensors"))
    victim.write_bytes(forged(victim.read_bytes(), description))
    scan = store.scan()
    entries = [entry for batch in scan for entry in batch.entries]
    assert [Path(entry.path).name for entry in entries] == [other.name]
    assert scan.damaged == 1
    assert not victim.exists()


@pytest.mark.parametrize(
    "content", [f'{{"hours":{{}},"x":{DEEP[4000:6000]}}}', '{"hours":{"1":-5}}']
)
def test_a_write_meter_that_somebody_made_counts_as_nothing_written(
    store: Store, content: str
) -> None:
    """D6: no file keeps a daemon from starting, and none gives it more to write than its budget."""
    Path(store.directory.path, METER_NAME).write_text(content)
    meter = WriteMeter(100, store.load_meter())
    assert meter.written_bytes(7200.0) == 0
    assert not meter.allows(101, 7200.0)
