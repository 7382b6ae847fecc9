"""Target `files`: a state directory that anybody may have changed (D1, D3, D4, D10).

A store is written once. Each input damages copies of its files, in any byte or with a hostile
writer's care for checksums; then they are scanned, verified, loaded and indexed. Accidents are
never served as data; nothing but `DamagedFile` and OSError comes out of a file, and nothing at all
out of the scan or the index.
"""

import json
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog.testing
import xxhash

from prefixcached.actors import memory
from prefixcached.actors.reading import VerifiedFile
from prefixcached.actors.storage_format import (
    DESCRIPTION_CHECKSUM_KEY,
    DESCRIPTION_KEY,
    LENGTH_BYTES,
    DamagedFile,
)
from prefixcached.actors.store import Store
from prefixcached.actors.write_policy import WriteMeter
from prefixcached.protocol import messages as m
from prefixcached.protocol.actor_messages import FileEntry, Loaded
from tests.fuzz.choices import Choices
from tests.support.core import Core, small_config
from tests.support.core_checks import check_core
from tests.support.descriptors import open_descriptors
from tests.support.filesystems import QuickFs, scratch_directory
from tests.support.store_samples import Sample, checkpoint, every_kind, segment

_PLAIN_CHILD: Final = 11
"""Where the child of the first sample ends."""


_DEEP: Final = b'{"hours":{},"x":' + b"[" * 2000 + b"]" * 2000 + b"}"
"""JSON that fits into the write meter and into no parser's recursion."""


class _Written(msgspec.Struct, frozen=True):
    """What the undamaged store has: the bytes of each file, and what each image holds by its id."""

    files: dict[str, bytes]
    contents: dict[str, bytes]


@cache
def _original() -> _Written:
    parent = segment()
    child = segment(7, _PLAIN_CHILD, seed=9, parent=parent.header.id)
    samples: tuple[Sample, ...] = (*every_kind(), child, checkpoint(7, seed=6))
    with scratch_directory() as root:
        store = Store(root / "state", QuickFs(), min_free_bytes=0)
        store.prepare()
        for one in samples:
            image = one.image()
            store.write(one.header, one.tokens, one.schema, image)
            image.free()
        meter = WriteMeter(1 << 20)
        meter.record(5, 7200.0)
        store.save_meter(meter.encode())
        store.close()
        files = {
            str(path.relative_to(root / "state")): path.read_bytes()
            for path in sorted((root / "state").rglob("*"))
            if path.is_file()
        }
    # Names of namespaces are hashes and ids are drawn from seeds: always the same files.
    return _Written(files, {one.header.id: one.data + one.tokens for one in samples})


def run(data: bytes) -> None:
    """Damage a copy of the store as ``data`` chooses, and use it."""
    choices = Choices(data)
    before = open_descriptors()
    with structlog.testing.capture_logs(), scratch_directory() as root:
        state = root / "state"
        is_honest = _lay_out(choices, state)
        store = Store(state, QuickFs(), min_free_bytes=0)
        try:
            if _prepare(store):
                _use(choices, store, is_honest=is_honest)
        finally:
            store.close()
    # What earlier tests left to the collector may be closed meanwhile.
    assert not open_descriptors() - before, "a descriptor was left"


# -- damage ----------------------------------------------------------------------------------------


def _lay_out(choices: Choices, state: Path) -> bool:
    """Write the changed files; return whether no checksum was made to fit."""
    files = dict(_original().files)
    is_honest = True
    aside: list[tuple[str, int]] = []
    for _ in range(choices.below(5) + 1):
        name = choices.pick(sorted(files))
        match choices.below(8):
            case 0:
                # Most of a small file is its header.
                place = len(files[name]) - choices.pick((1 << 20, 600, 40))
                head, tail = files[name][: max(0, place)], files[name][max(0, place) :]
                files[name] = head + choices.damaged(tail)
            case 1:
                files[name] = files[name][: choices.below(len(files[name]) + 1)]
            case 2:
                files[name] = files[choices.pick(sorted(files))]
            case 3:
                aside.append((name, choices.below(4)))
            case 4:
                folder = name.rpartition("/")[0] or "."
                files[f"{folder}/{_name(choices)}"] = files[name]
            case 5:
                files[name] = choices.pick((b"", b"{}", _DEEP)) or choices.blob(255)
            case _:
                forged = _forged(choices, files[name])
                is_honest &= forged == files[name]
                files[name] = forged
    for name, content in files.items():
        path = state / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(content)
    for name, what in aside:
        _put_aside(state / name, what)
    return is_honest


def _name(choices: Choices) -> str:
    return choices.pick((
        "tmp-1", "x", f"{choices.below(256):032x}.segment.safetensors", f"{1:032x}.schema",
        f"{2:032x}.object.safetensors", f"{3:032x}.checkpoint.safetensors", "lock", ".hidden",
    ))  # fmt: skip


