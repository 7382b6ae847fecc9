"""Target `wire`: frames and messages. Whatever arrives is a message or the peer's fault (C3)."""

from contextlib import suppress
from typing import Any, get_args

import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol.connection import CLOSED, Connection, Received, Role, State
from prefixcached.protocol.errors import LocalProtocolError, RemoteProtocolError
from prefixcached.protocol.framing import FORMAT, HEADER, MAGIC, FrameDecoder, Message, Side, encode
from prefixcached.protocol.messages import AnyReply, AnyRequest
from tests.fuzz.choices import Choices, packed
from tests.protocol.examples import REPLIES, REQUESTS

assert {type(message) for message in (*REQUESTS, *REPLIES)} == {
    *get_args(AnyRequest), *get_args(AnyReply),
}  # fmt: skip


_UNKNOWN_FIELD = b"\x82\xa4type\xa6status\xa1x"
"""A legal request, but for the value of a field that nobody knows."""


def run(data: bytes) -> None:
    """Feed what ``data`` chooses to a decoder and to a connection, whole and in pieces."""
    choices = Choices(data)
    side: Side = choices.pick(("request", "reply"))
    examples: tuple[Message, ...] = REQUESTS if side == "request" else REPLIES
    stream = b"".join(_frame(choices, examples) for _ in range(choices.below(4) + 1))
    whole = _decoded(side, [stream])
    step = choices.below(64) + 1
    pieces = [stream[start : start + step] for start in range(0, len(stream), step)]
    assert _decoded(side, pieces) == whole, "the same bytes in pieces are another conversation"
    for message in whole[0]:
        again = _decoded(side, [encode(message)])
        assert repr(again) == repr(([message], False)), "a message that does not survive the wire"
    _converse(choices, side, pieces)


def _frame(choices: Choices, examples: tuple[Message, ...]) -> bytes:
    plain: Any = msgspec.to_builtins(choices.pick(examples), builtin_types=(bytes,))
    match choices.below(6):
        case 0:
            body = packed(plain)
        case 1 | 2:
            for _ in range(choices.below(3) + 1):
                plain = choices.changed(plain)
            body = packed(plain)
        case 3:
            body = choices.damaged(packed(plain))
        case 4 if choices.one_in(2):
            depth = choices.pick((5, limits.MAX_NESTING, limits.MAX_NESTING + 1, 600, 5000))
            body = _UNKNOWN_FIELD + choices.pick((b"\x91", b"\x81\xa1x")) * depth + b"\xc0"
        case 4:
            body = choices.blob(200)
        case _:
            return choices.blob(64)
    length, declared, form, magic = len(body), 0, FORMAT, MAGIC
    match choices.below(12):
        case 0:
            length = choices.integer() & 0xFFFFFFFF
        case 1:
            declared = choices.byte()
        case 2:
            form = choices.byte()
        case 3:
            magic = choices.blob(2)
        case _:
            pass
    return HEADER.pack(magic, form, declared, length) + body


def _decoded(side: Side, pieces: list[bytes]) -> tuple[list[Message], bool]:
    """The messages of a stream, and whether it ends in an error of the peer's."""
    decoder = FrameDecoder(side)
    found: list[Message] = []
    try:
        for piece in pieces:
            decoder.feed(piece)
            while (frame := decoder.next_frame()) is not None:
                assert 0 <= frame.descriptors <= limits.MAX_DESCRIPTORS
                _check_limits(frame.message)
                found.append(frame.message)
    except RemoteProtocolError:
        return found, True
    assert decoder.buffered_bytes <= sum(map(len, pieces))
    return found, False


def _check_limits(message: Message) -> None:
    """What nobody behind the decoder looks at again."""
    for name, most in (
        ("namespace", limits.MAX_NAMESPACE_BYTES), ("label", limits.MAX_LABEL_BYTES),
        ("key", limits.MAX_KEY_BYTES),
    ):  # fmt: skip
        text = getattr(message, name, None)
        assert text is None or len(text.encode()) <= most
    assert len(getattr(message, "tokens", b"")) % 4 == 0


def _converse(choices: Choices, side: Side, pieces: list[bytes]) -> None:
    """Numbers that stand for descriptors come out with messages or are left over, each once."""
    connection = Connection(Role.DAEMON if side == "request" else Role.CLIENT)
    given: list[int] = []
    handed: list[int] = []
    failed = False
    for piece in [*pieces, b""]:
        new = list(range(len(given), len(given) + (choices.below(20) if choices.one_in(3) else 0)))
        given += new
        connection.receive(piece, new)
        if not piece:
            connection.receive_eof()
        try:
            while isinstance(event := connection.next_event(), Received):
                assert not failed, "a message after an error"
                handed += event.descriptors
                _answer(choices, connection)
            assert event is CLOSED or piece, "the end of the stream is not seen"
        except RemoteProtocolError:
            failed = True
    left = connection.take_unclaimed()
    assert handed == sorted(handed)
    assert sorted(handed + left) == given, "a descriptor was lost or handed out twice"
    assert connection.state in State


def _answer(choices: Choices, connection: Connection) -> None:
    """Say something, legal or not: an illegal message is this side's own fault."""
    if choices.one_in(4):
        return
    is_asked = connection.state in (State.GREETED, State.PENDING)
    mine: tuple[Message, ...] = REPLIES if is_asked else REQUESTS
    with suppress(LocalProtocolError):
        connection.send(choices.pick(mine))
