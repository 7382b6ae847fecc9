"""The limits of the wire: docs/protocol.md states each, and both sides keep exactly to it."""

import re
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from prefixcached.protocol import actor_messages, image, limits, messages, schema
from prefixcached.protocol.errors import RemoteProtocolError
from prefixcached.protocol.framing import tag_of
from tests.protocol.examples import CHECKPOINT, REPLIES, REQUESTS
from tests.protocol.test_messages import PAGE, decode, frame_of, plain

SPACES: Final = re.compile(r"\s+")
WORDS: Final = SPACES.sub(" ", PAGE)
RULES: Final = SPACES.sub(
    " ", (Path(__file__).parents[2] / "docs" / "behaviour.md").read_text(encoding="utf-8")
)
MIB: Final = 1 << 20


@pytest.mark.parametrize(
    "sentence",
    [
        f"now {limits.PROTOCOL_VERSION[0]}.{limits.PROTOCOL_VERSION[1]}, and capabilities",
        f"belong to this frame, 0 to {limits.MAX_DESCRIPTORS} |",
        f"at most {limits.MAX_DESCRIPTORS} and never more than there are images",
        f"little-endian, at most {limits.MAX_FRAME_BYTES / MIB:g} MiB |",
        f"nests at most {limits.MAX_NESTING} containers and holds at most {limits.MAX_VALUES:,} ",
        f"| Namespace, Label, Key | str, at most {limits.MAX_NAMESPACE_BYTES} bytes of UTF-8 |",
        f"| Namespace, Label, Key | str, at most {limits.MAX_LABEL_BYTES} bytes of UTF-8 |",
        f"| Namespace, Label, Key | str, at most {limits.MAX_KEY_BYTES} bytes of UTF-8 |",
        f"little-endian, at most {limits.MAX_TOKENS:,} tokens |",
        f"`shape` (at most {limits.MAX_DIMENSIONS} dimensions",
        f"`windows` (at most {limits.MAX_WINDOW_GROUPS} WindowRows",
        f"`tensors` (at most {limits.MAX_TENSORS:,} StateTensors)",
        f"`metadata` (bin, at most {limits.MAX_METADATA_BYTES / MIB:g} MiB",
        f"travels as bin, at most {limits.MAX_SCHEMA_BYTES / MIB:g} MiB",
        f"`limit`: integer, 1 to {limits.MAX_LISTED:,}, default",
        f"at most {limits.MAX_CONTINUATIONS} bins of at most {limits.MAX_CONTINUATION_TOKENS} ",
        f"`clients`: at most {limits.MAX_WATCHED} connections",
        f"at most {limits.MAX_LATENCY_BOUNDS} floats, ascending",
        f"`most`: integer, 1 to {limits.MAX_HISTORY_ROWS:,}, default {limits.MAX_HISTORY_ROWS:,}",
        f"`series`: at most {limits.MAX_HISTORY_SERIES} maps",
    ],
    ids=lambda _: "limit",
)
def test_the_page_states_each_limit_that_the_code_keeps(sentence: str) -> None:
    """C2: a limit belongs to the wire, so that another number is another version of it."""
    assert sentence in WORDS


def test_the_rules_state_the_page_and_the_rows_beyond_a_window() -> None:
    """E1, T13: what is charged and what is stored is what docs/behaviour.md says."""
    assert f"whole pages of {limits.PAGE_BYTES / 1024:g} KiB" in RULES
    assert f"Up to {limits.WINDOW_EXTRA_ROWS} further rows" in RULES


def test_a_segment_is_small_enough_to_evict_and_large_enough_to_stream() -> None:
    """DESIGN 3: a long put is several images of at most 128 MiB."""
    assert limits.SEGMENT_MAX_BYTES == 128 * MIB


def stated(default: Any) -> str:
    """How the page writes a default."""
    match default:
        case None:
            return "nil"
        case () | {}:
            return "none"
        case "" | b"":
            return "empty"
        case bool():
            return str(default).lower()
        case str():
            return f"`{default}`"
        case _:
            return f"{default:,g}" if isinstance(default, float) else f"{default:,}"


