"""The wire messages: each survives the wire, and nothing else passes for one."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgpack
import msgspec
import pytest

from prefixcached.protocol import connection, limits, messages
from prefixcached.protocol.errors import LocalProtocolError, RemoteProtocolError
from prefixcached.protocol.framing import HEADER, FrameDecoder, Message, Side, encode, tag_of
from tests.protocol.examples import CHECKPOINT, REPLIES, REQUESTS, SEGMENT, TOKENS


def decode(data: bytes, side: Side) -> Message | None:
    decoder = FrameDecoder(side)
    decoder.feed(data)
    frame = decoder.next_frame()
    return None if frame is None else frame.message


def frame_of(body: Any) -> bytes:
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return HEADER.pack(b"PC", 1, 0, len(packed)) + packed


def plain(message: Message) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return built


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_every_request_survives_the_wire(message: messages.AnyRequest) -> None:
    """What the daemon decodes equals what the client encoded."""
    assert decode(encode(message), "request") == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_every_reply_survives_the_wire(message: messages.AnyReply) -> None:
    """What the client decodes equals what the daemon encoded."""
    assert decode(encode(message), "reply") == message


def test_the_examples_cover_every_message() -> None:
    """A message that is added gets an example, and with it all tests of this folder."""
    assert {type(message) for message in REQUESTS} == set(get_args(messages.AnyRequest))
    assert {type(message) for message in REPLIES} == set(get_args(messages.AnyReply))


def test_the_table_knows_every_message() -> None:
    """Each request is one-way or has its replies, and each reply belongs to a request."""
    requests = set(get_args(messages.AnyRequest))
    assert set(connection.REPLIES) | connection.ONE_WAY == requests
    assert set(get_args(messages.OneWay)) == connection.ONE_WAY
    replies = {reply for legal in connection.REPLIES.values() for reply in legal}
    assert replies | {messages.Failed} == set(get_args(messages.AnyReply))


def test_no_two_messages_share_a_tag() -> None:
    """A tag names one message on either side."""
    kinds = [*get_args(messages.AnyRequest), *get_args(messages.AnyReply)]
    assert len({tag_of(kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("message", "side"),
    [*((message, "request") for message in REQUESTS), *((message, "reply") for message in REPLIES)],
    ids=lambda value: type(value).__name__,
)
def test_unknown_fields_are_ignored(message: Message, side: Side) -> None:
    """C2: a newer peer's additional fields do not disturb an older one."""
    body = {**plain(message), "added_later": [1, {"deep": b"x"}]}
    assert decode(frame_of(body), side) == message


@pytest.mark.parametrize(
    "body",
    [
        {"type": "steal", "namespace": "n", "tokens": TOKENS},
        {"type": 1},
        {"type": ["take"]},
        {"type": "hit", "lease": 1, "length": 1, "tier": "ram", "parts": []},
        {"namespace": "n", "tokens": TOKENS},
        {},
        [],
        "take",
        None,
        7,
    ],
    ids=repr,
)
def test_what_names_no_request_is_refused(body: Any) -> None:
    """C3: an unknown, absent or foreign tag is the peer's error."""
    with pytest.raises(RemoteProtocolError, match="malformed request"):
        decode(frame_of(body), "request")


TAKE = plain(messages.Take(namespace="n", tokens=TOKENS))
OFFER = plain(messages.Offer(namespace="n", tokens=TOKENS, schema=b"s", checkpoint=CHECKPOINT))


