"""What RamTier gives back under memory pressure, and how it takes it again (rules M2 to M5)."""

from typing import Any

import pytest

from prefixcached.actors.pressure_response import RETRY_SECONDS, RETURN_SECONDS
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import (
    DeleteFile,
    PressureChanged,
    RamCapChanged,
    WriteImage,
)
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core
from tests.support.core_disk import FakeDisk
from tests.support.core_payload import encoded
from tests.support.core_traffic import in_ram, offer, packed, put, read, take

CAP = 8 * PAGE


def ram_only(**changes: Any) -> Core:
    return Core(small_config(**{"ram_bytes": CAP, **changes}))


def with_disk(**changes: Any) -> tuple[Core, FakeDisk]:
    core = Core(small_config(**{"ram_bytes": CAP, "ssd_bytes": 1 << 30, **changes}))
    return core, FakeDisk(core)


def durable(core: Core, disk: FakeDisk, *names: int) -> None:
    """Put names and have them written."""
    for name in names:
        assert isinstance(put(core, name), wire.Stored)
    core.advance(core.config.write_delay_seconds)
    disk.settle()
    assert all(entry.file is not None for entry in core.index.entries.values())


def press(core: Core, level: str) -> None:
    core.send(PressureChanged(level, f"a test says {level}"))
    check_core(core)


def pressure(core: Core) -> dict[str, Any]:
    return core.statistics().pressure


# -- warn --------------------------------------------------------------------------------------


def test_warn_releases_the_least_used_durable_images_without_io() -> None:
    """M2: durable victims leave RAM until half the cap is reached; the disk has nothing to do."""
    core, disk = with_disk()
    durable(core, disk, 1, 2, 3, 4, 5, 6)
    read(core, 1)
    press(core, "warn")
    assert core.index.ram.bytes == CAP // 2
    assert in_ram(core) == {1, 4, 5, 6}
    assert core.to_ssd == []
    assert len(disk.files) == 6
    assert core.reply(1, wire.Peek("plain", packed(2, more=1))).length == 20


def test_warn_below_the_target_releases_nothing() -> None:
    """M2: what fits the reduced target stays."""
    core, disk = with_disk()
    durable(core, disk, 1, 2, 3)
    press(core, "warn")
    assert in_ram(core) == {1, 2, 3}


def test_warn_keeps_what_is_not_durable_until_it_is() -> None:
    """M2, E10: what only RAM holds stays, and leaves with the write that makes it durable."""
    core, disk = with_disk()
    for name in range(1, 7):
        put(core, name)
    press(core, "warn")
    assert core.index.ram.bytes == 6 * PAGE
    core.advance(core.config.write_delay_seconds)
    disk.step()
    assert core.index.ram.bytes == 5 * PAGE
    disk.settle()
    assert core.index.ram.bytes == CAP // 2
    assert len(core.index.entries) == 6


def test_warn_without_a_disk_releases_nothing_by_itself() -> None:
    """M2: with the SSD tier off nothing is durable, and warn destroys nothing."""
    core = ram_only()
    for name in range(1, 7):
        put(core, name)
    press(core, "warn")
    assert in_ram(core) == {1, 2, 3, 4, 5, 6}


def test_the_target_is_configurable() -> None:
    """M2: the share of the cap that is used while memory is short is a setting."""
    core, disk = with_disk(pressure_target=0.25)
    durable(core, disk, 1, 2, 3, 4, 5, 6)
    press(core, "warn")
    assert core.index.ram.bytes == CAP // 4


@pytest.mark.parametrize("level", ["warn", "critical"])
def test_promotions_are_not_started(level: str) -> None:
    """M2: what is hit on SSD is lent from there and does not become resident."""
    core, disk = with_disk(promote="always")
    durable(core, disk, 1)
    core.index.drop_memory(next(iter(core.index.entries.values())))
    press(core, level)
    slot = take(core, 1)
    disk.settle()
    assert isinstance(slot.reply, wire.Hit)
    assert slot.reply.tier == "ssd"
    assert core.promotions.in_flight == 0
    assert core.promotions.declined == 1


