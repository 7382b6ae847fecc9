"""TakeDesk: look-ups, leases, and takes that wait for the disk. Part of RamTier, pure.

A hit holds its images until the lease ends (rule L1). What is on SSD only is verified by the
Prefetcher first; if that fails the best RAM prefix serves (rule T8).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from prefixcached.actors import tree
from prefixcached.actors.claims import Claim, ClaimDesk
from prefixcached.actors.desk import Answer, Shared
from prefixcached.actors.entries import Entry, Namespace
from prefixcached.actors.labels import LabelDesk
from prefixcached.actors.parts import Lent, parts_of
from prefixcached.actors.promotions import PromotionDesk
from prefixcached.actors.reads import OpenFile, ReadDesk
from prefixcached.actors.resume import Available, held, longest_resumable, resident
from prefixcached.actors.tree import Path
from prefixcached.protocol import limits
from prefixcached.protocol.messages import Failed, Hit, Miss, Part, Take, Tier
from prefixcached.protocol.tokens import TokenArray, token_array

MAX_LEASES: Final = 64
"""Leases one connection may hold; a well-behaved client has one."""


@dataclass(slots=True, eq=False)
class Lease:
    """Lent images. ``files`` are open files by part index; the others are lent from RAM."""

    id: int
    session: int
    lent: list[Lent]
    files: dict[int, OpenFile] = field(default_factory=dict)

    def descriptors(self, first: int) -> list[int]:
        """The descriptors of at most 16 parts from ``first`` on."""
        found: list[int] = []
        for index in range(first, min(first + limits.MAX_DESCRIPTORS, len(self.lent))):
            file, memory = self.files.get(index), self.lent[index].entry.memory
            if file is not None:
                found.append(file.descriptor)
            else:
                assert memory is not None
                found.append(memory.descriptor)
        return found


@dataclass(slots=True, eq=False)
class Lookup:
    """What a prompt finds: the longest prefix in RAM, and in either tier."""

    namespace: Namespace | None
    path: Path
    ram_length: int
    any_length: int
    reason: str
    claim: int | None = None


@dataclass(slots=True, eq=False)
class WaitingTake:
    """A take that is considered now, or waits for ``claim`` to cover ``promised`` tokens."""

    session: int
    take: Take
    tokens: TokenArray
    answer: Answer
    deadline: float
    claim: int = 0
    promised: int = 0


@dataclass(slots=True)
class TakeCounters:
    """Rule C5: a RAM candidate counts as a RAM hit or miss even where SSD serves."""

    takes: int = 0
    ram_hits: int = 0
    ram_misses: int = 0
    ssd_hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    tokens_requested: int = 0
    tokens_reused: int = 0
    restores_failed: int = 0
    waits: int = 0
    prefills_saved: int = 0


class TakeDesk:
    """Owns leases and the takes that wait for reads."""

    def __init__(
        self, shared: Shared, reads: ReadDesk, promotions: PromotionDesk, claims: ClaimDesk,
        labels: LabelDesk,
    ) -> None:  # fmt: skip
        self._shared = shared
        self._index = shared.index
        self._reads = reads
        self._promotions = promotions
        self._claims = claims
        self._labels = labels
        self._waiting: list[WaitingTake] = []
        self.used: list[Entry] = []
        """What was hit and is not durable, since the caller last took it."""
        self.leases: dict[int, Lease] = {}
        self.counters = TakeCounters()
        self.is_loading = False

    # -- requests -------------------------------------------------------------------------------

    def look_up(self, namespace_name: str, tokens: TokenArray, limit: int) -> Lookup:
        """Find the longest resumable prefix of at most ``limit`` tokens, changing nothing."""
        limit = max(limit, 0)
        namespace = self._index.namespaces.get(namespace_name)
        if namespace is None:
            cause = self._index.evicted_memory.cause(namespace_name, tokens, 0)
            reason = _gone(cause) if cause else "loading" if self.is_loading else "empty"
            return Lookup(None, Path((), 0), 0, 0, reason)
        path = tree.walk(namespace.root, tokens)
        schema = namespace.schema
        best = longest_resumable(schema, path, limit, held)
        ram = best
        if best.position and self._index.ssd_on:
            ram = longest_resumable(schema, path, limit, resident)
        reason = best.reason
        if self.is_loading:
            reason = "loading"
        elif cause := self._index.evicted_memory.cause(namespace_name, tokens, path.matched):
            reason = _gone(cause)
        return Lookup(namespace, path, ram.position, best.position, reason)

    def take(self, session: int, take: Take, answer: Answer, now: float) -> None:
        """Answer a take (rules T1 to T9), or let it wait for another's prefill (rule Q2)."""
        if self.refuses(session, answer):
            return
        self.counters.takes += 1
        waiting = WaitingTake(session, take, token_array(take.tokens), answer, now + take.wait)
        self.counters.tokens_requested += int(waiting.tokens.size)
        if not self._try(waiting, now):
            self.counters.waits += 1
            self._waiting.append(waiting)

    def refuses(self, session: int, answer: Answer) -> bool:
        """Whether the session has as many leases as it may; it is told so."""
        if sum(lease.session == session for lease in self.leases.values()) < MAX_LEASES:
            return False
        answer.set(Failed(reason="protocol", detail=f"more than {MAX_LEASES} leases"))
        return True

    def retry(self, now: float) -> None:
        """Look again for the takes that wait, oldest first: a put, a claim's end, or time.

        Whoever is answered may become a claimant and lose an older claim by that; then once more.
        """
        while True:
            self._claims.changed = False
            waiting, self._waiting = self._waiting, []
            for take in waiting:
                if not self._try(take, now):
                    self._waiting.append(take)
            if not self._claims.changed:
                return

    def put_declined(self, namespace: str, tokens: TokenArray, now: float) -> None:
        """A claimant's put was declined: all who wait for it are answered at once (rule Q2)."""
        ended = self._claims.declined(namespace, tokens)
        for take in self._waiting:
            if take.claim in ended:
                take.deadline = now

    @property
    def next_deadline(self) -> float | None:
        """When `retry` must be called at the latest."""
        if not self._waiting:
            return None  # asked for in every turn
        return min(take.deadline for take in self._waiting)

    @property
    def waiting(self) -> int:
        """Takes that wait for another's prefill."""
        return len(self._waiting)

    @property
    def awaited_claims(self) -> dict[int, int]:
        """By session, the claim that its take waits for."""
        return {take.session: take.claim for take in self._waiting}

    def _try(self, waiting: WaitingTake, now: float) -> bool:
        """Answer the take, unless another session is computing what it needs."""
        take, tokens = waiting.take, waiting.tokens
        lookup = self.look_up(take.namespace, tokens, int(tokens.size) - 1)
        if now < waiting.deadline:
            promise = self._claims.worth_waiting_for(
                waiting.session, take.namespace, tokens, lookup.any_length,
                lambda claim: self._would_deadlock(waiting.session, claim),
            )  # fmt: skip
            if promise is not None:
                waiting.claim, waiting.promised = promise[0].id, promise[1]
                return False
        if waiting.claim and lookup.any_length >= waiting.promised:
            self.counters.prefills_saved += 1
        self._answer(waiting.session, take, tokens, waiting.answer, lookup, now)
        return True

    def _would_deadlock(self, session: int, claim: Claim) -> bool:
        """Whether the claimant waits, directly or not, for a claim of ``session`` (rule Q3)."""
        seen: set[int] = set()
        frontier = [claim.session]
        while frontier:
            claimant = frontier.pop()
            if claimant == session:
                return True
            if claimant in seen:
                continue
            seen.add(claimant)
            for take in self._waiting:
                awaited = self._claims.claims.get(take.claim)
                if take.session == claimant and awaited is not None:
                    frontier.append(awaited.session)
        return False

    def _answer(
        self, session: int, take: Take, tokens: TokenArray, answer: Answer, lookup: Lookup,
        now: float,
    ) -> None:  # fmt: skip
        if lookup.ram_length:
            self.counters.ram_hits += 1
        else:
            self.counters.ram_misses += 1
        # Before a read from disk: whoever asks meanwhile must find this session computing.
        lookup.claim = self._claim(session, take, tokens, lookup.any_length)
        if not lookup.any_length:
            self._miss(session, take, tokens, answer, lookup, lookup.reason)
        elif lookup.any_length > lookup.ram_length:
            self._take_from_disk(session, take, tokens, answer, lookup, now)
        else:
            lease = self._lease(session, lookup, lookup.ram_length, resident)
            self._hit(session, take, tokens, answer, lookup, lease, lookup.ram_length, "ram", now)

    def peek(self, namespace: str, tokens_packed: bytes) -> int:
        """Return how many tokens `take` would reuse (rule T11)."""
        tokens = token_array(tokens_packed)
        return self.look_up(namespace, tokens, int(tokens.size) - 1).any_length

    def contains(self, namespace: str, tokens_packed: bytes) -> int:
        """Return the number of tokens if exactly these are resumable at their end, else 0."""
        tokens = token_array(tokens_packed)
        length = self.look_up(namespace, tokens, int(tokens.size)).any_length
        return length if length == tokens.size else 0

    def descriptors(self, session: int, lease_id: int, first: int, boot: str) -> list[int] | None:
        """Return the next descriptors of a lease of this session, None if there is none such."""
        lease = self._find(session, lease_id, boot)
        return None if lease is None else lease.descriptors(first)

    def release(self, session: int, lease_id: int, boot: str) -> None:
        """End a lease; anything that is not this session's is ignored (rules L1, L3)."""
        lease = self._find(session, lease_id, boot)
        if lease is not None:
            self._end(lease)

    def client_gone(self, session: int) -> None:
        """End the leases of a connection, and its take if it waits."""
        self._waiting = [take for take in self._waiting if take.session != session]
        for lease in [lease for lease in self.leases.values() if lease.session == session]:
            self._end(lease)

    # -- the disk -------------------------------------------------------------------------------

    def _take_from_disk(
        self, session: int, take: Take, tokens: TokenArray, answer: Answer, lookup: Lookup,
        now: float,
    ) -> None:  # fmt: skip
        """Lend files for what RAM lacks, once the Prefetcher has verified them."""
        lease = self._lease(session, lookup, lookup.any_length, held)
        on_disk = {i: p.entry for i, p in enumerate(lease.lent) if p.entry.memory is None}
        if not on_disk:  # what RAM lacks contributes nothing to this hit
            self._hit(session, take, tokens, answer, lookup, lease, lookup.any_length, "ram", now)
            return

        def verified(files: dict[int, OpenFile] | None, now: float) -> None:
            namespace = lookup.namespace
            lease.files = files or {}
            if files is None or namespace is None or namespace.cleared:
                self._end(lease)
                reason = "restore-failed" if files is None else ""
                self._fall_back(session, take, tokens, answer, now, reason, lookup.claim)
                return
            for entry in on_disk.values():
                entry.ssd_hits += 1
            self.counters.ssd_hits += 1
            self._hit(session, take, tokens, answer, lookup, lease, lookup.any_length, "ssd", now)
            self._promotions.after_hit(on_disk.values())

        self._reads.read(session, on_disk, verified)

    def _fall_back(
        self, session: int, take: Take, tokens: TokenArray, answer: Answer, now: float,
        reason: str, claim: int | None,
    ) -> None:  # fmt: skip
        """The disk failed, or all was cleared: the best RAM prefix serves (rules T8, D11)."""
        self.counters.restores_failed += bool(reason)
        lookup = self.look_up(take.namespace, tokens, int(tokens.size) - 1)
        lookup.claim = self._claim(session, take, tokens, lookup.ram_length, claim)
        if lookup.ram_length:
            lease = self._lease(session, lookup, lookup.ram_length, resident)
            self._hit(session, take, tokens, answer, lookup, lease, lookup.ram_length, "ram", now)
        else:
            self._miss(session, take, tokens, answer, lookup, reason or lookup.reason)

    # -- inside ---------------------------------------------------------------------------------

    def _lease(self, session: int, lookup: Lookup, length: int, available: Available) -> Lease:
        assert lookup.namespace is not None
        return self.lend(session, parts_of(lookup.namespace.schema, lookup.path, length, available))

    def use(self, entries: Iterable[Entry], now: float) -> None:
        """Count a hit on ``entries``, given with ancestors before descendants (rules E9, D6).

        Whoever finds something for a client counts it here: the writer hears of it as well.
        """
        used = [entry for entry in entries if entry.attached]
        self._index.use(used, now)
        self.used += [entry for entry in used if entry.file is None]

    def lend(
        self, session: int, lent: list[Lent], files: dict[int, OpenFile] | None = None
    ) -> Lease:
        """Lend images to a session until it releases the lease or ends."""
        lease = Lease(next(self._shared.numbers), session, lent, files or {})
        self._index.hold(part.entry for part in lent)
        self.leases[lease.id] = lease
        return lease

    def _hit(
        self, session: int, take: Take, tokens: TokenArray, answer: Answer, lookup: Lookup,
        lease: Lease, length: int, tier: Tier, now: float,
    ) -> None:  # fmt: skip
        namespace = lookup.namespace
        assert namespace is not None
        parts = tuple(
            Part(
                lent.entry.spec, lent.use_start, lent.use_end,
                lease.files[index].data_offset if index in lease.files else 0,
            )
            for index, lent in enumerate(lease.lent)
        )  # fmt: skip
        steps = lookup.path.cut(length).steps
        used: list[Entry] = [step.segment for step in steps]
        used.extend(p.entry for p in lease.lent if p.use_start == p.use_end)
        self.use(used, now)
        self.counters.tokens_reused += length
        self._labels.count_take(take.namespace, take.label, length)
        if steps[-1].segment.attached:
            self._labels.mark(take.namespace, take.label, steps[-1].segment, length, now)
        known = take.schema_digest == bytes.fromhex(namespace.schema_digest)
        answer.set(
            Hit(
                lease=lease.id, length=length, tier=tier, parts=parts,
                schema=b"" if known else namespace.schema_bytes, matched=lookup.path.matched,
                claim=lookup.claim,
            ),
            lease.descriptors(0),
        )  # fmt: skip

    def _miss(
        self, session: int, take: Take, tokens: TokenArray, answer: Answer, lookup: Lookup,
        reason: str,
    ) -> None:  # fmt: skip
        self.counters.misses[reason] = self.counters.misses.get(reason, 0) + 1
        self._labels.count_take(take.namespace, take.label, 0)
        answer.set(Miss(reason=reason, matched=lookup.path.matched, claim=lookup.claim))

    def _claim(
        self, session: int, take: Take, tokens: TokenArray, held: int, earlier: int | None = None
    ) -> int | None:
        """Return the claim that the reply carries, ``earlier`` if that has not ended."""
        if earlier in self._claims.claims:
            return earlier
        number = next(self._shared.numbers)
        return self._claims.grant(number, session, take.namespace, tokens, held)

    def _find(self, session: int, lease_id: int, boot: str) -> Lease | None:
        lease = self.leases.get(lease_id)
        ours = lease is not None and lease.session == session and boot in ("", self._shared.boot)
        return lease if ours else None

    def _end(self, lease: Lease) -> None:
        del self.leases[lease.id]
        for file in lease.files.values():
            file.close()
        self._index.release(lent.entry for lent in lease.lent)


def _gone(cause: str) -> str:
    """The miss reason for what is remembered as evicted (rule T9)."""
    return "pressure" if cause == "pressure" else "evicted"
