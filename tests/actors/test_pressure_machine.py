"""Hypothesis state machines of the core under changing memory pressure (rules M1 to M4, T10).

The machines of tests/support/core_machine.py, whose model and checks hold at any level: every byte
of every hit, the caps, the ledgers, what was confirmed durable stays. Added are the levels, and
what must be true of RAM at each of them after every step.
"""

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from prefixcached.actors.entries import Entry, Segment
from prefixcached.actors.pressure_policy import Level
from prefixcached.protocol.actor_messages import PressureChanged
from tests.support.core import Core
from tests.support.core_disk_machine import DiskMachine
from tests.support.core_machine import ClientMachine, machine_settings


def may_leave(entry: Entry) -> bool:
    """By definition: in RAM, held by nobody, and no resident entry hangs on it."""
    is_parent = isinstance(entry, Segment) and any(
        below.memory is not None
        for below in [*entry.children.values(), *entry.checkpoints.values()]
    )
    return entry.memory is not None and not entry.holders and not is_parent


def check_pressure(core: Core) -> None:
    """M2, M3: what could leave RAM without loss has left while RAM is above its target."""
    level, ram = core.pressure.level, core.index.ram
    goal = {Level.WARN: int(ram.bytes_cap * 0.5), Level.CRITICAL: 0}.get(level, ram.bytes_cap)
    assert ram.limit_bytes <= goal
    excess = ram.bytes - ram.bytes_by_state["freeing"] - ram.limit_bytes
    candidates = [entry for entry in core.index.entries.values() if may_leave(entry)]
    if excess > 0:
        assert not [entry for entry in candidates if entry.file is not None]
    if level is Level.CRITICAL and not core.index.ssd_on:
        assert not candidates
    if level.is_raised:
        assert all(pin.answer is None for pin in core.pins.pins.values()), "a prefetch waits"


class PressureOneTier(ClientMachine):
    """Without an SSD tier: critical pressure drops what nobody holds."""

    @rule(level=st.sampled_from(list(Level)))
    def press(self, level: Level) -> None:
        before = set(self.core.index.entries)
        self.core.send(PressureChanged(level, "a test"))
        if level is not Level.CRITICAL:
            assert set(self.core.index.entries) == before, "only critical pressure destroys"
        self.collect()

    @invariant()
    def eased(self) -> None:
        if hasattr(self, "core"):
            check_pressure(self.core)

    def has_losses(self) -> bool:
        return super().has_losses() or bool(self.core.statistics().pressure["dropped_images"])

    def quiet(self) -> None:
        self.press(Level.NORMAL)
        super().quiet()


class PressureBothTiers(DiskMachine):
    """With an SSD tier: no level ever loses an entry."""

    @rule(level=st.sampled_from(list(Level)))
    def press(self, level: Level) -> None:
        before = set(self.core.index.entries)
        self.core.send(PressureChanged(level, "a test"))
        assert set(self.core.index.entries) == before, "pressure loses nothing"
        self.collect()

    @rule()
    def ease_all(self) -> None:
        """M3: with a healthy disk that has room, critical pressure leaves what is held."""
        if self.config.ssd_bytes < 1 << 30:
            return
        self.disk.set_healthy(True)
        self.press(Level.CRITICAL)
        while self.disk.step():
            pass
        self.core.advance(31.0)
        while self.disk.step():
            pass
        # The segment of a model without slices has no bytes to give back.
        candidates = [e for e in self.core.index.entries.values() if may_leave(e)]
        assert not [e for e in candidates if e.write != "refused" and e.charged_bytes]
        self.collect()

    @invariant()
    def eased(self) -> None:
        if hasattr(self, "core"):
            check_pressure(self.core)

    def quiet(self) -> None:
        self.press(Level.NORMAL)
        super().quiet()


TestPressureOneTier = PressureOneTier.TestCase
TestPressureOneTier.settings = machine_settings()

TestPressureBothTiers = PressureBothTiers.TestCase
TestPressureBothTiers.settings = machine_settings()