def _forged(choices: Choices, content: bytes) -> bytes:
    """A file whose description says something else, with checksums that fit."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        table = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length])
        description = json.loads(table["__metadata__"][DESCRIPTION_KEY])
    except (ValueError, struct.error, KeyError, TypeError, RecursionError):
        return content
    if not isinstance(table["__metadata__"], dict) or not isinstance(description, dict):
        return content
    body = content[LENGTH_BYTES + length :]
    if choices.one_in(3):
        body = choices.damaged(body)
    for _ in range(choices.below(3)):
        description = _plain(choices.changed(description))
    if isinstance(description, dict) and choices.one_in(2):
        description["checksum"] = xxhash.xxh3_128_hexdigest(body)
    text = json.dumps(description)
    if choices.one_in(8):
        text = choices.pick(('{"format":1,"x":', "")) + "[" * 5000 + "]" * 5000 + "}"
    table["__metadata__"] = {
        **table["__metadata__"], DESCRIPTION_KEY: text,
        DESCRIPTION_CHECKSUM_KEY: xxhash.xxh3_128_hexdigest(text.encode("utf-8", "replace")),
    }  # fmt: skip
    if choices.one_in(3):
        table = _plain(choices.changed(table))
    header = json.dumps(table).encode("utf-8", "replace")
    if choices.one_in(8):
        header = header[:-1] + b',"deep":' + b"[" * 4000 + b"]" * 4000 + b"}"
    # Data begins at a page still, as the format wants.
    padded = -(-(LENGTH_BYTES + len(header)) // 16384) * 16384 - LENGTH_BYTES
    return struct.pack("<Q", padded) + header.ljust(padded) + body


def _plain(value: Any) -> Any:
    """``value`` as JSON can carry it."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _put_aside(path: Path, what: int) -> None:
    """Put something that is no file in its place."""
    if not path.is_file() or path.is_symlink():
        return
    path.unlink()
    match what:
        case 0:
            path.symlink_to("/etc/hostname")
        case 1:
            path.mkdir()
        case 2:
            os.mkfifo(path)
        case _:
            pass


# -- use -------------------------------------------------------------------------------------------


def _prepare(store: Store) -> bool:
    """Whether the directory can be used at all: no pipe or link where a part of it should be."""
    try:
        store.prepare()
    except OSError:
        return False
    return True


def _use(choices: Choices, store: Store, *, is_honest: bool) -> None:
    try:
        stored = store.load_meter()
    except OSError:
        stored = b""
    meter = WriteMeter(1 << 20, stored)
    assert meter.written_bytes(7200.0) >= 0
    assert WriteMeter(None, meter.encode()).written_bytes(7200.0) == meter.written_bytes(7200.0)
    schemas: dict[str, bytes] = {}
    entries: list[FileEntry] = []
    core = Core(small_config(ssd_bytes=1 << 26), is_loaded=False)
    for batch in store.scan():
        entries += batch.entries
        schemas.update(batch.schemas)
        core.send(Loaded(batch.entries, batch.schemas))
    assert len({entry.path for entry in entries}) == len(entries)
    core.send(Loaded((), done=True))
    check_core(core)
    for entry in entries:
        _read(store, entry, is_honest=is_honest)
        if entry.header.kind != "object":
            name, prompt = entry.header.namespace, entry.tokens + b"\0" * 4
            length = core.reply(1, m.Peek(name, prompt)).length
            assert 0 <= length < len(prompt) // 4
            core.reply(1, m.Explain(name, prompt))
    core.reply(1, m.List())
    if choices.one_in(2):
        core.call(1, m.Clear())
        check_core(core)


def _read(store: Store, entry: FileEntry, *, is_honest: bool) -> None:
    """Verify one file and load it; both say the same, and what they give is what was stored."""
    verified: VerifiedFile | None = None
    try:
        verified = store.reader.verify(entry)
        found = os.pread(
            verified.descriptor, entry.data_bytes + len(entry.tokens), verified.data_offset
        )
    except (DamagedFile, OSError):
        found = None
    finally:
        if verified is not None:
            verified.close()
    if entry.data_bytes > 1 << 24:
        return  # a sparse one, which nobody lends memory to in a test
    image = memory.create(entry.data_bytes)
    try:
        store.reader.load(entry, image)
        image.seal()
        assert found is not None, "loaded, although it could not be verified"
        loaded = os.pread(image.descriptor, entry.data_bytes, 0)
        assert loaded == found[: entry.data_bytes]
    except (DamagedFile, OSError):
        assert found is None, "verified, although it could not be loaded"
    finally:
        image.free()
    if is_honest and found is not None:
        assert found == _original().contents[entry.header.id], "damage was served as data"
