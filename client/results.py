"""What the calls of a cache return."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from prefixcached.client.claims import Claim
from prefixcached.client.pool import PoolStatistics
from prefixcached.protocol.messages import Tier


class _MayClaim(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A result that may make this client the claimant of its prompt (rule Q1).

    The claim says that this client is computing the rest, so that others may wait for it. It ends
    with a put that covers the prompt, with `drop_claim`, or with the last reference to the result.

    Attributes:
        claim: It, None where little is left to compute.
    """

    claim: Claim | None = None

    def drop_claim(self) -> None:
        """Say that this prompt will not be computed here after all. Harmless without a claim."""
        if self.claim is not None:
            self.claim.end()


class Hit(_MayClaim, frozen=True, kw_only=True, eq=False):
    """The first ``length`` tokens of the prompt need no prefill. True.

    Attributes:
        kv: mlx-lm cache objects, ready to append token number ``length``. They are the caller's
            own copy (rule T2).
        length: Tokens that ``kv`` covers, at most the prompt's length - 1 (rule T3).
        tier: Where the bytes came from; "ssd" when a part of them did.
        attachments: What the put of this very position attached, else None (rule A1).
        matched: Tokens of the prompt that are known, which may be more than are resumable.
    """

    kv: Sequence[Any]
    length: int
    tier: Tier
    attachments: Any = None
    matched: int = 0

    def __bool__(self) -> Literal[True]:
        return True

    def __repr__(self) -> str:
        return f"Hit(length={self.length}, tier={self.tier!r}, matched={self.matched})"


class Miss(_MayClaim, frozen=True, kw_only=True, eq=True):
    """Nothing is resumable, for a ``reason`` of rule T9. False.

    Attributes:
        reason: One word, "no-daemon" or "diverged" for instance.
        matched: Tokens of the prompt that are known and yet not resumable.
    """

    reason: str
    matched: int = 0

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return f"Miss(reason={self.reason!r}, matched={self.matched})"


class ObjectHit(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The object of a key. True.

    Attributes:
        tensors: Arrays of the kind, dtype and shape that were put; the caller's own copies.
        metadata: What was put, as JSON returns it: tuples are lists, keys are texts.
        tier: Where the bytes came from.
    """

    tensors: Mapping[str, Any]
    metadata: Any = None
    tier: Tier = "ram"

    def __bool__(self) -> Literal[True]:
        return True


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the first ``length`` tokens is visible to every process. True.

    Attributes:
        new_bytes: Bytes that this put added; 0 where all of it was held already (rule P3).
        length: Tokens stored.
    """

    new_bytes: int
    length: int

    def __bool__(self) -> Literal[True]:
        return True


class Declined(msgspec.Struct, frozen=True, kw_only=True):
    """The KV is not stored, for a ``reason`` of rule P10. False."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the images that were visible at the call (rule P8). True when all is durable.

    Attributes:
        written: Images written.
        skipped: Images that policy keeps from the SSD.
        failed: Images that could not be written.
        complete: Whether the flush ended in time.
        reason: Why the daemon was not asked, else "".
    """

    written: int = 0
    skipped: int = 0
    failed: int = 0
    complete: bool = False
    reason: str = ""

    def __bool__(self) -> bool:
        return self.complete and not self.failed and not self.reason


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """What `Cache.clear` removed (rule D11). True when the daemon did it.

    Attributes:
        images: Images that left.
        ram_bytes: Their bytes in RAM.
        reason: Why the daemon was not asked, else "".
    """

    images: int = 0
    ram_bytes: int = 0
    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


class CacheStatistics(PoolStatistics, frozen=True):
    """What one client did: its connections and failures, and these.

    Attributes:
        claims: Prompts that this client is computing for others too.
        restores_skipped: Hits not restored, since that would have gained less than the minimum.
        slow_restores: Restores that took longer than computing the same tokens.
    """

    claims: int = 0
    restores_skipped: int = 0
    slow_restores: int = 0
