"""What a replay does, read from a trace: order, and what is left out."""

from typing import Any

import pytest

from prefixcached.daemon.trace.plain import PlainForm
from prefixcached.daemon.trace.replay_steps import Answered, Effect, Gone, Send, Settle, steps_of
from prefixcached.daemon.trace.summary import summarise
from prefixcached.daemon.trace.trace_file import Record, TraceError
from prefixcached.daemon.trace.tracer import OWN, REPLIES, REQUESTS, WORKERS
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.messages import AnyRequest

FORM = PlainForm(keep_tokens=True)
HEADER = inner.FileHeader(1, "a" * 32, ImageKind.SEGMENT, "n", ImageSpec(ImageKind.SEGMENT, 0, 4))
ENTRY = inner.FileEntry(HEADER, "n/x", b"", 0, 1, 1)
TAKE = wire.Take("n", bytes(40))


def call(session: int, request: AnyRequest, seconds: float = 0.0) -> Record:
    message = FORM.of(inner.Call(session, request))
    return Record(seconds, REQUESTS, f"{session}.1", message)


def reply(session: int, message: wire.Reply, seconds: float = 0.0) -> Record:
    return Record(seconds, REPLIES, f"{session}.1", FORM.of(message))


def told(channel: str, message: Any) -> Record:
    return Record(0.0, channel, "", FORM.of(message))


def test_the_order_is_that_of_the_record() -> None:
    """Requests and replies stand where they stood, with the time that a reply took."""
    steps = list(
        steps_of(
            [
                call(1, TAKE, 1.0), call(2, TAKE, 1.5), reply(2, wire.Miss(reason="empty"), 1.75),
                call(2, wire.Release(9), 2.0), reply(1, wire.Miss(reason="empty"), 3.0),
                told(REQUESTS, inner.ClientGone(2)),
            ]
        )
    )  # fmt: skip
    assert [type(step) for step in steps] == [Send, Send, Answered, Send, Answered, Gone]
    assert steps[0] == Send(1, TAKE, 1.0)
    answers = [step for step in steps if isinstance(step, Answered)]
    assert [(a.session, a.took_seconds) for a in answers] == [(2, 0.25), (1, 2.0)]


def test_a_commit_is_followed_by_its_effect() -> None:
    """P4: its images are sealed in a thread, and what others did meanwhile found nothing of it."""
    commit = wire.Commit(7)
    sealed = Record(2.0, WORKERS, "1.1", FORM.of(inner.Sealed(7)))
    stored = wire.Stored(new_bytes=1, length=1)
    gone = told(REQUESTS, inner.ClientGone(1))

    def kinds(*records: Record) -> list[type]:
        return [type(step) for step in steps_of([call(1, commit), call(2, TAKE), *records])]

    assert kinds(sealed, reply(1, stored, 3.0)) == [Send, Send, Effect, Answered]
    assert kinds(reply(1, wire.Declined(reason="invalid"))) == [Send, Send, Effect, Answered]
    assert kinds(gone, sealed) == [Send, Send, Effect, Gone]


def test_what_tells_nothing_of_the_cache_is_left_out() -> None:
    """Who looks at a daemon, and further descriptors, are not issued again, nor their replies."""
    requests: list[AnyRequest] = [
        wire.Status(), wire.List(), wire.Explain("n", b""), wire.Fetch(1, 16), wire.Activity(),
    ]  # fmt: skip
    records = [r for q in requests for r in (call(1, q), reply(1, wire.StatusReport(report={})))]
    assert list(steps_of(records)) == []


def test_the_disk_is_waited_for_before_a_request() -> None:
    """What had been written and promoted by then is one step, however much it was."""
    written = told("ssd_tier->ram_tier", inner.Written("a" * 32, ENTRY))
    failed = told("ssd_tier->ram_tier", inner.Written("a" * 32, error="full"))
    promoted = told("prefetcher->ram_tier", inner.Promoted("a" * 32))
    records = [written, written, promoted, failed, call(1, TAKE), call(1, TAKE), written]
    steps = list(steps_of(records))
    assert steps == [Settle(2, 1), Send(1, TAKE, 0.0), Send(1, TAKE, 0.0)]


def test_metadata_has_its_size_again() -> None:
    """The trace keeps how long it was; what it said is nobody's business."""
    spec = ImageSpec(ImageKind.OBJECT, metadata=b"x" * 17)
    (step,) = steps_of([call(1, wire.OfferObject("n", "k", spec))])
    assert isinstance(step, Send)
    assert isinstance(step.request, wire.OfferObject)
    assert step.request.spec.metadata == bytes(17)


@pytest.mark.parametrize("request_", [{"type": "levitate"}, {"type": "take", "namespace": 3}])
def test_a_request_of_another_version_is_named(request_: dict[str, Any]) -> None:
    """Rather than leave it out and report numbers that compare nothing."""
    message = {"type": "call", "session": 1, "request": request_}
    with pytest.raises(TraceError, match="the trace has"):
        list(steps_of([Record(0.0, REQUESTS, "1.1", message)]))


def test_a_summary_counts_what_was_found() -> None:
    """Hits by tier, misses by reason, tokens, times, and the last statistics."""
    hit = wire.Hit(lease=1, length=8, tier="ssd", parts=())
    statistics = {"ram_tier": {"evictions": {"evictions": 3}, "disk": {"written_bytes": 4096}}}
    summary = summarise(
        [
            call(1, TAKE, 1.0), reply(1, hit, 1.5),
            call(2, TAKE, 2.0), reply(2, wire.Miss(reason="diverged"), 2.25),
            call(2, wire.Offer("n", b"", b""), 3.0), reply(2, wire.Declined(reason="busy"), 3.5),
            call(2, wire.TakeObject("n", "k"), 3.0), reply(2, wire.Miss(reason="empty"), 3.5),
            call(3, wire.Status(), 3.6), reply(3, wire.StatusReport(report={}), 3.7),
            Record(4.0, OWN, "", {"type": "statistics", "report": statistics}),
            Record(5.0, OWN, "", {"type": "gap", "records": 6}),
        ]
    )  # fmt: skip
    assert (summary.takes, summary.hits, summary.misses) == (
        2,
        {"ram": 0, "ssd": 1},
        {"diverged": 1},
    )
    assert (summary.tokens_requested, summary.tokens_reused, summary.hit_ratio) == (20, 8, 0.4)
    assert (summary.declined, summary.object_misses) == ({"busy": 1}, 1)
    assert (summary.evictions, summary.written_bytes, summary.ssd_evictions) == (3, 4096, None)
    assert summary.times["take"].percentiles == {50: 0.25, 90: 0.5, 99: 0.5}
    assert (summary.sessions, summary.left_out, summary.seconds) == (2, 6, 5.0)
