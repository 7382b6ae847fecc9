"""A client that may do anything and still knows what its daemon owes it.

Whatever it sends is decoded as the daemon decodes it; so for every reply it knows the request, also
where the request came out of damage by chance. A `Peer` owns its end of the socket, and every
descriptor and mapping that it got.
"""

import fcntl
import mmap
import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import trio

from prefixcached.daemon.sockets import RECEIVE_BYTES, MessageSocket
from prefixcached.protocol import messages as m
from prefixcached.protocol.connection import ONE_WAY, REPLIES
from prefixcached.protocol.errors import RemoteProtocolError
from prefixcached.protocol.framing import FrameDecoder, encode
from prefixcached.protocol.image import ImageSpec
from prefixcached.protocol.messages import AnyRequest
from prefixcached.protocol.schema import Schema, decode_schema
from prefixcached.protocol.tokens import token_array
from tests.fuzz.payload import is_cheap, object_bytes
from tests.support.core_payload import Tokens, image_bytes, verify_hit

ANSWER_SECONDS: Final = 100.0
"""For an answer that must come, or an end: more than all deadlines of a session."""

WAIT_SECONDS: Final = 0.01
"""For an answer that need not come: a take may wait for another's prefill as long as it asks."""

_F_ADD_SEALS: Final = 1033
_F_SEAL_SEAL: Final = 1
_F_SEAL_WRITE: Final = 8
"""Linux's numbers, which `fcntl` has on Linux alone."""

_BUFFER: Final = bytearray(RECEIVE_BYTES)


@dataclass
class Put:
    """A granted put: what was offered, the images to fill, and what came of them so far."""

    offer: m.Offer | m.OfferObject
    specs: tuple[ImageSpec, ...]
    descriptors: list[int]
    is_filled: bool = False


@dataclass
class Lent:
    """A hit that is still leased. ``tokens`` are those asked for, ``key`` that of an object."""

    hit: m.Hit
    namespace: str
    descriptors: list[int]
    tokens: Tokens = ()
    key: str | None = None
    edits: int = 0
    """`Known.edits` when it was asked for."""


@dataclass
class Known:
    """What all peers of a run know: the namespaces they use, and those with any bytes in them.

    ``edits`` counts changes of files behind the daemon's back.
    """

    names: tuple[str, ...]
    tainted: set[str] = field(default_factory=set)
    edits: int = 0


class Place(Protocol):
    """Where clients meet a daemon: `world.World`, or a daemon of its own process."""

    state_dir: Path | None
    """Files that may be damaged; None for none."""

    def connect(self) -> socket.socket:
        """Return the client's end of a new connection."""
        ...

    async def squeeze(self) -> None:
        """Have what can leave RAM leave it."""
        ...


