"""What the parts of RamTier share: configuration, the index, where replies and orders go.

RamTier is one owner in several files: each desk keeps the records of one kind of request and
decides synchronously; the actor (ram_tier.py) runs them and carries out what they order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from prefixcached.actors.entries import Memory
from prefixcached.actors.eviction import Eviction
from prefixcached.actors.index import Index
from prefixcached.actors.retention_policy import DEFAULT_POLICY
from prefixcached.protocol import limits
from prefixcached.protocol.actor_messages import ActorMessage
from prefixcached.protocol.messages import Reply

DEFAULT_RAM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RamConfig:
    """How RamTier behaves. Bytes and seconds; rules in docs/behaviour.md.

    ``ssd_bytes`` 0 turns the SSD tier off. ``put_wait_seconds`` is how long an offer waits for
    another put of the same tokens (P5), ``room_wait_seconds`` how long for memory (E4).
    A snapshot less than ``checkpoint_min_tokens`` beyond another is not stored (E11).
    ``retention`` names a policy of retention_policy.py (E3). ``namespace_quota`` is the share of
    RAM that one namespace keeps when others want room (E9; 1.0 is no quota), ``pressure_target``
    the share that is used while memory is short (M2).
    """

    ram_bytes: int = DEFAULT_RAM_BYTES
    ssd_bytes: int = 0
    max_images: int = 4096
    segment_max_bytes: int = limits.SEGMENT_MAX_BYTES
    segment_min_tokens: int = 256
    put_min_tokens: int = 16
    checkpoint_min_tokens: int = 32
    put_wait_seconds: float = 2.0
    room_wait_seconds: float = 1.0
    write_delay_seconds: float = 0.5
    idle_seconds: float = 300.0
    promote: str = "second-hit"
    write_policy: str = "always"
    retention: str = DEFAULT_POLICY
    namespace_quota: float = 1.0
    pressure_target: float = 0.5
    claim_min_tokens: int = 256
    label_ttl_seconds: float = 3600.0


class Answer(Protocol):
    """Where the one reply to a call goes (`mailbox.ReplySlot`)."""

    def set(self, reply: Reply, descriptors: Sequence[int] = ()) -> None:
        """Give the reply, with descriptors that stay open until the session's next request."""


class Orders(Protocol):
    """What the desks have carried out by others."""

    def seal(self, put: int, memories: Sequence[Memory]) -> None:
        """Seal a put's images; `Sealed` tells the outcome."""

    def ssd(self, message: ActorMessage, handle: Any = None) -> None:
        """Tell SsdTier."""

    def prefetcher(self, message: ActorMessage, handle: Any = None) -> None:
        """Tell Prefetcher."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What every desk is given."""

    config: RamConfig
    index: Index
    eviction: Eviction
    orders: Orders
    boot: str
    create_memory: Callable[[int], Memory]
    new_id: Callable[[], str]
    numbers: "count[int]"