@pytest.mark.parametrize(
    "body",
    [
        TAKE | {"tokens": "text"},
        TAKE | {"tokens": [1, 2, 3]},
        TAKE | {"tokens": TOKENS + b"x"},
        TAKE | {"tokens": bytes(4 * limits.MAX_TOKENS + 4)},
        TAKE | {"namespace": b"n"},
        TAKE | {"namespace": None},
        TAKE | {"namespace": "n" * (limits.MAX_NAMESPACE_BYTES + 1)},
        TAKE | {"namespace": "é" * (limits.MAX_NAMESPACE_BYTES // 2 + 1)},
        TAKE | {"label": "é" * (limits.MAX_LABEL_BYTES // 2 + 1)},
        TAKE | {"wait": -1.0},
        TAKE | {"wait": float("nan")},
        TAKE | {"wait": float("inf")},
        TAKE | {"wait": "1"},
        {"type": "take", "namespace": "n"},
        {"type": "release", "lease": 0},
        {"type": "release", "lease": -1},
        {"type": "release", "lease": 1 << 63},
        {"type": "release", "lease": True},
        {"type": "release", "lease": 1.0},
        {"type": "hello", "version": [1]},
        {"type": "hello", "version": [1, 0], "capabilities": ["x"] * 65},
        {"type": "clear", "namespace": "é" * (limits.MAX_NAMESPACE_BYTES // 2 + 1)},
        {"type": "take-object", "namespace": "n", "key": "é" * (limits.MAX_KEY_BYTES // 2 + 1)},
        {"type": "take-object", "namespace": "é" * 257, "key": "k"},
        {"type": "close-label", "label": "é" * (limits.MAX_LABEL_BYTES // 2 + 1)},
        {"type": "peek", "namespace": "é" * 257, "tokens": TOKENS},
        {"type": "contains", "namespace": "n", "tokens": TOKENS + b"x"},
        {"type": "prefetch", "namespace": "n", "tokens": TOKENS[:-1]},
        OFFER | {"schema": bytes(limits.MAX_SCHEMA_BYTES + 1)},
        OFFER | {"windows": [{"ranges": [[0, 1]] * 17}]},
        OFFER | {"checkpoint": OFFER["checkpoint"] | {"kind": "elsewhere"}},
        OFFER | {"checkpoint": OFFER["checkpoint"] | {"metadata": bytes((4 << 20) + 1)}},
    ],
    ids=lambda body: ",".join(f"{key}={value!r:.20}" for key, value in body.items()),
)
def test_wrong_types_and_sizes_are_refused(body: dict[str, Any]) -> None:
    """C3: each field is held to its type and its limit."""
    with pytest.raises(RemoteProtocolError, match="malformed request"):
        decode(frame_of(body), "request")


@pytest.mark.parametrize(
    "message",
    [
        messages.Take(namespace="é" * 257, tokens=b""),
        messages.Take(namespace="é" * 256 + "n", tokens=b""),
        messages.Take(namespace="n", tokens=b"abc"),
        messages.Take(namespace="n", tokens=bytes(4 * limits.MAX_TOKENS + 4)),
        messages.Peek(namespace="n" * 513, tokens=b""),
        messages.Prefetch(namespace="n", tokens=b"", label="l" * 513),
        messages.Clear(namespace="n" * 513),
        messages.Peek(namespace="\ud800", tokens=b""),
        messages.StatusReport(report={"a": object()}),
        messages.StatusReport(report={"a": 1 << 70}),
        messages.Offer(namespace="n", tokens=bytes(4 * limits.MAX_TOKENS), schema=bytes(10 << 20)),
    ],
    ids=lambda message: f"{message!r:.40}",
)
def test_what_the_peer_would_refuse_is_not_sent(message: Message) -> None:
    """The side that made the mistake is told, before any byte leaves."""
    with pytest.raises(LocalProtocolError):
        encode(message)


BEYOND = {
    messages.Namespace: "é" * (limits.MAX_NAMESPACE_BYTES // 2 + 1),
    messages.Namespace | None: "é" * (limits.MAX_NAMESPACE_BYTES // 2 + 1),
    messages.Label: "é" * (limits.MAX_LABEL_BYTES // 2 + 1),
    messages.Label | None: "é" * (limits.MAX_LABEL_BYTES // 2 + 1),
    messages.Key: "é" * (limits.MAX_KEY_BYTES // 2 + 1),
    messages.Tokens: TOKENS + b"x",
}
"""By type: what msgspec admits and the rules do not."""
SIZED = [
    (message, name)
    for message in REQUESTS
    for name, kind in get_type_hints(type(message), include_extras=True).items()
    if kind in BEYOND
]


@pytest.mark.parametrize(
    ("message", "name"), SIZED, ids=[f"{type(message).__name__}.{name}" for message, name in SIZED]
)
def test_no_request_has_a_text_or_tokens_that_nobody_checks(
    message: messages.AnyRequest, name: str
) -> None:
    """C3: every field of such a type, in every request, on both sides."""
    kind = get_type_hints(type(message), include_extras=True)[name]
    with pytest.raises(RemoteProtocolError, match="malformed request"):
        decode(frame_of(plain(message) | {name: BEYOND[kind]}), "request")
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        encode(msgspec.structs.replace(message, **{name: BEYOND[kind]}))


@pytest.mark.parametrize("text", ["n" * 512, "é" * 256, "\U0001f600" * 128])
def test_a_text_may_take_exactly_its_bytes(text: str) -> None:
    """C2: the limit is one of UTF-8 bytes, in any script."""
    for message in (
        messages.Take(namespace=text, tokens=TOKENS, label=text),
        messages.TakeObject(namespace=text, key=text),
        messages.CloseLabel(label=text),
        messages.Clear(namespace=text),
    ):
        assert decode(encode(message), "request") == message


def test_the_largest_messages_fit_their_limits() -> None:
    """The largest legal offer and hit pass the bounds on frame size, nesting and values."""
    offer = messages.Offer(
        namespace="n" * limits.MAX_NAMESPACE_BYTES,
        tokens=bytes(4 * limits.MAX_TOKENS),
        schema=bytes(limits.MAX_SCHEMA_BYTES),
        checkpoint=msgspec.structs.replace(CHECKPOINT, metadata=bytes(limits.MAX_METADATA_BYTES)),
    )
    assert decode(encode(offer), "request") == offer
    state = CHECKPOINT.tensors[0]
    snapshot = msgspec.structs.replace(
        CHECKPOINT,
        tensors=tuple(
            msgspec.structs.replace(state, shape=(1 << 20,) * limits.MAX_DIMENSIONS)
            for _ in range(limits.MAX_TENSORS)
        ),
    )
    last = messages.Part(msgspec.structs.replace(SEGMENT, windows=SEGMENT.windows * 64), 0, 1)
    plain_part = messages.Part(msgspec.structs.replace(SEGMENT, windows=()), 0, 1)
    hit = messages.Hit(
        lease=1,
        length=1,
        tier="ram",
        parts=(
            *[plain_part] * (limits.MAX_IMAGES_PER_PUT - 2),
            last,
            messages.Part(snapshot, 0, 0),
        ),
    )
    assert decode(encode(hit), "reply") == hit


PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "kind",
    [*get_args(messages.AnyRequest), *get_args(messages.AnyReply)],
    ids=lambda kind: kind.__name__,
)
def test_the_page_has_every_message_with_every_field(kind: type[Message]) -> None:
    """docs/protocol.md is complete: a heading for each message, and below it each field."""
    tag = tag_of(kind)
    sections = {
        name.strip(): text
        for heading, _, text in (part.partition("\n") for part in PAGE.split("\n### ")[1:])
        for name in heading.replace("(one-way)", "").split(",")
    }
    assert tag in sections
    for field in msgspec.structs.fields(kind):
        if field.name != "boot" or kind in connection.ONE_WAY:
            assert f"`{field.name}`" in sections[tag], f"{tag}.{field.name}"


def test_the_page_has_the_replies_to_every_request() -> None:
    """docs/protocol.md's table of replies is the code's."""
    table = PAGE.split("| request | replies |\n|---|---|\n")[1].split("\n\n")[0]
    shown = {}
    for row in table.splitlines():
        requests, replies = (re.findall(r"`([a-z-]+)`", cell) for cell in row.split("|")[1:3])
        shown.update({request: set(replies) for request in requests})
    assert shown == {
        tag_of(request): {tag_of(reply) for reply in replies}
        for request, replies in connection.REPLIES.items()
    }


def test_the_page_has_the_limits_of_the_code() -> None:
    """docs/protocol.md's numbers are those that both sides enforce."""
    for number in (limits.MAX_VALUES, limits.MAX_TOKENS, limits.MAX_TENSORS):
        assert f"{number:,}" in PAGE
    assert f"nests at most {limits.MAX_NESTING} containers" in PAGE
    assert f"at most {limits.MAX_FRAME_BYTES >> 20} MiB" in PAGE
    for name in connection.CAPABILITIES:
        assert f"`{name}`" in PAGE
