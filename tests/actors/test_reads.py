"""ReadDesk: who waits for files, who no longer does, and what becomes of theirs (L1, F2)."""

import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import CancelRead, ImageRead, ReadImage
from tests.support.core import Core, FakeFile, small_config
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


def on_disk(*salts: int) -> Core:
    """A core that holds one image for each salt, on SSD alone; its orders are taken by hand."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0))
    disk = FakeDisk(core)
    for salt in salts:
        Client(core).store(sequence(20, salt))
    disk.settle()
    for entry in list(core.index.entries.values()):
        core.index.drop_memory(entry)
    return core


def orders(core: Core) -> list[object]:
    """What the prefetcher was told since the last time."""
    sent, core.to_prefetcher = core.to_prefetcher, []
    return [envelope.message for envelope in sent]


def asked(core: Core, session: int, salt: int) -> ImageRead:
    """Let a session take what is on SSD; the outcome of its read, to be sent."""
    assert Client(core, session).ask((*sequence(20, salt), 1)).reply is None
    (order,) = orders(core)
    assert isinstance(order, ReadImage)
    return ImageRead(order.read, order.entry.header.id, read_bytes=7, seconds=0.5)


def test_what_was_read_and_for_how_long_is_counted() -> None:
    """D3: bytes and seconds of verification are added up."""
    core = on_disk(1, 2)
    for salt in (1, 2):
        core.send(asked(core, 1, salt), FakeFile(core.descriptors, b""))
        orders(core)
    assert (core.reads.read_bytes, core.reads.read_seconds) == (14, 1.0)


@pytest.mark.parametrize("is_good", [True, False])
def test_what_was_read_for_a_client_that_is_gone_is_closed(is_good: bool) -> None:
    """L1: an outcome that crossed the cancellation leaves no descriptor open."""
    core = on_disk(1)
    outcome = asked(core, 2, 1)
    core.gone(2)
    core.send(outcome, FakeFile(core.descriptors, b"") if is_good else None)
    assert core.descriptors.open == {}
    assert core.reads.outstanding == 0


def test_a_client_that_goes_cancels_its_own_reads_alone() -> None:
    """F2: whoever asked before it is still answered, and what it asked for is given up."""
    core = on_disk(1, 2)
    first = Client(core, 1).ask((*sequence(20, 1), 1))
    (order,) = orders(core)
    assert isinstance(order, ReadImage)
    second = asked(core, 2, 2)
    core.gone(2)
    assert orders(core) == [CancelRead(second.read, second.id)]
    core.send(ImageRead(order.read, order.entry.header.id), FakeFile(core.descriptors, b""))
    assert isinstance(first.reply, wire.Hit)
