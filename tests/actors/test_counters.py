"""C5: what RamTier counts is what happened, each thing once."""

from typing import Any

import msgspec
import pytest

from prefixcached.actors import ram_statistics
from prefixcached.protocol import messages as wire
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import PAGE, Core, small_config
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk
from tests.support.core_payload import encoded

TOKEN_BYTES = 712
"""Of one token of the plain schema."""


def counted(core: Core) -> dict[str, int]:
    """All counters of events, by name; what is not one is left out."""
    found: dict[str, int] = {}
    statistics = core.statistics()
    for group in ("takes", "puts", "claim_outcomes", "label_takes", "prefetches", "evictions"):
        values: dict[str, Any] = getattr(statistics, group)
        found |= {f"{group}.{name}": n for name, n in values.items() if isinstance(n, int)}
    return found


class Difference:
    """What has changed since it was made."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._before = counted(core)

    def __call__(self) -> dict[str, int]:
        after = counted(self._core)
        changed = {name: after[name] - self._before[name] for name in after}
        self._before = after
        return {name: change for name, change in changed.items() if change}


def two_tiers(**changes: Any) -> tuple[Core, FakeDisk, Client]:
    settings: dict[str, Any] = {
        "ssd_bytes": 1 << 30, "write_delay_seconds": 0.0, "idle_seconds": 5.0, "promote": "never",
        **changes,
    }  # fmt: skip
    core = Core(small_config(**settings))
    return core, FakeDisk(core), Client(core)


@pytest.mark.parametrize("ssd_bytes", [0, 1 << 30])
def test_nothing_is_counted_before_anything_happens(ssd_bytes: int) -> None:
    """C5: a daemon that has just started has counted nothing."""
    core = Core(small_config(ssd_bytes=ssd_bytes))
    assert not [name for name, value in counted(core).items() if value]
    disk = core.statistics().disk
    assert not [name for name, value in disk.items() if value and name != "healthy"]


def test_puts_are_counted_by_how_they_end() -> None:
    """P3, P4, P10: offered, stored with their new bytes, held already, abandoned."""
    core = Core()
    client = Client(core)
    changed = Difference(core)
    client.store(sequence(20))
    assert changed() == {
        "puts.offers": 1, "puts.stored": 1, "puts.stored_bytes": 20 * TOKEN_BYTES,
    }  # fmt: skip
    client.store(sequence(30))
    assert changed() == {
        "puts.offers": 1, "puts.stored": 1, "puts.stored_bytes": 10 * TOKEN_BYTES,
    }  # fmt: skip
    assert client.store(sequence(25)) == 0
    assert changed() == {"puts.offers": 1, "puts.already_held": 1}
    grant = client.grant(sequence(10, 1))
    core.send_one_way(1, wire.Abandon(grant.put))
    assert changed() == {"puts.offers": 1, "puts.abandoned": 1}
    client.grant(sequence(10, 2))
    core.gone(1)
    assert changed() == {"puts.offers": 1, "puts.abandoned": 1}


def test_surplus_images_are_counted() -> None:
    """P6: what two puts granted at once, only one of them stored."""
    core = Core(small_config(put_wait_seconds=0.0))
    first, second = Client(core, 1), Client(core, 2)
    grant = first.grant(sequence(20))
    second.store(sequence(20))
    changed = Difference(core)
    assert first.commit(grant) == wire.Stored(new_bytes=0, length=20)
    assert changed() == {"puts.surplus_images": 1, "puts.stored": 1}


def test_takes_are_counted_with_the_tokens_that_they_save() -> None:
    """C5: requested and reused tokens, and RAM's hits and misses."""
    core = Core()
    client = Client(core)
    client.store(sequence(20))
    changed = Difference(core)
    client.hit((*sequence(20), 1, 2, 3))
    assert changed() == {
        "takes.takes": 1, "takes.tokens_requested": 23, "takes.tokens_reused": 20,
        "takes.ram_hits": 1,
    }  # fmt: skip
    client.miss(sequence(9, 1))
    assert changed() == {"takes.takes": 1, "takes.tokens_requested": 9, "takes.ram_misses": 1}
    assert core.takes.counters.misses == {"diverged": 1}


