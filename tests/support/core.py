"""A synchronous harness for the core: RamTier without its loop, its threads or its neighbours.

`Core` is the real RamTier whose orders are recorded instead of carried out, so that a test decides
when each is done, in which order, and whether it succeeds. Time stands still until `advance`.
`FakeDisk` (tests/support/fake_disk.py) carries out what is meant for SsdTier and Prefetcher.
"""

import errno
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from prefixcached.actors.desk import RamConfig
from prefixcached.actors.entries import Memory
from prefixcached.actors.ram_tier import RamTier
from prefixcached.client.lending import check_granted, check_hit
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import (
    ActorMessage,
    Call,
    ClientGone,
    Envelope,
    Freed,
    Loaded,
    Sealed,
    SyncAll,
    Synced,
)
from prefixcached.protocol.image import ImageSpec
from prefixcached.protocol.messages import Reply
from prefixcached.protocol.schema import decode_schema

PAGE = 16384
"""What one small image is charged."""


class Descriptors:
    """Gives out numbers that stand for descriptors, and knows what each one reads."""

    def __init__(self) -> None:
        self.open: dict[int, FakeMemory | FakeFile] = {}
        self._next = 1000

    def add(self, target: "FakeMemory | FakeFile") -> int:
        self._next += 1
        self.open[self._next] = target
        return self._next

    def read(self, descriptor: int, offset: int, nbytes: int) -> bytes:
        return self.open[descriptor].read(offset, nbytes)


