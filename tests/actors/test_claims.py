"""One prefill for many: claims and the takes that wait for them (rules Q1 to Q3), on the core."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcached.actors.claims import MAX_CLAIMS_PER_SESSION
from prefixcached.protocol import messages as wire
from tests.support.core import PAGE, Core, Slot, small_config
from tests.support.core_checks import check_core, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk
from tests.support.core_machine import machine_settings
from tests.support.core_payload import Tokens

LEAST = 5
PROMPT = sequence(40)


def make_core(**changes: Any) -> Core:
    return Core(small_config(**{"claim_min_tokens": LEAST, **changes}))


def clients(core: Core, count: int) -> list[Client]:
    return [Client(core, session) for session in range(1, count + 1)]


def claim_of(slot: Slot) -> int | None:
    """The claim of a take that was answered."""
    assert isinstance(slot.reply, wire.Hit | wire.Miss)
    return slot.reply.claim


def claimed(client: Client, tokens: Tokens = PROMPT, namespace: str = "plain/a") -> int:
    """Take tokens; the claim that must come with the reply."""
    number = claim_of(client.ask(tokens, namespace))
    assert number is not None
    return number


def waiting(client: Client, tokens: Tokens = PROMPT, wait: float = 10.0) -> Slot:
    """A take that waits for somebody's prefill."""
    slot = client.ask(tokens, wait=wait)
    assert slot.reply is None
    return slot


# -- Q1: a claim comes and goes ------------------------------------------------------------------


def test_a_take_that_leaves_much_to_compute_carries_a_claim() -> None:
    """Q1: the claim is of all tokens but the last, and needs so many left to compute."""
    core = make_core()
    (one,) = clients(core, 1)
    assert claim_of(one.ask(sequence(LEAST + 1, salt=2))) is not None
    assert claim_of(one.ask(sequence(LEAST, salt=1))) is None
    one.store(PROMPT[:20])
    assert claim_of(one.ask(PROMPT[: 20 + LEAST])) is None
    assert claim_of(one.ask(PROMPT[: 21 + LEAST])) is not None
    assert [c.length for c in core.claims.claims.values()] == [LEAST, 20 + LEAST]
    assert core.statistics().claim_outcomes["granted"] == 2


@pytest.mark.parametrize("stored", [PROMPT[:-1], PROMPT, (*PROMPT, 7)])
def test_a_put_from_any_connection_that_covers_it_ends_a_claim(stored: Tokens) -> None:
    """Q1: whoever stores the tokens, the claim is fulfilled."""
    core = make_core()
    one, two = clients(core, 2)
    claimed(one)
    two.store(PROMPT[:-2])
    assert core.statistics().claims == 1
    two.store(stored)
    assert core.statistics().claims == 0
    assert core.statistics().claim_outcomes["covered"] == 1


def test_a_put_elsewhere_ends_no_claim() -> None:
    """Q1, N1: another namespace or another prompt fulfils nothing."""
    core = make_core()
    one, two = clients(core, 2)
    claimed(one)
    two.store(PROMPT, "plain/b")
    two.store((*PROMPT[:-2], 1, 2, 3))
    assert core.statistics().claims == 1


def test_what_is_already_held_fulfils_a_claim_as_well() -> None:
    """Q1, P3: storing what another put has stored meanwhile covers the claim."""
    core = make_core()
    one, two = clients(core, 2)
    grant = two.grant(PROMPT)
    claimed(one)
    two.commit(grant)
    assert core.statistics().claims == 0
    claimed(one, sequence(60))
    assert one.store(PROMPT) == 0
    assert core.statistics().claims == 1


def test_a_claim_is_dropped_by_its_owner_alone() -> None:
    """Q1: ids belong to their session; a second drop is harmless."""
    core = make_core()
    one, two = clients(core, 2)
    number = claimed(one)
    core.send_one_way(two.session, wire.DropClaim(number))
    assert core.statistics().claims == 1
    core.send_one_way(one.session, wire.DropClaim(number))
    core.send_one_way(one.session, wire.DropClaim(number))
    assert core.statistics().claims == 0
    assert core.statistics().claim_outcomes["dropped"] == 1


def test_a_claim_has_no_timeout_and_ends_with_its_connection() -> None:
    """Q1: a prefill may take minutes; a dead process computes nothing."""
    core = make_core()
    one, _ = clients(core, 2)
    claimed(one)
    core.advance(86400)
    assert core.statistics().claims == 1
    core.gone(one.session)
    assert core.statistics().claims == 0
    assert core.statistics().claim_outcomes["orphaned"] == 1


