"""Target `trace`: a trace file that anybody may have written, as `trace` and `replay` read it (C3).

Records that a daemon writes, of every message there is, are changed, damaged and cut.
"""

from typing import Any, Final

import click

from prefixcached.daemon.trace.plain import PlainForm
from prefixcached.daemon.trace.trace_file import FORMAT, MAGIC
from prefixcached.daemon.trace.tracer import (
    FROM_CLIENT,
    OWN,
    REPLIES,
    REQUESTS,
    TO_CLIENT,
    TO_PREFETCHER,
    TO_SSD_TIER,
    WORKERS,
)
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol.image import ImageKind, ImageSpec
from tests.fuzz.choices import Choices, packed
from tests.fuzz.scratch import directory
from tests.protocol.examples import REPLIES as REPLY_EXAMPLES
from tests.protocol.examples import REQUESTS as REQUEST_EXAMPLES
from tests.support.trace_reading import read_all

_ID: Final = "a" * 32
_HEADER: Final = inner.FileHeader(
    1, _ID, ImageKind.SEGMENT, "n", ImageSpec(ImageKind.SEGMENT, 0, 4)
)
_ENTRY: Final = inner.FileEntry(_HEADER, "n/x", b"", 0, 1, 1)
_FORM: Final = PlainForm(keep_tokens=True)

_CHANNELS: Final = (
    REQUESTS, REPLIES, WORKERS, TO_SSD_TIER, TO_PREFETCHER, FROM_CLIENT, TO_CLIENT, OWN,
    "ssd_tier->ram_tier", "prefetcher->ram_tier", "pressure_monitor->ram_tier",
)  # fmt: skip

_SAID: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    *((REQUESTS, _FORM.of(inner.Call(1, request))) for request in REQUEST_EXAMPLES),
    *((REPLIES, _FORM.of(reply)) for reply in REPLY_EXAMPLES),
    (OWN, {"type": "turn", "now": 5.0, "wake": False}),
    (OWN, {"type": "turn", "now": 5.0, "wake": True}),
    (OWN, {"type": "new-image", "id": _ID}),
    (OWN, {"type": "gap", "records": 3}),
    (OWN, {"type": "statistics", "report": {"ram_tier": {"evictions": 1}}}),
    *((REQUESTS, _FORM.of(message)) for message in (inner.ClientGone(1), inner.CallGivenUp(1))),
    (WORKERS, _FORM.of(inner.Sealed(1))),
    (TO_SSD_TIER, _FORM.of(inner.SyncAll(1))),
    *(("ssd_tier->ram_tier", _FORM.of(message)) for message in (
        inner.Written(_ID, _ENTRY), inner.Written(_ID, error="full"), inner.Loaded((_ENTRY,)),
        inner.Synced(1), inner.FilesLost(),
    )),
    *(("prefetcher->ram_tier", _FORM.of(message)) for message in (
        inner.ImageRead(1, _ID), inner.ImageRead(1, _ID, "gone"), inner.Promoted(_ID),
    )),
)  # fmt: skip

_HEADER_OF_FILE: Final = {
    "format": FORMAT, "version": "1", "started": 5.0, "tokens": "digests",
    "config": {"ram_bytes": 1 << 20, "options": {"retention": "lru", "ssd_bytes": "0"}},
}  # fmt: skip


def run(data: bytes) -> None:
    """Read what ``data`` makes of a trace: records, or one line that says what is wrong with it."""
    choices = Choices(data)
    header: Any = choices.changed(_HEADER_OF_FILE) if choices.one_in(8) else _HEADER_OF_FILE
    values = [header, *(_record(choices) for _ in range(choices.below(12) + 1))]
    content = MAGIC + b"".join(packed(value) for value in values)
    if choices.one_in(4):
        content = choices.damaged(content)
    path = directory() / "trace"
    path.write_bytes(content)
    try:
        read_all(path)
    except click.ClickException as error:
        message = error.message
        assert str(path) in message or "the trace" in message, message
        assert not message.rstrip().endswith(":"), "it does not say what is wrong"


def _record(choices: Choices) -> Any:
    channel, message = choices.pick(_SAID)
    if choices.one_in(6):
        channel = choices.pick(_CHANNELS)
    session = choices.below(3) + 1
    if "session" in message:
        message = {**message, "session": session}
    record: Any = [choices.below(100) / 8, channel, f"{session}.{choices.below(4)}", message]
    for _ in range(choices.below(3) if choices.one_in(2) else 0):
        record = choices.changed(record)
    return record
