"""PromotionDesk: what is made resident, and what need not be (T7)."""

from tests.support.core import Core, small_config
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


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