@pytest.mark.parametrize("kind", get_args(messages.AnyRequest), ids=lambda kind: kind.__name__)
def test_the_page_has_the_default_of_every_field_of_a_request(kind: type[Any]) -> None:
    """C2: a field that another client leaves out has the value that the page promises."""
    sections = {
        name.strip(): text
        for heading, _, text in (part.partition("\n") for part in PAGE.split("\n### ")[1:])
        for name in heading.replace("(one-way)", "").split(",")
    }
    everywhere = SPACES.sub(" ", PAGE.split("## Requests")[1].split("###")[0])
    for field in msgspec.structs.fields(kind):
        if field.default is msgspec.NODEFAULT:
            continue
        bullet = re.search(rf"- `{field.name}`(.*?)(?=\n- |\Z)", sections[tag_of(kind)], re.DOTALL)
        assert bullet, f"{kind.__name__}.{field.name}"
        # Two fields are explained once for all requests.
        common = re.search(rf"`{field.name}` \((.*?)\)", everywhere)
        text = SPACES.sub(" ", bullet[1] if ":" in bullet[1] else common[1] if common else "")
        default = re.search(r"default (`\w+`|[\w,.]+\w|\w)", text)
        assert default, f"{kind.__name__}.{field.name}: {text}"
        assert default[1] == stated(field.default)


@pytest.mark.parametrize(
    ("kind", "field", "default"),
    [
        (messages.Flushed, "complete", True),
        (messages.Cleared, "durable", True),
        (messages.Listing, "complete", True),
        (messages.ActivityReport, "complete", True),
        (messages.Hit, "matched", 0),
        (messages.Hit, "claim", None),
        (messages.Miss, "matched", 0),
        (messages.Part, "data_offset", 0),
        (image.WindowRows, "phase", -1),
        (image.ImageSpec, "start", 0),
        (image.ImageSpec, "end", 0),
    ],
)
def test_what_an_older_daemon_leaves_out_means_nothing_unusual(
    kind: type[Any], field: str, default: object
) -> None:
    """C2: without a field a reply says that all is in order and nothing is known beyond it."""
    found = {each.name: each.default for each in msgspec.structs.fields(kind)}[field]
    assert found == default
    assert type(found) is type(default)


def test_a_client_that_did_nothing_is_shown_as_nothing() -> None:
    """C2: whatever a report leaves out of a connection is zero or empty."""
    shown = msgspec.structs.asdict(messages.ClientActivity(session=3))
    assert shown.pop("session") == 3
    assert not any(shown.values())


def structs_of(module: Any) -> list[type[Any]]:
    """The message types that a module defines."""
    found = (each for each in vars(module).values() if isinstance(each, type))
    return [
        each
        for each in found
        if issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
    ]


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for module in (messages, actor_messages, image, schema)
        for kind in structs_of(module)
        if kind is not actor_messages.Envelope
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_message_is_never_changed_after_it_was_made(kind: type[Any]) -> None:
    """Who receives a message may keep it: what it describes is shared by sender and receiver."""
    assert kind.__struct_config__.frozen


@pytest.mark.parametrize(
    "kind",
    [kind for kind in structs_of(actor_messages) if kind is not actor_messages.Envelope],
    ids=lambda kind: kind.__name__,
)
def test_what_an_actor_leaves_out_says_nothing(kind: type[Any]) -> None:
    """D1: a field that is not named is zero, empty or false, in a file's header as in a message."""
    for field in msgspec.structs.fields(kind):
        assert field.default is msgspec.NODEFAULT or not field.default, field.name


def test_the_parent_in_a_header_is_at_most_an_id() -> None:
    """D1: 32 hex digits name an image, and a longer parent no image at all."""
    header = {"format": 1, "id": "0" * 32, "kind": "segment", "namespace": "n"}
    header |= {"spec": {"kind": "segment"}}
    decoded = msgspec.convert(header | {"parent": "f" * 32}, actor_messages.FileHeader)
    assert decoded.parent == "f" * 32
    with pytest.raises(msgspec.ValidationError, match="parent"):
        msgspec.convert(header | {"parent": "f" * 33}, actor_messages.FileHeader)


HELLO = plain(REQUESTS[0])
TAKE = plain(messages.Take(namespace="n", tokens=b"", label="l"))
RELEASE = plain(messages.Release(lease=1))
OFFER = plain(messages.Offer(namespace="n", tokens=b"", schema=b"s", checkpoint=CHECKPOINT))
STATE: dict[str, Any] = {"name": "x", "dtype": "F32", "shape": [1]}
WELCOME = plain(REPLIES[0])
HIT = plain(messages.Hit(lease=1, length=1, tier="ram", parts=()))


def checkpoint(**changes: Any) -> dict[str, Any]:
    return OFFER | {"checkpoint": OFFER["checkpoint"] | changes}


def explanation(continuation: bytes) -> dict[str, Any]:
    held = messages.Explanation(length=0, ram_length=0, matched=0, continuations=(continuation,))
    return plain(held)


