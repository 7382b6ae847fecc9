"""What a replay does, step by step, read from a trace. Pure.

The order is the record's: a request is sent after the replies that the record has before it. What
was written or promoted between two requests becomes one `Settle`. A commit takes effect when its
images are sealed, in a thread; so it is sent where the record has that, and nothing comes between.
Requests that change nothing and
tell nothing about the cache (`status`, `ls`, who watches) are left out, and so are those for
further descriptors, of which a replay may need more or fewer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import msgspec

from prefixcached.daemon.trace.trace_file import Plain, Record, TraceError
from prefixcached.daemon.trace.tracer import REPLIES, REQUESTS, WORKERS
from prefixcached.protocol import messages
from prefixcached.protocol.framing import tag_of
from prefixcached.protocol.messages import AnyRequest

LEFT_OUT: Final = (
    messages.Hello, messages.Fetch, messages.Status, messages.List, messages.Explain,
    messages.Activity, messages.Latency, messages.History,
)  # fmt: skip

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
    reply: Plain
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


Step = Send | Answered | Gone | Settle


def steps_of(records: Iterable[Record]) -> Iterator[Step]:
    """Return the steps in the order of the record.

    Raises:
        TraceError: A request is none that this version knows.
    """
    pending: dict[int, float] = {}
    commits: dict[int, Send] = {}
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
                    commits[step.session] = step
                    continue
            if isinstance(step, Gone) and step.session in commits:
                yield commits.pop(step.session)
            if step is not None:
                yield step
        elif record.channel == WORKERS and record.type == "sealed":
            if record.session in commits:
                yield commits.pop(record.session)
        elif record.channel == REPLIES:
            if record.session in commits:  # declined at once
                yield commits.pop(record.session)
            since = pending.pop(record.session, None)
            if since is not None:
                yield Answered(record.session, record.message, record.seconds - since)
        elif record.type == "written" and record.message.get("entry") is not None:
            done = replace(done, written=done.written + 1)
        elif record.type == "promoted" and not record.message.get("error"):
            done = replace(done, promoted=done.promoted + 1)


def _request(record: Record) -> Send | Gone | None:
    message = record.message
    if message.get("type") == "client-gone":
        return Gone(message["session"])
    kind = _KINDS.get(record.type)
    if kind is None:
        raise TraceError(f"the trace has a request of type {record.type!r}, which is unknown here")
    if kind in LEFT_OUT:
        return None
    try:
        request: AnyRequest = msgspec.convert(
            _with_metadata(record.body), kind, builtin_types=(bytes,)
        )
    except msgspec.ValidationError as error:
        raise TraceError(f"the trace has a {record.type} that is none: {error}") from error
    return Send(message["session"], request, record.seconds)


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
