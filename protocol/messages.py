"""The wire messages, all of them (docs/protocol.md explains each).

A request gets exactly one reply, except the one-way ones (`Release`, `Abandon`, `Unpin`,
`DropClaim`), which get none. Every reply carries the daemon's boot id (rule L3). Descriptors travel
beside a frame: one for each image of a `Hit` or `Grant`, in order, at most 16 a frame; the client
asks for the rest with `Fetch`.
"""

from typing import Annotated, Any, Literal

import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol.image import ImageSpec, WindowRows
from prefixcached.protocol.schema import Count

Namespace = Annotated[str, msgspec.Meta(max_length=limits.MAX_NAMESPACE_BYTES)]
Label = Annotated[str, msgspec.Meta(max_length=limits.MAX_LABEL_BYTES)]
Key = Annotated[str, msgspec.Meta(max_length=limits.MAX_KEY_BYTES)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=4 * limits.MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)]
Identifier = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Tier = Literal["ram", "ssd"]
HistoryStep = Literal["second", "minute"]


class Request(msgspec.Struct, frozen=True, tag_field="type"):
    """What a client sends."""


class Reply(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """What the daemon sends. ``boot`` names this run of the daemon."""

    boot: Annotated[str, msgspec.Meta(max_length=64)] = ""


# -- connection ---------------------------------------------------------------------------------


class Hello(Request, frozen=True, tag="hello"):
    """First message of every connection."""

    version: tuple[Count, Count]
    capabilities: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()
    client: Text = ""
    pid: Count = 0


class Welcome(Reply, frozen=True, tag="welcome"):
    """Answer to `Hello`: what the daemon speaks."""

    version: tuple[Count, Count]
    capabilities: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()
    daemon: Text = ""


class Failed(Reply, frozen=True, tag="failed"):
    """The request broke the protocol or the daemon cannot serve it; the session ends."""

    reason: Text
    detail: Text = ""


# -- take ---------------------------------------------------------------------------------------


class Take(Request, frozen=True, tag="take"):
    """Ask for the longest resumable prefix of ``tokens`` (rules T1 to T13).

    ``schema_digest`` is the digest of the schema that the client already has for this namespace;
    the reply then leaves the schema out. ``seconds_left`` bounds what the daemon starts (rule C4).
    """

    namespace: Namespace
    tokens: Tokens
    label: Label | None = None
    wait: Seconds = 0.0
    seconds_left: Seconds = 5.0
    schema_digest: bytes = b""


class Part(msgspec.Struct, frozen=True):
    """One lent image of a hit and what of it to use.

    Append slices of positions [use_start, use_end) come from this image. Its window rows belong to
    this prompt below ``use_end`` (a segment's path may leave the prompt's there) and below the
    hit's length; a segment may be lent for its rows alone. ``data_offset`` is where the image's
    bytes begin in the descriptor (0 in RAM, behind the header in a file).
    """

    spec: ImageSpec
    use_start: Count
    use_end: Count
    data_offset: Count = 0


class Hit(Reply, frozen=True, tag="hit"):
    """The prefix ``tokens[:length]`` is lent until `Release` (rule L1)."""

    lease: Identifier
    length: Count
    tier: Tier
    parts: tuple[Part, ...]
    schema: bytes = b""
    matched: Count = 0
    claim: Identifier | None = None


class Miss(Reply, frozen=True, tag="miss"):
    """Nothing is resumable (rule T9). ``matched`` tokens of the prompt are known."""

    reason: Text
    matched: Count = 0
    claim: Identifier | None = None


class Fetch(Request, frozen=True, tag="fetch"):
    """Ask for the descriptors from index ``first`` on of a lease or a put of this connection."""

    of: Identifier
    first: Count
    boot: Text = ""


class Descriptors(Reply, frozen=True, tag="descriptors"):
    """Carries the descriptors asked for, at most 16."""

    first: Count
    count: Count


class Release(Request, frozen=True, tag="release"):
    """One-way: end a lease. A second release, or one of an earlier boot, does nothing.

    Who copied what was lent says how many bytes and how long that took, and whether computing the
    same tokens would have been faster.
    """

    lease: Identifier
    boot: Text = ""
    seconds: Seconds = 0.0
    restored_bytes: Count = 0
    is_slow: bool = False


class Peek(Request, frozen=True, tag="peek"):
    """Ask how long a hit `Take` would give, changing nothing (rule T11)."""

    namespace: Namespace
    tokens: Tokens


class Contains(Request, frozen=True, tag="contains"):
    """Ask whether exactly these tokens are resumable at their end (rule T11)."""

    namespace: Namespace
    tokens: Tokens


class Length(Reply, frozen=True, tag="length"):
    """Answer to `Peek` (tokens that would be reused) and `Contains` (their number, or 0)."""

    length: Count


# -- put ----------------------------------------------------------------------------------------


class Offer(Request, frozen=True, tag="offer"):
    """Offer the KV of ``tokens`` (rules P1 to P11).

    Append slices cover [0, len(tokens)). ``windows`` says, group by group, which rows the client
    has. ``checkpoint`` describes the snapshot at the end, if there is one; its window rows are
    left empty. ``minimum`` is the shortest reusable length within the new segments (rule T6).
    """

    namespace: Namespace
    tokens: Tokens
    schema: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_SCHEMA_BYTES)]
    windows: Annotated[
        tuple[WindowRows, ...], msgspec.Meta(max_length=limits.MAX_WINDOW_GROUPS)
    ] = ()
    checkpoint: ImageSpec | None = None
    attachments: bool = False
    minimum: Count = 0
    label: Label | None = None
    seconds_left: Seconds = 5.0