def latency(counts: list[int]) -> dict[str, Any]:
    request = messages.RequestLatency("take", 0.0, tuple(counts))
    return plain(messages.LatencyReport(bounds_seconds=(), requests=(request,)))


def history(times: bytes = b"", values: bytes = b"") -> dict[str, Any]:
    series = (messages.Series("takes", "counter", values),)
    return plain(messages.HistoryReport(first=1, times=times, series=series))


def rows(**changes: Any) -> dict[str, Any]:
    return OFFER | {"windows": [{"ranges": [[0, 1]], **changes}]}


@pytest.mark.parametrize(
    ("side", "within", "beyond"),
    [
        ("request", HELLO | {"capabilities": ["x"] * 64}, HELLO | {"capabilities": ["x"] * 65}),
        ("request", HELLO | {"client": "x" * 4096}, HELLO | {"client": "x" * 4097}),
        ("request", HELLO | {"pid": 1 << 40}, HELLO | {"pid": (1 << 40) + 1}),
        ("request", HELLO | {"pid": 0}, HELLO | {"pid": -1}),
        ("request", TAKE | {"namespace": "n" * 512}, TAKE | {"namespace": "n" * 513}),
        ("request", TAKE | {"label": "n" * 512}, TAKE | {"label": "n" * 513}),
        ("request", TAKE | {"wait": 86400}, TAKE | {"wait": 86400.5}),
        ("request", TAKE | {"wait": 0}, TAKE | {"wait": -0.5}),
        ("request", RELEASE | {"lease": (1 << 63) - 1}, RELEASE | {"lease": 1 << 63}),
        ("request", RELEASE | {"lease": 1}, RELEASE | {"lease": 0}),
        ("request", rows(ranges=[[0, 1]] * 16), rows(ranges=[[0, 1]] * 17)),
        ("request", rows(phase=-1), rows(phase=-2)),
        ("request", rows(phase=1 << 40), rows(phase=(1 << 40) + 1)),
        ("request", OFFER | {"windows": [{}] * 64}, OFFER | {"windows": [{}] * 65}),
        (
            "request",
            checkpoint(tensors=[STATE | {"shape": [1] * 8}]),
            checkpoint(tensors=[STATE | {"shape": [1] * 9}]),
        ),
        (
            "request",
            checkpoint(tensors=[STATE | {"name": "x" * 256}]),
            checkpoint(tensors=[STATE | {"name": "x" * 257}]),
        ),
        (
            "request",
            checkpoint(tensors=[STATE | {"name": "x"}]),
            checkpoint(tensors=[STATE | {"name": ""}]),
        ),
        (
            "request",
            checkpoint(tensors=[STATE | {"shape": [1 << 40]}]),
            checkpoint(tensors=[STATE | {"shape": [(1 << 40) + 1]}]),
        ),
        (
            "request",
            checkpoint(tensors=[STATE | {"shape": [0]}]),
            checkpoint(tensors=[STATE | {"shape": [-1]}]),
        ),
        ("request", {"type": "list", "limit": 4096}, {"type": "list", "limit": 4097}),
        ("request", {"type": "list", "limit": 1}, {"type": "list", "limit": 0}),
        ("request", {"type": "history", "most": 3600}, {"type": "history", "most": 3601}),
        ("request", {"type": "history", "most": 1}, {"type": "history", "most": 0}),
        ("reply", WELCOME | {"boot": "b" * 64}, WELCOME | {"boot": "b" * 65}),
        ("reply", WELCOME | {"capabilities": ["x"] * 64}, WELCOME | {"capabilities": ["x"] * 65}),
        ("reply", HIT | {"tier": "ssd"}, HIT | {"tier": "tape"}),
        ("reply", explanation(bytes(4 * 32)), explanation(bytes(4 * 32 + 1))),
        ("reply", latency([0] * 129), latency([0] * 130)),
        ("reply", history(values=bytes(8 * 3600)), history(values=bytes(8 * 3600 + 1))),
        ("reply", history(times=bytes(8 * 3600)), history(times=bytes(8 * 3600 + 1))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_is_held_to_exactly_its_limit(
    side: Any, within: dict[str, Any], beyond: dict[str, Any]
) -> None:
    """C3: what docs/protocol.md allows is accepted, and the next value is refused."""
    assert decode(frame_of(within), side) is not None
    with pytest.raises(RemoteProtocolError, match=f"malformed {side}"):
        decode(frame_of(beyond), side)