def test_a_connection_has_so_many_claims_and_the_oldest_ends() -> None:
    """Q1: a client that never puts cannot fill the daemon; who waits for the oldest goes on."""
    core = make_core()
    one, two = clients(core, 2)
    first = claimed(one)
    slot = waiting(two)
    later = [claimed(one, sequence(30, salt)) for salt in range(1, MAX_CLAIMS_PER_SESSION)]
    assert slot.reply is None
    last = claimed(one, sequence(30, 99))
    assert isinstance(slot.reply, wire.Miss)
    assert set(core.claims.claims) == {*later, last, slot.reply.claim}
    assert first not in core.claims.claims


def test_a_connection_has_sixteen_claims() -> None:
    """Q1: each keeps its prompt's tokens, so their number is bounded."""
    core = make_core()
    (one,) = clients(core, 1)
    for salt in range(1, 18):
        claimed(one, sequence(30, salt))
    assert core.statistics().claims == 16


def test_who_waits_goes_on_waiting_when_others_leave() -> None:
    """Q2: the end of a connection ends what that one waits for, and nobody else's."""
    core = make_core()
    before, claimant, leaving, after = clients(core, 4)
    claimed(claimant)
    slots = [waiting(before), waiting(leaving), waiting(after)]
    core.gone(leaving.session)
    assert core.statistics().takes_waiting == 2
    claimant.store(PROMPT)
    assert isinstance(slots[0].reply, wire.Hit)
    assert isinstance(slots[2].reply, wire.Hit)
    assert slots[1].reply is None


def test_an_answer_that_costs_an_older_claim_wakes_its_waiters_in_the_same_step() -> None:
    """Q2: a waiter that becomes a claimant may lose its oldest claim; nobody waits for that."""
    core = make_core()
    one, two, three = clients(core, 3)
    oldest = claimed(two, sequence(50, 1))
    for salt in range(2, MAX_CLAIMS_PER_SESSION + 1):
        claimed(two, sequence(50, salt))
    claimed(one)
    for_the_oldest = waiting(three, sequence(50, 1))
    slot = waiting(two)
    core.gone(one.session)
    assert claim_of(slot) is not None
    assert oldest not in core.claims.claims
    assert claim_of(for_the_oldest) is not None


def test_clearing_a_namespace_ends_its_claims() -> None:
    """D11: who waited in a cleared namespace starts anew, one of them as the claimant."""
    core = make_core()
    one, two, three = clients(core, 3)
    claimed(one)
    claimed(one, PROMPT, "plain/b")
    second, third = waiting(two), waiting(three)
    one.clear("plain/a")
    assert claim_of(second) is not None
    assert third.reply is None
    assert core.statistics().claims == 2


# -- Q2: waiting ---------------------------------------------------------------------------------


def test_a_waiting_take_is_answered_with_what_the_claimant_stores() -> None:
    """Q2: N together on one cold prompt prefill it once."""
    core = make_core()
    one, *others = clients(core, 4)
    claimed(one)
    slots = [waiting(other) for other in others]
    assert core.statistics().takes_waiting == 3
    one.store(PROMPT[:-1])
    for other, slot in zip(others, slots, strict=True):
        assert other.verify(slot, PROMPT).length == len(PROMPT) - 1
        assert claim_of(slot) is None
    assert core.statistics().takes["prefills_saved"] == 3
    assert core.statistics().takes_waiting == 0


def test_a_shorter_put_serves_those_who_share_no_more() -> None:
    """Q2: a waiter wants the common prefix, not the whole of the claim."""
    core = make_core()
    one, two, three = clients(core, 3)
    claimed(one)
    branch = (*PROMPT[:20], *sequence(20, 3))
    at_20, at_end = waiting(two, branch), waiting(three)
    one.store(PROMPT[:20])
    assert two.verify(at_20, branch).length == 20
    assert at_end.reply is None
    one.store(PROMPT[:-1])
    assert three.verify(at_end, PROMPT).length == len(PROMPT) - 1


