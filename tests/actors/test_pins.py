"""Prefetches and pins (rules F1 to F4, E10)."""

from prefixcached.protocol import messages as wire
from tests.support.core import PAGE, Core, Slot, small_config
from tests.support.core_checks import check_core, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk

EMPTY = wire.Pinned(pin=None, length=0)


def two_tiers(*lengths: int, ram_pages: int = 100) -> tuple[Core, FakeDisk, Client]:
    """A core whose entries of ``sequence(length)`` are on SSD only."""
    core = Core(
        small_config(
            ram_bytes=ram_pages * PAGE, ssd_bytes=1 << 30, write_delay_seconds=0.0,
            idle_seconds=5.0, promote="never", put_wait_seconds=0.0,
        )
    )  # fmt: skip
    disk, client = FakeDisk(core), Client(core)
    for length in lengths:
        client.store(sequence(length))
    disk.settle()
    core.advance(30.0)
    return core, disk, client


def pinned(slot: Slot) -> int:
    """The pin of a prefetch that found something."""
    assert isinstance(slot.reply, wire.Pinned)
    assert slot.reply.pin is not None
    return slot.reply.pin


def test_a_prefetch_makes_resident_and_pins() -> None:
    """F1: what `take` would choose is verified, brought into RAM and stays until unpinned."""
    core, disk, client = two_tiers(10, 20)
    slot = client.prefetch(sequence(21))
    assert slot.reply is None
    disk.settle()
    pin = pinned(slot)
    assert core.index.ram.bytes_by_state["resident"] == 2 * PAGE
    core.advance(1000.0)
    assert core.index.ram.bytes_by_state["resident"] == 2 * PAGE, "pinned, however long unused"
    assert client.hit(sequence(21)).tier == "ram"
    client.unpin(pin)
    core.gone(1)
    core.advance(1000.0)
    assert core.index.ram.bytes == 0
    check_idle(core)


def test_a_pin_follows_what_replaces_its_end() -> None:
    """F1, P11: a short end that a next turn absorbs is still there for the pin's prompt."""
    core = Core(small_config(ram_bytes=4 * PAGE, segment_min_tokens=50, put_wait_seconds=0.0))
    client, other = Client(core, 1), Client(core, 2)
    client.store(sequence(10))
    pin = pinned(client.prefetch(sequence(11)))
    other.store(sequence(20))
    assert core.index.counters["superseded"] == 1
    for salt in range(1, 6):
        other.store(sequence(20, salt))
        other.reuse(sequence(21, salt))
    assert client.reuse(sequence(11)) == 10
    check_core(core)
    client.unpin(pin)
    for salt in range(6, 12):
        other.store(sequence(20, salt))
        other.reuse(sequence(21, salt))
    assert client.reuse(sequence(11)) == 0, "let go, it is a victim like any other"
    check_core(core)


def test_a_prefetch_answers_with_what_absorbed_what_it_reads() -> None:
    """F1, P11: a put stored the leaf again while its file was read, and the file is gone since."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0, segment_min_tokens=64))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(10))
    disk.settle()
    (leaf,) = core.index.entries.values()
    core.index.drop_memory(leaf)
    slot = client.prefetch(sequence(12))
    disk.accept()
    assert slot.reply is None
    client.store(sequence(20))
    while disk.step():
        pass
    assert not leaf.attached
    disk.finish_read(next(iter(disk.reads)), "good")
    assert slot.reply == wire.Pinned(pin=pinned(slot), length=10)
    check_core(core)


def test_a_prefetch_that_does_not_fit_pins_all_the_same() -> None:
    """F1, E6: resident if the budget allows; the files stay pinned."""
    core, disk, client = two_tiers(10, 20, ram_pages=2)
    other = Client(core, 2)
    other.store(sequence(10, 1))
    other.hit(sequence(11, 1))
    slot = client.prefetch(sequence(21))
    disk.settle()
    assert isinstance(slot.reply, wire.Pinned)
    assert slot.reply.length == 20
    assert core.index.ram.bytes == 2 * PAGE
    assert core.promotions.declined == 1
    assert all(e.holders == 1 for e in core.index.entries.values())


def test_each_asker_gets_its_own_pin() -> None:
    """F2: one read and one copy however many ask; one that is gone does not cancel the others."""
    core, disk, _ = two_tiers(10)
    clients = [Client(core, session) for session in range(1, 6)]
    slots = [client.prefetch(sequence(11)) for client in clients]
    disk.accept()
    assert len(disk.reads) == 1
    core.gone(2)
    (name,) = list(disk.reads)
    disk.finish_read(name)
    disk.accept()
    assert len(disk.promotions) == 1
    core.gone(3)
    disk.settle()
    pins = [pinned(slot) for slot in (slots[0], slots[3], slots[4])]
    assert len(set(pins)) == 3
    assert slots[1].reply is None
    assert slots[2].reply is None
    assert core.promotions.promoted == 1
    entry = next(iter(core.index.entries.values()))
    assert entry.holders == 3


def test_the_last_asker_gone_cancels_the_read() -> None:
    """F2: nothing is read for nobody."""
    core, disk, client = two_tiers(10)
    client.prefetch(sequence(11))
    disk.accept()
    core.gone(1)
    disk.accept()
    assert not disk.reads
    check_idle(core)


def test_what_ram_has_is_only_pinned() -> None:
    """F3: no read where RAM holds as much, and the answer comes at once."""
    _core, disk, client = two_tiers()
    client.store(sequence(20))
    disk.settle()
    slot = client.prefetch(sequence(21))
    disk.accept()
    assert pinned(slot)
    assert not disk.reads


def test_rows_that_ram_has_are_not_read() -> None:
    """F3: where an image on SSD has the same window rows RAM's are taken."""
    core, disk, _ = two_tiers()
    first, second = Client(core, 1), Client(core, 2)
    late = first.grant(sequence(60), "ring/a", extra=40)
    second.store(sequence(30), "ring/a")
    first.commit(late)
    disk.settle()
    (behind,) = (e for e in core.index.entries.values() if e.spec.end == 60)
    core.index.drop_memory(behind)
    slot = first.prefetch(sequence(31), "ring/a")
    disk.accept()
    assert not disk.reads
    assert pinned(slot)


