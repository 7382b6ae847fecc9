"""What a replay does, step by step, read from a trace. Pure.

The order is the record's: a request is sent after the replies that the record has before it. What
was written or promoted between two requests becomes one `Settle`. A commit takes effect when its
images are sealed, in a thread; where the record has that there is an `Effect`, up to which a replay
that paces itself keeps the commit. Requests that change nothing and tell nothing about the cache
(`status`, `ls`, who watches) are left out, and so are those for further descriptors, of which a
replay may need more or fewer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import msgspec

from prefixcached.daemon.trace.trace_file import MAX_TURN_SECONDS, Facts, Record, TraceError
from prefixcached.daemon.trace.tracer import OWN, REPLIES, REQUESTS, WORKERS
from prefixcached.protocol import limits, messages
from prefixcached.protocol.framing import tag_of
from prefixcached.protocol.messages import AnyRequest

LEFT_OUT: Final = (
    messages.Hello, messages.Fetch, messages.Status, messages.List, messages.Explain,
    messages.Activity, messages.Latency, messages.History,
)  # fmt: skip

BARRIER: Final = messages.Contains("", b"")
"""A question that changes nothing; its reply says that the messages before it were handled."""

_KINDS: Final = {tag_of(kind): kind for kind in get_args(AnyRequest)}


@dataclass(frozen=True, slots=True)
class Send:
    """Session ``session`` sends ``request``, ``seconds`` after the record's start."""

    session: int
    request: AnyRequest
    seconds: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The record has here the reply to the session's request, after ``took_seconds``."""

    session: int
    reply: Facts
    took_seconds: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The session ended."""

    session: int


@dataclass(frozen=True, slots=True)
class Settle:
    """The record's daemon had written and promoted so many images before it went on."""

    written: int
    promoted: int


@dataclass(frozen=True, slots=True)
class Effect:
    """The session's commit took effect, or was refused."""

    session: int


Step = Send | Answered | Gone | Settle | Effect


def steps_of(records: Iterable[Record]) -> Iterator[Step]:
    """Return the steps in the order of the record.

    Raises:
        TraceError: A request is none that this version knows, or a time none of a clock.
    """
    pending: dict[int, float] = {}
    commits: set[int] = set()
    settled = done = Settle(0, 0)
    for record in records:
        if record.channel == REQUESTS:
            step = _request(record)
            if isinstance(step, Send):
                if settled != done:
                    yield done
                    settled = done
                if not isinstance(step.request, messages.OneWay):
                    pending[step.session] = step.seconds
                if isinstance(step.request, messages.Commit):
                    commits.add(step.session)
            if isinstance(step, Gone):
                yield from _effect(step.session, commits)
            if step is not None:
                yield step
        elif record.channel == WORKERS and record.type == "sealed":
            yield from _effect(record.session, commits)
        elif record.channel == REPLIES:
            yield from _effect(record.session, commits)  # declined at once
            since = pending.pop(record.session, None)
            if since is not None:
                yield Answered(record.session, record.facts, record.seconds - since)
        elif record.channel == OWN and record.facts.now > MAX_TURN_SECONDS:
            raise TraceError(
                f"the trace is damaged: a turn at {record.facts.now:g} s of a clock that is a "
                f"machine's, and at most {MAX_TURN_SECONDS:g}"
            )
        elif record.type == "written" and record.message.get("entry") is not None:
            done = replace(done, written=done.written + 1)
        elif record.type == "promoted" and not record.facts.error:
            done = replace(done, promoted=done.promoted + 1)


def _effect(session: int, commits: set[int]) -> Iterator[Effect]:
    if session in commits:
        commits.discard(session)
        yield Effect(session)


def _request(record: Record) -> Send | Gone | None:
    if record.message.get("type") == "client-gone":
        return Gone(record.facts.session)
    kind = _KINDS.get(record.type)
    if kind is None:
        raise TraceError(f"the trace has a request of type {record.type!r}, which is unknown here")
    if kind in LEFT_OUT:
        return None
    _check_metadata(record)
    try:
        request: AnyRequest = msgspec.convert(
            _with_metadata(record.body), kind, builtin_types=(bytes,)
        )
    except msgspec.ValidationError as error:
        raise TraceError(f"the trace has a {record.type} that is none: {error}") from error
    return Send(record.facts.session, request, record.seconds)


def _with_metadata(plain: Any) -> Any:
    """Give metadata, of which the trace keeps the size, as many bytes again."""
    if not isinstance(plain, dict):
        return plain
    return {
        name: bytes(value)
        if name == "metadata" and isinstance(value, int)
        else _with_metadata(value)
        for name, value in plain.items()
    }


def _check_metadata(record: Record) -> None:
    """No number in a file may be taken for memory before it was looked at."""
    sizes = list(_metadata_sizes(record.body))
    wrong = [size for size in (*sizes, sum(sizes)) if not 0 <= size <= limits.MAX_METADATA_BYTES]
    if wrong:
        raise TraceError(
            f"the trace is damaged: metadata of {wrong[0]:,} bytes in a request of type "
            f"{record.type!r}; the protocol admits {limits.MAX_METADATA_BYTES:,}"
        )


def _metadata_sizes(plain: Any) -> Iterator[int]:
    if isinstance(plain, dict):
        for name, value in plain.items():
            if name == "metadata" and isinstance(value, int):
                yield value
            else:
                yield from _metadata_sizes(value)
