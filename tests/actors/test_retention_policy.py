"""Retention policies, alone and as the core applies them (rule E3)."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcached.actors import tree
from prefixcached.actors.desk import RamConfig
from prefixcached.actors.entries import Checkpoint, Namespace, ObjectEntry, Segment
from prefixcached.actors.retention_policy import (
    DEFAULT_POLICY,
    POLICIES,
    PROTECTED_PRIORITY,
    PROTECTED_SHARE,
    CostSize,
    Segmented,
    policy_named,
    prefix_length,
)
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.schema import Schema
from prefixcached.protocol.tokens import pack_tokens, token_array
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core
from tests.support.core_disk import FakeDisk
from tests.support.core_machine import machine_settings
from tests.support.core_payload import encoded
from tests.support.core_traffic import ENTRY_TOKENS, entry_of, in_ram, put, read

CAP_PAGES = 6


def core_with(policy: str, pages: int = CAP_PAGES) -> Core:
    return Core(small_config(ram_bytes=pages * PAGE, retention=policy))


def test_policies_have_names() -> None:
    """E3: configuration names a policy; a wrong name is refused with those there are."""
    assert {"lru", "cost-size"} <= set(POLICIES)
    assert RamConfig().retention == DEFAULT_POLICY
    for name, made in POLICIES.items():
        assert isinstance(policy_named(name), made)
    with pytest.raises(ValueError, match=r"'mru' is no retention policy; choose one of lru, "):
        policy_named("mru")


def test_lru_evicts_the_least_recently_used() -> None:
    """E3: with `lru` the last use counts, by a put as by a take, and nothing else."""
    core = core_with("lru", pages=3)
    for name in (1, 2, 3):
        put(core, name)
    read(core, 2)
    read(core, 2)
    put(core, 1)
    read(core, 3)
    put(core, 4)
    assert in_ram(core) == {1, 3, 4}


def test_cost_size_is_greedy_dual() -> None:
    """E3: priority = age + length x uses / bytes, and the age rises to the evicted priority."""
    core = core_with("cost-size", pages=4)
    policy = core.index.policy  # the state of the formula is the policy's own
    assert isinstance(policy, CostSize)
    put(core, 1, pages=2)
    long_lived = entry_of(core, 1)
    assert long_lived is not None
    value = 2 * ENTRY_TOKENS / (2 * PAGE / (1 << 20))
    assert long_lived.priority == pytest.approx(value)
    read(core, 1, pages=2)
    assert long_lived.priority == pytest.approx(2 * value)
    put(core, 2)
    put(core, 3)
    put(core, 4)
    assert in_ram(core) == {1, 3, 4}
    assert policy.age == pytest.approx(value)
    newest = entry_of(core, 4)
    assert newest is not None
    assert newest.priority == pytest.approx(2 * value)


def test_cost_size_lets_what_is_not_used_any_more_go() -> None:
    """E3: the age overtakes an entry that was valuable once."""
    core = core_with("cost-size", pages=3)
    put(core, 1)
    for _ in range(3):
        read(core, 1)
    names = iter(range(2, 100))
    while 1 in in_ram(core):
        put(core, next(names))
    assert next(names) < 20


def test_what_costs_no_memory_is_worth_most() -> None:
    """E3: an object of metadata alone has no bytes to divide by, and goes after all that has."""
    space = Namespace("n", b"", Schema())
    policy = CostSize()
    empty, small = (
        ObjectEntry(name, space, ImageSpec(ImageKind.OBJECT), nbytes, "key")
        for name, nbytes in (("empty", 0), ("small", 1))
    )
    for entry in (empty, small):
        policy.accessed(entry, 1 << 30)
    assert empty.priority > small.priority > 0


def test_segmented_evicts_what_was_never_hit_first() -> None:
    """E3, E9: newly stored entries pass by what was hit once, however long ago."""
    core = core_with("segmented", pages=4)
    for name in (1, 2):
        put(core, name)
        read(core, name)
    for name in range(3, 50):
        put(core, name)
    assert in_ram(core) == {1, 2, 48, 49}


def test_segmented_protects_most_of_the_cap_only() -> None:
    """E3: beyond the protected share the least recently hit are as good as new ones again."""
    core = core_with("segmented", pages=10)
    for name in range(1, 11):
        put(core, name)
        read(core, name)
    put(core, 11)
    put(core, 12)
    assert in_ram(core) == {3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
    put(core, 13)
    assert in_ram(core) == {3, 4, 5, 6, 7, 8, 9, 10, 12, 13}


def test_segmented_forgets_what_leaves() -> None:
    """E3: whatever leaves RAM, by eviction or clear, leaves the protected share too."""
    core = core_with("segmented")
    policy = core.index.policy
    assert isinstance(policy, Segmented)
    for name in (1, 2, 3):
        put(core, name)
        read(core, name)
    assert policy.protected_bytes == 3 * PAGE
    core.reply(1, wire.Clear())
    assert policy.protected_bytes == 0


def test_a_continuation_inherits_and_a_branch_does_not() -> None:
    """E9: who goes on with a conversation reads its end; a branch has to earn its first hit."""
    core = core_with("segmented", pages=100)
    base = tuple(range(100, 300))

    def store(tokens: tuple[int, ...]) -> Segment:
        offer = wire.Offer("plain", pack_tokens(tokens), encoded("plain"))
        core.reply(1, wire.Commit(core.reply(1, offer).put))
        last = tree.walk(core.index.namespaces["plain"].root, token_array(offer.tokens)).last
        assert last is not None
        return last

    assert store(base).uses == 0
    core.call(1, wire.Take("plain", pack_tokens((*base, 1))))
    assert store((*base, *range(1, 20))).uses == 1
    assert store((*base, *range(30, 50))).uses == 0
    assert store((*base[:50], *range(1, 20))).uses == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_puts_are_no_uses(policy: str) -> None:
    """E9: storing a path over and over does not make it popular."""
    core = core_with(policy)
    put(core, 1)
    entry = entry_of(core, 1)
    assert entry is not None
    for _ in range(5):
        assert put(core, 1) == wire.Stored(new_bytes=0, length=ENTRY_TOKENS)
    assert entry.uses == 0
    read(core, 1)
    assert entry.uses == 1


class Model:
    """One policy over flat entries, as its definition reads."""

    def __init__(self, priority: Callable[["Model", int], float]) -> None:
        self.priority_of = priority
        self.clock = 0
        self.age = 0.0
        self.pages: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.priority: dict[int, float] = {}
        self.protected: list[int] = []

    def use(self, name: int, hits: int) -> None:
        self.clock += 1
        self.uses[name] = self.uses.get(name, 0) + hits
        self.used[name] = self.clock
        self.priority[name] = self.priority_of(self, name)

    def put(self, name: int, pages: int) -> None:
        if name not in self.pages:
            if pages > CAP_PAGES:
                return
            while sum(self.pages.values()) + pages > CAP_PAGES:
                victim = min(self.pages, key=lambda n: self.priority[n])
                self.age = max(self.age, self.priority[victim])
                del self.pages[victim]
                del self.uses[victim]
                if victim in self.protected:
                    self.protected.remove(victim)
            self.pages[name] = pages
        self.use(name, 0)

    def read(self, name: int) -> None:
        if name in self.pages:
            self.use(name, 1)


def _lru(model: Model, name: int) -> float:
    return float(model.used[name])


def _cost_size(model: Model, name: int) -> float:
    pages = model.pages[name]
    value = ENTRY_TOKENS * pages * (1 + model.uses[name]) / (pages * PAGE / (1 << 20))
    return model.age + value + model.used[name] * 1e-9


def _segmented(model: Model, name: int) -> float:
    if not model.uses[name]:
        return float(model.used[name])
    model.protected = [n for n in model.protected if n != name] + [name]
    while sum(model.pages[n] for n in model.protected) > PROTECTED_SHARE * CAP_PAGES:
        if model.protected == [name]:
            break
        model.priority[model.protected.pop(0)] = float(model.used[name])
    return 1e12 + model.used[name]


MODELS = {"lru": _lru, "cost-size": _cost_size, "segmented": _segmented}


class PolicyMachine(RuleBasedStateMachine):
    """E3: the core with a policy keeps what the policy's definition keeps."""

    @initialize(policy=st.sampled_from(sorted(MODELS)))
    def start(self, policy: str) -> None:
        self.core = core_with(policy)
        self.model = Model(MODELS[policy])

    @rule(name=st.integers(1, 12))
    def put(self, name: int) -> None:
        put(self.core, name, pages=1 + name % 4)
        self.model.put(name, 1 + name % 4)

    @rule(name=st.integers(1, 12))
    def read(self, name: int) -> None:
        hit = read(self.core, name, pages=1 + name % 4)
        assert bool(hit) is (name in self.model.pages)
        self.model.read(name)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "core"):
            assert in_ram(self.core) == set(self.model.pages)
            check_core(self.core)


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = machine_settings(60)