class Grant(Reply, frozen=True, tag="grant"):
    """Fill these images, then `Commit`. ``base`` tokens are held already."""

    put: Identifier
    base: Count
    images: tuple[ImageSpec, ...]


class Commit(Request, frozen=True, tag="commit"):
    """Publish a granted put; all its images become visible at once (rule P4)."""

    put: Identifier
    boot: Text = ""


class Abandon(Request, frozen=True, tag="abandon"):
    """One-way: give a granted put up."""

    put: Identifier
    boot: Text = ""


class Stored(Reply, frozen=True, tag="stored"):
    """The KV is visible. ``new_bytes`` of images were published for it."""

    new_bytes: Count
    length: Count


class Declined(Reply, frozen=True, tag="declined"):
    """The KV is not stored; ``reason`` as in rule P10."""

    reason: Text


# -- claims, labels, objects ----------------------------------------------------------------------


class DropClaim(Request, frozen=True, tag="drop-claim"):
    """One-way: give up the claim that a `Hit` or `Miss` carried (rule Q1)."""

    claim: Identifier
    boot: Text = ""


class CloseLabel(Request, frozen=True, tag="close-label"):
    """Drop a label, in every namespace when that is None (rule S4)."""

    label: Label
    namespace: Namespace | None = None


class LabelClosed(Reply, frozen=True, tag="label-closed"):
    """How many labels there were."""

    labels: Count


class OfferObject(Request, frozen=True, tag="offer-object"):
    """Offer an immutable object under ``key``, replacing one that is there (rules O1, P3).

    ``spec`` is of kind OBJECT. A `Grant` of one image follows, as for `Offer`.
    """

    namespace: Namespace
    key: Key
    spec: ImageSpec
    seconds_left: Seconds = 5.0


class TakeObject(Request, frozen=True, tag="take-object"):
    """Ask for the object of exactly this key: a `Hit` of length 0 with one part, or a `Miss`."""

    namespace: Namespace
    key: Key
    seconds_left: Seconds = 5.0


# -- prefetch, flush, clear, status -------------------------------------------------------------


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Bring what `Take` would choose into RAM and pin it (rules F1 to F4)."""

    namespace: Namespace
    tokens: Tokens
    label: Label | None = None
    seconds_left: Seconds = 5.0


class Pinned(Reply, frozen=True, tag="pinned"):
    """``length`` tokens stay until `Unpin` or the connection's end; 0 tokens is an empty pin."""

    pin: Identifier | None
    length: Count


