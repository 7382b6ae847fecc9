"""Frames: any chunking gives the same messages; any bytes give messages or RemoteProtocolError."""

import random
import time
from itertools import pairwise

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixcached.protocol import limits, messages
from prefixcached.protocol.errors import LocalProtocolError, RemoteProtocolError
from prefixcached.protocol.framing import (
    FORMAT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Frame,
    FrameDecoder,
    Side,
    encode,
)
from tests.protocol.examples import REPLIES, REQUESTS

SIDES: list[Side] = ["request", "reply"]


def drain(decoder: FrameDecoder) -> list[Frame]:
    frames = []
    while (frame := decoder.next_frame()) is not None:
        frames.append(frame)
    return frames


def decode_all(data: bytes, side: Side) -> list[Frame] | None:
    """All frames of `data`, or None where the decoder refuses it."""
    decoder = FrameDecoder(side)
    decoder.feed(data)
    try:
        return drain(decoder)
    except RemoteProtocolError:
        return None


def frame(body: bytes, *, magic: bytes = b"PC", form: int = 1, descriptors: int = 0) -> bytes:
    return HEADER.pack(magic, form, descriptors, len(body)) + body


def test_the_header_is_the_documented_eight_bytes() -> None:
    """docs/protocol.md's table, byte by byte."""
    data = encode(messages.Descriptors(first=0, count=3), descriptors=3)
    assert data[:2] == b"PC"
    assert data[2] == 1
    assert data[3] == 3
    assert int.from_bytes(data[4:8], "little") == len(data) - HEADER_BYTES == len(data) - 8
    assert msgpack.unpackb(data[8:]) == {"type": "descriptors", "boot": "", "first": 0, "count": 3}


@given(
    picked=st.lists(st.sampled_from(REQUESTS), max_size=6),
    cuts=st.lists(st.integers(0, 1 << 14), max_size=30),
)
def test_any_chunking_gives_the_same_requests(
    picked: list[messages.AnyRequest], cuts: list[int]
) -> None:
    """Frames come out whole and in order however the bytes were cut."""
    data = b"".join(encode(message) for message in picked)
    decoder = FrameDecoder("request")
    frames = []
    for start, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        decoder.feed(data[start:end])
        frames += drain(decoder)
    assert frames == [Frame(message, 0) for message in picked]
    assert decoder.buffered_bytes == 0


def test_byte_by_byte_gives_the_same_replies() -> None:
    """The smallest chunks are no special case."""
    decoder = FrameDecoder("reply")
    frames = []
    for byte in b"".join(encode(message) for message in REPLIES):
        decoder.feed(bytes([byte]))
        frames += drain(decoder)
    assert [frame.message for frame in frames] == list(REPLIES)


def test_what_no_frame_has_used_is_counted() -> None:
    """L4: a session knows how much of a frame is still outstanding."""
    decoder = FrameDecoder("request")
    assert decoder.buffered_bytes == 0
    one = encode(messages.Status())
    decoder.feed(one + one + one[:5])
    assert decoder.buffered_bytes == 2 * len(one) + 5
    assert decoder.next_frame() == Frame(messages.Status(), 0)
    assert decoder.buffered_bytes == len(one) + 5
    decoder.feed(one[5:])
    assert decoder.buffered_bytes == 2 * len(one)
    assert len(drain(decoder)) == 2
    assert decoder.buffered_bytes == 0


@given(data=st.binary(max_size=200), side=st.sampled_from(SIDES))
def test_garbage_is_refused_or_incomplete(data: bytes, side: Side) -> None:
    """C3: no bytes raise anything but RemoteProtocolError."""
    decode_all(data, side)


@given(body=st.binary(max_size=200), side=st.sampled_from(SIDES))
@example(body=b"", side="request")
@example(body=b"\x81\xa4type\xc7\x00\x01", side="request")  # an empty extension
@example(body=b"\xc1", side="reply")  # the byte that begins nothing
@example(body=b"\x81\xa4type\xa1\xff", side="request")  # no UTF-8
@example(body=b"\x81\x01\x02", side="request")  # a key that is no text
@example(body=b"\x82\xa4type\xa6status\xc4\x01x\x01", side="request")  # a key of bytes
@example(body=b"\xdf\xff\xff\xff\xff", side="reply")  # four thousand million entries
@example(body=b"\xdb\xff\xff\xff\xff", side="reply")  # four gigabytes of text
@example(body=b"\xdd\x00", side="reply")  # a length cut short
def test_a_garbage_body_is_refused(body: bytes, side: Side) -> None:
    """C3: behind a good header too, and it never decodes to what is no message."""
    frames = decode_all(frame(body), side)
    legal = messages.Request if side == "request" else messages.Reply
    assert frames is None or all(isinstance(found.message, legal) for found in frames)