def test_segmented_keeps_the_order_of_hits() -> None:
    """E3: of what was hit, that whose last hit is longest ago is the first to lose protection."""
    core = core_with("segmented", pages=10)
    for name in range(1, 9):
        put(core, name)
        read(core, name)
    read(core, 1)
    put(core, 9)
    read(core, 9)
    put(core, 10)
    put(core, 11)
    assert 1 in in_ram(core)
    assert 2 not in in_ram(core)


def test_one_entry_larger_than_the_share_is_protected_all_the_same() -> None:
    """E3: there is always one entry that was hit last, however large."""
    core = core_with("segmented", pages=5)
    put(core, 1, pages=5)
    read(core, 1, pages=5)
    entry = entry_of(core, 1)
    assert entry is not None
    assert entry.priority > PROTECTED_PRIORITY
    assert PROTECTED_SHARE * core.index.ram.bytes_cap < 5 * PAGE


def test_what_left_ram_has_no_protection_on_the_disk() -> None:
    """E3: on SSD alone a hit of long ago does not count for more than the last use."""
    core = Core(
        small_config(
            ram_bytes=10 * PAGE, ssd_bytes=1 << 30, retention="segmented", idle_seconds=5.0,
            write_delay_seconds=0.0,
        )
    )  # fmt: skip
    disk = FakeDisk(core)
    put(core, 1)
    read(core, 1)
    disk.settle()
    entry = entry_of(core, 1)
    assert entry is not None
    assert entry.priority > PROTECTED_PRIORITY
    core.advance(30.0)
    assert entry.memory is None
    assert entry.priority == entry.used < PROTECTED_PRIORITY


def test_the_cost_of_an_entry_is_the_prefix_that_ends_there() -> None:
    """E3: a snapshot saves what lies before it, an object stands for itself."""
    space = Namespace("n", b"", Schema())
    segment = Segment(
        "s", space, ImageSpec(ImageKind.SEGMENT, 5, 9), 0, token_array([1, 2, 3, 4]), 5
    )
    snapshot = Checkpoint("c", space, ImageSpec(ImageKind.CHECKPOINT, 7, 7), 0)
    single = ObjectEntry("o", space, ImageSpec(ImageKind.OBJECT), 0, "key")
    assert [prefix_length(entry) for entry in (segment, snapshot, single)] == [9, 7, 1]
