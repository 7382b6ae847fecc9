"""Player: one session of a record and its connection, which it owns.

Numbers that the daemon gives out are translated. Where this daemon grants or lends what the
record's did not, the client behind it would have filled or released it, and so that is done at
once; where it does not, what belonged to it is left out. Bytes that are stored follow from the
tokens alone.
"""

import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio

from prefixcached.daemon.trace.replay_link import Link, ReplayFailedError, open_link
from prefixcached.daemon.trace.replay_steps import BARRIER, Answered
from prefixcached.daemon.trace.trace_file import Facts
from prefixcached.protocol import messages
from prefixcached.protocol.image import ImageSpec, layout
from prefixcached.protocol.messages import AnyRequest, OneWay, Reply
from prefixcached.protocol.schema import decode_schema

STALL_SECONDS: Final = 2.0
"""How much longer than in the record a reply may take before the replay goes on without it. It may
wait for what only a later step brings."""

BLOCK_BYTES: Final = 1 << 16
"""Of an image's bytes: one block follows from its tokens and is repeated."""

_NUMBERS: Final = ("lease", "put", "pin", "claim")
"""What replies give out and requests name."""


def connection_name(session: int, connection: int) -> str:
    """What a connection calls itself; the daemon of the replay knows its session by it."""
    return f"replay of session {session}, connection {connection}"


@dataclass(slots=True)
class Comparison:
    """How this daemon's replies compare with the record's; lengths are those of takes.

    ``left_out`` requests name what this daemon never gave. ``late`` replies took `STALL_SECONDS`
    longer than in the record, so that later requests may have overtaken them; they are compared all
    the same. Replies that did not come before the session's next request were ``given_up``.
    """

    requests: int = 0
    left_out: int = 0
    equal_takes: int = 0
    longer_takes: int = 0
    shorter_takes: int = 0
    late: int = 0
    given_up: int = 0
    ended_sessions: int = 0


class Player:
    """One session of the record and its connection."""

    def __init__(self, session: int, socket: Path, comparison: Comparison) -> None:
        self.name = ""
        self.link: Link
        self._session = session
        self._socket = socket
        self._connections = 0
        self._comparison = comparison
        self._numbers: dict[int, int] = {}
        self._pending: AnyRequest | None = None
        self._unheard: Facts | None = None
        self.is_open = True

    async def connect(self) -> None:
        """Open a connection, under a name that no other one has."""
        self._connections += 1
        self.name = connection_name(self._session, self._connections)
        self.link = await open_link(self._socket, self.name)

    @property
    def is_waiting(self) -> bool:
        """Whether a reply is outstanding."""
        return self._pending is not None

    async def send(self, request: AnyRequest) -> None:
        """Send a request of the record, unless this daemon never gave what it names."""
        translated = self._translated(request)
        if translated is None:
            self._comparison.left_out += 1
            return
        if self.is_waiting:
            await self._finish()
        self._comparison.requests += 1
        await self.link.say(translated)
        if not isinstance(translated, OneWay):
            self._pending, self._unheard = translated, None

    async def answered(self, step: Answered, patience_seconds: float = STALL_SECONDS) -> None:
        """Wait for the reply that the record has here, and follow it up."""
        if not self.is_waiting:
            return
        self._unheard = step.reply
        heard = None
        with trio.move_on_after(step.took_seconds + patience_seconds):
            heard = await self.link.hear()
        if heard is None:
            self._comparison.late += 1
        else:
            await self._follow_up(*heard)

    async def close(self) -> None:
        """End the connection as the record's ended."""
        if self.is_open and self.is_waiting and self._unheard is not None:
            await self._finish()
        self.is_open = False
        self.link.close()

    async def _finish(self) -> None:
        """Wait for a reply that is late, or give it up as a client does: with its connection.

        It may wait for what other sessions do later, and they for this one.
        """
        heard = None
        with trio.move_on_after(STALL_SECONDS):
            heard = await self.link.hear()
        if heard is not None:
            await self._follow_up(*heard)
            return
        self._comparison.given_up += 1
        self._pending = None
        self._numbers.clear()
        self.link.close()
        await self.connect()

    async def _follow_up(self, reply: Reply, descriptors: list[int]) -> None:
        """Do what the client behind the record would do with this reply."""
        request, self._pending = self._pending, None
        recorded = self._unheard or Facts()
        if isinstance(request, messages.Take):
            self._compare(recorded, reply)
        if isinstance(reply, messages.Grant):
            await self._fill(request, reply, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(reply, messages.Failed):
            self.is_open = False
            self._comparison.ended_sessions += 1
            self.link.close()
            return
        for name in _NUMBERS:
            given = getattr(reply, name, None)
            if given is None:
                continue
            if (number := getattr(recorded, name)) is not None:
                self._numbers[number] = given
            else:
                await self._use_up(name, given)

    def _compare(self, recorded: Facts, reply: Reply) -> None:
        before = recorded.length
        now = reply.length if isinstance(reply, messages.Hit) else 0
        self._comparison.equal_takes += now == before
        self._comparison.longer_takes += now > before
        self._comparison.shorter_takes += now < before

    async def _use_up(self, name: str, number: int) -> None:
        """The record's client had no such thing: end it as any client would."""
        match name:
            case "lease":
                await self.link.say(messages.Release(number))
            case "pin":
                await self.link.say(messages.Unpin(number))
            case "claim":
                await self.link.say(messages.DropClaim(number))
            case _:
                await self.link.ask(messages.Commit(number))
                return
        await self.link.ask(BARRIER)

    async def _fill(
        self, request: AnyRequest | None, grant: messages.Grant, descriptors: list[int]
    ) -> None:
        """Write all images of a grant; fetch the descriptors that did not come with it."""
        while len(descriptors) < len(grant.images):
            _, more = await self.link.ask(messages.Fetch(grant.put, len(descriptors)))
            if not more:
                raise ReplayFailedError(f"the daemon has no descriptor {len(descriptors)} of a put")
            descriptors += more
        assert isinstance(request, messages.Offer | messages.OfferObject)
        for spec, descriptor in zip(grant.images, descriptors, strict=True):
            _fill(descriptor, request, spec)

    def _translated(self, request: AnyRequest) -> AnyRequest | None:
        for name in _NUMBERS:
            number = getattr(request, name, None)
            if number is not None:
                if number not in self._numbers:
                    return None
                return msgspec.structs.replace(request, **{name: self._numbers[number], "boot": ""})
        return request


def _fill(descriptor: int, request: messages.Offer | messages.OfferObject, spec: ImageSpec) -> None:
    schema = decode_schema(request.schema) if isinstance(request, messages.Offer) else None
    nbytes = layout(schema, spec).nbytes
    if not nbytes:
        return
    what = request.tokens[: 4 * spec.end] if isinstance(request, messages.Offer) else b""
    name = f"{request.namespace}\0{spec.kind}\0{spec.start}\0{getattr(request, 'key', '')}\0"
    seed = hashlib.shake_128(name.encode() + what).digest(BLOCK_BYTES)
    # Closed before the commit: the daemon cannot seal what is mapped for writing.
    with mmap.mmap(descriptor, nbytes) as image:
        for start in range(0, nbytes, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, nbytes)
            image[start:stop] = seed[: stop - start]