@pytest.mark.parametrize("order", [(20, 40), (40, 20)])
def test_of_several_claims_the_one_that_promises_most_is_awaited(order: tuple[int, int]) -> None:
    """Q2: the end of a claim that promises less answers nobody who can have more."""
    core = make_core()
    one, *claimants = clients(core, 3)
    numbers = {
        length: claimed(claimant, PROMPT[:length])
        for length, claimant in zip(order, claimants, strict=True)
    }
    slot = waiting(one)
    assert core.takes.awaited_claims == {one.session: numbers[40]}
    by_length = dict(zip(order, claimants, strict=True))
    by_length[20].store(PROMPT[:19])
    assert slot.reply is None
    by_length[40].store(PROMPT[:-1])
    assert one.verify(slot, PROMPT).length == len(PROMPT) - 1


def test_a_take_does_not_wait_for_little() -> None:
    """Q2: sharing fewer tokens than the minimum more than is held is not worth it."""
    core = make_core()
    one, two = clients(core, 2)
    claimed(one)
    few = (*PROMPT[: LEAST - 1], *sequence(20, 4))
    assert two.ask(few, wait=10).reply is not None
    two.store(PROMPT[:30])
    assert two.ask((*PROMPT[: 29 + LEAST], 1), wait=10).reply is not None
    assert two.ask(PROMPT[: 31 + LEAST], wait=10).reply is None


def test_without_wait_nobody_waits() -> None:
    """Q2: a take with no wait is answered at once, and claims as well."""
    core = make_core()
    one, two = clients(core, 2)
    claimed(one)
    assert claimed(two)
    assert core.statistics().claims == 2


def test_the_end_of_the_wait_is_an_answer() -> None:
    """Q2: a claimant that takes too long costs its waiters their wait, no more."""
    core = make_core()
    one, two = clients(core, 2)
    claimed(one)
    slot = waiting(two, wait=3.0)
    core.advance(2.9)
    assert slot.reply is None
    core.advance(0.2)
    assert claim_of(slot) is not None


@pytest.mark.parametrize("how", ["dies", "drops"])
def test_exactly_one_waiter_takes_over(how: str) -> None:
    """Q2: a claimant that ends without a put is followed by one of its waiters, one at a time."""
    core = make_core()
    one, *others = clients(core, 4)
    number = claimed(one)
    slots = [waiting(other) for other in others]
    if how == "dies":
        core.gone(one.session)
    else:
        core.send_one_way(one.session, wire.DropClaim(number))
    assert claim_of(slots[0]) is not None
    assert [slot.reply for slot in slots[1:]] == [None, None]
    core.gone(others[0].session)
    assert claim_of(slots[1]) is not None
    assert slots[2].reply is None
    others[1].store(PROMPT[:-1])
    assert others[2].verify(slots[2], PROMPT).length == len(PROMPT) - 1


def test_a_waiter_that_dies_is_not_elected() -> None:
    """Q2: a connection that ended waits for nothing and claims nothing."""
    core = make_core()
    one, two, three = clients(core, 3)
    claimed(one)
    waiting(two)
    slot = waiting(three)
    core.gone(two.session)
    core.gone(one.session)
    assert claim_of(slot) is not None
    assert core.statistics().claims == 1


def test_a_declined_put_answers_all_its_waiters() -> None:
    """Q2: what was computed and could not be stored will not come: nobody waits on."""
    core = make_core()
    one, *others = clients(core, 4)
    claimed(one)
    slots = [waiting(other) for other in others]
    core.memories_left = 0
    assert one.refusal(PROMPT[:-1]) == "no-space"
    assert all(isinstance(slot.reply, wire.Miss) for slot in slots)
    assert core.statistics().claim_outcomes["declined"] == 1


def test_a_declined_put_leaves_nothing_to_wait_for() -> None:
    """Q2: whoever asks for the prompt after its put was declined is answered at once."""
    core = make_core()
    one, two = clients(core, 2)
    claimed(one)
    core.memories_left = 0
    assert one.refusal(PROMPT[:-1]) == "no-space"
    assert core.statistics().claims == 0
    assert claim_of(two.ask(PROMPT, wait=10)) is not None


def test_a_put_that_fails_to_seal_answers_all_its_waiters() -> None:
    """Q2: a commit that is declined is a declined put too."""
    core = Core(small_config(claim_min_tokens=LEAST), auto_seal=False)
    one, two = clients(core, 2)
    claimed(one)
    slot = waiting(two)
    grant = one.grant(PROMPT[:-1])
    core.call(one.session, wire.Commit(grant.put))
    assert slot.reply is None
    core.finish_seal("busy")
    assert isinstance(slot.reply, wire.Miss)


