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
    """One-way: end a lease. A second release, or one of an earlier boot, does nothing."""

    lease: Identifier
    boot: Text = ""


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


OneWay = Release | Abandon | Unpin | DropClaim
AnyRequest = (
    Hello | Take | Fetch | Release | Peek | Contains | Offer | Commit | Abandon
    | Prefetch | Unpin | DropClaim | CloseLabel | OfferObject | TakeObject | Flush | Clear | Status
    | List | Explain
)  # fmt: skip
AnyReply = (
    Welcome | Failed | Hit | Miss | Descriptors | Length | Grant | Stored | Declined
    | Pinned | LabelClosed | Flushed | Cleared | StatusReport
    | Listing | Explanation
)  # fmt: skip