def test_a_hit_on_ssd_is_counted_apart() -> None:
    """C5: a take that the disk serves is a miss of RAM and a hit of the disk."""
    core, disk, client = two_tiers()
    client.store(sequence(20))
    disk.settle()
    core.advance(30.0)
    assert core.index.ram.images == 0
    changed = Difference(core)
    slot = client.ask(sequence(21))
    disk.settle()
    client.verify(slot, sequence(21))
    assert changed() == {
        "takes.takes": 1, "takes.tokens_requested": 21, "takes.tokens_reused": 20,
        "takes.ram_misses": 1, "takes.ssd_hits": 1,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_read_that_fails_is_counted_by_its_kind(kind: str) -> None:
    """T8, D3: the take that needed it is a failed restore."""
    core, disk, client = two_tiers()
    client.store(sequence(20))
    disk.settle()
    core.advance(30.0)
    changed = Difference(core)
    slot = client.ask(sequence(21))
    disk.accept()
    (name,) = disk.reads
    if kind == "missing":
        disk.files.clear()
    disk.finish_read(name, kind)
    assert isinstance(slot.reply, wire.Miss)
    assert changed()["takes.restores_failed"] == 1
    assert core.statistics().disk["read_failures"] == 1
    assert core.statistics().disk[kind] == 1


def test_reads_that_are_awaited_are_shown() -> None:
    """C5: a take that waits for the disk is seen, and so is the end of its reads."""
    core, disk, client = two_tiers()
    client.store(sequence(20))
    client.store(sequence(40))
    disk.settle()
    core.advance(30.0)
    assert core.statistics().reads_outstanding == 0
    slot = client.ask(sequence(41))
    assert slot.reply is None
    assert core.statistics().reads_outstanding == 2
    disk.settle()
    assert core.statistics().reads_outstanding == 0


def test_prefetches_are_counted_and_so_are_empty_ones() -> None:
    """F3, F4: an empty pin is counted, whether nothing was found or it was cleared meanwhile."""
    core, disk, client = two_tiers()
    changed = Difference(core)
    client.prefetch(sequence(21))
    assert changed() == {"prefetches.asked": 1, "prefetches.empty": 1}
    client.store(sequence(20))
    disk.settle()
    core.advance(30.0)
    changed()
    slot = client.prefetch(sequence(21))
    assert changed() == {"prefetches.asked": 1}
    client.clear("plain/a")
    disk.settle()
    assert slot.reply == wire.Pinned(pin=None, length=0)
    assert changed() == {"prefetches.empty": 1}


def test_promotions_and_writes_are_counted_with_their_bytes() -> None:
    """T7, P8: what went to the disk and what came back from it."""
    core, disk, client = two_tiers(promote="always")
    client.store(sequence(20))
    disk.settle()
    core.advance(30.0)
    written = core.statistics().disk
    assert (written["written"], written["failed"], written["refused"]) == (1, 0, 0)
    assert written["written_bytes"] >= 20 * TOKEN_BYTES
    slot = client.ask(sequence(21))
    disk.settle()
    client.verify(slot, sequence(21))
    assert core.statistics().disk["promoted"] == 1
    assert core.index.ram.images == 1


def test_a_clear_says_what_it_took() -> None:
    """D11: images of both tiers, and the bytes of those in RAM."""
    core, disk, client = two_tiers()
    client.store(sequence(20))
    disk.settle()
    core.advance(30.0)
    client.store(sequence(40))
    client.store(sequence(10), "plain/b")
    said = client.clear("plain/a")
    disk.settle()
    assert isinstance(said.reply, wire.Cleared)
    assert (said.reply.images, said.reply.ram_bytes) == (2, PAGE)
    rest = client.clear()
    disk.settle()
    assert isinstance(rest.reply, wire.Cleared)
    assert (rest.reply.images, rest.reply.ram_bytes) == (1, PAGE)


def test_what_leaves_is_counted_by_its_cause() -> None:
    """C5: evicted for the cap, dropped unwritten, demoted as idle, superseded, off the disk."""
    core, disk, client = two_tiers(max_images=2)
    for salt in range(2):
        client.store(sequence(10, salt))
    disk.settle()
    changed = Difference(core)
    client.store(sequence(10, 2))
    assert changed()["evictions.evictions"] == 1
    disk.settle()
    changed()
    core.advance(30.0)
    assert changed() == {"evictions.demotions": 2}
    core.index.ssd.bytes_cap = disk.bytes - 1
    assert core.eviction.make_room_on_disk(0)
    assert changed() == {"evictions.ssd_evictions": 1}
    disk.settle()
    disk.set_healthy(False)
    for salt in range(3, 6):
        client.store(sequence(10, salt))
    assert changed()["evictions.dropped_unwritten"] == 1


def test_labels_are_counted_by_whether_the_conversation_was_found() -> None:
    """S2: a hit that ends at or beyond what the label marks, or short of it."""
    core = Core()
    client = Client(core)
    client.store(sequence(20), label="talk")
    changed = Difference(core)
    core.reply(1, wire.Take("plain/a", pack_tokens(sequence(21)), label="talk"))
    assert changed()["label_takes.label_hits"] == 1
    core.reply(1, wire.Take("plain/a", pack_tokens((*sequence(19), 1, 1)), label="talk"))
    assert changed()["label_takes.label_misses"] == 1
    core.reply(1, wire.Take("plain/a", pack_tokens(sequence(21)), label="unknown"))
    assert not {name for name in changed() if name.startswith("label")}


def test_gauges_are_those_of_the_moment() -> None:
    """C5: leases, pins, puts, waits and bytes are what is held now, and go back to nothing."""
    core = Core(small_config(put_wait_seconds=2.0, claim_min_tokens=5))
    client, other = Client(core, 1), Client(core, 2)
    client.store(sequence(20), label="talk")
    client.hit(sequence(21))
    client.prefetch(sequence(21))
    grant = client.grant(sequence(10, 1))
    waiting = other.offer(sequence(10, 1))
    assert waiting.reply is None
    now = core.statistics()
    assert (now.leases, now.pins, now.puts_in_flight, now.offers_waiting) == (1, 1, 1, 1)
    assert (now.images, now.entries, now.namespaces, now.labels) == (2, 1, 1, 1)
    assert now.ram_bytes_by_state["resident"] == now.ram_bytes_by_state["in_flight"] == PAGE
    assert now.resident_bytes_by_namespace == {"plain/a": PAGE}
    client.commit(grant)
    core.gone(1)
    core.gone(2)
    client.clear()
    after = core.statistics()
    gauges = ("leases", "pins", "puts_in_flight", "offers_waiting", "images", "entries", "labels")
    assert {name: getattr(after, name) for name in gauges} == dict.fromkeys(gauges, 0)
    assert after.ram_bytes == 0
    assert after.ram_bytes_peak == 2 * PAGE


def test_many_namespaces_do_not_outgrow_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """C5: those that hold most are listed, and all are counted."""
    monkeypatch.setattr(ram_statistics, "MAX_NAMESPACES", 2)
    core = Core()
    client = Client(core)
    for number, namespace in enumerate(("plain/a", "plain/b", "plain/c")):
        client.store(sequence(20 + 2000 * number, number), namespace)
    now = core.statistics()
    assert now.resident_bytes_by_namespace.keys() == {"plain/b", "plain/c"}
    assert now.namespaces == 3


def test_statistics_are_plain_values() -> None:
    """C5: `status` can send all of it."""
    core, disk, client = two_tiers()
    client.store(sequence(20))
    client.offer(sequence(5, 3), "chunk/a")
    core.reply(1, wire.Offer("plain/a", pack_tokens(sequence(9, 4)), encoded("ring")))
    disk.settle()
    report = msgspec.to_builtins(core.statistics())
    assert msgspec.json.decode(msgspec.json.encode(report)) == report