@given(
    plain=st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
        | st.text(max_size=8) | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.binary(max_size=4), inner, max_size=4),
        max_leaves=12,
    ),
    picked=st.sampled_from([(m, "request") for m in REQUESTS] + [(m, "reply") for m in REPLIES]),
    data=st.data(),
)  # fmt: skip
def test_a_field_of_any_value_is_accepted_or_refused(
    plain: object, picked: tuple[messages.AnyRequest | messages.AnyReply, Side], data: st.DataObject
) -> None:
    """C3: any value in any field gives a message or RemoteProtocolError."""
    message, side = picked
    body = msgpack.unpackb(encode(message)[HEADER_BYTES:])
    body[data.draw(st.sampled_from(sorted(body)))] = plain
    decode_all(frame(msgpack.packb(body)), side)


@given(
    picked=st.sampled_from([(m, "request") for m in REQUESTS] + [(m, "reply") for m in REPLIES]),
    changes=st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 1 << 14) | st.none(),
)
def test_a_mutated_frame_is_accepted_refused_or_incomplete(
    picked: tuple[messages.AnyRequest | messages.AnyReply, Side],
    changes: list[tuple[int, int]],
    cut: int | None,
) -> None:
    """C3: flipped and missing bytes raise nothing but RemoteProtocolError."""
    message, side = picked
    data = bytearray(encode(message))
    for position, value in changes:
        data[position % len(data)] = value
    decode_all(bytes(data[:cut]), side)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (frame(b"", magic=b"GE"), "does not speak this protocol"),
        (frame(b"", form=2), "frame format 2"),
        (frame(b"", descriptors=17), "17 descriptors"),
        (HEADER.pack(b"PC", 1, 0, limits.MAX_FRAME_BYTES + 1), "frame of 16777217 bytes"),
    ],
)
def test_a_wrong_header_is_refused_before_its_body(header: bytes, complaint: str) -> None:
    """C3: nobody waits for the body of what will be refused."""
    decoder = FrameDecoder("request")
    decoder.feed(header)
    with pytest.raises(RemoteProtocolError, match=complaint):
        decoder.next_frame()


@pytest.mark.parametrize(
    "value",
    [
        *(bytes([code]) for code in (0x00, 0x7F, 0xC0, 0xC2, 0xC3, 0xE0, 0xFF)),
        b"\xcc\xff", b"\xcd\xff\xff", b"\xce" + b"\xff" * 4, b"\xcf" + b"\xff" * 8,
        b"\xd0\x80", b"\xd1\x80\x00", b"\xd2\x80" + bytes(3), b"\xd3\x80" + bytes(7),
        b"\xca\x3f\x80\x00\x00", b"\xcb\x3f\xf0" + bytes(6),
        b"\xa0", b"\xa1x", b"\xbf" + b"x" * 31,
        b"\xd9\x02xx", b"\xda\x01\x00" + b"x" * 256, b"\xdb\x00\x01\x00\x00" + b"x" * 65536,
        b"\xc4\x02xx", b"\xc5\x01\x00" + bytes(256), b"\xc6\x00\x01\x00\x00" + bytes(65536),
        b"\x90", b"\x91\x01", b"\x9f" + bytes(15),
        b"\xdc\x00\x02\x01\x02", b"\xdc\x01\x00" + bytes(256), b"\xdd\x00\x00\x00\x02\x01\x02",
        b"\x80", b"\x81\xa1x\x01", b"\x8f" + b"".join(bytes([0xA1, 97 + i, i]) for i in range(15)),
        b"\xde\x00\x01\xa1x\x01", b"\xdf\x00\x00\x00\x01\xa1x\x01",
        b"\x92\x92\x01\x81\xa1x\x90\xa1y",
    ],
    ids=lambda value: value[:4].hex(),
)  # fmt: skip
def test_a_body_is_exactly_one_value_of_each_form_that_msgpack_has(value: bytes) -> None:
    """C3: wherever a value ends, the body ends: no byte is missing and none is left over."""
    body = b"\x82\xa4type\xa6status\xa1x" + value
    assert decode_all(frame(body), "request") == [Frame(messages.Status(), 0)]
    assert decode_all(frame(body + b"\xc0"), "request") is None
    assert decode_all(frame(body[:-1]), "request") is None


@pytest.mark.parametrize("code", [0xC1, *range(0xC7, 0xCA), *range(0xD4, 0xD9)])
def test_extension_types_are_refused(code: int) -> None:
    """C3: what no message uses reaches no decoder, however much follows it."""
    body = b"\x82\xa4type\xa6status\xa1x" + bytes([code])
    for length in range(40):
        assert decode_all(frame(body + bytes(length)), "request") is None


