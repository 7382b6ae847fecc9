"""The trace file: what it replaces and refuses, and what a damaged one still gives."""

import os
import stat
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from prefixcached.daemon.commands.trace import line_of
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.trace.trace_file import (
    FORMAT,
    MAGIC,
    Header,
    Record,
    TraceError,
    TraceWriter,
    encoded,
    reading,
)

HEADER = Header(format=FORMAT, version="1", started=5.0, tokens="digests", config={"a": 1})
RECORDS = [
    Record(0.5, "session->ram_tier", "1.1", {"type": "call", "session": 1, "request": {"x": b"y"}}),
    Record(0.7, "ram_tier->session", "1.1", {"type": "length", "length": 3}),
    Record(0.9, "ssd_tier->ram_tier", "", {"type": "freed", "images": [1, 2, {"a": None}]}),
]


def written(path: Path, records: list[Record] = RECORDS) -> Path:
    writer = TraceWriter(path, HEADER)
    writer.append([encoded(record) for record in records])
    writer.close()
    return path


def read(path: Path) -> tuple[Header, list[Record]]:
    with reading(path) as (header, records):
        return header, list(records)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Header and records come back as they were."""
    assert read(written(tmp_path / "t")) == (HEADER, RECORDS)


def test_a_header_with_a_path_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    """A trace starts whatever the configuration's paths are."""
    header = msgspec.structs.replace(HEADER, config={"state_dir": "/n\udcff"})
    TraceWriter(tmp_path / "t", header).close()
    assert read(tmp_path / "t")[0].config == {"state_dir": "/n\ufffd"}


def test_a_call_is_known_by_its_request(tmp_path: Path) -> None:
    """What people ask for by type is the request; who asked is in the flow."""
    _, (call, reply, freed) = read(written(tmp_path / "t"))
    assert (call.body, call.session) == ({"x": b"y"}, 1)
    assert (reply.type, reply.session) == ("length", 1)
    assert (freed.type, freed.session) == ("freed", 0)


def test_a_trace_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    """A killed daemon leaves half a record; all before it is whole."""
    path = written(tmp_path / "t")
    data = path.read_bytes()
    ends = [len(data)]
    for record in reversed(RECORDS):
        ends.append(ends[-1] - len(encoded(record)))
    for length in range(ends[-1], len(data)):
        path.write_bytes(data[:length])
        whole = sum(length >= end for end in ends[:-1])
        assert read(path)[1] == RECORDS[:whole], length


def test_a_trace_without_its_header_is_named(tmp_path: Path) -> None:
    """A daemon that died at once left nothing to read, which is no puzzle."""
    path = written(tmp_path / "t")
    path.write_bytes(path.read_bytes()[: len(MAGIC) + 3])
    with pytest.raises(TraceError, match="ends within its header"):
        read(path)


@pytest.mark.parametrize("damage", [b"\xc1", msgpack.packb({"a": 1}), msgpack.packb([1, 2])])
def test_damage_is_named_with_its_place(tmp_path: Path, damage: bytes) -> None:
    """Records before it are given out; then it is said where it begins."""
    path = written(tmp_path / "t")
    place = path.stat().st_size
    with path.open("ab") as file:
        file.write(damage)
    with reading(path) as (_, records):
        assert [next(records) for _ in RECORDS] == RECORDS
        with pytest.raises(TraceError, match=f"damaged at byte {place}:"):
            next(records)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no trace"),
        (b"some text", "is no trace"),
        (MAGIC + msgpack.packb({"format": FORMAT + 1}), f"has format {FORMAT + 1}"),
        (MAGIC + msgpack.packb({"format": FORMAT}), "damaged at its beginning"),
        (MAGIC + msgpack.packb([1]), "has format None"),
    ],
)
def test_no_trace_of_ours_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """It is said whether it is something else, another version's, or broken."""
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read(path)


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    """0600 whatever the umask, also where an older trace was open to all."""
    path = written(tmp_path / "t")
    path.chmod(0o666)
    written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_older_trace_is_replaced(tmp_path: Path) -> None:
    """Nothing of it stays behind the new one."""
    path = written(tmp_path / "t")
    assert read(written(path, RECORDS[:1]))[1] == RECORDS[:1]


def test_an_empty_file_is_taken(tmp_path: Path) -> None:
    """As `mktemp` makes it."""
    path = tmp_path / "t"
    path.touch()
    assert read(written(path))[1] == RECORDS


def _text(path: Path) -> None:
    path.write_text("my thesis")


def _link(path: Path) -> None:
    other = path.with_name("other")
    written(other)
    path.symlink_to(other)


@pytest.mark.parametrize(
    ("make", "says"),
    [(_text, "is no trace; name another"), (_link, "cannot write"), (os.mkfifo, "no regular file")],
)
def test_what_is_no_trace_is_never_overwritten(tmp_path: Path, make: Any, says: str) -> None:
    """A slip of the shell's completion must not cost a file."""
    path = tmp_path / "t"
    make(path)
    before = path.lstat()
    with pytest.raises(StartError, match=says):
        TraceWriter(path, HEADER)
    assert path.lstat().st_size == before.st_size
    assert path.lstat().st_mode == before.st_mode


def test_two_daemons_cannot_write_one_trace(tmp_path: Path) -> None:
    """The second says so; the first goes on."""
    path = tmp_path / "t"
    writer = TraceWriter(path, HEADER)
    with pytest.raises(StartError, match="another daemon writes"):
        TraceWriter(path, HEADER)
    writer.append([encoded(RECORDS[0])])
    writer.close()
    assert read(path)[1] == RECORDS[:1]


def test_nothing_in_a_trace_moves_the_cursor_or_forges_a_line() -> None:
    """A trace may be anybody's: what is not printable is not printed."""
    body = {"type": "take\nforged", "namespace": "\x1b[2J"}
    line = line_of(Record(1.0, "a\x1b]0;title\x07", "1.1", body))
    assert line.isprintable()
    assert "forged" in line
