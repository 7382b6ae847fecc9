"""Corners of the control groups' files and of what a reading says (rules M1, M5)."""

from pathlib import Path

import pytest

from prefixcached.actors import pressure_cgroups
from prefixcached.actors.pressure_cgroups import CgroupOne, CgroupTwo
from prefixcached.actors.pressure_policy import Level
from tests.actors.test_pressure_sensors import GIBIBYTE, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limited_group_a_reading_is_an_error(machine: Machine) -> None:
    """M1: where no group limits the process each version says so."""
    with pytest.raises(OSError, match="no control group of version 2"):
        CgroupTwo(machine.root).read(0.0)
    with pytest.raises(OSError, match="no control group of version 1"):
        CgroupOne(machine.root).read(0.0)


def test_a_process_without_a_group_of_its_own_has_no_limit(machine: Machine) -> None:
    """M5: a mount alone says nothing of a process that names no group of that version."""
    machine.group_two("", 1, "100")
    machine.group_one("", 1, 100)
    machine.own_groups("5:cpu:/app")
    assert CgroupTwo(machine.root).limits() == []
    assert CgroupOne(machine.root).limits() == []


@pytest.mark.parametrize(("used", "level"), [(74, Level.NORMAL), (75, Level.WARN)])
def test_the_kernels_complaint_counts_from_three_quarters_on(
    machine: Machine, used: int, level: Level
) -> None:
    """M1: new ``max`` events warn from 75 % in use on."""
    machine.own_groups("0::/app")
    machine.group_two("app", used, "100", events="max 1\n")
    sensor = CgroupTwo(machine.root)
    sensor.read(0.0)
    machine.group_two("app", used, "100", events="max 2\n")
    assert sensor.read(1.0).level is level


def test_the_reason_names_the_group_its_limit_and_new_events(machine: Machine) -> None:
    """M4: ``status`` shows why the level is what it is, and no events where there are none."""
    machine.own_groups("0::/app")
    machine.group_two("app", GIBIBYTE // 2, str(GIBIBYTE), events="high 3\n")
    sensor = CgroupTwo(machine.root)
    assert sensor.read(0.0).reason == (
        f"{machine.root}/sys/fs/cgroup/app uses 50.0% of its 1024 MiB, "
        "clean unused file pages not counted"
    )
    machine.group_two("app", GIBIBYTE // 2, str(GIBIBYTE), events="high 5\n")
    assert sensor.read(1.0).reason.endswith("not counted; events: 2 high")


def test_a_group_whose_limit_cannot_be_read_hides_no_other(machine: Machine) -> None:
    """M1, M5: the limit of a group above counts all the same."""
    machine.own_groups("4:memory:/pod/app")
    machine.group_one("pod", 95, 100)
    machine.write("sys/fs/cgroup/memory/pod/app/memory.limit_in_bytes", "nothing\n")
    assert CgroupOne(machine.root).limits() == [100]
    assert CgroupOne(machine.root).read(0.0).level is Level.WARN


def test_a_groups_name_may_have_colons(machine: Machine) -> None:
    """M5: only the first two colons of a line of /proc/self/cgroup divide it."""
    machine.own_groups("0::/docker:app:1")
    machine.group_two("docker:app:1", 1, "100")
    assert CgroupTwo(machine.root).limits() == [100]


def test_a_group_beside_the_containers_own_tree_is_not_read(machine: Machine) -> None:
    """M5: a path with ".." stands for the mount's top, whatever it leads to."""
    machine.own_groups("0::/../sibling")
    machine.group_two("", 1, "100")
    machine.group_two("../sibling", 1, "50")
    assert CgroupTwo(machine.root).limits() == [100]


def test_a_limit_that_goes_while_it_is_read_is_no_reading(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M1: an OSError, which counts as a sensor that does not work, and not the daemon's end."""
    machine.own_groups("0::/app")
    machine.group_two("app", 1, "100")
    answers = iter([100, None, None])  # the group, the top, the group again
    monkeypatch.setattr(pressure_cgroups, "_limit_two", lambda _: next(answers))
    with pytest.raises(OSError, match="has lost its limit"):
        CgroupTwo(machine.root).read(0.0)


def test_version_one_may_count_more_clean_pages_than_are_used(machine: Machine) -> None:
    """M1: the two figures are read one after the other; that is no use at all."""
    machine.own_groups("4:memory:/app")
    machine.group_one("app", 10, 100, unused_files=50)
    assert "uses 0.0%" in CgroupOne(machine.root).read(0.0).reason


def test_events_that_could_not_be_read_once_are_not_new_later(machine: Machine) -> None:
    """M1: a count that was there before says nothing of now."""
    machine.own_groups("0::/app")
    machine.group_two("app", 10, "100", events="oom 3\n")
    sensor = CgroupTwo(machine.root)
    sensor.read(0.0)
    machine.group_two("app", 10, "100", events="")
    sensor.read(1.0)
    machine.group_two("app", 10, "100", events="oom 3\n")
    assert sensor.read(2.0).level is Level.NORMAL


def test_a_group_whose_events_cannot_be_read_hides_no_others(machine: Machine) -> None:
    """M1: the kernel's complaint about a group above counts all the same."""
    machine.own_groups("0::/pod/app")
    machine.group_two("pod/app", 10, "100", events="")
    machine.group_two("pod", 10, "100", events="oom 3\n")
    sensor = CgroupTwo(machine.root)
    sensor.read(0.0)
    machine.group_two("pod", 10, "100", events="oom 4\n")
    assert sensor.read(1.0).level is Level.CRITICAL


def test_counts_that_begin_again_are_no_events(machine: Machine) -> None:
    """M1: a group that was made anew under its old name has had nothing yet."""
    machine.own_groups("0::/app")
    machine.group_two("app", 10, "100", events="oom 3\n")
    sensor = CgroupTwo(machine.root)
    sensor.read(0.0)
    machine.group_two("app", 10, "100", events="oom 0\n")
    reading = sensor.read(1.0)
    assert reading.level is Level.NORMAL
    assert "events" not in reading.reason


def test_a_limit_of_nothing_is_no_limit(machine: Machine) -> None:
    """M1, M5: it is no share of anything, and the other limit of the group counts."""
    machine.own_groups("0::/app")
    machine.group_two("app", 95, "100", high="0")
    sensor = CgroupTwo(machine.root)
    assert sensor.limits() == [100]
    assert sensor.read(0.0).level is Level.WARN