def test_as_many_values_as_the_limit_are_accepted() -> None:
    """C3: the number of values is bounded where docs/protocol.md says, keys and containers too."""
    inner = limits.MAX_VALUES - 5  # two maps and arrays, two names and the type
    for count, is_legal in ((inner, True), (inner + 1, False)):
        body = b"\x82\xa4type\xa6status\xa1x\xdd" + count.to_bytes(4, "big") + b"\xc0" * count
        assert (decode_all(frame(body), "request") is not None) is is_legal


@pytest.mark.parametrize("depth", [limits.MAX_NESTING, 1000, 5_000_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\xdc\x00\x01"])
def test_deep_nesting_is_refused_at_once(depth: int, opening: bytes) -> None:
    """C3: depth is bounded before anything is built, whatever the containers."""
    body = b"\x82\xa4type\xa6status\xa1x" + opening * depth + b"\xc0"
    if len(body) > limits.MAX_FRAME_BYTES:
        body = body[: limits.MAX_FRAME_BYTES]
    started = time.process_time()
    assert decode_all(frame(body), "request") is None
    assert time.process_time() - started < 1.0


def test_nesting_up_to_the_limit_is_accepted() -> None:
    """The limit is where the documentation says."""
    inside = limits.MAX_NESTING - 1  # the message itself is the outermost
    body = b"\x82\xa4type\xa6status\xa1x" + b"\x91" * inside + b"\xc0"
    assert decode_all(frame(body), "request") == [Frame(messages.Status(), 0)]
    with pytest.raises(LocalProtocolError, match="nested deeper"):
        encode(messages.StatusReport(report=nested(limits.MAX_NESTING)))
    encode(messages.StatusReport(report=nested(limits.MAX_NESTING - 1)))


def nested(depth: int) -> dict[str, object]:
    report: dict[str, object] = {"x": 1}
    for _ in range(depth - 1):
        report = {"x": report}
    return report


def test_many_tiny_values_are_refused_before_they_become_objects() -> None:
    """C3: sixteen million empty lists fit a frame and would be a gigabyte."""
    count = limits.MAX_FRAME_BYTES - 100
    body = b"\x82\xa4type\xa6status\xa1x\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    decoder = FrameDecoder("request")
    decoder.feed(frame(body))
    with pytest.raises(RemoteProtocolError, match=f"more than {limits.MAX_VALUES} values"):
        decoder.next_frame()


def test_a_large_frame_in_small_chunks_costs_linear_time() -> None:
    """Twice the chunks take about twice the time, not four times."""
    message = messages.Take(namespace="n", tokens=random.Random(0).randbytes(8 << 20))
    data = encode(message)
    decoder = FrameDecoder("request")
    started = time.process_time()
    frames = []
    for start in range(0, len(data), 512):
        decoder.feed(data[start : start + 512])
        frames += drain(decoder)
    assert frames == [Frame(message, 0)]
    # 16,000 chunks: about 20 ms, and minutes if each copied what came before it.
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize("count", [-1, 17])
def test_a_frame_declares_at_most_sixteen_descriptors(count: int) -> None:
    """The side that sends more is told so itself."""
    with pytest.raises(LocalProtocolError, match="descriptors"):
        encode(messages.Status(), descriptors=count)


def test_sixteen_descriptors_beside_a_frame_are_legal() -> None:
    """docs/protocol.md: both sides allow exactly as many as the page says."""
    reply = messages.Descriptors(first=0, count=limits.MAX_DESCRIPTORS)
    data = encode(reply, descriptors=limits.MAX_DESCRIPTORS)
    assert decode_all(data, "reply") == [Frame(reply, limits.MAX_DESCRIPTORS)]


def test_a_frame_of_exactly_the_limit_is_sent() -> None:
    """C3: whoever sends a frame is held to the very limit that its reader keeps."""
    around = len(encode(messages.Failed(reason="protocol", detail="x" * (1 << 16)))) - HEADER_BYTES
    room = limits.MAX_FRAME_BYTES - around + (1 << 16)
    fits = messages.Failed(reason="protocol", detail="x" * room)
    data = encode(fits)
    assert len(data) == HEADER_BYTES + limits.MAX_FRAME_BYTES
    with pytest.raises(LocalProtocolError, match=f"takes {limits.MAX_FRAME_BYTES + 1} bytes"):
        encode(messages.Failed(reason="protocol", detail="x" * (room + 1)))


@pytest.mark.parametrize("form", [FORMAT - 1, FORMAT + 1])
def test_frames_of_another_format_are_refused(form: int) -> None:
    """DESIGN 4: older and newer alike, before anything of them is read."""
    decoder = FrameDecoder("request")
    decoder.feed(HEADER.pack(MAGIC, form, 0, 1) + b"x")
    with pytest.raises(RemoteProtocolError, match="frame format"):
        decoder.next_frame()
