"""PutDesk: offers, waiting offers, puts in flight and their commit. Part of RamTier, pure.

A put reserves its bytes when it is granted and nobody can find them until all its images are
sealed (rule P4). Its base path is held meanwhile, and walked again at commit (rule P6).
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prefixcached.actors import tree
from prefixcached.actors.desk import Answer, Shared
from prefixcached.actors.entries import Entry, Memory, Namespace, Segment
from prefixcached.actors.eviction import Room
from prefixcached.actors.publish import PutImage, is_complete, lower_minimum, publish
from prefixcached.actors.put_policy import PutPlan, check_offer, may_absorb, plan_put
from prefixcached.actors.resume import checkpoints_on
from prefixcached.actors.tree import Path
from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import ImageKind, allocated_bytes, layout
from prefixcached.protocol.messages import (
    Commit,
    Declined,
    Grant,
    Offer,
    OfferObject,
    Reply,
    Stored,
)
from prefixcached.protocol.schema import Schema, decode_schema
from prefixcached.protocol.tokens import TokenArray, common_prefix_length, token_array

MAX_PUTS_PER_SESSION: Final = 16
"""Puts one connection may have in flight; a well-behaved client has one."""

MARGIN: Final = 0.8
"""Share of a client's remaining seconds that the daemon may spend waiting on its behalf."""


@dataclass(slots=True, eq=False)
class Put:
    """A granted put. ``held`` are the entries of its base path, ``key`` is that of an object."""

    id: int
    session: int
    namespace: Namespace
    tokens: TokenArray
    base: int
    absorbed: Segment | None
    images: list[PutImage]
    held: list[Entry]
    minimum: int = 0
    attachments: bool = False
    label: str | None = None
    key: str | None = None
    answer: Answer | None = None

    @property
    def is_sealing(self) -> bool:
        """Whether it was committed and waits for its images to become immutable."""
        return self.answer is not None


@dataclass(slots=True, eq=False)
class WaitingOffer:
    """An offer that waits for another put, or for room."""

    session: int
    offer: Offer | OfferObject
    tokens: TokenArray
    answer: Answer
    put_deadline: float
    room_deadline: float
    reason: str = ""


class FinishedPut(NamedTuple):
    """A put that was published, or found to be held already, or declined.

    ``last`` is the segment that its tokens end in, ``published`` what became visible with it,
    parents first.
    """

    namespace: str
    tokens: TokenArray
    label: str | None
    is_stored: bool
    last: Segment | None
    published: list[Entry]


@dataclass(slots=True)
class PutCounters:
    """What became of offers."""

    offers: int = 0
    stored: int = 0
    stored_bytes: int = 0
    already_held: int = 0
    waits_for_put: int = 0
    waits_for_room: int = 0
    abandoned: int = 0
    surplus_images: int = 0
    snapshots_left_out: int = 0
    declined: dict[str, int] = field(default_factory=dict)


