"""The writer's queue in rare orders of events (rules P8, D1, D6, D7, D11, C4, E1)."""

import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import FilesLost, Synced, WriteImage
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor
from tests.actors.test_write_behind import orders, two_tiers
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core, check_disk_idle
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


def put_object(core: Core, spec: ImageSpec) -> None:
    """Offer an object and commit it."""
    grant = core.reply(1, wire.OfferObject("objects", "key", spec))
    assert isinstance(core.reply(1, wire.Commit(grant.put)), wire.Stored)


def test_each_image_waits_for_its_own_delay() -> None:
    """P8: a later put does not put off what was stored before it."""
    core, disk, client = two_tiers()
    client.store(sequence(10, 1))
    core.advance(0.3)
    client.store(sequence(10, 2))
    core.advance(0.25)
    assert orders(disk) == ["WriteImage"]


def test_after_a_deletion_made_room_the_next_write_has_its_delay_again() -> None:
    """P8, D5: what once waited for deletions waits for nothing but its delay from then on."""
    core, disk, client = two_tiers(ssd_bytes=6 * PAGE)
    salt = 0
    while "DeleteFile" not in orders(disk):
        disk.step()
        salt += 1
        client.store(sequence(10, salt))
        core.advance(0.6)
    disk.settle()
    client.store(sequence(10, salt + 1))
    core.advance(0.6)
    assert orders(disk)
    check_core(core)


def test_ancestors_that_could_not_be_written_are_written_first_after_all() -> None:
    """P8: what is stored below them queues them again, from the top of the path."""
    core, disk, client = two_tiers(write_delay_seconds=0.0)
    client.store(sequence(10))
    disk.step(fails=True)
    client.store(sequence(20))
    disk.step(fails=True)
    assert core.writes.failed == 2
    client.store(sequence(30))
    disk.settle()
    assert sorted(f.entry.header.spec.end for f in disk.files.values()) == [10, 20, 30]
    check_disk_idle(core, disk)


def test_what_is_cleared_while_it_is_queued_and_lent_is_never_written() -> None:
    """D11, L2: the lease keeps the bytes in RAM, and nothing hands them to the writer any more."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    hit = client.hit(sequence(11))
    client.clear()
    core.advance(1.0)
    assert orders(disk) == ["ClearNamespace"]
    client.release(hit)
    disk.settle()
    assert core.index.ram.bytes == core.index.ssd.bytes == 0


def test_a_flush_does_not_wait_for_what_was_cleared() -> None:
    """P8, D11: an image that is gone before its turn counts as skipped."""
    _core, disk, client = two_tiers()
    client.store(sequence(10), "plain/a")
    client.store(sequence(10), "plain/b")
    slot = client.flush()
    client.clear("plain/b")
    disk.step()
    assert slot.reply == wire.Flushed(written=1, skipped=1, failed=0)


def test_a_disk_that_fails_does_not_fail_what_was_cleared() -> None:
    """P8, D7: a flush that waits is answered, and counts as failed only what is still there."""
    core, disk, client = two_tiers()
    for name in ("plain/a", "plain/b", "plain/c"):
        client.store(sequence(10), name)
    slot = client.flush()
    client.clear("plain/b")
    disk.set_healthy(False)
    assert slot.reply is None
    disk.step(fails=True)
    assert slot.reply == wire.Flushed(written=0, skipped=1, failed=2)
    assert core.writes.refused == 1


@pytest.mark.parametrize("written", [1, 2])
def test_a_flush_begins_again_when_all_files_are_lost(written: int) -> None:
    """P8, D7: what it saw written is gone, so it waits until it was written once more."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=9.0))
    disk, client = FakeDisk(core), Client(core)
    for salt in range(2):
        client.store(sequence(10, salt))
    core.auto_sync = False
    slot = client.flush()
    core.send(Synced(core.syncing.pop(0).sync))
    for _ in range(written):
        disk.step()
    late = [order.sync for order in core.syncing]
    core.syncing.clear()
    disk.files.clear()
    core.send(FilesLost())
    for number in late:
        core.send(Synced(number))
    assert slot.reply is None
    core.auto_sync = True
    core.send(Synced(core.syncing.pop(0).sync))
    disk.settle()
    assert slot.reply == wire.Flushed(written=2, skipped=0, failed=0)
    assert len(disk.files) == 2
    check_core(core)


def test_a_flush_of_another_connection_is_not_forgotten() -> None:
    """C4: who leaves takes only its own flushes along."""
    core, disk, client = two_tiers()
    client.store(sequence(10))
    slot = client.flush()
    Client(core, 2).flush()
    core.gone(2)
    disk.step()
    assert slot.reply == wire.Flushed(written=1, skipped=0, failed=0)


