"""Latency histograms: what is counted where, and what percentiles say."""

import math

from hypothesis import given
from hypothesis import strategies as st

from prefixcached.daemon.latency import BOUNDS_SECONDS, KINDS, Latencies, percentile
from prefixcached.protocol import limits
from prefixcached.protocol import messages as m

seconds = st.floats(BOUNDS_SECONDS[0], BOUNDS_SECONDS[-1])


def test_bounds_ascend_and_fit_the_message() -> None:
    """The scale is what a report may carry."""
    assert list(BOUNDS_SECONDS) == sorted(set(BOUNDS_SECONDS))
    assert len(BOUNDS_SECONDS) <= limits.MAX_LATENCY_BOUNDS


def test_a_request_counts_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    """A bound belongs to its own bucket, as Prometheus's `le` has it."""
    latencies = Latencies()
    for took in (0.0, BOUNDS_SECONDS[0], 0.001, 0.00100001, 1e6):
        latencies.record(m.Take, took)
    counts = latencies.counts(m.Take)
    at = BOUNDS_SECONDS.index(0.001)
    assert (counts[0], counts[at], counts[at + 1], counts[-1]) == (2, 1, 1, 1)
    assert sum(counts) == 5


def test_watching_is_not_measured() -> None:
    """Who looks on does not change what is looked at."""
    latencies = Latencies()
    before = latencies.report()
    for kind in (m.Activity, m.Latency, m.History, m.Hello):
        latencies.record(kind, 1.0)
    assert latencies.report() == before
    assert {one.request for one in before.requests} >= {"take", "offer", "commit", "prefetch"}
    assert len(before.requests) == len(KINDS)


@given(st.lists(seconds, min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_within_a_bucket_of_the_truth(times: list[float], share: float) -> None:
    """At most a quarter and a rounding off, on any data."""
    latencies = Latencies()
    for took in times:
        latencies.record(m.Take, took)
    truth = sorted(times)[math.ceil(share * len(times)) - 1]
    found = percentile(latencies.counts(m.Take), share)
    assert truth / 1.29 <= found <= truth * 1.29


def test_without_requests_there_is_no_percentile() -> None:
    """Nothing is not zero seconds."""
    assert math.isnan(percentile(Latencies().counts(m.Take), 0.5))


def test_what_exceeds_the_scale_counts_as_its_end() -> None:
    """A wait of an hour does not break the figure."""
    latencies = Latencies()
    latencies.record(m.Take, 3600.0)
    assert percentile(latencies.counts(m.Take), 0.99) == BOUNDS_SECONDS[-1]