class PutDesk:
    """Owns puts in flight and offers that wait."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._index = shared.index
        self._config = shared.config
        self.puts: dict[int, Put] = {}
        self._waiting: list[WaitingOffer] = []
        self._absorbing: set[str] = set()
        self.counters = PutCounters()
        self.is_loading = False
        self.finished: list[FinishedPut] = []
        """Puts that ended since the caller last took them."""

    # -- requests -------------------------------------------------------------------------------

    def offer(self, session: int, offer: Offer | OfferObject, answer: Answer, now: float) -> None:
        """Answer an offer, now or when what it waits for has happened."""
        self.counters.offers += 1
        tokens = token_array(offer.tokens if isinstance(offer, Offer) else b"")
        patience = offer.seconds_left * MARGIN
        waiting = WaitingOffer(
            session, offer, tokens, answer,
            put_deadline=now + min(self._config.put_wait_seconds, patience),
            room_deadline=now + min(self._config.room_wait_seconds, patience),
        )  # fmt: skip
        if not self._try(waiting, now):
            if waiting.reason == "put":
                self.counters.waits_for_put += 1
            else:
                self.counters.waits_for_room += 1
            self._waiting.append(waiting)

    def commit(self, session: int, commit: Commit, answer: Answer) -> None:
        """Begin to publish a put; the answer follows its `sealed`."""
        put = self._find(session, commit.put, commit.boot)
        if put is None or put.is_sealing:
            answer.set(self._declined("invalid"))
            return
        put.answer = answer
        self._shared.orders.seal(put.id, [image.memory for image in put.images])

    def abandon(self, session: int, put_id: int, boot: str) -> None:
        """Give up a granted put; anything else is ignored."""
        put = self._find(session, put_id, boot)
        if put is not None and not put.is_sealing:
            self.counters.abandoned += 1
            self._end(put, put.images)

    def sealed(self, put_id: int, error: str, now: float) -> None:
        """A committed put's images are immutable: publish them all at once, or none."""
        put = self.puts[put_id]
        assert put.answer is not None
        if put.namespace.cleared:
            reply: Reply = self._declined("cleared")
            leftover = put.images
        elif error:
            reply = self._declined("invalid")
            leftover = put.images
        elif not is_complete(put):  # the next try finds what is held by then
            reply = self._declined("busy")
            leftover = put.images
        else:
            outcome = publish(self._index, self._shared.new_id, put)
            leftover = outcome.surplus
            self.counters.surplus_images += len(leftover)
            self.counters.stored += 1
            self.counters.stored_bytes += outcome.new_bytes
            self._index.use(outcome.used, now, is_hit=False)
            self._finish(put.namespace.name, put.tokens, put.label, True, outcome.published)
            reply = Stored(new_bytes=outcome.new_bytes, length=int(put.tokens.size))
        if isinstance(reply, Declined):
            self._finish(put.namespace.name, put.tokens, put.label, False)
        self._end(put, leftover)
        put.answer.set(reply)

    def client_gone(self, session: int) -> None:
        """Forget the offers and ungranted bytes of a connection; what it committed is published."""
        self._waiting = [w for w in self._waiting if w.session != session]
        for put in [p for p in self.puts.values() if p.session == session]:
            if not put.is_sealing:
                self.counters.abandoned += 1
                self._end(put, put.images)

    def descriptors(self, session: int, put_id: int, first: int, boot: str) -> list[int] | None:
        """Return the next writable descriptors of a granted put, None if there is none such."""
        put = self._find(session, put_id, boot)
        if put is None or put.is_sealing:
            return None
        batch = put.images[first : first + limits.MAX_DESCRIPTORS]
        return [image.memory.writable_descriptor for image in batch]

    # -- waiting --------------------------------------------------------------------------------

    @property
    def is_room_wanted(self) -> bool:
        """Whether an offer waits for room in RAM."""
        return any(waiting.reason == "room" for waiting in self._waiting)

    def retry(self, now: float) -> None:
        """Try the waiting offers again, oldest first: a put ended, room came, or time passed."""
        waiting, self._waiting = self._waiting, []
        for offer in waiting:
            if not self._try(offer, now):
                self._waiting.append(offer)

    @property
    def next_deadline(self) -> float | None:
        """When `retry` must be called at the latest."""
        if not self._waiting:
            return None  # asked for in every turn
        return min(w.put_deadline if w.reason == "put" else w.room_deadline for w in self._waiting)

    @property
    def waiting(self) -> int:
        """Offers that wait."""
        return len(self._waiting)

    # -- inside ---------------------------------------------------------------------------------

    def _try(self, waiting: WaitingOffer, now: float) -> bool:
        """Answer the offer if it can be answered now."""
        result = self._consider(waiting, now)
        if isinstance(result, Reply):
            offer = waiting.offer
            self._finish(
                offer.namespace, waiting.tokens,
                offer.label if isinstance(offer, Offer) else None, isinstance(result, Stored),
            )  # fmt: skip
            waiting.answer.set(result)
            return True
        if isinstance(result, str):
            waiting.reason = result
            return False
        waiting.answer.set(
            Grant(put=result.id, base=result.base, images=tuple(i.spec for i in result.images)),
            [i.memory.writable_descriptor for i in result.images[: limits.MAX_DESCRIPTORS]],
        )
        return True

    def _consider(self, waiting: WaitingOffer, now: float) -> Reply | Put | str:
        """Return the reply, the put to grant, or what the offer waits for: "put" or "room"."""
        if self._index.ram.bytes_cap == 0:
            return self._declined("disabled")
        if self.is_loading:
            return self._declined("loading")
        try:
            if isinstance(waiting.offer, OfferObject):
                return self._consider_object(waiting, waiting.offer, now)
            return self._consider_tokens(waiting, waiting.offer, now)
        except SchemaError:
            return self._declined("invalid")

    def _consider_object(
        self, waiting: WaitingOffer, offer: OfferObject, now: float
    ) -> Reply | Put | str:
        if offer.spec.kind is not ImageKind.OBJECT:
            return self._declined("invalid")
        namespace = self._index.namespaces.get(offer.namespace)
        if namespace is None:
            namespace = self._index.new_namespace(offer.namespace, b"", Schema())
        plan = PutPlan(0, None, (offer.spec,))
        return self._grant(waiting, namespace, Path((), 0), plan, now)

    def _consider_tokens(
        self, waiting: WaitingOffer, offer: Offer, now: float
    ) -> Reply | Put | str:
        tokens = waiting.tokens
        length = int(tokens.size)
        if length < max(1, self._config.put_min_tokens):
            return self._declined("too-short")
        namespace = self._namespace(offer)
        if namespace is None:
            return self._declined("schema-mismatch")
        check_offer(namespace.schema, offer, length)
        path = tree.walk(namespace.root, tokens)
        if self._other_put_covers(namespace, waiting, path.matched) and now < waiting.put_deadline:
            return "put"
        new_bytes = namespace.schema.append_token_bytes * (length - path.matched)
        if new_bytes > self._index.ram.bytes_cap:
            return self._declined("too-large")
        leaf = may_absorb(namespace.schema, path, length, offer, self._config.segment_min_tokens)
        if leaf is not None and leaf.id in self._absorbing:
            leaf = None
        plan = plan_put(
            namespace.schema, path, length, offer, leaf, self._config.segment_max_bytes,
            self._config.checkpoint_min_tokens,
        )  # fmt: skip
        if plan is None:
            return self._declined("invalid")
        if not plan.images:
            self.counters.already_held += 1
            self.counters.snapshots_left_out += plan.leaves_out_snapshot
            self._index.use(_whole_path(path), now, is_hit=False)
            lower_minimum((segment for segment, _ in path.steps), offer.minimum)
            return Stored(new_bytes=0, length=length)
        granted = self._grant(waiting, namespace, path, plan, now)
        if isinstance(granted, Put):
            self.counters.snapshots_left_out += plan.leaves_out_snapshot
        return granted

    def _grant(
        self, waiting: WaitingOffer, namespace: Namespace, path: Path, plan: PutPlan, now: float
    ) -> Reply | Put | str:
        offer = waiting.offer
        schema = namespace.schema if isinstance(offer, Offer) else None
        sizes = [layout(schema, spec).nbytes for spec in plan.images]
        charged = [allocated_bytes(size) for size in sizes]
        total, ram = sum(charged), self._index.ram
        if total > ram.bytes_cap or len(sizes) > min(ram.images_cap, limits.MAX_IMAGES_PER_PUT):
            return self._declined("too-large")
        if sum(p.session == waiting.session for p in self.puts.values()) >= MAX_PUTS_PER_SESSION:
            return self._declined("busy")
        held = _whole_path(path)
        self._index.keep(held)  # before making room: the path must not be its victim
        room = self._shared.eviction.make_room(total, len(sizes))
        if room is not Room.FITS:
            self._index.let_go(held)
            if room is Room.SOON and now < waiting.room_deadline:
                return "room"
            if ram.is_reduced:  # with the whole cap it might have fitted (rule M2)
                return self._declined("pressure")
            return self._declined("busy" if room is Room.SOON else "no-space")
        memories = self._create(sizes)
        if memories is None:
            self._index.let_go(held)
            return self._declined("no-space")
        images = [
            PutImage(*image) for image in zip(plan.images, sizes, charged, memories, strict=True)
        ]
        put = Put(
            next(self._shared.numbers), waiting.session, namespace, waiting.tokens, plan.base,
            plan.absorbed, images, held,
        )  # fmt: skip
        if isinstance(offer, Offer):
            put.minimum, put.attachments = offer.minimum, offer.attachments
            put.label = offer.label
        else:
            put.key = offer.key
        ram.add("in_flight", total, len(sizes))
        self.puts[put.id] = put
        namespace.puts += 1
        self._index.namespaces[namespace.name] = namespace
        if plan.absorbed is not None:
            self._absorbing.add(plan.absorbed.id)
        return put

    def _create(self, sizes: list[int]) -> list[Memory] | None:
        memories: list[Memory] = []
        try:
            for size in sizes:  # one by one: what was created before a failure must be freed
                memories += [self._shared.create_memory(size)]
        except OSError:
            for memory in memories:
                memory.free()
            return None
        return memories

    def _namespace(self, offer: Offer) -> Namespace | None:
        """Return the offer's namespace, a new one if it holds nothing; None on a mismatch (N4)."""
        namespace = self._index.namespaces.get(offer.namespace)
        if namespace is None:
            schema = decode_schema(offer.schema)
            return self._index.new_namespace(offer.namespace, offer.schema, schema)
        if namespace.schema_bytes == offer.schema:
            return namespace
        # Objects have no schema, whether they are held or on their way.
        is_writing = any(p.namespace is namespace and p.key is None for p in self.puts.values())
        if namespace.root.children or is_writing:
            return None
        namespace.adopt(offer.schema, decode_schema(offer.schema))  # it holds objects alone
        return namespace

    def _other_put_covers(self, namespace: Namespace, waiting: WaitingOffer, base: int) -> bool:
        """Whether another uncommitted put writes this offer's first missing tokens (rule P5)."""
        return base < waiting.tokens.size and any(
            put.namespace is namespace
            and put.session != waiting.session
            and common_prefix_length(put.tokens, waiting.tokens) > base
            for put in self.puts.values()
        )

    def _finish(
        self, namespace: str, tokens: TokenArray, label: str | None, is_stored: bool,
        published: list[Entry] | None = None,
    ) -> None:  # fmt: skip
        found = self._index.namespaces.get(namespace)
        last = tree.walk(found.root, tokens).last if found is not None and is_stored else None
        self.finished.append(
            FinishedPut(namespace, tokens, label, is_stored, last, published or [])
        )

    def _find(self, session: int, put_id: int, boot: str) -> Put | None:
        put = self.puts.get(put_id)
        ours = put is not None and put.session == session and boot in ("", self._shared.boot)
        return put if ours else None

    def _end(self, put: Put, leftover: list[PutImage]) -> None:
        """Forget a put: free what was not published, let go of its path."""
        del self.puts[put.id]
        put.namespace.puts -= 1
        if put.absorbed is not None:
            self._absorbing.discard(put.absorbed.id)
        for image in leftover:
            self._index.give_back(image.memory, "in_flight", image.charged_bytes)
        self._index.let_go(put.held)
        self._index.forget_if_empty(put.namespace)

    def _declined(self, reason: str) -> Declined:
        self.counters.declined[reason] = self.counters.declined.get(reason, 0) + 1
        return Declined(reason=reason)


def _whole_path(path: Path) -> list[Entry]:
    """The path's segments, and the checkpoints at its end or with window rows for it."""
    return [
        *(segment for segment, _ in path.steps),
        *(c for c in checkpoints_on(path) if c.spec.windows or c.position == path.matched),
    ]