def test_nothing_found_is_an_empty_pin() -> None:
    """F3: there is nothing to hold and nothing to release."""
    core, _, client = two_tiers(10)
    assert client.prefetch(sequence(20, 5)).reply == EMPTY
    assert client.prefetch(sequence(20), "plain/b").reply == EMPTY
    assert not core.pins.pins
    assert core.pins.empty == 2


def test_a_clear_while_it_is_read_gives_an_empty_pin() -> None:
    """F4: work started before a clear is discarded when it ends after it."""
    core, disk, client = two_tiers(10)
    slot = client.prefetch(sequence(11))
    disk.accept()
    Client(core, 2).clear()
    disk.finish_read(next(iter(disk.reads)))
    assert slot.reply == EMPTY
    disk.settle()
    check_idle(core)
    assert (core.index.ram.bytes, core.index.ssd.bytes) == (0, 0)


def test_a_clear_while_it_is_copied_gives_an_empty_pin() -> None:
    """F4: also where the bytes are on their way into RAM."""
    core, disk, client = two_tiers(10)
    slot = client.prefetch(sequence(11))
    disk.accept()
    disk.finish_read(next(iter(disk.reads)))
    Client(core, 2).clear()
    disk.finish_promotion(next(iter(disk.promotions)))
    assert slot.reply == EMPTY
    disk.settle()
    check_idle(core)
    assert core.index.ram.bytes == 0


def test_a_failed_read_gives_an_empty_pin() -> None:
    """F1, T8: a prefetch whose file cannot be read holds nothing."""
    core, disk, client = two_tiers(10)
    slot = client.prefetch(sequence(11))
    disk.accept()
    disk.finish_read(next(iter(disk.reads)), "transient")
    assert slot.reply == EMPTY
    check_idle(core)


def test_releasing_a_pin_lets_waiting_puts_in() -> None:
    """E10: the end of a pin re-runs the budget."""
    core, disk, client = two_tiers(ram_pages=2)
    client.store(sequence(10))
    disk.settle()
    pin = pinned(client.prefetch(sequence(11)))
    other = Client(core, 2)
    assert other.refusal(sequence(40, 1)) == "no-space"
    client.unpin(pin)
    other.store(sequence(40, 1))


def test_only_its_own_session_unpins() -> None:
    """L1: ids belong to their session, and an unknown one is harmless."""
    core, disk, client = two_tiers(10)
    slot = client.prefetch(sequence(11))
    disk.settle()
    pin = pinned(slot)
    Client(core, 2).unpin(pin)
    core.send_one_way(1, wire.Unpin(pin, boot="earlier"))
    assert pin in core.pins.pins
    client.unpin(pin)
    client.unpin(pin)
    assert not core.pins.pins
    check_core(core)


def test_what_was_prefetched_counts_as_used() -> None:
    """F1, E3: after its pin has ended it is not the first to go."""
    core = Core(small_config(ram_bytes=2 * PAGE, retention="lru"))
    client = Client(core)
    client.store(sequence(10))
    client.store(sequence(10, 1))
    client.unpin(pinned(client.prefetch(sequence(11))))
    client.store(sequence(10, 2))
    assert client.contains(sequence(10))
    assert not client.contains(sequence(10, 1))
