"""Reading files of the store: whatever stands in a file's place is damage or gone, never lent."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from prefixcached.actors import memory
from prefixcached.actors.reading import (
    CACHED_SCHEMAS,
    READ_BYTES,
    Identity,
    Reader,
    VerifiedFile,
)
from prefixcached.actors.storage_format import (
    DATA_ALIGNMENT,
    FORMAT,
    DamagedFile,
    encode_header,
    schema_digest,
    schema_name,
)
from prefixcached.actors.store import Store
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import FileEntry
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor, layout
from prefixcached.protocol.schema import Schema, decode_schema
from tests.support.filesystems import QuickFs
from tests.support.store_samples import path_of, sample, schema_of, segment, write


class ChangingFs(QuickFs):
    """The real file system; something may happen between the header's reading and the data's."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] | None = None

    def advise_read(self, descriptor: int, offset: int, count: int) -> None:
        if self.meanwhile is not None:
            self.meanwhile()
        super().advise_read(descriptor, offset, count)


@pytest.fixture
def system() -> ChangingFs:
    """A file system that the test can interfere with."""
    return ChangingFs()


@pytest.fixture
def store(tmp_path: Path, system: ChangingFs) -> Iterator[Store]:
    """A prepared store in a directory of its own."""
    store = Store(tmp_path / "state", system, min_free_bytes=0)
    store.prepare()
    yield store
    store.close()


def load(store: Store, entry: FileEntry, nbytes: int | None = None) -> None:
    image = memory.create(entry.data_bytes if nbytes is None else nbytes)
    try:
        store.reader.load(entry, image)
    finally:
        image.free()


def assert_damaged(store: Store, entry: FileEntry, complaint: str) -> None:
    """Neither lent nor promoted."""
    with pytest.raises(DamagedFile, match=complaint):
        store.reader.verify(entry)
    with pytest.raises(DamagedFile, match=complaint):
        load(store, entry)