def test_a_promotion_in_flight_is_given_back() -> None:
    """M2: optional work that is under way when pressure comes frees its memory when it ends."""
    core, disk = with_disk(promote="always")
    durable(core, disk, 1)
    core.index.drop_memory(next(iter(core.index.entries.values())))
    slot = take(core, 1)
    disk.accept()
    for image in list(disk.reads):
        disk.finish_read(image)
    assert core.promotions.in_flight == 1
    press(core, "warn")
    disk.settle()
    assert core.index.ram.bytes == 0
    assert isinstance(slot.reply, wire.Hit)
    check_core(core)


def test_prefetches_return_an_empty_pin() -> None:
    """M2: at warn a prefetch is answered with an empty pin, also of what RAM holds."""
    core, disk = with_disk()
    durable(core, disk, 1)
    press(core, "warn")
    reply = core.reply(1, wire.Prefetch("plain", packed(1, more=1)))
    assert (reply.pin, reply.length) == (None, 0)


def test_a_prefetch_that_waits_is_answered_with_an_empty_pin() -> None:
    """M2: pending optional work is dropped first, and what it held can leave."""
    core, disk = with_disk()
    durable(core, disk, 1)
    core.index.drop_memory(next(iter(core.index.entries.values())))
    slot = core.call(1, wire.Prefetch("plain", packed(1, more=1)))
    disk.accept()
    assert slot.reply is None
    press(core, "warn")
    assert isinstance(slot.reply, wire.Pinned)
    assert slot.reply.pin is None
    disk.settle()
    assert core.descriptors.open == {}
    assert not core.pins.pins


# -- leases and pins ---------------------------------------------------------------------------


@pytest.mark.parametrize("with_ssd", [False, True])
def test_what_is_lent_stays_until_it_is_released(with_ssd: bool) -> None:
    """T10, E10: critical pressure takes everything but the lease, and that when it ends."""
    core, disk = with_disk()
    if not with_ssd:
        core = ram_only()
        for name in (1, 2, 3):
            put(core, name)
    else:
        durable(core, disk, 1, 2, 3)
    lease = take(core, 2).reply
    assert isinstance(lease, wire.Hit)
    press(core, "critical")
    assert in_ram(core) == {2}
    core.call(1, wire.Release(lease.lease))
    assert core.index.ram.bytes == 0
    check_core(core)


def test_what_is_pinned_stays_until_the_client_goes() -> None:
    """T10, E10: a pin given before the pressure holds; its end re-runs the pressure."""
    core, disk = with_disk()
    durable(core, disk, 1, 2)
    pin = core.reply(7, wire.Prefetch("plain", packed(1, more=1)))
    assert pin.pin is not None
    press(core, "critical")
    assert in_ram(core) == {1}
    core.gone(7)
    assert core.index.ram.bytes == 0


def test_a_put_in_flight_keeps_its_bytes() -> None:
    """T10, M3: what was granted before the pressure may still be committed, and leaves then."""
    core, disk = with_disk()
    grant = offer(core, 1).reply
    assert isinstance(grant, wire.Grant)
    press(core, "critical")
    assert core.index.ram.bytes == PAGE
    assert isinstance(core.reply(1, wire.Commit(grant.put)), wire.Stored)
    disk.settle()
    assert core.index.ram.bytes == 0
    assert len(disk.files) == 1


# -- critical ----------------------------------------------------------------------------------


def test_critical_writes_first_and_drops_then() -> None:
    """M3: what only RAM holds is written at once, without the usual delay, and leaves then."""
    core, disk = with_disk(write_delay_seconds=3600.0)
    for name in (1, 2, 3):
        put(core, name)
    press(core, "critical")
    assert in_ram(core) == {1, 2, 3}
    disk.step()
    assert in_ram(core) == {2, 3}
    disk.settle()
    assert core.index.ram.bytes == 0
    assert len(disk.files) == 3
    assert all(
        core.reply(1, wire.Peek("plain", packed(name, more=1))).length == 20 for name in (1, 2, 3)
    )


def test_critical_without_a_disk_drops() -> None:
    """M3, T9: with the SSD tier off all that is not held goes, and later misses say why."""
    core = ram_only()
    for name in (1, 2, 3):
        put(core, name)
    press(core, "critical")
    assert core.index.ram.bytes == 0
    assert core.index.entries == {}
    assert pressure(core)["dropped_images"] == 3
    reply = take(core, 1).reply
    assert isinstance(reply, wire.Miss)
    assert reply.reason == "pressure"
    assert put(core, 4) == wire.Declined(reason="pressure")


