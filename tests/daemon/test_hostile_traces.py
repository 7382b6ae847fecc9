"""A trace may be anybody's: what in it could reach files, memory, processes or the terminal."""

import tempfile
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import trio

from prefixcached.daemon import config
from prefixcached.daemon.commands.replay import MAX_OPTION_CHARACTERS, chosen_options
from prefixcached.daemon.commands.trace import opened
from prefixcached.daemon.options import Options
from prefixcached.daemon.trace.followed_mailboxes import FollowedInbox
from prefixcached.daemon.trace.following import FollowingTracer
from prefixcached.daemon.trace.guide import Followed, Guide
from prefixcached.daemon.trace.replay_steps import Send, steps_of
from prefixcached.daemon.trace.trace_file import (
    FORMAT,
    MAX_TURN_SECONDS,
    Header,
    Record,
    TraceError,
    TraceWriter,
    encoded,
    reading,
)
from prefixcached.daemon.trace.tracer import OWN, REQUESTS
from prefixcached.daemon.trace.turn_clock import FollowingClock
from prefixcached.daemon.trace.turns import outcomes_of, turns_of
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import Envelope
from prefixcached.protocol.image import ImageKind, ImageSpec
from tests.daemon.command_line import invoke

HEADER = Header(
    format=FORMAT,
    version="1",
    started=5.0,
    tokens="digests",
    config={"options": {"ram_bytes": "1MiB", "ssd_bytes": "0"}},
)
OBJECT = {"type": "offer-object", "namespace": "n", "key": "k"}
WAKE = Record(1.0, OWN, "", {"type": "turn", "now": 5.0, "wake": True})


def written(path: Path, *records: Record, header: Header = HEADER) -> Path:
    writer = TraceWriter(path, header)
    writer.append([encoded(record) for record in records])
    writer.close()
    return path


def call(request: dict[str, Any]) -> Record:
    message = {"type": "call", "session": 1, "request": request}
    return Record(1.0, REQUESTS, "1.1", message)


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "image", ["/home/victim/x", "../../x", "a\0b", "", "z" * 32, "A" * 32, "0" * 32 + "\n"]
)
@pytest.mark.parametrize("command", ["trace", "replay"])
def test_an_image_is_called_only_what_a_daemon_calls_it(
    tmp_path: Path, command: str, image: str
) -> None:
    """D9: a replay names its files by the record's ids; one that is none is damage, exit code 1."""
    path = written(tmp_path / "t", Record(1.0, OWN, "", {"type": "new-image", "id": image}))
    result = invoke(command, str(path))
    assert result.exit_code == 1
    assert f"{path} is damaged at byte" in result.output.strip().splitlines()[-1]


async def test_a_write_that_failed_brings_no_path() -> None:
    """D9: RamTier deletes and reads files by their entries' paths; the record's are never told."""
    header = inner.FileHeader(
        1, "a" * 32, ImageKind.OBJECT, "n", ImageSpec(ImageKind.OBJECT, 0, 0), key="k"
    )
    entry = inner.FileEntry(header, "../../victim", b"", 0, 1, 1)
    told = inner.Written("a" * 32, entry, error="the disk failed")
    plain = msgspec.to_builtins(told, builtin_types=(bytes,))
    records = [
        Record(1.0, "ssd_tier->ram_tier", "", plain),
        Record(1.0, OWN, "", {"type": "turn", "now": 5.0}),
        WAKE,
    ]
    ended: list[Followed] = []
    sessions: dict[int, int] = {}
    guide = Guide(turns_of(records), outcomes_of(records), ended.append)
    _outbox, inbox = trio.open_memory_channel[Envelope](9)
    followed = FollowedInbox(inbox, guide, FollowingClock(), sessions.get, lambda _: None)
    with trio.fail_after(30):
        assert (await followed.receive()).message == inner.SyncAll()
    assert "failed and has a file" in ended[0].reason


def test_no_recorded_option_names_a_place() -> None:
    """The other way to a path: the state directory and the port are the replay's own."""
    recorded = {
        "state_dir": "/home/victim", "metrics_port": 1, "config": "/x", "socket": "/x",
        "trace": "/x", "log_file": "/x", "retention": "lru",
    }  # fmt: skip
    header = msgspec.structs.replace(HEADER, config={"options": recorded})
    assert chosen_options(header, {}, None) == {"retention": "lru"}


# -- processes and memory ----------------------------------------------------------------------


@pytest.mark.parametrize("value", ["lru\0--socket", "x" * (MAX_OPTION_CHARACTERS + 1)])
def test_an_option_that_no_process_can_be_given_is_damage(tmp_path: Path, value: str) -> None:
    """One line that blames the configuration, exit code 1."""
    header = msgspec.structs.replace(HEADER, config={"options": {"retention": value}})
    result = invoke("replay", str(written(tmp_path / "t", header=header)))
    assert result.exit_code == 1
    assert result.output.startswith("Error: the trace's configuration is damaged: option 'retent")