class Unpin(Request, frozen=True, tag="unpin"):
    """One-way: end a pin."""

    pin: Identifier
    boot: Text = ""


class Flush(Request, frozen=True, tag="flush"):
    """Wait until everything visible is durable (rule P8)."""

    seconds_left: Seconds = 5.0


class Flushed(Reply, frozen=True, tag="flushed"):
    """What became of the images that were visible when `Flush` arrived."""

    written: Count
    skipped: Count
    failed: Count
    complete: bool = True


class Clear(Request, frozen=True, tag="clear"):
    """Forget one namespace, or all of them when None (rule D11)."""

    namespace: Namespace | None = None


class Cleared(Reply, frozen=True, tag="cleared"):
    """How many images left, and their bytes in RAM.

    ``durable`` is false where the disk fails: the files are taken away once it works again.
    """

    images: Count
    ram_bytes: Count
    durable: bool = True


class Status(Request, frozen=True, tag="status"):
    """Ask for the merged statistics of all actors (rule C5)."""


class StatusReport(Reply, frozen=True, tag="status-report"):
    """Statistics by actor name; plain values only."""

    report: dict[str, Any]


# -- inspection ----------------------------------------------------------------------------------


class List(Request, frozen=True, tag="list"):
    """Ask what is held, one namespace or all when None, at most ``limit`` images."""

    namespace: Namespace | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_LISTED)] = 1000


class Listed(msgspec.Struct, frozen=True):
    """One image of a listing; it stands behind what it hangs on. ``depth`` counts branchings.

    ``start`` and ``end`` are token positions, equal for a checkpoint and 0 for an object, which
    has a ``key``. ``sharing`` counts the prompts' ends at or below it: how many branches use its
    tokens. ``holders`` are leases, pins and puts in flight. ``idle_seconds`` is None where it was
    not used since the daemon's start.
    """

    kind: Literal["segment", "checkpoint", "object"]
    depth: Count
    start: Count
    end: Count
    nbytes: Count
    in_ram: bool
    on_ssd: bool
    idle_seconds: float | None
    uses: Count
    sharing: Count
    holders: Count
    key: Key = ""


class ListedNamespace(msgspec.Struct, frozen=True):
    """One namespace of a listing: all its images are counted, ``images`` may be the first few."""

    namespace: Namespace
    count: Count
    images: Annotated[tuple[Listed, ...], msgspec.Meta(max_length=limits.MAX_LISTED)] = ()


class Listing(Reply, frozen=True, tag="listing"):
    """Answer to `List`. ``complete`` is false where the limit left something out."""

    namespaces: Annotated[tuple[ListedNamespace, ...], msgspec.Meta(max_length=limits.MAX_LISTED)]
    complete: bool = True


class Explain(Request, frozen=True, tag="explain"):
    """Ask what `Take` would find and why not more, changing nothing (rules T9, T11)."""

    namespace: Namespace
    tokens: Tokens


class Explanation(Reply, frozen=True, tag="explanation"):
    """Answer to `Explain`.

    ``length`` tokens would be reused, ``ram_length`` of them from RAM alone; ``matched`` tokens of
    the prompt are held, resumable or not. ``reason`` says why not more, empty where all is that
    can be. ``continuations`` are the tokens that are held behind the first ``matched``, one for
    each branch, packed, the most recently used first.
    """

    length: Count
    ram_length: Count
    matched: Count
    reason: Text = ""
    continuations: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=4 * limits.MAX_CONTINUATION_TOKENS)], ...],
        msgspec.Meta(max_length=limits.MAX_CONTINUATIONS),
    ] = ()


# -- watching ------------------------------------------------------------------------------------


class Activity(Request, frozen=True, tag="activity"):
    """Ask which clients are connected, what each is doing, and what is being computed."""