def test_a_file_of_another_format_in_its_place_is_damage(store: Store) -> None:
    """D3: a newer version's file is foreign to the scan, but not what the index knows here."""
    one = segment()
    entry = write(store, one)
    newer = msgspec.structs.replace(entry.header, format=FORMAT + 1)
    header = encode_header(newer, layout(schema_of(one), newer.spec), len(one.tokens) // 4)
    path_of(store, entry).write_bytes(header + one.data + one.tokens)
    assert_damaged(store, entry, "another file stands in its place")


def test_another_whole_file_in_its_place_is_damage(store: Store) -> None:
    """N1, D3: a good file of the same size that says something else is not served for it."""
    entry, other = write(store, segment(seed=0)), write(store, segment(seed=1))
    path_of(store, other).replace(path_of(store, entry))
    assert_damaged(store, entry, "not the one that the index knows")


def test_tokens_are_compared_with_those_of_the_index(store: Store) -> None:
    """N1: KV is lent for exactly the tokens that it was computed from."""
    entry = write(store, segment())
    wrong = msgspec.structs.replace(entry, tokens=bytes(len(entry.tokens)))
    assert_damaged(store, wrong, "the tokens are not those that the index knows")


def test_a_file_that_becomes_shorter_while_it_is_read_is_damage(
    store: Store, system: ChangingFs
) -> None:
    """D3: what ends early was not read whole."""
    entry = write(store, segment())
    path = path_of(store, entry)
    whole = path.read_bytes()
    for read in (store.reader.verify, lambda entry: load(store, entry)):
        path.write_bytes(whole)
        system.meanwhile = lambda: os.truncate(path, entry.data_offset + 1)
        with pytest.raises(DamagedFile, match="end"):
            read(entry)
        system.meanwhile = None
    path.write_bytes(whole)
    store.reader.verify(entry).close()


def test_a_file_that_always_changes_is_no_damage(store: Store, system: ChangingFs) -> None:
    """D4: who cannot read a file in peace says so, and the file stays."""
    entry = write(store, segment())
    times = iter(range(1, 100))
    system.meanwhile = lambda: os.utime(path_of(store, entry), (0, next(times)))
    with pytest.raises(OSError, match="changes while it is read"):
        store.reader.verify(entry)
    system.meanwhile = None
    assert path_of(store, entry).exists()


def test_reads_may_return_less_than_was_asked_for(tmp_path: Path) -> None:
    """D3: a file is verified whole, however few bytes the system gives at a time."""

    class ShortFs(QuickFs):
        def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
            return super().read(descriptor, buffer[:3], offset)

    store = Store(tmp_path / "short", ShortFs(), min_free_bytes=0)
    store.prepare()
    try:
        entry = write(store, segment())
        fresh_reader(store).verify(entry).close()
    finally:
        store.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_changed_meanwhile_is_read_again(
    store: Store, system: ChangingFs, times: int
) -> None:
    """D3: our own touch while a file is verified costs another reading, nothing else."""
    entry = write(store, segment())
    touched: list[int] = []

    def touch_now_and_then() -> None:
        if len(touched) < times:
            touched.append(len(touched))
            os.utime(path_of(store, entry), (0, len(touched)))

    system.meanwhile = touch_now_and_then
    store.reader.verify(entry).close()
    assert len(touched) == times


def test_memory_of_another_size_is_the_callers_mistake(store: Store) -> None:
    """A promotion into memory that does not fit is refused before a byte is copied."""
    entry = write(store, segment())
    with pytest.raises(ValueError, match=f"{entry.data_bytes + 1} bytes of memory"):
        load(store, entry, entry.data_bytes + 1)


def test_an_image_of_many_reads_is_checked_to_its_end(store: Store) -> None:
    """D3: the last byte of the last read counts as the first of the first does."""
    size = 2 * READ_BYTES + 1
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("x", "U8", (size,)),))
    entry = write(store, sample(spec, None))
    steps: list[None] = []
    store.reader.verify(entry, step=lambda: steps.append(None)).close()
    assert len(steps) == 3
    for position in (0, READ_BYTES, size - 1):
        with path_of(store, entry).open("r+b") as file:
            file.seek(entry.data_offset + position)
            byte = file.read(1)
            file.seek(entry.data_offset + position)
            file.write(bytes([byte[0] ^ 1]))
        assert_damaged(store, entry, "does not match its checksum")
        with path_of(store, entry).open("r+b") as file:
            file.seek(entry.data_offset + position)
            file.write(byte)
    store.reader.verify(entry).close()


def test_a_header_longer_than_a_page_is_read_whole(store: Store) -> None:
    """D1: metadata may make a header long; it is found, verified and loaded like any other."""
    spec = ImageSpec(
        ImageKind.OBJECT,
        tensors=(StateTensor("x", "U8", (9,)),),
        metadata=bytes(range(256)) * (DATA_ALIGNMENT // 128),
    )
    entry = write(store, sample(spec, None))
    assert entry.data_offset > DATA_ALIGNMENT
    assert [found for batch in store.scan() for found in batch.entries] == [entry]
    store.reader.verify(entry).close()
    load(store, entry)


def test_a_close_that_fails_is_no_failure_of_the_reader(store: Store) -> None:
    """D7: what a volume that is gone says to a close comes too late for anybody."""
    file = store.reader.verify(write(store, segment()))
    os.close(file.descriptor)
    file.close()
    assert file.descriptor == -1


# -- schemas ---------------------------------------------------------------------------------------


def fresh_reader(store: Store) -> Reader:
    """A reader that has no schema in memory yet."""
    return Reader(store.directory)


def schema_file(store: Store, entry: FileEntry) -> Path:
    return path_of(store, entry).with_name(schema_name(entry.header.schema_digest))


def test_without_its_schema_a_file_cannot_be_checked(store: Store) -> None:
    """D1: losing a namespace's schema file is no transient error for the files that need it."""
    entry = write(store, segment())
    fresh_reader(store).verify(entry).close()
    schema_file(store, entry).unlink()
    with pytest.raises(DamagedFile, match="the schema's file is gone"):
        fresh_reader(store).verify(entry)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "does not match its name"),
        (b"\x80", "does not match its name"),
        (bytes(limits.MAX_SCHEMA_BYTES), "does not match its name"),
        (bytes(limits.MAX_SCHEMA_BYTES + 1), f"a schema of {limits.MAX_SCHEMA_BYTES + 1} bytes"),
    ],
    ids=["empty", "other", "long", "too long"],
)
def test_a_schema_that_is_not_what_its_name_says_is_damage(
    store: Store, content: bytes, complaint: str
) -> None:
    """N4: a file is never read by the schema of another model."""
    entry = write(store, segment())
    schema_file(store, entry).write_bytes(content)
    with pytest.raises(DamagedFile, match=complaint):
        fresh_reader(store).verify(entry)


