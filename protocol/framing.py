"""Frames: how one message becomes bytes and how untrusted bytes become one message.

    offset  size  field
    0       2     magic, b"PC"
    2       1     format, 1
    3       1     number of descriptors beside this frame, 0..16
    4       4     length of the body in bytes, little-endian, at most MAX_FRAME_BYTES
    8       n     body: one msgpack map with the message's tag under "type"

The bytes of a body are scanned before anything is built from them (`scan`). Only what nests within
MAX_NESTING, holds at most MAX_VALUES values, has no extension types and ends exactly at its length
reaches msgspec, which admits only the types of `messages`. `FrameDecoder` owns the bytes not yet
consumed.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol.errors import LocalProtocolError, RemoteProtocolError
from prefixcached.protocol.messages import AnyReply, AnyRequest, StatusReport
from prefixcached.protocol.scan import scan

MAGIC: Final = b"PC"
FORMAT: Final = 1
HEADER: Final = struct.Struct("<2sBBI")
HEADER_BYTES: Final = HEADER.size

Message = AnyRequest | AnyReply
Side = Literal["request", "reply"]


def tag_of(kind: type[Message]) -> str:
    """Return the name that stands under "type" in a message's body."""
    return str(kind.__struct_config__.tag)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final[Mapping[Side, msgspec.msgpack.Decoder[Message]]] = {
    "request": msgspec.msgpack.Decoder(AnyRequest),
    "reply": msgspec.msgpack.Decoder(AnyReply),
}

_MOST_BYTES: Final = {
    "namespace": limits.MAX_NAMESPACE_BYTES,
    "key": limits.MAX_KEY_BYTES,
    "label": limits.MAX_LABEL_BYTES,
}
_TEXTS: Final[Mapping[type[Message], Sequence[tuple[str, int]]]] = {
    kind: [(name, most) for name, most in _MOST_BYTES.items() if name in kind.__struct_fields__]
    for kind in get_args(AnyRequest)
}
"""By the names of their fields: no list leaves out a request that is added."""
_WITH_TOKENS: Final = frozenset(
    kind for kind in get_args(AnyRequest) if "tokens" in kind.__struct_fields__
)


class Frame(NamedTuple):
    """One decoded frame: its message and how many descriptors belong to it."""

    message: Message
    descriptors: int


def encode(message: Message, descriptors: int = 0) -> bytes:
    """Return the frame of ``message``, beside which ``descriptors`` descriptors will travel.

    Raises:
        LocalProtocolError: The message breaks a limit, so that the peer would refuse it.
    """
    if not 0 <= descriptors <= limits.MAX_DESCRIPTORS:
        raise LocalProtocolError(
            f"{descriptors} descriptors beside one frame; at most {limits.MAX_DESCRIPTORS}"
        )
    try:
        body = _ENCODER.encode(message)
        if isinstance(message, StatusReport):
            # The one message whose depth and number of values no type bounds.
            scan(body, 0, len(body))
        _check_sizes(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"{tag_of(type(message))} cannot be encoded: {error}") from error
    if len(body) > limits.MAX_FRAME_BYTES:
        raise LocalProtocolError(
            f"{tag_of(type(message))} takes {len(body)} bytes; a frame has room for "
            f"{limits.MAX_FRAME_BYTES}"
        )
    return HEADER.pack(MAGIC, FORMAT, descriptors, len(body)) + body


class FrameDecoder:
    """Cuts a stream of bytes into frames, however the bytes arrive.

    Args:
        side: Which messages the peer may send at all.

    After it raised once it is of no further use (`Connection` keeps the error).
    """

    def __init__(self, side: Side) -> None:
        self._side: Side = side
        self._buffer: bytes | bytearray = b""
        self._start = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes received that no returned frame has used."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes) -> None:
        """Append bytes that the peer sent."""
        if self._start == len(self._buffer):
            # Mostly whole frames arrive in one piece, and are decoded where they lie.
            self._buffer, self._start = data, 0
            return
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer)
        # Cheap: a bytearray moves its start instead of its bytes.
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += data

    def discard(self) -> None:
        """Drop what no frame has used: nobody will ask for it."""
        self._buffer, self._start = b"", 0

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None until more bytes arrive.

        Raises:
            RemoteProtocolError: The bytes are no legal frame.
        """
        buffer, start = self._buffer, self._start
        if len(buffer) - start < HEADER_BYTES:
            return None
        magic, form, descriptors, length = HEADER.unpack_from(buffer, start)
        if magic != MAGIC:
            raise RemoteProtocolError(
                f"the peer does not speak this protocol: a frame begins {MAGIC!r}, not {magic!r}"
            )
        if form != FORMAT:
            raise RemoteProtocolError(
                f"the peer sent frame format {form}; this side reads {FORMAT}"
            )
        if descriptors > limits.MAX_DESCRIPTORS:
            raise RemoteProtocolError(
                f"the peer declared {descriptors} descriptors; at most {limits.MAX_DESCRIPTORS}"
            )
        if length > limits.MAX_FRAME_BYTES:
            raise RemoteProtocolError(
                f"the peer declared a frame of {length} bytes; at most {limits.MAX_FRAME_BYTES}"
            )
        start += HEADER_BYTES
        end = start + length
        if len(buffer) < end:
            return None
        message = _decode_body(buffer, start, end, self._side)
        self._start = end
        if end == len(buffer):
            self._buffer, self._start = b"", 0
        return Frame(message, descriptors)


def _decode_body(data: bytes | bytearray, start: int, end: int, side: Side) -> Message:
    """The message that ``data[start:end]``, the body of a complete frame, encodes."""
    try:
        scan(data, start, end)
        # A view, so that a prompt of a million tokens is copied once, into its message.
        with memoryview(data) as whole, whole[start:end] as body:
            message = _DECODERS[side].decode(body)
        _check_sizes(message)
    except ValueError as error:
        raise RemoteProtocolError(f"the peer sent a malformed {side}: {error}") from error
    return message


def _check_sizes(message: Message) -> None:
    """Raise ValueError where a text exceeds its limit in bytes, or tokens are no whole words.

    msgspec counts characters, and on this side's own messages it checks nothing at all.
    """
    for name, most_bytes in _TEXTS.get(type(message), ()):
        text = getattr(message, name)
        if text is not None:
            _check_text(name, text, most_bytes)
    if type(message) in _WITH_TOKENS:
        _check_tokens(getattr(message, "tokens"))  # noqa: B009, no type says that it has them


def _check_text(name: str, text: str, most_bytes: int) -> None:
    if len(text) > most_bytes or (not text.isascii() and len(text.encode()) > most_bytes):
        raise ValueError(f"{name} of {len(text.encode())} bytes; at most {most_bytes}")


def _check_tokens(tokens: bytes) -> None:
    if len(tokens) % 4:
        raise ValueError(f"tokens are 4 bytes each, and {len(tokens)} bytes are no whole number")
    if len(tokens) > 4 * limits.MAX_TOKENS:
        raise ValueError(f"{len(tokens) // 4} tokens; at most {limits.MAX_TOKENS}")