def test_critical_drops_what_the_policy_never_writes() -> None:
    """M3, D6: as without a disk; what was hit often enough is written first, and leaves then."""
    core, disk = with_disk(write_policy="second-hit")
    for name in (1, 2, 3):
        put(core, name)
    for _ in range(2):
        read(core, 2)
    press(core, "critical")
    assert in_ram(core) == {2}
    assert pressure(core)["dropped_images"] == 2
    reply = take(core, 1).reply
    assert isinstance(reply, wire.Miss)
    assert reply.reason == "pressure"
    disk.settle()
    assert core.index.ram.bytes == 0
    assert len(disk.files) == 1
    assert pressure(core)["failed_attempts"] == 0


def written_by_its_hits() -> tuple[Core, FakeDisk]:
    """A core that has written name 1, which was hit twice."""
    core, disk = with_disk(write_policy="second-hit", retention="lru")
    put(core, 1)
    for _ in range(2):
        read(core, 1)
    core.advance(core.config.write_delay_seconds)
    disk.settle()
    assert len(disk.files) == 1
    return core, disk


def test_critical_drops_what_was_used_after_a_durable_image() -> None:
    """M3, D6: what is on SSD is passed over, and saves nothing that never will be."""
    core, _ = written_by_its_hits()
    for name in (2, 3):
        put(core, name)
    press(core, "critical")
    assert core.index.ram.bytes == 0
    assert pressure(core)["dropped_images"] == 2


def test_critical_drops_nothing_durable() -> None:
    """M3, M4: what leaves RAM and stays on SSD is released, however little it was used since."""
    core, _ = written_by_its_hits()
    (entry,) = core.index.entries.values()
    entry.uses = 0  # as after a restart
    press(core, "critical")
    assert core.index.ram.bytes == 0
    assert (pressure(core)["released_images"], pressure(core)["dropped_images"]) == (1, 0)


def test_critical_drops_nothing_that_an_unhealthy_disk_will_take_later() -> None:
    """M3, D6: what was hit often enough stays, though nothing can be written now."""
    core, disk = with_disk(write_policy="second-hit")
    disk.set_healthy(False)
    put(core, 1)
    for _ in range(2):
        read(core, 1)
    press(core, "critical")
    assert in_ram(core) == {1}
    assert pressure(core)["dropped_images"] == 0


def test_critical_drops_an_unwritten_end_and_then_what_is_durable() -> None:
    """M3: a durable beginning leaves with the end that is never written, and stays on SSD."""
    core, disk = with_disk(write_policy="second-hit", write_delay_seconds=0.0)
    put(core, 1)
    for _ in range(2):
        read(core, 1)
    disk.settle()
    (beginning,) = core.index.entries.values()
    assert beginning.file is not None
    branch = wire.Offer("plain", packed(1, more=30), encoded("plain"), seconds_left=0.0)
    beginning.uses = 0  # as after a restart: the end inherits none
    core.reply(1, wire.Commit(core.reply(1, branch).put))
    assert len(core.index.entries) == 2
    press(core, "critical")
    assert core.index.ram.bytes == 0
    assert list(core.index.entries.values()) == [beginning]


def test_critical_drops_nothing_that_is_lent_until_it_is_back() -> None:
    """M3, E10: also not what the policy never writes."""
    core, _ = with_disk(write_policy="second-hit")
    put(core, 1)
    lease = take(core, 1).reply
    press(core, "critical")
    assert in_ram(core) == {1}
    assert isinstance(lease, wire.Hit)
    core.call(1, wire.Release(lease.lease))
    assert in_ram(core) == set()


def test_warn_drops_nothing_that_the_policy_never_writes() -> None:
    """M2: at warn nothing is destroyed."""
    core, _ = with_disk(write_policy="second-hit")
    for name in range(1, 7):
        put(core, name)
    press(core, "warn")
    assert in_ram(core) == {1, 2, 3, 4, 5, 6}