class FakeMemory:
    """One image's memory. Using it after `free`, or writing after `seal`, fails the test."""

    def __init__(self, descriptors: Descriptors, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = bytearray(nbytes)
        self.is_sealed = False
        self.is_freed = False
        self._descriptors = descriptors
        self._number = descriptors.add(self)

    @property
    def writable_descriptor(self) -> int:
        assert not self.is_sealed, "no writable descriptor after the seal"
        return self._number

    @property
    def descriptor(self) -> int:
        assert self.is_sealed, "no read-only descriptor before the seal"
        return self._number

    def write(self, data: bytes) -> None:
        assert not self.is_sealed
        assert not self.is_freed
        assert len(data) == self.nbytes
        self.data[:] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        assert not self.is_freed, "lent memory was freed"
        return bytes(self.data[offset : offset + nbytes])

    def seal(self) -> None:
        assert not self.is_freed
        self.is_sealed = True

    def free(self) -> None:
        assert not self.is_freed, "memory was freed twice"
        self.is_freed = True
        del self._descriptors.open[self._number]


class FakeFile:
    """A verified open file; its image begins at ``data_offset``."""

    def __init__(self, descriptors: Descriptors, data: bytes, data_offset: int = 4096) -> None:
        self.data_offset = data_offset
        self._data = data
        self._descriptors = descriptors
        self.descriptor = descriptors.add(self)

    def read(self, offset: int, nbytes: int) -> bytes:
        first = offset - self.data_offset
        assert first >= 0, "a read before the data"
        return self._data[first : first + nbytes]

    def close(self) -> None:
        self._descriptors.open.pop(self.descriptor, None)


class Slot:
    """Holds the one reply to a call. No grant or hit is one that the client would refuse."""

    def __init__(self, request: wire.AnyRequest | None = None) -> None:
        self._request = request
        self.reply: Reply | None = None
        self.descriptors: list[int] = []

    def set(self, reply: Reply, descriptors: Sequence[int] = ()) -> None:
        assert self.reply is None, f"answered twice: {self.reply}, then {reply}"
        self.reply = reply
        self.descriptors = list(descriptors)
        if isinstance(self._request, wire.Offer) and isinstance(reply, wire.Grant):
            offer: Any = SimpleNamespace(
                length=len(self._request.tokens) // 4,
                windows=self._request.windows,
                checkpoint=self._request.checkpoint,
            )
            for spec in reply.images:
                check_granted(spec, offer)
        if isinstance(self._request, wire.Take) and isinstance(reply, wire.Hit) and reply.schema:
            check_hit(reply, decode_schema(reply.schema))


class LivelockError(AssertionError):
    """The actor would spin: a deadline in the past that handling it does not move."""


class Core(RamTier):
    """RamTier, driven by hand.

    Orders wait in ``to_ssd``, ``to_prefetcher``, ``sealing``, ``freeing`` and ``syncing``. With
    ``auto_seal``, ``auto_free`` and ``auto_sync`` (the default) the last three are carried out
    within the same step. Memory is refused once ``memories_left`` images have been made.
    """

    def __init__(
        self, config: RamConfig | None = None, *, auto_seal: bool = True, auto_free: bool = True,
        is_loaded: bool = True,
    ) -> None:  # fmt: skip
        self.descriptors = Descriptors()
        self.memories: list[FakeMemory] = []
        self.memories_left = float("inf")
        super().__init__(config or small_config(), create_memory=self.create_memory)
        self.clock = 1000.0
        self.auto_seal, self.auto_free = auto_seal, auto_free
        self.auto_sync = True
        self.to_ssd: list[Envelope] = []
        self.to_prefetcher: list[Envelope] = []
        self.sealing: list[tuple[int, Sequence[Memory]]] = []
        self.freeing: list[tuple[Memory, int]] = []
        self.syncing: list[SyncAll] = []
        self._depth = 0
        self._set_loading(self.config.ssd_bytes > 0)
        if is_loaded and self.config.ssd_bytes:
            self.send(Loaded((), done=True))

    def create_memory(self, nbytes: int) -> Memory:
        if not self.memories_left:
            raise OSError(errno.EMFILE, "too many open files")
        self.memories_left -= 1
        memory = FakeMemory(self.descriptors, nbytes)
        self.memories.append(memory)
        return memory

    # -- orders, recorded -----------------------------------------------------------------------

    def ssd(self, message: ActorMessage, handle: Any = None) -> None:
        if isinstance(message, SyncAll):
            self.syncing.append(message)
        else:
            self.to_ssd.append(Envelope(message, handle))

    def prefetcher(self, message: ActorMessage, handle: Any = None) -> None:
        self.to_prefetcher.append(Envelope(message, handle))

    def seal(self, put: int, memories: Sequence[Memory]) -> None:
        self.sealing.append((put, memories))

    def free(self, memory: Memory, charged_bytes: int) -> None:
        if self.auto_free:
            memory.free()
            self.index.freed(charged_bytes, 1)
        else:
            self.freeing.append((memory, charged_bytes))

    # -- steps ----------------------------------------------------------------------------------

    def send(self, message: ActorMessage, handle: Any = None) -> None:
        """Let the actor handle one message, and what follows from it."""
        self._handle(message, handle, self.clock)
        self._after(self.clock)
        if self.auto_seal:
            while self.sealing:
                self.finish_seal()
        while self.auto_sync and self.syncing:
            self.send(Synced(self.syncing.pop(0).sync))

    def call(self, session: int, request: wire.AnyRequest) -> Slot:
        slot = Slot(request)
        self.send(Call(session, request), slot)
        return slot

    def reply(self, session: int, request: wire.AnyRequest) -> Any:
        """The reply to a request that is answered at once."""
        slot = self.call(session, request)
        assert slot.reply is not None, f"not answered yet: {request!r}"
        return slot.reply

    def send_one_way(self, session: int, request: wire.AnyRequest) -> None:
        """A request that gets no reply."""
        self.send(Call(session, request))

    def finish_seal(self, error: str = "") -> None:
        put, memories = self.sealing.pop(0)
        if not error:
            for memory in memories:
                memory.seal()
        self.send(Sealed(put, error))

    def finish_free(self) -> None:
        memory, charged_bytes = self.freeing.pop(0)
        memory.free()
        self.send(Freed(charged_bytes, 1))

    def gone(self, session: int) -> None:
        self.send(ClientGone(session))

    def advance(self, seconds: float) -> None:
        """Let time pass, waking the actor at each of its deadlines as its loop would."""
        end = self.clock + seconds
        while (deadline := self._next_deadline()) <= end:
            self.clock = max(self.clock, deadline)
            self._after(self.clock)
            if self._next_deadline() <= deadline:
                raise LivelockError(f"the deadline {deadline} is not met by waking up")
        self.clock = end

    def check_no_livelock(self) -> None:
        """Waking up at a deadline that has passed must be enough to meet it."""
        if self._next_deadline() <= self.clock:
            self._after(self.clock)
            if self._next_deadline() <= self.clock:
                raise LivelockError("a deadline in the past stays")


def small_config(**changes: Any) -> RamConfig:
    """A configuration for tests: no minimum put, segments of at most a few tokens."""
    settings: dict[str, Any] = {
        "ram_bytes": 1 << 30, "put_min_tokens": 1, "segment_min_tokens": 4,
        "claim_min_tokens": 1 << 20, "checkpoint_min_tokens": 1,
    }  # fmt: skip
    return RamConfig(**{**settings, **changes})


def fill(core: Core, session: int, slot: Slot, data: Sequence[bytes]) -> None:
    """Write the images of a `Grant`, fetching descriptors beyond the first batch."""
    grant = slot.reply
    assert isinstance(grant, wire.Grant)
    numbers = fetch_all(core, session, grant.put, len(grant.images), slot)
    for number, image in zip(numbers, data, strict=True):
        memory = core.descriptors.open[number]
        assert isinstance(memory, FakeMemory)
        memory.write(image)


def fetch_all(core: Core, session: int, owner: int, count: int, slot: Slot) -> list[int]:
    """All descriptors of a lease or put, in batches."""
    numbers = list(slot.descriptors)
    while len(numbers) < count:
        batch = core.call(session, wire.Fetch(of=owner, first=len(numbers)))
        assert isinstance(batch.reply, wire.Descriptors), batch.reply
        numbers += batch.descriptors
    assert len(numbers) == count
    return numbers


def spec_bytes(specs: Sequence[ImageSpec]) -> int:
    """Tokens of append slices in the images."""
    return sum(spec.end - spec.start for spec in specs)
