"""A state machine over the core: several clients of RAM alone (core_disk_machine.py adds a disk).

The model is plain: which token sequences were stored, from which
every byte of every hit follows, and what is resumable by definition (`longest_by_definition`).
"""

import os
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import PAGE, Core, Slot, fetch_all, fill, small_config
from tests.support.core_checks import (
    check_core,
    check_idle,
    longest_by_definition,
)
from tests.support.core_payload import (
    HEAVY_STATE,
    SCHEMAS,
    STATE,
    Tokens,
    encoded,
    image_bytes,
    offered_rows,
    verify_hit,
)

SESSIONS = st.integers(1, 4)

EXAMPLES = {"default": 60, "thorough": 2000}
"""Runs of each machine; PREFIXCACHED_HYPOTHESIS=thorough asks for more."""


def walk_seeds() -> range:
    """Seeds of random walks (tests/support/core_walk.py), as many as examples of a machine."""
    return range(EXAMPLES[_profile()])


def _profile() -> str:
    return os.environ.get("PREFIXCACHED_HYPOTHESIS", "default")


def machine_settings(steps: int = 40) -> settings:
    """Bounded: the whole suite of the core stays under a minute by default."""
    profile = _profile()
    return settings(
        max_examples=EXAMPLES[profile], stateful_step_count=steps, deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
        derandomize=profile == "default",
        report_multiple_bugs=False,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class Granted:
    """A put that its client has filled, or not."""

    session: int
    number: int
    namespace: str
    tokens: Tokens
    is_resumable: bool
    committing: Slot | None = None


@dataclass(slots=True, eq=False)
class Held:
    """A pin, and the prompt whose first ``length`` tokens stay for it; 0 once they were cleared."""

    session: int
    number: int
    namespace: str
    tokens: Tokens
    length: int


@dataclass(slots=True, eq=False)
class Lent:
    """A lease and what it must go on showing."""

    session: int
    hit: wire.Hit
    namespace: str
    tokens: Tokens
    descriptors: list[int]


@dataclass(slots=True, eq=False)
class Pending:
    """A request that has not been answered."""

    session: int
    request: Any
    tokens: Tokens
    slot: Slot
    is_resumable: bool = False


class ClientMachine(RuleBasedStateMachine):
    """Clients of a core without a disk."""

    ssd_caps: tuple[int, ...] = (0,)

    @initialize(
        schemas=st.lists(st.sampled_from(sorted(SCHEMAS)), min_size=1, max_size=2, unique=True),
        ram_pages=st.sampled_from([4000, 4000, 40, 16, 6]),
        images=st.sampled_from([4000, 4000, 30, 8]),
        ssd_cap=st.integers(0, 3),
        segment_bytes=st.sampled_from([1 << 20, 6000, 3000]),
        auto=st.booleans(),
        minimum_tokens=st.sampled_from([6, 24]),
        promote=st.sampled_from(["second-hit", "always", "never"]),
        delay=st.sampled_from([0.0, 0.5]),
    )
    def start(
        self, schemas: list[str], ram_pages: int, images: int, ssd_cap: int, segment_bytes: int,
        auto: bool, minimum_tokens: int, promote: str, delay: float,
    ) -> None:  # fmt: skip
        self.config = small_config(
            ram_bytes=ram_pages * PAGE, max_images=images,
            ssd_bytes=self.ssd_caps[ssd_cap % len(self.ssd_caps)], segment_max_bytes=segment_bytes,
            segment_min_tokens=minimum_tokens, promote=promote,
            write_delay_seconds=delay, idle_seconds=30.0,
        )  # fmt: skip
        self.auto = auto
        self.core = Core(self.config, auto_seal=auto, auto_free=auto)
        self.namespaces = [f"{schema}/{salt}" for schema in schemas for salt in "ab"]
        self.known: list[Tokens] = [(5, 6)]
        self.visible: dict[str, set[Tokens]] = {name: set() for name in self.namespaces}
        self.promised: dict[str, set[Tokens]] = {name: set() for name in self.namespaces}
        self.granted: list[Granted] = []
        self.lent: list[Lent] = []
        self.pins: list[Held] = []
        self.pending: list[Pending] = []
        self.versions = count(1)
        self.started()

    def started(self) -> None:
        """What a machine over more than the core sets up."""

    def cleared(self, name: str | None) -> None:
        """What a machine over more than the core forgets."""

    # -- choices --------------------------------------------------------------------------------

    def namespace_of(self, choice: int) -> str:
        return self.namespaces[choice % len(self.namespaces)]

    def tokens_of(self, stem: int, cut: int, tail: list[int]) -> Tokens:
        """A known sequence, the latest first, mostly whole, and a continuation."""
        base = self.known[-1 - stem % len(self.known)]
        tokens = (base[: len(base) - cut % len(base)] + tuple(tail))[:60]
        return tokens or (7,)

    def is_free(self, session: int) -> bool:
        """Whether the session has no request pending: it has one at a time."""
        waiting = any(p.session == session for p in self.pending)
        return not waiting and not any(
            g.session == session and g.committing is not None for g in self.granted
        )

    choices: ClassVar[dict[str, Any]] = {
        "stem": st.one_of(st.integers(0, 3), st.integers(0, 50)),
        "cut": st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 60)),
        "tail": st.lists(st.integers(1, 2), max_size=14),
        "space": st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
    }  # fmt: skip

    # -- clients --------------------------------------------------------------------------------

    @rule(
        session=SESSIONS, **choices, extra=st.integers(0, 9), lacks=st.integers(0, 9),
        checkpoint=st.sampled_from([True, True, False]), heavy=st.booleans(),
        attachments=st.integers(0, 4), minimum=st.integers(0, 12),
        seconds=st.sampled_from([5.0, 5.0, 0.0]), is_whole=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def put(
        self, session: int, stem: int, cut: int, tail: list[int], space: int, extra: int,
        lacks: int, checkpoint: bool, heavy: bool, attachments: int, minimum: int, seconds: float,
        is_whole: bool,
    ) -> None:  # fmt: skip
        """Offer, and mostly commit at once."""
        if not self.is_free(session):
            return
        namespace, tokens = self.namespace_of(space), self.tokens_of(stem, cut, tail)
        schema_name = namespace.split("/")[0]
        schema, length = SCHEMAS[schema_name], len(tokens)
        spec = None
        with_attachments = attachments == 4
        if with_attachments or (schema.has_state and checkpoint):
            metadata = b"%d" % next(self.versions) if with_attachments else b""
            spec = ImageSpec(
                ImageKind.CHECKPOINT, length, length, metadata=metadata,
                tensors=(HEAVY_STATE if heavy else STATE,),
            )  # fmt: skip
        windows = tuple(
            offered_rows(window, length if lacks else max(1, length - 1), extra)
            for window in schema.windows
        )
        offer = wire.Offer(
            namespace, pack_tokens(tokens), encoded(schema_name), windows=windows, checkpoint=spec,
            attachments=with_attachments, minimum=min(minimum, length) if minimum > 9 else 0,
            seconds_left=seconds,
        )  # fmt: skip
        if tokens not in self.known:
            self.known.append(tokens)
        resumable = spec is not None or not schema.has_state
        pending = Pending(session, offer, tokens, self.core.call(session, offer), resumable)
        self.pending.append(pending)
        self.collect()
        if is_whole and isinstance(pending.slot.reply, wire.Grant):
            self.commit_one(self.granted[-1])

    @precondition(lambda self: self.granted)
    @rule(which=st.integers(0, 20))
    def commit(self, which: int) -> None:
        self.commit_one(self.granted[which % len(self.granted)])

    def commit_one(self, put: Granted) -> None:
        if put.committing is None and self.is_free(put.session):
            put.committing = self.core.call(put.session, wire.Commit(put.number))
            self.collect()

    @precondition(lambda self: self.granted)
    @rule(which=st.integers(0, 20))
    def abandon(self, which: int) -> None:
        put = self.granted[which % len(self.granted)]
        if put.committing is None:
            self.core.send_one_way(put.session, wire.Abandon(put.number))
            self.granted.remove(put)
            self.collect()

    @rule(session=SESSIONS, **choices)
    def take(self, session: int, stem: int, cut: int, tail: list[int], space: int) -> None:
        if not self.is_free(session):
            return
        namespace, tokens = self.namespace_of(space), self.tokens_of(stem, cut, tail)
        self.check_definition(namespace, tokens)
        request = wire.Take(namespace, pack_tokens(tokens))
        expected = longest_by_definition(self.core, namespace, tokens, len(tokens) - 1)
        pending = Pending(session, request, tokens, self.core.call(session, request))
        reply = pending.slot.reply
        if isinstance(reply, wire.Hit):
            assert reply.length == expected
        elif reply is not None:
            assert isinstance(reply, wire.Miss)
            assert expected == 0
        self.pending.append(pending)
        self.collect()

    @rule(session=SESSIONS, **choices)
    def prefetch(self, session: int, stem: int, cut: int, tail: list[int], space: int) -> None:
        if self.is_free(session):
            namespace, tokens = self.namespace_of(space), self.tokens_of(stem, cut, tail)
            request = wire.Prefetch(namespace, pack_tokens(tokens))
            self.pending.append(Pending(session, request, tokens, self.core.call(session, request)))
            self.collect()

    @precondition(lambda self: self.lent)
    @rule(which=st.integers(0, 20))
    def release(self, which: int) -> None:
        lent = self.lent.pop(which % len(self.lent))
        self.verify(lent)
        self.core.send_one_way(lent.session, wire.Release(lent.hit.lease))
        self.collect()

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 20))
    def unpin(self, which: int) -> None:
        held = self.pins.pop(which % len(self.pins))
        self.core.send_one_way(held.session, wire.Unpin(held.number))
        self.collect()

    @rule(session=SESSIONS, really=st.integers(0, 2))
    def dies(self, session: int, really: int) -> None:
        if not really:
            self.die(session)

    def die(self, session: int) -> None:
        self.core.gone(session)
        self.lent = [lent for lent in self.lent if lent.session != session]
        self.pins = [held for held in self.pins if held.session != session]
        self.pending = [p for p in self.pending if p.session != session]
        # What was committed is published all the same.
        self.granted = [g for g in self.granted if g.session != session or g.committing is not None]
        self.collect()

    @rule(space=st.integers(0, 4), really=st.integers(0, 3))
    def clear(self, space: int, really: int) -> None:
        if really:
            return
        name = None if space == 4 else self.namespace_of(space)
        self.core.call(99, wire.Clear(name))
        for namespace in self.namespaces if name is None else [name]:
            self.visible[namespace].clear()
            self.promised[namespace].clear()
            for held in self.pins:
                held.length *= held.namespace != namespace
            # An offer that waited may have been granted at once: that put is of the new epoch.
            left = [e for e in self.core.index.entries.values() if e.namespace.name == namespace]
            assert not left
        self.cleared(name)
        self.collect()

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.core.advance(seconds)
        self.collect()

    @precondition(lambda self: self.core.sealing)
    @rule(fails=st.integers(0, 5))
    def finish_seal(self, fails: int) -> None:
        self.core.finish_seal("" if fails else "busy")
        self.collect()

    @precondition(lambda self: self.core.freeing)
    @rule()
    def finish_free(self) -> None:
        self.core.finish_free()
        self.collect()

    # -- replies --------------------------------------------------------------------------------

    def collect(self) -> None:
        """Look at the replies that have come."""
        for put in [p for p in self.granted if p.committing is not None and p.committing.reply]:
            self.granted.remove(put)
            assert put.committing is not None
            self.committed(put, put.committing.reply)
        for pending in [p for p in self.pending if p.slot.reply is not None]:
            self.pending.remove(pending)
            match pending.slot.reply:
                case wire.Grant() as grant:
                    self.fill(pending, grant)
                case wire.Hit() as hit:
                    self.hit(pending, hit)
                case wire.Pinned(pin=pin, length=length) if pin is not None:
                    namespace = pending.request.namespace
                    self.pins.append(Held(pending.session, pin, namespace, pending.tokens, length))
                case wire.Stored(new_bytes=new_bytes, length=length):
                    assert new_bytes == 0
                    assert length == len(pending.tokens)
                    if pending.is_resumable:
                        self.promised[pending.request.namespace].add(pending.tokens)
                    self.check_promises(pending.request.namespace)
                case _:
                    pass

    def fill(self, pending: Pending, grant: wire.Grant) -> None:
        namespace, schema = self.schema_of(pending.request.namespace)
        images = [image_bytes(schema, spec, namespace, pending.tokens) for spec in grant.images]
        fill(self.core, pending.session, pending.slot, images)
        self.granted.append(
            Granted(
                pending.session, grant.put, namespace, pending.tokens,
                pending.is_resumable and pending.request.minimum <= len(pending.tokens),
            )
        )  # fmt: skip

    def committed(self, put: Granted, reply: Any) -> None:
        if isinstance(reply, wire.Stored):
            assert reply.length == len(put.tokens)
            self.visible[put.namespace].add(put.tokens)
            if put.is_resumable:
                self.promised[put.namespace].add(put.tokens)
            self.check_promises(put.namespace)
        else:
            assert isinstance(reply, wire.Declined)

    def check_promises(self, namespace: str) -> None:
        """What was stored is resumable at its own end as long as nothing had to leave."""
        if self.has_losses():
            return
        for tokens in self.promised[namespace]:
            assert longest_by_definition(self.core, namespace, tokens, len(tokens)) == len(tokens)

    def has_losses(self) -> bool:
        """Whether anything that was stored may have left since the beginning."""
        return bool(self.core.index.counters["evictions"])

    def hit(self, pending: Pending, hit: wire.Hit) -> None:
        namespace = pending.request.namespace
        assert 0 < hit.length < len(pending.tokens), "T3"
        numbers = fetch_all(self.core, pending.session, hit.lease, len(hit.parts), pending.slot)
        lent = Lent(pending.session, hit, namespace, pending.tokens, numbers)
        self.verify(lent)
        self.lent.append(lent)

    def verify(self, lent: Lent) -> None:
        namespace, schema = self.schema_of(lent.namespace)
        read = self.core.descriptors.read
        verify_hit(schema, namespace, lent.tokens, lent.hit, lent.descriptors, read)

    def schema_of(self, namespace: str) -> tuple[str, Any]:
        return namespace, SCHEMAS[namespace.split("/", maxsplit=1)[0]]

    def check_definition(self, namespace: str, tokens: Tokens) -> None:
        """The walk finds what trying every position finds (T1), and nothing uncommitted (P4)."""
        packed = pack_tokens(tokens)
        expected = longest_by_definition(self.core, namespace, tokens, len(tokens) - 1)
        assert self.core.reply(98, wire.Peek(namespace, packed)).length == expected
        longest = max((_common(tokens, t) for t in self.visible[namespace]), default=0)
        assert expected <= longest, "found what nobody committed"
        exact = longest_by_definition(self.core, namespace, tokens, len(tokens)) == len(tokens)
        length = self.core.reply(98, wire.Contains(namespace, packed)).length
        assert length == (len(tokens) if exact else 0)

    # -- always ---------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "core"):
            check_core(self.core)
            self.core.check_no_livelock()

    @invariant()
    def pinned_stays(self) -> None:
        """F1: what a pin promised is there for its prompt, whatever came in its place."""
        if hasattr(self, "core") and not self.has_damage():
            for held in self.pins:
                found = longest_by_definition(
                    self.core, held.namespace, held.tokens, len(held.tokens) - 1
                )
                assert found >= held.length

    def has_damage(self) -> bool:
        """Whether a file was ever lost or damaged."""
        return False

    def quiet(self) -> None:
        """Everybody leaves, and what is under way ends."""
        for session in range(1, 5):
            self.die(session)
        while self.core.sealing or self.core.freeing:
            while self.core.sealing:
                self.core.finish_seal()
            while self.core.freeing:
                self.core.finish_free()
        self.core.advance(5.0)
        while self.core.freeing:
            self.core.finish_free()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.quiet()
        check_core(self.core)
        check_idle(self.core)
        self.core.call(99, wire.Clear())
        while self.core.freeing:
            self.core.finish_free()
        assert self.core.index.ram.bytes == 0
        assert not [m for m in self.core.memories if not m.is_freed]


def _common(left: Tokens, right: Tokens) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
