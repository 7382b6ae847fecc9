"""PromotionDesk: what is made resident, and what need not be (T7)."""

import pytest

from prefixcached.actors.entries import Entry
from prefixcached.protocol import messages as wire
from tests.support.core import Core, small_config
from tests.support.core_checks import check_core, check_disk_idle, check_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


def one_on_disk() -> tuple[Core, FakeDisk, Client, Entry]:
    """A core with one entry, of ``sequence(20)``, that is on SSD only."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk, client = FakeDisk(core), Client(core)
    client.store(sequence(20))
    disk.settle()
    (entry,) = core.index.entries.values()
    core.index.drop_memory(entry)
    return core, disk, client, entry


def test_what_is_resident_is_not_promoted() -> None:
    """T7: what RAM holds is not read again."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk = FakeDisk(core)
    Client(core).store(sequence(20))
    disk.settle()
    (entry,) = core.index.entries.values()
    assert entry.memory is not None
    assert entry.file is not None
    assert not core.promotions.promote(entry)
    assert core.promotions.in_flight == 0


@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_file_that_a_promotion_finds_broken_is_no_longer_held(kind: str) -> None:
    """D3, P3: as after a read it counts no more, and who stores the same again stores it."""
    core, disk, client, entry = one_on_disk()
    stored = entry.nbytes
    assert core.promotions.promote(entry)
    disk.accept()
    if kind == "missing":
        disk.files.clear()
    disk.finish_promotion(entry.id, kind)
    assert core.index.ssd.bytes == core.index.ram.bytes == 0
    assert core.statistics().disk[kind] == 1
    assert client.store(sequence(20)) == stored
    disk.settle()
    assert client.reuse(sequence(21)) == 20
    check_core(core)
    check_disk_idle(core, disk)


def test_a_promotion_that_fails_for_a_moment_leaves_the_file() -> None:
    """D4: what could not be read now is still held."""
    core, disk, client, entry = one_on_disk()
    assert core.promotions.promote(entry)
    disk.accept()
    disk.finish_promotion(entry.id, "transient")
    assert client.contains(sequence(20))
    assert core.statistics().disk["read_failures"] == 1
    check_disk_idle(core, disk)


def test_a_prefetch_whose_file_breaks_on_its_way_pins_nothing() -> None:
    """F1, D3: it was whole when it was verified, and not any more when it was copied."""
    core, disk, client, entry = one_on_disk()
    slot = client.prefetch(sequence(21))
    disk.accept()
    disk.finish_read(entry.id)
    disk.finish_promotion(entry.id, "damaged")
    assert slot.reply == wire.Pinned(pin=None, length=0)
    check_core(core)
    check_idle(core)