@pytest.mark.parametrize("size", [-1, limits.MAX_METADATA_BYTES + 1, 10**12, 2**62])
def test_metadata_is_as_large_as_the_protocol_admits(size: int) -> None:
    """A number in a file is no reason to take memory."""
    with pytest.raises(TraceError, match="metadata of"):
        list(steps_of([call(OBJECT | {"spec": {"metadata": size}})]))


def test_many_metadata_are_no_more_than_one() -> None:
    """Nor are many numbers, each of which the protocol admits."""
    many = {f"x{n}": {"metadata": limits.MAX_METADATA_BYTES} for n in range(1000)}
    with pytest.raises(TraceError, match="metadata of"):
        list(steps_of([call(OBJECT | many)]))


def test_metadata_that_fits_is_given_again() -> None:
    """As many bytes as the record's client sent."""
    spec = {"kind": "object", "start": 0, "end": 0, "metadata": limits.MAX_METADATA_BYTES}
    (step,) = steps_of([call(OBJECT | {"spec": spec})])
    assert isinstance(step, Send)
    assert msgspec.to_builtins(step.request, builtin_types=(bytes,))["spec"]["metadata"] == bytes(
        limits.MAX_METADATA_BYTES
    )


def test_a_time_that_no_clock_has_is_the_records_fault() -> None:
    """What follows the record adds to its times, and its own trace must stay readable."""
    late = Record(1.0, OWN, "", {"type": "turn", "now": 2 * MAX_TURN_SECONDS})
    with pytest.raises(TraceError, match="the trace is damaged: a turn at 2e"):
        list(steps_of([late]))


# -- the terminal ------------------------------------------------------------------------------


def test_what_a_trace_says_is_shown_as_text(tmp_path: Path) -> None:
    """A miss's reason is a row of the table: neither markup nor an order to the terminal."""
    take = call({"type": "take", "namespace": "n", "tokens": b"\0" * 8})
    miss = Record(1.1, "ram_tier->session", "1.1", {"type": "miss", "reason": "[/red]\x1b[2J"})
    result = invoke("replay", str(written(tmp_path / "t", take, miss)))
    assert result.exit_code == 0, result.output
    assert "misses: [/red]?[2J" in result.output
    assert "\x1b" not in result.output


def test_where_the_daemons_differ_is_shown_as_text(tmp_path: Path) -> None:
    """The first decision that differs is the record's own words."""
    order = Record(1.0, "ram_tier->ssd_tier", "", {"type": "\x1b]0;pwn\x07"})
    result = invoke("replay", str(written(tmp_path / "t", order, WAKE, WAKE)))
    assert result.exit_code == 0, result.output
    assert "the record goes on with ?]0;pwn?, " in result.output
    assert "\x1b" not in result.output


# -- who is at fault ---------------------------------------------------------------------------


def test_only_what_cannot_be_read_is_the_traces_fault(tmp_path: Path) -> None:
    """What goes wrong while a trace is open is not said to be the trace's."""
    path = written(tmp_path / "t", WAKE)
    with pytest.raises(OSError, match="not the trace"), opened(path):
        raise OSError("not the trace")


def test_a_directory_too_long_for_a_socket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: the path of a socket has 103 bytes; the line says so, and what to do."""
    directory = tmp_path / ("d" * 90)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    result = invoke("replay", str(written(tmp_path / "t", WAKE)))
    assert result.exit_code == 1
    assert f"Error: {directory}" in result.output
    assert "too long a path for a socket to lie in; name a shorter directory" in result.output
    assert list(directory.iterdir()) == []


def test_a_directory_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay's own files are no fault of the trace's either."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    result = invoke("replay", str(written(tmp_path / "t", WAKE)))
    assert result.exit_code == 1
    assert "cannot use its temporary directory" in result.output
    assert str(tmp_path / "gone") in result.output


# -- a trace that grows ------------------------------------------------------------------------


def test_a_trace_is_read_up_to_where_it_ended(tmp_path: Path) -> None:
    """Each pass over a trace that is still written has the same records."""
    path = written(tmp_path / "t", WAKE)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(encoded(WAKE))
    with reading(path, size) as (_, records):
        assert len(list(records)) == 1
    with reading(path, size - 1) as (_, records):
        assert list(records) == []
    with reading(path) as (_, records):
        assert len(list(records)) == 2
    with pytest.raises(TraceError, match="ends within its header"), reading(path, 30):
        pass


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_written_after_the_start_is_not_followed(tmp_path: Path, is_told: bool) -> None:
    """Outcomes are read once and turns as they come: both end where the file did."""
    path = written(tmp_path / "t", WAKE)
    size = path.stat().st_size
    options = Options(state_dir=tmp_path / "state", ram_bytes="1MiB", ssd_bytes="0")
    effective = config.load(options, socket=tmp_path / "s")
    more = msgpack.packb([1.0, OWN, "", WAKE.message]) * 9
    if is_told:
        path.write_bytes(path.read_bytes() + more)
    tracer = FollowingTracer(tmp_path / "own", effective, path, size if is_told else None)
    try:
        path.write_bytes(path.read_bytes() + more)
        while tracer.guide.upcoming() is not None:
            tracer.guide.begin()
        assert tracer.guide.followed == 1
    finally:
        tracer.close()