def test_who_reads_from_disk_is_the_claimant_while_it_reads() -> None:
    """Q1, Q3: N together on a prompt whose head is on SSD: one computes the rest, not each."""
    core = make_core(ssd_bytes=1 << 30, ram_bytes=4 * PAGE, promote="never")
    disk = FakeDisk(core)
    one, two, three = clients(core, 3)
    one.store(PROMPT[:20])
    core.advance(core.config.write_delay_seconds)
    disk.settle()
    (head,) = core.index.entries.values()
    core.index.drop_memory(head)
    first = one.ask(PROMPT, wait=10)
    second, third = two.ask(PROMPT, wait=10), three.ask(PROMPT, wait=10)
    disk.accept()
    disk.finish_read(head.id)
    assert one.verify(first, PROMPT).length == 20
    assert claim_of(first) is not None
    assert (second.reply, third.reply) == (None, None)
    one.store(PROMPT[:-1])
    disk.accept()
    disk.finish_read(head.id)
    assert two.verify(second, PROMPT).length == len(PROMPT) - 1
    assert three.verify(third, PROMPT).length == len(PROMPT) - 1


@pytest.mark.parametrize("how", ["damaged", "cleared"])
def test_a_claim_outlives_a_read_that_fails(how: str) -> None:
    """Q1, T8: whoever gets less than was promised still computes the prompt, with one claim."""
    core = make_core(ssd_bytes=1 << 30, ram_bytes=4 * PAGE)
    disk = FakeDisk(core)
    one, two = clients(core, 2)
    one.store(PROMPT[:20])
    core.advance(core.config.write_delay_seconds)
    disk.settle()
    (head,) = core.index.entries.values()
    core.index.drop_memory(head)
    slot = one.ask(PROMPT)
    disk.accept()
    if how == "cleared":
        two.clear()
    disk.finish_read(head.id, "damaged" if how == "damaged" else "good")
    assert isinstance(slot.reply, wire.Miss)
    assert list(core.claims.claims) == [slot.reply.claim]


# -- Q3: no deadlock -----------------------------------------------------------------------------


def test_a_session_does_not_wait_for_itself() -> None:
    """Q3: who takes its own prompt again is answered."""
    core = make_core()
    (one,) = clients(core, 1)
    claimed(one)
    assert one.ask(PROMPT, wait=10).reply is not None


def test_two_that_would_wait_for_each_other_do_not() -> None:
    """Q3: a claimant never waits for a claim whose claimant waits for it, however indirectly."""
    core = make_core()
    one, two, three = clients(core, 3)
    prompts = [sequence(30, salt) for salt in range(3)]
    for client, prompt in zip((one, two, three), prompts, strict=True):
        claimed(client, prompt)
    first = waiting(one, prompts[1])
    second = waiting(two, prompts[2])
    assert claim_of(three.ask(prompts[0], wait=10)) is not None
    assert (first.reply, second.reply) == (None, None)


def test_a_second_claim_is_awaited_where_the_first_would_deadlock() -> None:
    """Q2, Q3: a claim whose claimant waits for this session does not hide another one."""
    core = make_core()
    one, two, three = clients(core, 3)
    claimed(two)
    claimed(three)
    claimed(one, sequence(30, 5))
    waiting(two, sequence(30, 5))
    slot = waiting(one)
    three.store(PROMPT[:-1])
    assert one.verify(slot, PROMPT).length == len(PROMPT) - 1


# -- a state machine -----------------------------------------------------------------------------


@dataclass(eq=False)
class Wait:
    """A take that has not been answered."""

    session: int
    namespace: str
    prompt: Tokens
    deadline: float
    slot: Slot


@dataclass(eq=False)
class Claimed:
    """A claim as the model has it."""

    session: int
    namespace: str
    tokens: Tokens


TRUNK = (1, 2, 3, 4, 5, 6)
PROMPTS = st.builds(
    lambda tail, length: (*TRUNK, *tail)[:length],
    st.sampled_from([(7, 8, 9, 10, 11, 12), (7, 8, 9, 20, 21, 22), (30,) * 6]),
    st.integers(2, 12),
)
"""Few, so that sessions meet: three branches of one trunk, and prefixes of them."""