def test_a_schema_that_is_none_is_damage(store: Store) -> None:
    """C3: bytes that are named rightly may still be no schema."""
    entry = write(store, segment())
    junk = b"\xc1 no schema"
    digest = schema_digest(junk)
    schema_file(store, entry).with_name(schema_name(digest)).write_bytes(junk)
    header = msgspec.structs.replace(entry.header, schema_digest=digest)
    with pytest.raises(DamagedFile, match="not an encoded schema"):
        fresh_reader(store).verify(msgspec.structs.replace(entry, header=header))


def test_a_reader_keeps_as_many_schemas_as_it_may(store: Store) -> None:
    """E1: models come and go; the schema remembered first is the first to be read again."""
    one = segment()
    entry = write(store, one)
    reader = fresh_reader(store)
    reader.remember_schema(entry.header.schema_digest, decode_schema(one.schema))
    schema_file(store, entry).unlink()
    for number in range(CACHED_SCHEMAS - 1):
        reader.remember_schema(f"{number}", Schema())
    reader.verify(entry).close()
    reader.remember_schema("one more", Schema())
    with pytest.raises(DamagedFile, match="the schema's file is gone"):
        reader.verify(entry)


def test_threads_share_the_cache_of_schemas(store: Store) -> None:
    """F2: files of more models than are kept are verified in several threads at once."""
    reader = fresh_reader(store)
    schema = Schema()

    def remember(thread: int) -> None:
        for number in range(20_000):
            reader.remember_schema(f"{thread}-{number}", schema)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as threads:
            assert list(threads.map(remember, range(4))) == [None] * 4
    finally:
        sys.setswitchinterval(interval)


def test_a_file_closed_twice_is_closed_once(store: Store) -> None:
    """L1: the second closing must not close what has the descriptor's number by then."""
    file = store.reader.verify(write(store, segment()))
    other = file.duplicate(store.directory.filesystem)
    number = file.descriptor
    file.close()
    with open(os.devnull, "rb") as unrelated:
        os.dup2(unrelated.fileno(), number)
    try:
        file.close()
        os.fstat(number)
        assert os.pread(other.descriptor, 1, 0)
    finally:
        os.close(number)
        other.close()


def test_descriptor_0_is_closed_once_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: a daemon without standard input is given 0 for a file, and a closed file names none."""
    closed: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", closed.append)
        file = VerifiedFile(0, 0, Identity(0, 0, 0, 0))
        file.close()
        file.close()
    assert closed == [0]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_changes_while_it_is_touched_is_verified_again(
    tmp_path: Path, change: int
) -> None:
    """D3: our own new time hides no other's change, whether the file grew or shrank."""

    class Touching(QuickFs):
        def touch(self, descriptor: int, nanoseconds: int) -> None:
            os.truncate(path, path.stat().st_size + change)
            super().touch(descriptor, nanoseconds)

    store = Store(tmp_path / "state", Touching(), min_free_bytes=0)
    store.prepare()
    entry = write(store, segment())
    path = path_of(store, entry)
    file = store.reader.verify(entry)
    file.close()
    assert store.reader.touch(entry, 10**18, file.identity) is None
    store.close()