def test_a_failed_write_stops_the_attempt() -> None:
    """M3: where a write fails the entry stays, and the disk is not asked again at once."""
    core, disk = with_disk()
    for name in (1, 2):
        put(core, name)
    press(core, "critical")
    disk.step(fails=True)
    assert 1 in in_ram(core)
    assert pressure(core)["failed_attempts"] == 1
    disk.settle()
    core.advance(RETRY_SECONDS - 1.0)
    disk.settle()
    assert in_ram(core) == {1}


def test_a_persisting_level_tries_again() -> None:
    """M3: while the level persists the failed write is tried again after a time."""
    core, disk = with_disk()
    put(core, 1)
    press(core, "critical")
    disk.step(fails=True)
    core.advance(RETRY_SECONDS)
    disk.step(fails=True)
    assert in_ram(core) == {1}
    assert pressure(core)["failed_attempts"] == 2
    core.advance(RETRY_SECONDS)
    disk.settle()
    assert core.index.ram.bytes == 0
    assert len(disk.files) == 1


def test_after_thirty_seconds_it_is_tried_again() -> None:
    """M3: a failing disk is not asked in a loop, and one that was full gets its chance."""
    core, disk = with_disk()
    put(core, 1)
    press(core, "critical")
    disk.step(fails=True)
    assert core.pressure.next_deadline == core.clock + 30.0


def test_failures_before_the_pressure_do_not_count() -> None:
    """M3: only a write that fails during the attempt stops it."""
    core, disk = with_disk(write_delay_seconds=3600.0)
    put(core, 1)
    core.call(9, wire.Flush(seconds_left=5.0))
    disk.step(fails=True)
    press(core, "critical")
    disk.settle()
    assert core.index.ram.bytes == 0
    assert pressure(core)["failed_attempts"] == 0


def test_after_the_pressure_writes_wait_again() -> None:
    """M3: the delay that spares short-lived tails a write is back with the normal level."""
    core, disk = with_disk(write_delay_seconds=100.0)
    press(core, "critical")
    press(core, "normal")
    put(core, 1)
    core.advance(99.0)
    assert not disk.step()
    core.advance(1.0)
    assert disk.step()


def test_without_a_disk_critical_pressure_leaves_nothing_to_do() -> None:
    """M3: the actor sleeps while a critical level lasts."""
    core = ram_only()
    press(core, "critical")
    core.check_no_livelock()
    core.advance(1.0)
    core.check_no_livelock()


def test_no_attempt_after_the_level_has_fallen() -> None:
    """M3: only a level that persists is a reason for another attempt."""
    core, disk = with_disk()
    put(core, 1)
    press(core, "critical")
    disk.step(fails=True)
    press(core, "normal")
    core.advance(10 * RETRY_SECONDS)
    disk.accept()
    assert not [e for e in disk.writer if isinstance(e.message, WriteImage)]
    assert in_ram(core) == {1}


def test_an_unhealthy_disk_loses_nothing() -> None:
    """M3: with a disk that refuses everything, critical pressure drops nothing."""
    core, disk = with_disk()
    for name in (1, 2, 3):
        put(core, name)
    disk.set_healthy(False)
    press(core, "critical")
    core.advance(3 * RETRY_SECONDS)
    assert in_ram(core) == {1, 2, 3}
    assert pressure(core)["failed_attempts"] == 4
    check_core(core)


def test_chains_leave_from_their_ends() -> None:
    """M3, P8: a long put of several segments is written parents first and leaves as a whole."""
    core, disk = with_disk(segment_max_bytes=PAGE, ram_bytes=16 * PAGE)
    put(core, 1, pages=3)
    segments = len(core.index.entries)
    assert segments > 1
    press(core, "critical")
    disk.settle()
    assert core.index.ram.bytes == 0
    assert len(disk.files) == segments


# -- puts --------------------------------------------------------------------------------------


def test_critical_declines_new_puts() -> None:
    """M3, P10: no new bytes at critical; what is held already is still `Stored`."""
    core, disk = with_disk()
    durable(core, disk, 1)
    press(core, "critical")
    assert put(core, 2) == wire.Declined(reason="pressure")
    stored = put(core, 1)
    assert isinstance(stored, wire.Stored)
    assert stored.new_bytes == 0
    assert core.puts.counters.declined["pressure"] == 1


