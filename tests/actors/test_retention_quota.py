"""The quota of a namespace: soft while there is room, binding when there is none (rule E9)."""

from hypothesis import given
from hypothesis import strategies as st

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core
from tests.support.core_traffic import in_ram, put, read, take

CAP = 8 * PAGE
BIG, SMALL = "plain/big", "plain/small"


def core_with(quota: float) -> Core:
    return Core(small_config(ram_bytes=CAP, namespace_quota=quota, retention="lru"))


def resident(core: Core, namespace: str) -> int:
    """Pages of one namespace, by its entries."""
    entries = core.index.entries.values()
    return sum(
        e.charged_bytes for e in entries if e.namespace.name == namespace and e.memory
    ) // PAGE  # fmt: skip


def test_without_a_quota_one_namespace_may_push_out_all() -> None:
    """E9: the quota is optional; without it the least used goes, whosever it is."""
    core = core_with(1.0)
    put(core, 1, namespace=SMALL)
    for name in range(10, 20):
        put(core, name, namespace=BIG)
    assert resident(core, SMALL) == 0
    assert resident(core, BIG) == 8


def test_over_its_quota_a_namespace_evicts_its_own() -> None:
    """E9: one namespace's flood leaves the older entries of another alone."""
    core = core_with(0.5)
    for name in (1, 2, 3):
        put(core, name, namespace=SMALL)
    for name in range(10, 40):
        put(core, name, namespace=BIG)
        check_core(core)
    assert {1, 2, 3} <= in_ram(core)
    assert resident(core, BIG) == 5
    assert core.index.quotas.evictions == 25


def test_below_the_cap_the_quota_is_soft() -> None:
    """E9: what nobody else wants a namespace may fill, beyond its quota."""
    core = core_with(0.25)
    for name in range(10, 18):
        put(core, name, namespace=BIG)
    assert resident(core, BIG) == 8


def test_what_was_borrowed_is_given_back_first() -> None:
    """E9: room for others comes from the namespace that is over its quota, recent as it may be."""
    core = core_with(0.5)
    put(core, 1, namespace=SMALL)
    for name in range(10, 17):
        put(core, name, namespace=BIG)
        read(core, name, namespace=BIG)
    put(core, 2, namespace=SMALL)
    put(core, 3, namespace=SMALL)
    assert {1, 2, 3} <= in_ram(core)
    assert resident(core, BIG) == 5


def test_the_largest_offender_pays_first() -> None:
    """E9: of several namespaces over their quota the largest gives first."""
    core = core_with(0.25)
    for name in (1, 2, 3):
        put(core, name, namespace=SMALL)
    for name in range(10, 15):
        put(core, name, namespace=BIG)
    put(core, 90, namespace="plain/other")
    assert resident(core, SMALL) == 3
    assert resident(core, BIG) == 4


def test_held_entries_are_no_victims_of_a_quota() -> None:
    """E9, E2: what is leased stays, also over the quota; others make the room then."""
    core = core_with(0.25)
    put(core, 1, namespace=SMALL)
    leases = []
    for name in range(10, 17):
        put(core, name, namespace=BIG)
        leases.append(take(core, name, namespace=BIG).reply)
    put(core, 2, namespace=SMALL)
    assert resident(core, BIG) == 7
    assert in_ram(core) >= {2, *range(10, 17)}
    for lease in leases:
        assert isinstance(lease, wire.Hit)
        core.call(1, wire.Release(lease.lease))
    put(core, 3, namespace=SMALL)
    assert resident(core, BIG) == 6


@given(
    quota=st.sampled_from([0.25, 0.5, 1.0]),
    steps=st.lists(
        st.tuples(st.sampled_from("prlc"), st.integers(1, 12), st.integers(0, 2)), max_size=60
    ),
)
def test_resident_bytes_are_those_of_the_entries(
    quota: float, steps: list[tuple[str, int, int]]
) -> None:
    """E9: the bytes of each namespace are those of its resident entries, whatever happens."""
    core = core_with(quota)
    names = (BIG, SMALL, "plain/other")
    for step, name, space in steps:
        namespace = names[space]
        match step:
            case "p":
                put(core, name, namespace=namespace)
            case "r":
                read(core, name, namespace=namespace)
            case "l":
                take(core, name, session=name, namespace=namespace)
            case _:
                core.reply(1, wire.Clear(namespace))
        held = {n.name: nbytes for n, nbytes in core.index.quotas.resident_bytes.items()}
        assert {n: b // PAGE for n, b in held.items()} == {
            n: resident(core, n) for n in names if resident(core, n)
        }
        check_core(core)


def test_a_namespace_that_has_left_ram_holds_nothing() -> None:
    """E9: also where images of no bytes go after all others."""
    core = core_with(0.5)
    spec = ImageSpec(ImageKind.OBJECT, metadata=b"m")
    grant = core.reply(1, wire.OfferObject(BIG, "key", spec))
    core.reply(1, wire.Commit(grant.put))
    put(core, 1, namespace=BIG)
    (prompt,) = (e for e in core.index.entries.values() if e.charged_bytes)
    core.index.drop_memory(prompt)
    assert core.index.quotas.resident_bytes == {}
    core.reply(1, wire.Clear(BIG))
    assert core.index.quotas.resident_bytes == {}
