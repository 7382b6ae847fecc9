"""The ladder: up at once, down by steps after calm (rule M1)."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixcached.actors.pressure_policy import UNREADABLE, Ladder, Level, Reading, highest

CALM = 10.0
SIGNALS = st.sampled_from(list(Level))


def test_begins_unknown() -> None:
    """M1: before anything was read the level is unknown."""
    assert Ladder().level is Level.UNKNOWN


def test_rises_at_once() -> None:
    """M1: a higher signal is in force with its first reading, whatever lies between."""
    ladder = Ladder(CALM)
    assert ladder.observe(Level.NORMAL, 0.0) is Level.NORMAL
    assert ladder.observe(Level.CRITICAL, 0.0) is Level.CRITICAL


def test_falls_one_step_after_calm() -> None:
    """M1: after the calm time the level falls by one step, and by the next after as long again."""
    ladder = Ladder(CALM)
    ladder.observe(Level.CRITICAL, 0.0)
    assert ladder.observe(Level.NORMAL, 1.0) is Level.CRITICAL
    assert ladder.observe(Level.NORMAL, 1.0 + CALM - 0.001) is Level.CRITICAL
    assert ladder.observe(Level.NORMAL, 1.0 + CALM) is Level.WARN
    assert ladder.observe(Level.NORMAL, 1.0 + 2 * CALM - 0.001) is Level.WARN
    assert ladder.observe(Level.NORMAL, 1.0 + 2 * CALM) is Level.NORMAL


def test_ten_seconds_are_calm() -> None:
    """M1: so long a signal must stay below, where nobody says otherwise."""
    ladder = Ladder()
    ladder.observe(Level.WARN, 0.0)
    assert ladder.observe(Level.NORMAL, 1.0) is Level.WARN
    assert ladder.observe(Level.NORMAL, 10.9) is Level.WARN
    assert ladder.observe(Level.NORMAL, 11.0) is Level.NORMAL


def test_a_relapse_starts_the_calm_time_again() -> None:
    """M1: one reading at the level in force, and the calm time begins anew."""
    ladder = Ladder(CALM)
    ladder.observe(Level.WARN, 0.0)
    ladder.observe(Level.NORMAL, 1.0)
    ladder.observe(Level.WARN, 9.0)
    assert ladder.observe(Level.NORMAL, 12.0) is Level.WARN
    assert ladder.observe(Level.NORMAL, 21.9) is Level.WARN
    assert ladder.observe(Level.NORMAL, 22.0) is Level.NORMAL


def test_a_lost_signal_becomes_unknown_after_calm() -> None:
    """M1: where no sensor works any more the level is unknown, not one that nobody measured."""
    ladder = Ladder(CALM)
    ladder.observe(Level.CRITICAL, 0.0)
    assert ladder.observe(Level.UNKNOWN, 1.0) is Level.CRITICAL
    assert ladder.observe(Level.UNKNOWN, 11.0) is Level.UNKNOWN
    assert ladder.observe(Level.NORMAL, 11.5) is Level.NORMAL


def test_the_highest_reading_counts() -> None:
    """M1: any sensor that sees pressure is right, and without sensors the level is unknown."""
    warn = Reading(Level.WARN, "a container's limit")
    readings = [Reading(Level.UNKNOWN, ""), warn, Reading(Level.NORMAL, "")]
    assert highest(readings) is warn
    assert highest([]) is UNREADABLE
    assert UNREADABLE.level is Level.UNKNOWN


class LadderMachine(RuleBasedStateMachine):
    """M1: compares the ladder with its definition over the whole history of readings."""

    def __init__(self) -> None:
        super().__init__()
        self.ladder = Ladder(CALM)
        self.now = 0.0
        self.level = Level.UNKNOWN
        self.since_change = 0.0
        self.history: list[tuple[float, Level]] = []

    @rule(signal=SIGNALS, seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 9.5, 10.0, 25.0]))
    def read(self, signal: Level, seconds: float) -> None:
        self.now += seconds
        self.history.append((self.now, signal))
        before = self.level
        self.level = self.ladder.observe(signal, self.now)
        if signal.rank >= before.rank:
            assert self.level is signal, "up at once"
        elif self.level is not before:
            assert self._calm_since(before) <= self.now - CALM
            fell_to = Level.UNKNOWN if signal is Level.UNKNOWN else list(Level)[before.rank - 1]
            assert self.level is fell_to, "one step, or to unknown"
        else:
            assert self._calm_since(before) > self.now - CALM, "calm for long enough"
        if self.level is not before:
            self.since_change = self.now

    def _calm_since(self, level: Level) -> float:
        """The first reading below ``level`` since the last change and the last one at it."""
        since = self.now
        for time, signal in reversed(self.history):
            if signal.rank >= level.rank or time < self.since_change:
                break
            since = time
        return since

    @precondition(lambda self: self.history)
    @invariant()
    def never_below_the_signal(self) -> None:
        assert self.level.rank >= self.history[-1][1].rank


TestLadderMachine = LadderMachine.TestCase