def test_warn_declines_what_exceeds_the_target() -> None:
    """M2, P10: a put that needs more than the target is answered `pressure`, a smaller one fits."""
    core = ram_only()
    press(core, "warn")
    assert put(core, 1, pages=5) == wire.Declined(reason="pressure")
    assert isinstance(put(core, 2, pages=3), wire.Stored)
    press(core, "normal")
    core.advance(4 * RETURN_SECONDS)
    assert isinstance(put(core, 1, pages=5), wire.Stored)


def test_what_can_never_fit_is_declined_at_once() -> None:
    """M2, P10: a put larger than the target does not wait for room that will not come."""
    core = ram_only()
    press(core, "warn")
    large = wire.Offer("plain", packed(1, pages=5), encoded("plain"), seconds_left=5.0)
    assert core.reply(1, large) == wire.Declined(reason="pressure")


def test_puts_at_warn_without_a_disk_evict_down_to_the_target() -> None:
    """M2, E4: the target is the cap of new puts; what is never written makes room for them."""
    core = ram_only()
    for name in range(1, 9):
        put(core, name)
    press(core, "warn")
    assert isinstance(put(core, 9), wire.Stored)
    assert core.index.ram.bytes == CAP // 2
    assert 9 in in_ram(core)


def test_puts_at_warn_stay_within_the_target() -> None:
    """M2: whatever is put at warn, RAM holds no more than the target."""
    core, disk = with_disk()
    press(core, "warn")
    for name in range(1, 20):
        put(core, name)
        core.advance(core.config.write_delay_seconds)
        disk.settle()
        assert core.index.ram.bytes <= CAP // 2
        check_core(core)
    assert len(core.index.entries) == 19


def test_a_put_that_finds_no_room_says_why() -> None:
    """P10: when leases fill the target the reason is `pressure`, not `no-space`."""
    core = ram_only()
    for name in range(1, 5):
        put(core, name)
        take(core, name)
    press(core, "warn")
    assert put(core, 9) == wire.Declined(reason="pressure")


# -- and back ----------------------------------------------------------------------------------


