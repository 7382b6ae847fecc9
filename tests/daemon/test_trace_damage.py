"""Whatever a trace holds, the commands that read it end with a line, never with a stack."""

from pathlib import Path
from typing import Any

import click
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcached.daemon.trace.trace_file import FORMAT, MAGIC
from tests.daemon.command_line import invoke
from tests.support.trace_reading import read_all

HEADER = {"format": FORMAT, "version": "1", "started": 5.0, "tokens": "digests", "config": {}}

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
    | st.binary(max_size=9) | st.text(max_size=9)
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
fields = st.sampled_from(
    ["session", "request", "report", "records", "now", "wake", "tokens", "namespace", "tier",
     "length", "reason", "error", "id", "put", "read", "header", "entry", "lease", "done"]
)  # fmt: skip
kinds = st.sampled_from(
    ["call", "client-gone", "take", "commit", "hit", "miss", "statistics", "gap", "turn",
     "new-image", "written", "image-read", "promoted", "sealed", "grant", "sync-all"]
)  # fmt: skip
bodies = st.builds(
    lambda kind, rest: {**rest, "type": kind},
    kinds | scalars,
    st.dictionaries(fields, values, max_size=5),
)
messages = bodies | st.builds(
    lambda session, body: {"type": "call", "session": session, "request": body},
    st.integers(0, 3) | scalars,
    bodies,
)
channels = st.sampled_from(
    ["tracer", "session->ram_tier", "ram_tier->session", "ram_tier->ram_tier",
     "ram_tier->ssd_tier", "ssd_tier->ram_tier", "prefetcher->ram_tier"]
)  # fmt: skip
records = st.tuples(
    st.floats(0, 100) | scalars,
    channels | scalars,
    st.sampled_from(["1.1", "2.end", "", "\u00b2.1"]) | scalars,
    messages | values,
)


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def complaint_about(path: Path) -> str:
    try:
        read_all(path)
    except click.ClickException as error:
        return error.message
    return ""


@settings(max_examples=300, deadline=None)
@given(
    header=st.just(HEADER)
    | st.builds(lambda config: {**HEADER, "config": {"options": config}}, values)
    | values,
    found=st.lists(records | values, max_size=6),
    cut=st.integers(0, 40),
)
def test_arbitrary_values_and_truncations_are_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, header: Any, found: list[Any], cut: int
) -> None:
    """A trace may be anybody's, or damaged anywhere: a click error is one line and exit code 1."""
    data = MAGIC + packed(header) + b"".join(packed(value) for value in found)
    path = tmp_path_factory.mktemp("trace") / "t"
    path.write_bytes(data[: max(len(MAGIC), len(data) - cut)])
    complaint = complaint_about(path)
    assert not complaint or str(path) in complaint or "the trace" in complaint
    assert not complaint.rstrip().endswith(":")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1e300, "a->b", "", {}], "<= 10000000000.0"),
        ([float("nan"), "a->b", "", {}], "damaged at byte"),
        ([0.0, "tracer", "", {"type": "statistics", "report": 3}], "Expected `object`, got `int`"),
        ([0.0, "tracer", "", {"type": "gap", "records": "many"}], "Expected `int`, got `str`"),
        ([0.0, "tracer", "", {"type": "gap", "records": -3}], ">= 0"),
        ([0.0, "a->b", "", {"a": {b"b": 1}}], "a key is of type bytes"),
        ([0.0, "a->b", "", {"a": msgpack.Timestamp(1)}], "a value is of type Timestamp"),
        ([0.0, "a->b", "", {"a": nested(100)}], "deeper than 32 levels"),
        ([0.0, "a->b", "", {"a": nested(2000)}], "damaged at byte"),
        (3, "Expected `array`, got `int`"),
    ],
)
@pytest.mark.parametrize("command", ["trace", "replay"])
def test_a_record_that_is_none_is_one_line(
    tmp_path: Path, command: str, value: Any, says: str
) -> None:
    """The line names the file, the place and the reason; exit code 1."""
    path = tmp_path / "t"
    path.write_bytes(MAGIC + packed(HEADER) + _packed_deep(value))
    result = invoke(command, str(path))
    assert result.exit_code == 1
    last = result.output.strip().splitlines()[-1]
    assert last.startswith(f"Error: {path} is damaged at byte {len(MAGIC + packed(HEADER))}: ")
    assert says in last


def _packed_deep(value: Any) -> bytes:
    """`msgpack` packs 512 levels; a damaged file has what it has."""
    try:
        return packed(value)
    except ValueError:
        return packed([0.0, "a->b", ""])[:1].replace(b"\x93", b"\x94") + b"\x91" * 2000 + b"\x01"


@pytest.mark.parametrize("options", [-1, [1], {"retention": {"a": 1}}])
def test_a_configuration_that_is_none_is_one_line(tmp_path: Path, options: Any) -> None:
    """A replay starts from the recorded options; the header is data like all the rest."""
    path = tmp_path / "t"
    path.write_bytes(MAGIC + packed({**HEADER, "config": {"options": options}}))
    result = invoke("replay", str(path))
    assert result.exit_code == 1
    assert "the trace's configuration is damaged: Expected" in result.output
    assert len(result.output.strip().splitlines()) == 1