def test_an_image_that_no_file_can_hold_does_not_hold_up_the_next() -> None:
    """P8, C3: what is due behind it is handed over in the same turn."""
    core, disk, client = two_tiers()
    names = (StateTensor("\0" * 250 + str(n), "U8", (4,)) for n in range(8192))
    put_object(core, ImageSpec(ImageKind.OBJECT, tensors=tuple(names)))
    client.store(sequence(10))
    core.advance(0.5)
    assert orders(disk) == ["WriteImage"]
    assert core.writes.refused == 1


def test_all_that_a_full_disk_has_no_room_for_is_refused_in_one_turn() -> None:
    """E4, D5: each is told so when it is due; none waits for the other."""
    core, disk, client = two_tiers(ssd_bytes=20 * PAGE)
    for salt in (1, 2):
        client.store(sequence(10, salt))
    disk.other_bytes = disk.kept_other_bytes = 20 * PAGE
    disk.set_healthy(True)
    core.advance(0.5)
    disk.step()
    assert core.writes.refused == 2
    assert core.writes.is_idle


def test_without_a_disk_nothing_is_queued_and_nothing_is_refused() -> None:
    """P8: a flush skips what no tier can make durable, and no counter calls that a refusal."""
    core = Core(small_config())
    client = Client(core)
    client.store(sequence(10))
    assert core.writes.is_idle
    assert client.flush().reply == wire.Flushed(written=0, skipped=1, failed=0)
    assert core.writes.refused == 0


def test_who_leaves_before_the_disk_has_looked_gets_no_answer() -> None:
    """C4, L1: what SsdTier says to a flush that is gone concerns nobody."""
    core, _disk, client = two_tiers()
    client.store(sequence(10))
    core.auto_sync = False
    slot = client.flush()
    core.gone(1)
    core.send(Synced(core.syncing.pop().sync))
    assert slot.reply is None
    assert Client(core, 2).contains(sequence(10))


def test_the_file_of_an_object_names_its_key_and_no_place_in_a_tree() -> None:
    """D1, O1: an object has no parent, no position, no schema and no tokens."""
    core, disk, _client = two_tiers(write_delay_seconds=0.0)
    put_object(core, ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("x", "U8", (4,)),)))
    disk.accept()
    message = disk.writer[0].message
    assert isinstance(message, WriteImage)
    header = message.header
    assert (header.kind, header.key) == (ImageKind.OBJECT, "key")
    assert (header.parent, header.position, header.minimum) == ("", 0, 0)
    assert (header.schema_digest, message.schema, message.tokens) == ("", b"", b"")


def test_under_second_hit_what_is_stored_is_refused_once_for_now() -> None:
    """D6: the counter of refused images says how many the policy keeps from the disk."""
    core, disk, client = two_tiers(write_delay_seconds=0.0, write_policy="second-hit")
    for salt in range(3):
        client.store(sequence(10, salt))
    client.reuse(sequence(11, 0))
    client.flush()
    disk.settle()
    assert core.writes.refused == 3
    assert not disk.files


def test_under_second_hit_a_flush_writes_what_was_hit_behind_what_was_not() -> None:
    """D6, P8: an image that is not worth a write does not stand in the way of one that is."""
    _core, disk, client = two_tiers(write_delay_seconds=0.0, write_policy="second-hit")
    for salt in (1, 2):
        client.store(sequence(10, salt))
    for _ in range(2):
        client.reuse(sequence(11, 2))
    disk.step(fails=True)
    slot = client.flush()
    disk.step()
    assert slot.reply == wire.Flushed(written=1, skipped=1, failed=0)


def test_a_put_waits_for_room_that_only_the_writer_still_holds() -> None:
    """E1, E4: what is being written leaves RAM when it is durable, so the offer is not declined."""
    core, disk, client = two_tiers(ram_bytes=2 * PAGE)
    client.store(sequence(10))
    core.advance(1.0)
    assert orders(disk) == ["WriteImage"]
    slot = client.offer(sequence(40, 1))
    assert slot.reply is None
    disk.step()
    assert isinstance(slot.reply, wire.Grant)
    check_core(core)


def test_the_writer_is_idle_with_nothing_queued_and_nothing_under_way() -> None:
    """C2: a daemon that stops waits for both."""
    core, disk, client = two_tiers(write_delay_seconds=0.5)
    assert core.writes.is_idle
    client.store(sequence(10))
    assert not core.writes.is_idle
    core.advance(0.5)
    assert core.writes.queued == 1
    assert not core.writes.is_idle
    disk.settle()
    assert core.writes.is_idle