SPACES = st.sampled_from(["plain/a", "plain/a", "plain/a", "plain/b"])
SESSIONS = st.integers(1, 4)


class ClaimMachine(RuleBasedStateMachine):
    """Sessions that take, wait, store, fail to store, drop and die, against sets and lists."""

    @initialize(least=st.integers(1, 4))
    def start(self, least: int) -> None:
        self.least = least
        self.core = Core(small_config(claim_min_tokens=least, segment_min_tokens=1))
        self.stored: dict[str, set[Tokens]] = {"plain/a": set(), "plain/b": set()}
        self.claims: dict[int, Claimed] = {}
        self.waits: list[Wait] = []

    # -- the model ------------------------------------------------------------------------------

    def held(self, namespace: str, prompt: Tokens) -> int:
        longest = max((_common(prompt, tokens) for tokens in self.stored[namespace]), default=0)
        return min(longest, len(prompt) - 1)

    def worthwhile(self, wait: Wait) -> Iterator[int]:
        """Claims that the wait may be for, whoever waits for whom."""
        held = self.held(wait.namespace, wait.prompt)
        for number, claim in self.claims.items():
            if claim.namespace == wait.namespace and claim.session != wait.session:
                common = min(_common(claim.tokens, wait.prompt), len(wait.prompt) - 1)
                if common - held >= self.least:
                    yield number

    def edges(self) -> set[tuple[int, int]]:
        """Which session waits for which, as the core has it."""
        core_claims = self.core.claims.claims
        return {
            (take.session, core_claims[take.claim].session)
            for take in self.core.takes._waiting
            if take.claim in core_claims
        }

    def awaited(self) -> list[tuple[Wait, Claimed]]:
        """Which wait is for which claim, as the core has it."""
        numbers = {id(take.answer): take.claim for take in self.core.takes._waiting}
        return [(wait, self.claims[numbers[id(wait.slot)]]) for wait in self.waits]

    def end_claims(self, which: Any) -> None:
        self.claims = {n: c for n, c in self.claims.items() if not which(c)}

    def settle(self, edges_before: set[tuple[int, int]], *, declined: bool = False) -> None:
        """Check every answer that has come, and that who still waits has a reason to."""
        now = self.core.clock
        answered = [wait for wait in self.waits if wait.slot.reply is not None]
        self.waits = [wait for wait in self.waits if wait.slot.reply is None]
        for wait in answered:
            self.check_answer(wait)
        edges = self.edges()
        for wait in answered:
            number = claim_of(wait.slot)
            if number is None or declined or now >= wait.deadline:
                continue
            for earlier in self.worthwhile(wait):
                claimant = self.claims[earlier].session
                assert earlier > number or any(
                    _reaches(graph, claimant, wait.session) for graph in (edges_before, edges)
                ), "it was answered and should have waited"
        for wait in self.waits:
            assert now < wait.deadline
            assert any(True for _ in self.worthwhile(wait)), "it waits for nothing"
        for session in {source for source, _ in edges}:
            assert not _reaches(edges, session, session), "sessions wait for each other"
        assert len(edges) == len({wait.session for wait in self.waits})
        assert set(self.core.claims.claims) == set(self.claims)

    def check_answer(self, wait: Wait) -> None:
        reply, held = wait.slot.reply, self.held(wait.namespace, wait.prompt)
        client = Client(self.core, wait.session)
        if held:
            hit = client.verify(wait.slot, wait.prompt, wait.namespace)
            assert hit.length == held
            client.release(hit)
        else:
            assert isinstance(reply, wire.Miss)
        number = claim_of(wait.slot)
        assert (number is not None) is (len(wait.prompt) - 1 - held >= self.least)
        if number is not None:
            own = [n for n, c in self.claims.items() if c.session == wait.session]
            if len(own) >= MAX_CLAIMS_PER_SESSION:
                del self.claims[own[0]]
            self.claims[number] = Claimed(wait.session, wait.namespace, wait.prompt[:-1])

    # -- what happens ---------------------------------------------------------------------------

    def is_free(self, session: int) -> bool:
        return all(wait.session != session for wait in self.waits)

    @rule(session=SESSIONS, wait=st.sampled_from([0, 1, 100, 100]), prompt=PROMPTS, space=SPACES)
    def take(self, session: int, wait: float, prompt: Tokens, space: str) -> None:
        if self.is_free(session):
            before = self.edges()
            slot = Client(self.core, session).ask(prompt, space, wait=wait)
            self.waits.append(Wait(session, space, prompt, self.core.clock + wait, slot))
            self.settle(before)

    @rule(session=SESSIONS, fails=st.booleans(), tokens=PROMPTS, space=SPACES)
    def put(self, session: int, fails: bool, tokens: Tokens, space: str) -> None:
        if not self.is_free(session):
            return
        before, awaited = self.edges(), self.awaited()
        self.core.memories_left = 0 if fails else math.inf
        reply = Client(self.core, session).put(tokens, space)
        self.core.memories_left = math.inf
        is_stored = isinstance(reply, wire.Stored)
        if is_stored:
            self.stored[space].add(tokens)
        else:
            for wait, claim in awaited:
                if claim.namespace == space and tokens[: len(claim.tokens)] == claim.tokens:
                    assert wait.slot.reply is not None, "it waits for what was declined"
        self.end_claims(lambda c: c.namespace == space and tokens[: len(c.tokens)] == c.tokens)
        self.settle(before, declined=not is_stored)

    @rule(session=SESSIONS)
    def finish(self, session: int) -> None:
        """A claimant stores what it claimed first."""
        own = [c for c in self.claims.values() if c.session == session]
        if own and self.is_free(session):
            before = self.edges()
            claim = own[0]
            reply = Client(self.core, session).put(claim.tokens, claim.namespace)
            assert isinstance(reply, wire.Stored)
            self.stored[claim.namespace].add(claim.tokens)
            self.end_claims(
                lambda c: (
                    c.namespace == claim.namespace and claim.tokens[: len(c.tokens)] == c.tokens
                )
            )
            self.settle(before)

    @rule(session=SESSIONS, which=st.integers(0, 20))
    def drop(self, session: int, which: int) -> None:
        own = [n for n, c in self.claims.items() if c.session == session]
        if own and self.is_free(session):
            before = self.edges()
            number = own[which % len(own)]
            self.core.send_one_way(session, wire.DropClaim(number))
            del self.claims[number]
            self.settle(before)

    @rule(session=SESSIONS)
    def die(self, session: int) -> None:
        before = self.edges()
        self.core.gone(session)
        self.waits = [wait for wait in self.waits if wait.session != session]
        self.end_claims(lambda c: c.session == session)
        self.settle(before)

    @rule(space=st.sampled_from(["plain/a", "plain/b", None]))
    def clear(self, space: str | None) -> None:
        before = self.edges()
        self.core.reply(9, wire.Clear(space))
        for namespace in self.stored if space is None else [space]:
            self.stored[namespace].clear()
        self.end_claims(lambda c: space in (None, c.namespace))
        self.settle(before)

    @rule(seconds=st.sampled_from([0.5, 2.0, 200.0]))
    def time(self, seconds: float) -> None:
        before = self.edges()
        self.core.advance(seconds)
        self.settle(before)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "core"):
            check_core(self.core)
            self.core.check_no_livelock()
            statistics = self.core.statistics()
            assert statistics.claims == len(self.claims)
            assert statistics.takes_waiting == len(self.waits)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            for session in range(1, 5):
                self.die(session)
            check_idle(self.core)
            assert not self.core.claims.claims
            outcomes = self.core.statistics().claim_outcomes
            assert outcomes["granted"] >= sum(outcomes.values()) - outcomes["granted"]


def _common(left: Tokens, right: Tokens) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def _reaches(edges: set[tuple[int, int]], source: int, target: int) -> bool:
    """Whether a path of at least one edge leads from ``source`` to ``target``."""
    reached: set[int] = set()
    frontier = {source}
    while frontier:
        frontier = {b for a, b in edges if a in frontier} - reached
        reached |= frontier
    return target in reached


TestClaims = ClaimMachine.TestCase
TestClaims.settings = settings(machine_settings(), max_examples=200)


def test_a_shorter_prompt_waits_for_no_more_than_it_can_use() -> None:
    """Q2, T3: the claim promises it all but its own last token, and so few more are no promise."""
    core = make_core()
    one, two = clients(core, 2)
    claimed(one)
    slot = waiting(two, PROMPT[:20])
    one.store(PROMPT[: 19 - LEAST])
    assert slot.reply is None
    one.store(PROMPT[: 20 - LEAST])
    assert two.verify(slot, PROMPT[:20]).length == 20 - LEAST
