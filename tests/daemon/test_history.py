"""The history: bounded, cheap, and what its rows say."""

import math
import tracemalloc

import numpy as np
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.actors import ram_samples
from prefixcached.actors.desk import RamConfig
from prefixcached.actors.ram_tier import RamTier
from prefixcached.daemon.historian import COLUMNS, Historian
from prefixcached.daemon.history_rings import (
    MINUTE_ROWS,
    SECOND_ROWS,
    Column,
    HistoryRings,
    Ring,
    Rows,
)
from prefixcached.daemon.latency import Latencies
from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.messages import HistoryReport

MOST_BYTES = 4 << 20


def column(report: HistoryReport, name: str) -> Rows:
    (series,) = [one for one in report.series if one.name == name]
    return np.frombuffer(series.values, "<f8")


def times(report: HistoryReport) -> Rows:
    return np.frombuffer(report.times, "<f8")


# -- rings ----------------------------------------------------------------------------------------


@given(
    rows=st.integers(0, 30),
    capacity=st.integers(1, 12),
    after=st.integers(0, 35),
    most=st.integers(1, 15),
)
def test_a_ring_gives_the_newest_rows_that_are_asked_for(
    rows: int, capacity: int, after: int, most: int
) -> None:
    """Rows keep their numbers; what has left is left out, however often the ring went round."""
    ring = Ring(capacity, 1)
    for number in range(1, rows + 1):
        ring.append([number])
    first, found = ring.after(after, most)
    expected = [n for n in range(1, rows + 1) if n > max(after, rows - capacity, rows - most)]
    assert found[:, 0].tolist() == expected
    assert not expected or first == expected[0]


def test_the_whole_history_takes_less_than_4_mib() -> None:
    """No more memory after a day of rows than at the start."""
    tracemalloc.start()
    rings = HistoryRings(COLUMNS)
    row = [1.0] * len(COLUMNS)
    for second in range(2 * SECOND_ROWS):
        rings.add(float(second), row)
    for minute in range(MINUTE_ROWS + 10):
        rings.add(1e6 + 60.0 * minute, row)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rings.nbytes < MOST_BYTES
    assert held < MOST_BYTES
    assert peak < 2 * MOST_BYTES
    assert len(rings.report("second", 0, limits.MAX_HISTORY_ROWS).times) == 8 * SECOND_ROWS
    assert len(rings.report("minute", 0, limits.MAX_HISTORY_ROWS).times) == 8 * MINUTE_ROWS
    assert len(COLUMNS) <= limits.MAX_HISTORY_SERIES


def test_a_minute_has_the_last_of_counters_and_the_mean_of_gauges() -> None:
    """A minute's row appears when the next minute begins; gaps do not count as zero."""
    rings = HistoryRings([Column("n", is_counter=True), Column("g", is_counter=False)])
    for second, gauge in ((60, 1.0), (61, math.nan), (62, 4.0), (119, 4.0)):
        rings.add(float(second), (second, gauge))
    assert rings.report("minute", 0, 10).times == b""
    rings.add(120.0, (120, math.nan))
    report = rings.report("minute", 0, 10)
    assert (report.first, times(report).tolist()) == (1, [119.0])
    assert column(report, "n").tolist() == [119.0]
    assert column(report, "g").tolist() == [3.0]
    rings.add(180.0, (180, 1.0))
    assert math.isnan(column(rings.report("minute", 1, 10), "g")[0])


def test_a_clock_that_steps_back_only_closes_a_minute() -> None:
    """Times are the wall clock's, which people set; rows go on."""
    rings = HistoryRings([Column("g", is_counter=False)])
    for second in (600.0, 601.0, 30.0, 31.0):
        rings.add(second, (second,))
    assert times(rings.report("second", 0, 10)).tolist() == [600.0, 601.0, 30.0, 31.0]
    assert times(rings.report("minute", 0, 10)).tolist() == [601.0]


# -- the task -------------------------------------------------------------------------------------


async def test_the_historian_adds_a_row_a_second(autojump_clock: trio.testing.MockClock) -> None:
    """Rows come by the clock, and carry what was there at that moment."""
    taken = iter(range(100))
    row = [0.0] * len(ram_samples.COLUMNS)
    historian = Historian(
        lambda: [float(next(taken)), *row[1:]], lambda: 3, Latencies(), trio.current_time
    )
    with trio.move_on_after(10.5):
        await historian.run()
    report = historian.report(m.History())
    assert len(times(report)) == 11
    assert np.diff(times(report)).tolist() == [1.0] * 10
    assert column(report, COLUMNS[0].name).tolist() == list(range(11))
    assert set(column(report, "connections")) == {3.0}
    assert len(times(historian.report(m.History(after=8, most=2)))) == 2


def test_percentiles_of_a_row_are_of_its_second_alone() -> None:
    """A slow take of an hour ago does not colour the present."""
    latencies = Latencies()
    row = [0.0] * len(ram_samples.COLUMNS)
    historian = Historian(lambda: row, lambda: 0, latencies)
    for took in ((0.5,), (), (0.001, 0.001)):
        for one in took:
            latencies.record(m.Take, one)
        historian.add_row()
    slow, nothing, fast = column(historian.report(m.History()), "take_p50_seconds")
    assert 0.4 <= slow <= 0.5
    assert math.isnan(nothing)
    assert 0.0008 <= fast <= 0.001


# -- what RamTier gives ---------------------------------------------------------------------------


def test_a_sample_agrees_with_the_statistics() -> None:
    """C5: the history and `status` show the same numbers."""
    ram_tier = RamTier(RamConfig(ram_bytes=1 << 20, ssd_bytes=1 << 21))
    ram_tier.takes.counters.takes = 5
    ram_tier.takes.counters.misses.update({"diverged": 2, "of-tomorrow": 1})
    ram_tier.puts.counters.declined.update({"busy": 3, "pressure": 4})
    names = [name for name, _ in ram_samples.COLUMNS]
    row = dict(zip(names, ram_tier.sample(), strict=True))
    assert len(set(names)) == len(names)
    statistics = ram_tier.statistics()
    for name in ("ram_bytes", "ram_bytes_cap", "ssd_bytes_cap", "entries", "leases", "claims"):
        assert row[name] == getattr(statistics, name), name
    assert (row["takes"], row["misses_diverged"], row["misses_other"]) == (5, 2, 1)
    assert row["puts_declined"] == 7


def test_a_sample_visits_no_entries() -> None:
    """It costs the same however much is held: it would fail here if it walked anything."""
    ram_tier = RamTier(RamConfig(ram_bytes=1 << 20, ssd_bytes=0))

    class Counted(dict):  # type: ignore[type-arg]
        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("walked")

        values = items = keys = __iter__  # type: ignore[assignment]

    before = ram_tier.sample()
    ram_tier.index.entries = Counted(ram_tier.index.entries)
    ram_tier.takes.leases = Counted(ram_tier.takes.leases)
    ram_tier.labels.labels = Counted(ram_tier.labels.labels)
    assert ram_tier.sample() == before
