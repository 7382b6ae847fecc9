"""The queue of possible victims (actors/victims.py)."""

from hypothesis import given
from hypothesis import strategies as st

from prefixcached.actors.entries import Namespace, ObjectEntry
from prefixcached.actors.victims import SLACK, Victims
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.schema import Schema

SPACE = Namespace("n", b"", Schema())


def entry(name: str, priority: float = 0.0) -> ObjectEntry:
    made = ObjectEntry(name, SPACE, ImageSpec(ImageKind.OBJECT), 0, name)
    made.priority = priority
    return made


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["use", "hold", "free", "label", "evict"]), st.integers(0, 5)
    ),
    max_size=60,
)  # fmt: skip


@given(operations=OPERATIONS)
def test_victims_come_in_order_of_rank_and_only_while_eligible(
    operations: list[tuple[str, int]],
) -> None:
    """E2: whatever happened before, the least rank among the eligible ones comes first."""
    entries = [entry(str(number)) for number in range(6)]
    queue = Victims(lambda e: not e.holders)
    clock = 0
    for operation, number in operations:
        clock += 1
        chosen = entries[number]
        match operation:
            case "use":
                chosen.priority = clock
            case "hold":
                chosen.holders = 1  # nobody tells the queue
                continue
            case "free":
                chosen.holders = 0
            case "label":
                chosen.is_labelled = not chosen.is_labelled
            case _:
                for victim in queue.in_order():
                    victim.holders = 1
                    queue.offer(victim)
                    break
                continue
        queue.offer(chosen)
    for chosen in entries:
        queue.offer(chosen)
    eligible = [e for e in entries if not e.holders]
    assert [v.rank for v in queue.in_order()] == sorted(e.rank for e in eligible)
    assert {v.id for v in queue.in_order()} == {e.id for e in eligible}


def test_skipped_entries_stay_queued() -> None:
    """A victim that is passed over comes again the next time."""
    queue = Victims(lambda e: True)
    entries = [entry("a", 1.0), entry("b", 2.0)]
    for each in entries:
        queue.offer(each)
    assert next(queue.in_order()) is entries[0]
    assert list(queue.in_order()) == entries
    assert list(queue.in_order()) == entries


def test_an_ancestor_that_becomes_eligible_meanwhile_is_yielded() -> None:
    """E2: leaves go before their ancestors, all within one round."""
    leaf, parent = entry("leaf", 1.0), entry("parent", 1.0)
    parent.holders = 1
    queue = Victims(lambda e: not e.holders)
    queue.offer(leaf)
    seen = []
    for victim in queue.in_order():
        seen.append(victim)
        victim.holders, parent.holders = 1, 0 if victim is leaf else 1
        queue.offer(victim)
        queue.offer(parent)
    assert seen == [leaf, parent]


def test_dead_entries_do_not_pile_up() -> None:
    """What left the cache is swept out, also where nothing was ever evicted."""
    queue = Victims(lambda e: not e.holders)
    for number in range(10 * SLACK):
        each = entry(str(number))
        queue.offer(each)
        each.holders = 1
        queue.offer(each)
    assert len(queue) <= 2 * SLACK


def test_stale_items_are_swept_out_however_they_became_stale() -> None:
    """One call may make two items stale: no number of them is stepped over for good."""
    queue = Victims(lambda e: not e.holders)
    busy, other = entry("busy"), entry("other")
    for each in (busy, other):
        queue.offer(each)
    for _ in range(2 * 2 + SLACK - 1 - len(queue)):  # all but one of the stale ones tolerated
        busy.priority += 1
        queue.offer(busy)
    other.holders = 1
    queue.offer(other)
    assert len(queue) == 1


def test_a_few_stale_items_are_left_alone() -> None:
    """The heap is not rebuilt at each change: that would cost every use of a small cache."""
    queue = Victims(lambda e: True)
    each = entry("a")
    for priority in range(3):
        each.priority = priority
        queue.offer(each)
    assert len(queue) == 3
    assert list(queue.in_order()) == [each]


def test_the_order_survives_a_sweep() -> None:
    """E2: what is left after a rebuild is a heap again."""
    queue = Victims(lambda e: True)
    entries = [entry(str(number)) for number in range(50)]
    for used in range(2 * 50 + SLACK + 1):
        entries[used % 50].priority = used * 7919 % 997
        queue.offer(entries[used % 50])
    assert len(queue) == 50
    assert [v.rank for v in queue.in_order()] == sorted(e.rank for e in entries)


def test_entries_of_equal_rank_keep_their_order() -> None:
    """Whoever is offered again without any change does not fall behind its equals."""
    queue = Victims(lambda e: True)
    entries = [entry("a"), entry("b")]
    for each in (*entries, entries[0]):
        queue.offer(each)
    assert list(queue.in_order()) == entries


def test_what_was_in_use_when_its_turn_came_is_a_victim_later() -> None:
    """E2: it hides nobody behind it, and is queued again once it is free."""
    queue = Victims(lambda e: not e.holders)
    held, free = entry("held", 1.0), entry("free", 2.0)
    for each in (held, free):
        queue.offer(each)
    held.holders = 1  # nobody tells the queue
    assert list(queue.in_order()) == [free]
    held.holders = 0
    queue.offer(held)
    assert list(queue.in_order()) == [held, free]
