"""The trace file: a stream of msgpack values, written by one daemon and read by commands.

    value 1      the text "prefixcached-trace", by which a file is known to be one
    value 2      the header: a map, see `Header`
    value 3...   records: [seconds since the start, channel, flow, message], the message a map with
                 its tag under "type"

A file that ends in the middle of a value, as kill -9 leaves it, is readable up to there. It may be
anybody's: a record that is read has been checked (`Facts`), so that whoever uses it need not.
`TraceWriter` owns the descriptor it writes to; one thread at a time may use it.
"""

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

import msgpack
import msgspec

from prefixcached.daemon.errors import StartError
from prefixcached.daemon.sendable import sendable

FORMAT: Final = 1
"""Grows when a reader of the old one would misunderstand the new."""

MAGIC: Final[bytes] = msgpack.packb("prefixcached-trace")

MAX_VALUE_BYTES: Final = 64 << 20
"""One record: four frames of the protocol. More is damage, not a message."""

MAX_NESTING: Final = 32
"""Of values in a record: what we write has a third of it, and readers walk it recursively."""

MAX_SECONDS: Final = 1e10
"""Three centuries since a start: more is damage, and no column is so wide."""

MAX_TURN_SECONDS: Final = 1e9
"""Of the clock of a record, 30 years after a machine's start: what follows it adds to that, and
stays below `MAX_SECONDS`."""

MAX_NAME_CHARACTERS: Final = 256
"""Of channels and flows, which have a tenth of it."""

Plain = dict[str, Any]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
ImageId = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32})?\Z")]
"""As `ram_tier.random_id` makes it, or none: a replay calls its files so."""
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says of itself. ``started`` is Unix time, ``config`` what was in force."""

    format: int
    version: str
    started: float
    tokens: Literal["digests", "ids"]
    config: Plain


class Facts(msgspec.Struct, frozen=True):
    """What our commands use of a message, whatever it is; a message has some of it."""

    type: str = ""
    session: Count = 0
    request: Plain | None = None
    tier: str = ""
    length: Count = 0
    reason: str = ""
    error: str = ""
    id: ImageId = ""
    lease: int | None = None
    put: int | None = None
    pin: int | None = None
    claim: int | None = None
    read: int | None = None
    sync: int | None = None
    epoch: int | None = None
    allocated_bytes: int | None = None
    records: Count = 0
    report: Plain = {}
    now: Seconds = 0.0
    wake: bool = False


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One message. ``channel`` is "sender->receiver", ``flow`` as in `flows`, or empty."""

    seconds: Seconds
    channel: ShortText
    flow: ShortText
    message: Plain

    @property
    def facts(self) -> Facts:
        """The message as far as commands use it; raises `msgspec.ValidationError`."""
        return msgspec.convert(self.message, Facts)

    @property
    def type(self) -> str:
        """The message's tag; of a call that of its request."""
        return str(self.body.get("type", ""))

    @property
    def body(self) -> Plain:
        """The message; of a call its request."""
        body = self.message.get("request")
        return body if isinstance(body, dict) else self.message

    @property
    def session(self) -> int:
        """The session of the flow, 0 where there is none."""
        number = self.flow.partition(".")[0]
        return int(number) if number.isascii() and number.isdecimal() else 0


class TraceError(ValueError):
    """A file is no trace, or is damaged."""


class TraceWriter:
    """Appends to a new trace.

    Args:
        path: Created with mode 0600. A file that is there is replaced if it is a trace.
        header: The header.

    Raises:
        StartError: It cannot be written, is no trace, or another daemon writes it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        try:
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise StartError(f"cannot write the trace {path}: {error.strerror}") from error
        try:
            self._take_over(path)
            self.append([MAGIC, msgpack.packb(sendable(msgspec.to_builtins(header)))])
        except OSError as error:
            self.close()
            raise StartError(f"cannot write the trace {path}: {error.strerror}") from error
        except StartError:
            self.close()
            raise

    def _take_over(self, path: Path) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StartError(f"cannot write the trace {path}: it is no regular file")
        if status.st_size and os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            raise StartError(
                f"{path} exists and is no trace; name another file, or remove this one first"
            )
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another daemon writes the trace {path}; name another file") from None
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, 0)

    def append(self, values: list[bytes]) -> int:
        """Write encoded values and return their bytes.

        Raises:
            OSError: Not all could be written.
        """
        data = b"".join(values)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        return len(data)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def encoded(record: Record) -> bytes:
    """Return a record as it stands in the file.

    Raises:
        ValueError, TypeError, OverflowError: The message has no msgpack form.
    """
    data: bytes = msgpack.packb(
        [record.seconds, record.channel, record.flow, record.message], use_bin_type=True
    )
    return data


class _Beginning:
    """The rest of an open file up to byte ``end``."""

    def __init__(self, file: BinaryIO, end: int | None) -> None:
        self._file = file
        self._left = sys.maxsize if end is None else max(0, end - file.tell())

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


@contextmanager
def reading(path: Path, file_bytes: int | None = None) -> Iterator[tuple[Header, Iterator[Record]]]:
    """Open a trace for the block: its header, and its records as they are read.

    Args:
        path: The file.
        file_bytes: Where to take it for cut: whoever reads a file twice while it grows gets the
            same. None: where it ends.

    Raises:
        OSError: It cannot be read.
        TraceError: It is no trace, of another format, or damaged; the records raise it as well.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise TraceError(f"{path} is no trace")
        values = msgpack.Unpacker(
            _Beginning(file, file_bytes),
            raw=False,
            strict_map_key=False,
            max_buffer_size=MAX_VALUE_BYTES,
        )
        header = _header(path, values)
        yield header, _records(path, values)


def _header(path: Path, values: Any) -> Header:
    try:
        plain = next(values)
        check_plain(plain)
        form = plain.get("format") if isinstance(plain, dict) else None
        if form != FORMAT:
            raise TraceError(
                f"{path} has format {form!r}, and this version reads {FORMAT}; read it with the "
                "version that wrote it"
            )
        return msgspec.convert(plain, Header)
    except StopIteration:
        raise TraceError(f"{path} ends within its header: nothing was recorded") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path} is damaged at its beginning: {_reason(error)}") from error


def _records(path: Path, values: Any) -> Iterator[Record]:
    while True:
        start = values.tell()
        try:
            value = next(values)
            check_plain(value)
            record = msgspec.convert(value, Record)
            facts = record.facts
            if facts.type == "new-image" and not facts.id:
                raise ValueError("a new image without an id")
        except StopIteration:
            return
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise TraceError(
                f"{path} is damaged at byte {len(MAGIC) + start}: {_reason(error)}"
            ) from error
        yield record


def check_plain(value: Any, nesting: int = MAX_NESTING) -> None:
    """Refuse what a trace never holds, however deep it lies.

    Raises:
        ValueError: A value of another type, a key that is no text or number, or too deep a nest.
    """
    if nesting < 0:
        raise ValueError(f"values lie deeper than {MAX_NESTING} levels")
    match value:
        case dict():
            for key, inner in value.items():
                if not isinstance(key, str | int):
                    raise ValueError(f"a key is of type {type(key).__name__}")
                check_plain(inner, nesting - 1)
        case list():
            for inner in value:
                check_plain(inner, nesting - 1)
        case str() | bytes() | bool() | int() | float() | None:
            pass
        case _:
            raise ValueError(f"a value is of type {type(value).__name__}")


def _reason(error: Exception) -> str:
    """Why a value cannot be read; msgpack's own errors often say nothing."""
    return str(error) or f"no msgpack value ({type(error).__name__})"
