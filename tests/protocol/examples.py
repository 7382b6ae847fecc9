"""One legal example of every message, and more where a field changes what is legal."""

from typing import Final

from prefixcached.protocol import messages as m
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor, WindowRows

SEGMENT: Final = ImageSpec(
    ImageKind.SEGMENT, start=256, end=512, windows=(WindowRows(((0, 4), (400, 512)), phase=3),)
)
CHECKPOINT: Final = ImageSpec(
    ImageKind.CHECKPOINT,
    start=512,
    end=512,
    tensors=(StateTensor("layers.0.conv", "BF16", (1, 3, 64)),),
    metadata=b"\x00\xff{}",
)
TOKENS: Final = bytes(range(256)) * 4

REQUESTS: Final = (
    m.Hello(version=(1, 0), capabilities=("cache",), client="tests", pid=1),
    m.Take(namespace="n", tokens=TOKENS, label="session é", wait=2.5, schema_digest=b"\x00" * 16),
    m.Take(namespace="", tokens=b""),
    m.Fetch(of=1, first=16, boot="b"),
    m.Release(lease=(1 << 63) - 1, boot="b"),
    m.Peek(namespace="n", tokens=TOKENS),
    m.Contains(namespace="n", tokens=TOKENS),
    m.Offer(
        namespace="n",
        tokens=TOKENS,
        schema=b"\x80",
        windows=(WindowRows(((0, 512),)),),
        checkpoint=CHECKPOINT,
        attachments=True,
        minimum=300,
    ),
    m.Commit(put=7),
    m.Abandon(put=7, boot="b"),
    m.Prefetch(namespace="n", tokens=TOKENS, label=None),
    m.Unpin(pin=9),
    m.DropClaim(claim=11, boot="b"),
    m.CloseLabel(label="session"),
    m.OfferObject(
        namespace="n",
        key="image",
        spec=ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("features", "F16", (2, 8)),)),
    ),
    m.TakeObject(namespace="n", key="image"),
    m.Flush(seconds_left=0.0),
    m.Clear(namespace="n"),
    m.Clear(),
    m.Status(),
    m.List(),
    m.List(namespace="n", limit=7),
    m.Explain(namespace="n", tokens=TOKENS),
    m.Activity(),
    m.Latency(),
    m.History(),
    m.History(step="minute", after=7, most=60),
)

REPLIES: Final = (
    m.Welcome(version=(1, 2), capabilities=("cache", "later"), daemon="d", boot="b"),
    m.Failed(reason="protocol", detail="why", boot="b"),
    m.Hit(
        lease=1,
        length=512,
        tier="ssd",
        parts=(m.Part(SEGMENT, 256, 500, data_offset=4096), m.Part(CHECKPOINT, 512, 512)),
        schema=b"\x80",
        matched=600,
        claim=3,
        boot="b",
    ),
    m.Miss(reason="diverged", matched=12),
    m.Descriptors(first=16, count=0),
    m.Length(length=1 << 21),
    m.Grant(put=7, base=256, images=(SEGMENT, CHECKPOINT)),
    m.Stored(new_bytes=1 << 40, length=512),
    m.Declined(reason="too-short"),
    m.Pinned(pin=None, length=0),
    m.LabelClosed(labels=2),
    m.Flushed(written=1, skipped=2, failed=3, complete=False),
    m.Cleared(images=3, ram_bytes=49152),
    m.Listing(
        namespaces=(
            m.ListedNamespace(
                namespace="n",
                count=2,
                images=(
                    m.Listed("segment", 0, 0, 512, 49152, True, False, 1.5, 3, 2, 1),
                    m.Listed("object", 0, 0, 0, 96, False, True, None, 0, 1, 0, key="image"),
                ),
            ),
        ),
        complete=False,
    ),
    m.Explanation(
        length=256, ram_length=0, matched=300, reason="diverged", continuations=(TOKENS[:128],)
    ),
    m.ActivityReport(
        clients=(
            m.ClientActivity(3, 4711, "tests", 12.5, 99, "take", 0.25, 1, 2, 3, 4, waits_for=2),
            m.ClientActivity(2),
        ),
        claims=(m.ClaimActivity(2, "n", 20_000, 1),),
        labels=(m.LabelActivity("session é", "n", 512, 3.5),),
        complete=False,
    ),
    m.LatencyReport(
        bounds_seconds=(0.1, 1.0), requests=(m.RequestLatency("take", 2.5, (3, 1, 0)),)
    ),
    m.HistoryReport(
        first=8, times=bytes(16), series=(m.Series("takes", "counter", bytes(range(16))),)
    ),
    m.StatusReport(report={"ram_tier": {"images": 3, "by": {"state": 1.5}, "on": True, "x": None}}),
)