class ClientActivity(msgspec.Struct, frozen=True):
    """One connection. ``doing`` is the tag of the request in flight, empty between two.

    ``pid`` and ``client`` are what it said of itself. ``waits_for`` is the session that computes
    what its take waits for, 0 where it waits for nobody.
    """

    session: Count
    pid: Count = 0
    client: Text = ""
    connected_seconds: float = 0.0
    requests: Count = 0
    doing: Text = ""
    doing_seconds: float = 0.0
    leases: Count = 0
    pins: Count = 0
    puts: Count = 0
    claims: Count = 0
    waits_for: Count = 0


class ClaimActivity(msgspec.Struct, frozen=True):
    """``session`` is computing ``tokens`` tokens of a prompt; ``waiting`` takes wait for it."""

    session: Count
    namespace: Namespace
    tokens: Count
    waiting: Count


class LabelActivity(msgspec.Struct, frozen=True):
    """A conversation: its label marks an entry of ``tokens`` tokens."""

    label: Label
    namespace: Namespace
    tokens: Count
    idle_seconds: float


class ActivityReport(Reply, frozen=True, tag="activity-report"):
    """Answer to `Activity`. ``complete`` is false where a limit left something out.

    Labels are those used last, the newest first.
    """

    clients: Annotated[tuple[ClientActivity, ...], msgspec.Meta(max_length=limits.MAX_WATCHED)]
    claims: Annotated[tuple[ClaimActivity, ...], msgspec.Meta(max_length=limits.MAX_WATCHED)] = ()
    labels: Annotated[tuple[LabelActivity, ...], msgspec.Meta(max_length=limits.MAX_WATCHED)] = ()
    complete: bool = True


class Latency(Request, frozen=True, tag="latency"):
    """Ask how long the daemon took for each kind of request."""


class RequestLatency(msgspec.Struct, frozen=True):
    """Requests of one kind since the daemon's start.

    ``seconds`` is the sum of their times. ``counts`` says how many took at most each bound of the
    report and more than the one before it; its last number counts those beyond all bounds.
    """

    request: Text
    seconds: float
    counts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=limits.MAX_LATENCY_BOUNDS + 1)]


class LatencyReport(Reply, frozen=True, tag="latency-report"):
    """Answer to `Latency`; kinds that never occurred are among them."""

    bounds_seconds: Annotated[tuple[float, ...], msgspec.Meta(max_length=limits.MAX_LATENCY_BOUNDS)]
    requests: tuple[RequestLatency, ...]


class History(Request, frozen=True, tag="history"):
    """Ask for the rows behind row ``after``, the newest ``most`` of them."""

    step: HistoryStep = "second"
    after: Count = 0
    most: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_HISTORY_ROWS)] = limits.MAX_HISTORY_ROWS


class Series(msgspec.Struct, frozen=True):
    """One column: packed little-endian float64, one for each row; NaN where there was no value."""

    name: Text
    kind: Literal["counter", "gauge"]
    values: Annotated[bytes, msgspec.Meta(max_length=8 * limits.MAX_HISTORY_ROWS)]


class HistoryReport(Reply, frozen=True, tag="history-report"):
    """Answer to `History`: rows ``first`` and on, each taken at one of ``times`` (Unix seconds).

    Rows are numbered from 1 at the daemon's start. A row of a minute has of counters the last
    value and of gauges the mean.
    """

    first: Count
    times: Annotated[bytes, msgspec.Meta(max_length=8 * limits.MAX_HISTORY_ROWS)]
    series: Annotated[tuple[Series, ...], msgspec.Meta(max_length=limits.MAX_HISTORY_SERIES)]


OneWay = Release | Abandon | Unpin | DropClaim
WatchRequest = Activity | Latency | History
AnyRequest = (
    Hello | Take | Fetch | Release | Peek | Contains | Offer | Commit | Abandon
    | Prefetch | Unpin | DropClaim | CloseLabel | OfferObject | TakeObject | Flush | Clear | Status
    | List | Explain
    | Activity | Latency | History
)  # fmt: skip
AnyReply = (
    Welcome | Failed | Hit | Miss | Descriptors | Length | Grant | Stored | Declined
    | Pinned | LabelClosed | Flushed | Cleared | StatusReport
    | Listing | Explanation
    | ActivityReport | LatencyReport | HistoryReport
)  # fmt: skip