class Peer:
    """One connection of ``place``."""

    def __init__(self, place: Place, known: Known) -> None:
        self._end = place.connect()
        self._socket = MessageSocket(self._end, _BUFFER)
        self._known = known
        self._replies = FrameDecoder("reply")
        self._requests: FrameDecoder | None = FrameDecoder("request")
        self._received: deque[int] = deque()
        self._mappings: list[mmap.mmap] = []
        self._opened: list[int] = []
        self.pending: deque[AnyRequest] = deque()
        self._edits: deque[int] = deque()
        self.puts: dict[int, Put] = {}
        self.lent: dict[int, Lent] = {}
        self.pins: list[int] = []
        self.claims: list[int] = []
        self.boots: list[str] = [""]
        self.names = known.names
        self.is_over = False

    # -- sending --------------------------------------------------------------------------------

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send any bytes with any descriptors, up to 16 of which go with one message."""
        if self.is_over or not data:
            return
        self._note(data)
        with suppress(OSError):  # it ended; what it said before is still to be read
            await self._socket.send(data, descriptors, ANSWER_SECONDS)

    async def ask(self, request: AnyRequest) -> None:
        """Send a legal request and take in its reply."""
        await self.send(encode(request))
        await self.hear()

    def _note(self, data: bytes) -> None:
        """Find out what the daemon will take these bytes for."""
        if self._requests is None:
            return
        self._requests.feed(data)
        try:
            while (frame := self._requests.next_frame()) is not None:
                self._note_request(frame.message)  # type: ignore[arg-type]
        except RemoteProtocolError:
            self._requests = None

    def _note_request(self, request: AnyRequest) -> None:
        match request:
            case m.Commit(put=number) if number in self.puts and not self.puts[number].is_filled:
                self._known.tainted.add(self.puts[number].offer.namespace)
            case m.Release(lease=number):
                self._drop(self.lent.pop(number, None))
            case m.Abandon(put=number):
                self._drop(self.puts.pop(number, None))
            case _:
                pass
        if type(request) not in ONE_WAY:
            self.pending.append(request)
            self._edits.append(self._known.edits)

    def _drop(self, held: Put | Lent | None) -> None:
        for descriptor in held.descriptors if held is not None else ():
            os.close(descriptor)

    # -- hearing --------------------------------------------------------------------------------

    async def hear(self) -> None:
        """Take in the replies to what is pending, those that must come and those that have."""
        while self.pending and not self.is_over:
            may_wait = isinstance(self.pending[0], m.Take) and self.pending[0].wait > 0
            with trio.move_on_after(WAIT_SECONDS if may_wait else ANSWER_SECONDS) as scope:
                await self._read()
            if scope.cancelled_caught:
                assert may_wait, f"no answer to {self.pending[0]!r}"
                return

    async def hear_the_end(self) -> None:
        """Read until the daemon closes."""
        with trio.fail_after(ANSWER_SECONDS):
            while not self.is_over:
                await self._read()

    async def _read(self) -> None:
        try:
            data, descriptors = await self._socket.receive()
        except ConnectionError:
            data, descriptors = b"", []
        self._received.extend(descriptors)
        if not data:
            self.is_over = True
            assert not self._replies.buffered_bytes, "the daemon ended within a frame"
            assert not self._received, "descriptors that no reply declared"
            return
        self._replies.feed(data)
        while (frame := self._replies.next_frame()) is not None:
            assert isinstance(frame.message, m.Reply)
            claimed = [self._received.popleft() for _ in range(frame.descriptors)]
            self._hear_one(frame.message, claimed)

    def _hear_one(self, reply: m.Reply, descriptors: list[int]) -> None:
        self.boots = ["", reply.boot]
        if isinstance(reply, m.Failed):
            assert reply.reason != "internal", reply
            self.pending.clear()
            self._edits.clear()
            return
        request, edits = self.pending.popleft(), self._edits.popleft()
        assert type(reply) in REPLIES[type(request)], (request, reply)
        match request, reply:
            case ((m.Offer() | m.OfferObject() as offer), m.Grant()):
                self.puts[reply.put] = Put(offer, reply.images, descriptors)
            case m.Commit(put=number), _ if number in self.puts:
                # A hostile client keeps what it could write to: see `attack`.
                self._opened += self.puts.pop(number).descriptors
            case m.Take(), m.Hit():
                tokens = tuple(token_array(request.tokens).tolist())
                self._hit(reply, Lent(reply, request.namespace, descriptors, tokens, edits=edits))
                assert reply.length < len(tokens), "T3: a hit covers at most all but one"
            case m.TakeObject(), m.Hit():
                self._hit(
                    reply,
                    Lent(reply, request.namespace, descriptors, key=request.key, edits=edits),
                )
            case m.Fetch(of=number, first=first), m.Descriptors():
                self._fetched(number, first, descriptors)
            case m.Prefetch(), m.Pinned(pin=int(pin)):
                self.pins.append(pin)
            case _:
                assert not descriptors
        if isinstance(reply, m.Hit | m.Miss) and reply.claim is not None:
            self.claims.append(reply.claim)

    def _hit(self, hit: m.Hit, lent: Lent) -> None:
        self.lent[hit.lease] = lent
        self.verify(lent)

    def _fetched(self, number: int, first: int, descriptors: list[int]) -> None:
        held: Put | Lent | None = self.puts.get(number) or self.lent.get(number)
        if held is not None and first == len(held.descriptors):
            held.descriptors += descriptors
            if isinstance(held, Lent):
                self.verify(held)
        else:
            self._opened += descriptors

    # -- bytes ----------------------------------------------------------------------------------

    def note_edit(self) -> None:
        """Some file is about to be changed behind the daemon's back."""
        self._known.edits += 1

    def verify(self, lent: Lent) -> None:
        """Compare every byte of a hit with what must have been stored, once all of it is here."""
        hit = lent.hit
        if len(lent.descriptors) < len(hit.parts) or lent.namespace in self._known.tainted:
            return
        if hit.tier == "ssd" and lent.edits != self._known.edits:
            return  # a file is checked before it is lent, and cannot be sealed (D3)
        if lent.key is not None:
            (part,), (descriptor,) = hit.parts, lent.descriptors
            wanted = object_bytes(lent.namespace, lent.key, part.spec)
            if wanted is not None:
                found = os.pread(descriptor, len(wanted), part.data_offset)
                assert found == wanted, "wrong bytes of an object"
            return
        if not hit.schema:
            return
        schema = decode_schema(hit.schema)
        if all(is_cheap(schema, part.spec) for part in hit.parts):
            verify_hit(
                schema, lent.namespace, lent.tokens, hit, lent.descriptors,
                lambda descriptor, offset, count: os.pread(descriptor, count, offset),
            )  # fmt: skip

    def fill(self, number: int) -> None:
        """Write a granted put's images; what cannot be written right is known to be tainted."""
        put = self.puts[number]
        put.is_filled = len(put.descriptors) == len(put.specs)
        schema = _schema_of(put.offer)
        for spec, descriptor in zip(put.specs, put.descriptors, strict=False):
            if isinstance(put.offer, m.OfferObject):
                data = object_bytes(put.offer.namespace, put.offer.key, spec)
            elif schema is not None and is_cheap(schema, spec):
                tokens = tuple(token_array(put.offer.tokens).tolist())
                data = image_bytes(schema, spec, put.offer.namespace, tokens)
            else:
                data = None
            try:
                written = -1 if data is None else os.pwrite(descriptor, data, 0)
            except PermissionError:  # this client sealed it before
                written = -1
            put.is_filled &= data is not None and written == len(data)

    # -- what a hostile client does with the memory it was given ----------------------------------

    def abuse(self, number: int, what: int, size: int) -> None:
        """Do to a granted image what must have no effect, or end in a declined commit."""
        put = self.puts[number]
        for descriptor in put.descriptors:
            nbytes = os.fstat(descriptor).st_size
            with suppress(OSError):
                match what:
                    case 0:
                        os.ftruncate(descriptor, size)
                    case 1:
                        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SEAL)
                    case 2:
                        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_WRITE)
                    case 3 if nbytes:
                        self._mappings.append(mmap.mmap(descriptor, nbytes))
                    case 4:
                        self._opened.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
                    case _:
                        os.lseek(descriptor, size, os.SEEK_SET)
            assert os.fstat(descriptor).st_size == nbytes, "an image changed its size"

    def attack(self, number: int) -> None:
        """Try to change what is lent: nothing may come of it."""
        for descriptor in self.lent[number].descriptors:
            for attempt in (_overwrite, _cut):
                try:
                    attempt(descriptor)
                except OSError:
                    continue
                assert os.fstat(descriptor).st_size == 0, "a lent image was changed"
        for descriptor in self._opened:
            # What could be written before the commit: sealed, or never published.
            with suppress(OSError):
                os.pwrite(descriptor, b"\xff" * 8, 0)
        self.verify(self.lent[number])

    # -- the end --------------------------------------------------------------------------------

    async def finish_sending(self) -> None:
        """Let the daemon see the end of the stream, and read what it still says."""
        self._end.shutdown(socket.SHUT_WR)
        await self.hear_the_end()

    def close(self) -> None:
        """Check what is lent once more, and give up everything."""
        for lent in self.lent.values():
            self.verify(lent)
        self.is_over = True
        self._socket.close()
        given: list[Put | Lent] = [*self.puts.values(), *self.lent.values()]
        for held in given:
            self._drop(held)
        for mapping in self._mappings:
            mapping.close()
        for descriptor in (*self._opened, *self._received):
            os.close(descriptor)


def _schema_of(offer: m.Offer | m.OfferObject) -> Schema | None:
    return decode_schema(offer.schema) if isinstance(offer, m.Offer) else None


def _overwrite(descriptor: int) -> None:
    if os.pwrite(descriptor, b"\xff", 0) == 0:
        raise OSError


def _cut(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