def test_the_target_returns_step_by_step() -> None:
    """M4: a quarter of the cap at once and another one each interval."""
    core, _ = with_disk()
    press(core, "critical")
    assert pressure(core)["target_bytes"] == 0
    press(core, "normal")
    seen = [pressure(core)["target_bytes"]]
    for _ in range(4):
        core.advance(RETURN_SECONDS)
        seen.append(pressure(core)["target_bytes"])
    assert seen == [CAP // 4, CAP // 2, 3 * CAP // 4, CAP, CAP]


def test_ten_seconds_lie_between_two_steps() -> None:
    """M4: long enough for the sensors to see what the last one did."""
    core, _ = with_disk()
    press(core, "critical")
    press(core, "normal")
    assert core.pressure.next_deadline == core.clock + 10.0


def test_a_cap_of_a_few_bytes_is_reached_again() -> None:
    """M4: however small its quarter is, a step is one, and the steps come to an end."""
    core = ram_only(ram_bytes=3)
    press(core, "critical")
    press(core, "normal")
    core.advance(4 * RETURN_SECONDS)
    assert pressure(core)["target_bytes"] == 3
    assert core.pressure.next_deadline is None


def test_from_critical_to_warn_it_returns_to_the_reduced_target() -> None:
    """M4: a fall to warn leads no further than warn's own target."""
    core, _ = with_disk()
    press(core, "critical")
    press(core, "warn")
    core.advance(10 * RETURN_SECONDS)
    assert pressure(core)["target_bytes"] == CAP // 2


def test_a_relapse_stops_the_return() -> None:
    """M4: pressure that comes again brings the target down at once."""
    core, _ = with_disk()
    press(core, "critical")
    press(core, "normal")
    press(core, "critical")
    core.advance(10 * RETURN_SECONDS)
    assert pressure(core)["target_bytes"] == 0


def test_status_shows_bytes_before_and_after() -> None:
    """M4: status keeps what RAM held before the pressure and what it held when that ended."""
    core, disk = with_disk()
    durable(core, disk, 1, 2, 3, 4, 5, 6)
    assert pressure(core)["bytes_before"] == 0
    press(core, "warn")
    assert pressure(core) == {
        "level": "warn", "reason": "a test says warn", "target_bytes": CAP // 2,
        "bytes_before": 6 * PAGE, "bytes_after": CAP // 2, "changes": 1,
        "released_bytes": 2 * PAGE, "released_images": 2, "dropped_images": 0,
        "failed_attempts": 0,
    }  # fmt: skip
    press(core, "critical")
    assert pressure(core)["bytes_before"] == CAP // 2
    press(core, "warn")
    assert pressure(core)["bytes_before"] == CAP // 2
    press(core, "normal")
    core.advance(4 * RETURN_SECONDS)
    durable(core, disk, 7, 8, 9)
    assert pressure(core)["bytes_after"] == 0


def test_bytes_on_their_way_to_the_system_are_not_released_twice() -> None:
    """M4: freeing takes time; what is being freed counts as gone for the target."""
    core = Core(small_config(ram_bytes=CAP, ssd_bytes=1 << 30), auto_free=False)
    disk = FakeDisk(core)
    durable(core, disk, 1, 2, 3, 4, 5, 6)
    press(core, "warn")
    assert len(core.freeing) == 2
    core.advance(1.0)
    assert len(core.freeing) == 2
    core.finish_free()
    core.finish_free()
    assert core.index.ram.bytes == CAP // 2


def test_what_remains_is_shown_until_the_pressure_ends() -> None:
    """M4: a fall to warn is no end; from the end on the number stands, whatever comes then."""
    core, _ = with_disk()
    put(core, 1)
    press(core, "critical")
    press(core, "warn")
    core.advance(RETURN_SECONDS)
    put(core, 2)
    assert pressure(core)["bytes_after"] == 2 * PAGE
    press(core, "normal")
    put(core, 3)
    press(core, "unknown")
    assert pressure(core)["bytes_after"] == 2 * PAGE


def test_without_any_pressure_there_is_nothing_to_compare() -> None:
    """M4: as long as no level was raised, before and after are 0."""
    core, _ = with_disk()
    put(core, 1)
    assert (pressure(core)["bytes_before"], pressure(core)["bytes_after"]) == (0, 0)


@pytest.mark.parametrize("images", [4, 6])
def test_not_a_byte_more_than_the_target_stays(images: int) -> None:
    """M2: where the target is a byte short of an image, that image leaves as well."""
    core, disk = with_disk(ram_bytes=CAP - 2)
    durable(core, disk, *range(1, images + 1))
    press(core, "warn")
    assert pressure(core)["target_bytes"] == 4 * PAGE - 1
    assert core.index.ram.bytes == 3 * PAGE


def test_the_actor_wakes_up_for_the_next_step() -> None:
    """M4: the target grows, and who waits for room gets it, though no message comes."""
    core, _ = with_disk()
    press(core, "critical")
    press(core, "normal")
    assert core.pressure.next_deadline == core.clock + RETURN_SECONDS
    core.advance(RETURN_SECONDS)
    assert core.pressure.next_deadline == core.clock + RETURN_SECONDS
    core.advance(2 * RETURN_SECONDS)
    assert core.pressure.next_deadline is None


@pytest.mark.parametrize("level", ["unknown", "normal"])
def test_levels_without_pressure_change_nothing(level: str) -> None:
    """M1: unknown is a level of its own that asks for nothing, and so does normal."""
    core, disk = with_disk(promote="always")
    durable(core, disk, 1, 2, 3, 4, 5, 6)
    press(core, level)
    assert core.index.ram.bytes == 6 * PAGE
    assert pressure(core)["target_bytes"] == CAP
    assert not core.promotions.is_suspended
    assert core.reply(1, wire.Prefetch("plain", packed(1, more=1))).pin is not None


def test_pressure_that_ends_in_unknown_ends() -> None:
    """M1: when the sensors break down under pressure, puts are not declined for ever."""
    core, _ = with_disk()
    press(core, "critical")
    press(core, "unknown")
    core.advance(4 * RETURN_SECONDS)
    assert isinstance(put(core, 1), wire.Stored)
    assert pressure(core)["target_bytes"] == CAP


# -- another cap -------------------------------------------------------------------------------


def test_a_lower_cap_evicts_by_the_rules_of_the_cap() -> None:
    """M5, E4: a machine that shrinks takes what no longer fits, the least used first."""
    core = ram_only()
    for name in range(1, 7):
        put(core, name)
    read(core, 1)
    core.send(RamCapChanged(3 * PAGE))
    assert in_ram(core) == {1, 5, 6}
    check_core(core)
    assert core.statistics().ram_bytes_cap == 3 * PAGE


def test_a_lower_cap_waits_for_what_is_held() -> None:
    """M5, L2: what is lent leaves when its lease ends, and nothing is granted until then."""
    core = ram_only()
    leases = []
    for name in range(1, 5):
        put(core, name)
        leases.append(take(core, name).reply)
    core.send(RamCapChanged(PAGE))
    assert core.index.ram.bytes == 4 * PAGE
    assert isinstance(put(core, 9), wire.Declined)
    for lease in leases:
        assert isinstance(lease, wire.Hit)
        core.call(1, wire.Release(lease.lease))
    assert core.index.ram.bytes == PAGE
    check_core(core)


def test_a_lower_cap_waits_for_writes() -> None:
    """M5, E4: what will be written is written first and leaves then."""
    core, disk = with_disk()
    for name in (1, 2, 3):
        put(core, name)
    core.send(RamCapChanged(PAGE))
    assert core.index.ram.bytes == 3 * PAGE
    core.advance(core.config.write_delay_seconds)
    disk.settle()
    assert core.index.ram.bytes == PAGE
    assert len(disk.files) == 3


def test_a_higher_cap_is_usable_at_once() -> None:
    """M5: a machine that grows gives its share without delay."""
    core = ram_only()
    core.send(RamCapChanged(16 * PAGE))
    for name in range(1, 17):
        put(core, name)
    assert core.index.ram.bytes == 16 * PAGE


def test_a_cap_that_changes_under_pressure_keeps_the_target() -> None:
    """M5, M2: the reduced target is a share of the cap in force."""
    core, disk = with_disk()
    durable(core, disk, 1, 2, 3, 4, 5, 6)
    press(core, "warn")
    core.send(RamCapChanged(4 * PAGE))
    assert pressure(core)["target_bytes"] == 2 * PAGE
    assert core.index.ram.bytes == 2 * PAGE
    press(core, "normal")
    core.advance(4 * RETURN_SECONDS)
    assert pressure(core)["target_bytes"] == 4 * PAGE


def test_a_cap_that_changes_during_the_return_keeps_its_steps() -> None:
    """M5, M4: another cap is no reason to take everything back at once."""
    core, _ = with_disk()
    press(core, "critical")
    press(core, "normal")
    core.send(RamCapChanged(16 * PAGE))
    assert pressure(core)["target_bytes"] == CAP // 4 + 4 * PAGE
    core.advance(4 * RETURN_SECONDS)
    assert pressure(core)["target_bytes"] == 16 * PAGE


def test_nothing_is_deleted_from_the_disk_under_pressure() -> None:
    """M3: releasing memory never costs a file."""
    core, disk = with_disk()
    durable(core, disk, 1, 2, 3, 4)
    press(core, "critical")
    assert not [e for e in core.to_ssd if isinstance(e.message, DeleteFile)]
    assert len(disk.files) == 4


def test_a_cap_that_is_a_byte_short_of_an_image_has_no_room_for_it() -> None:
    """M5, E1: not a byte is held beyond the new cap."""
    core = ram_only()
    for name in (1, 2, 3):
        put(core, name)
    core.send(RamCapChanged(3 * PAGE - 1))
    assert in_ram(core) == {2, 3}


def test_a_cap_of_nothing_leaves_nothing_to_do_under_pressure() -> None:
    """M3: without RAM a critical level is met at once, and RamTier sleeps."""
    core, _ = with_disk(ram_bytes=0)
    core.send(PressureChanged("critical", "test"))
    core.check_no_livelock()
    core, _ = with_disk()
    core.send(PressureChanged("critical", "test"))
    core.send(RamCapChanged(0))
    core.check_no_livelock()
    core.advance(RETRY_SECONDS)
