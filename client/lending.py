"""A take and a put from request to end: ask, fetch, read or fill, give back.

Each runs over one wire of the pool, which it leaves in good order, or closed when it raises: that
ends the lease, and abandons the put (rules L1, P4). Deadlines are on `time.monotonic`.
"""

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from prefixcached.client import results, transfer
from prefixcached.client.arguments import seconds_until
from prefixcached.client.errors import (
    CallTimeout,
    NoSpace,
    NotStorable,
    PrefixCachedError,
    ProtocolFailure,
    RestoreFailed,
)
from prefixcached.client.pool import Pool
from prefixcached.client.schemas import SchemaBook
from prefixcached.client.seam import Adapter, Restoration, Snapshot
from prefixcached.client.wire import Wire
from prefixcached.protocol import image, messages, ranges
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import Extent, ImageKind, ImageSpec
from prefixcached.protocol.schema import Schema, encode_schema

_NO_MEMORY: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT})

_logger = logging.getLogger(__name__)


def take(
    pool: Pool, schemas: SchemaBook, adapter: Adapter, request: messages.Take, deadline: float
) -> results.Hit | results.Miss:
    """Ask for a prefix and copy it into new caches.

    Args:
        pool: Lends the wire.
        schemas: What this process knows; learns the hit's.
        adapter: Makes the caches.
        request: Without schema and seconds left, which are filled in here.
        deadline: End of the call, ``request.wait`` included.

    Raises:
        PrefixCachedError: Of any kind; the reason says which.
    """
    known = schemas.known(request.namespace)
    # A daemon that is not there must not be waited for: ``wait`` is for a prefill.
    with pool.lend(deadline - request.wait) as wire:
        request = msgspec.structs.replace(
            request, seconds_left=seconds_until(deadline), schema_digest=known.digest
        )
        reply, descriptors = wire.request(request, deadline)
        if isinstance(reply, messages.Miss):
            return results.Miss(reason=reply.reason, matched=reply.matched)
        assert isinstance(reply, messages.Hit), "the connection admits nothing else"
        tokens = len(request.tokens) // 4
        if not 0 < reply.length < tokens:
            raise ProtocolFailure(f"the daemon lent {reply.length} tokens for a prompt of {tokens}")
        schema = schemas.resolve(request.namespace, known, reply.schema)
        restoration = read_hit(wire, reply, descriptors, schema, adapter, deadline)
    kv, attachments = finish(restoration)
    return results.Hit(
        kv=kv,
        length=reply.length,
        tier=reply.tier,
        attachments=attachments,
        matched=max(reply.matched, reply.length),
    )


def put(
    pool: Pool, schemas: SchemaBook, snapshot: Snapshot, offer: messages.Offer, deadline: float
) -> results.Stored | results.Declined:
    """Offer a snapshot and copy what the daemon lacks of it.

    Args:
        pool: Lends the wire.
        schemas: Learns the snapshot's schema once it was accepted.
        snapshot: Within its context.
        offer: Without schema and seconds left, which are filled in here.
        deadline: End of the call.

    Raises:
        PrefixCachedError: Of any kind; the reason says which.
    """
    try:
        encoded = encode_schema(snapshot.schema)
    except SchemaError as error:
        raise NotStorable(f"these caches have no usable schema: {error}") from error
    with pool.lend(deadline) as wire:
        offer = msgspec.structs.replace(offer, schema=encoded, seconds_left=seconds_until(deadline))
        reply, descriptors = wire.request(offer, deadline)
        if isinstance(reply, messages.Grant):
            result = fill_grant(wire, reply, descriptors, snapshot, deadline)
        else:
            result = as_put_result(reply)
    if result:
        # What was accepted is the namespace's schema (rule N4): the next hit can leave it out.
        schemas.learn(offer.namespace, encoded, snapshot.schema)
    return result


def read_hit(
    wire: Wire,
    hit: messages.Hit,
    descriptors: Sequence[int],
    schema: Schema,
    adapter: Adapter,
    deadline: float,
) -> Restoration:
    """Copy what ``hit`` lends into new caches and end the lease.

    Returns:
        The restoration, all reads done, `finish` still to be called.

    Raises:
        RestoreFailed: The bytes cannot be read or do not make up caches (rule T8).
        CallTimeout, NoDaemon, ProtocolFailure: As `Wire.request`.
    """
    checkpoint = next((p.spec for p in hit.parts if p.spec.kind is ImageKind.CHECKPOINT), None)
    with failing_as(RestoreFailed, "what was lent cannot be restored"):
        check_hit(hit, schema)
        restoration = adapter.restoration(schema, hit.length, checkpoint, hit.parts)
    lent = each_lent(wire, hit.lease, hit.boot, descriptors, len(hit.parts), deadline)
    for index, fd in enumerate(lent):
        with failing_as(RestoreFailed, f"part {index} of the hit cannot be read"):
            for offset, views in transfer.merge_runs(restoration.targets(index)):
                transfer.read_rows(fd, hit.parts[index].data_offset + offset, views)
    # The copy is complete and stays good: should this fail, the closed wire ends the lease.
    with contextlib.suppress(PrefixCachedError):
        wire.notify(messages.Release(hit.lease, hit.boot), deadline)
    return restoration


def fill_grant(
    wire: Wire,
    grant: messages.Grant,
    descriptors: Sequence[int],
    snapshot: Snapshot,
    deadline: float,
) -> results.Stored | results.Declined:
    """Copy the granted rows into the granted images and commit them.

    Raises:
        NoSpace: The machine has no memory left for them.
        CallTimeout, NoDaemon, ProtocolFailure: As `Wire.request`, or the grant asks for what was
            not offered. The wire must be closed then, which abandons the put (rule P4).
    """
    lent = each_lent(wire, grant.put, grant.boot, descriptors, len(grant.images), deadline)
    for index, fd in enumerate(lent):
        with failing_as(ProtocolFailure, f"granted image {index} cannot be filled"):
            check_granted(grant.images[index], snapshot)
            extents = image.layout(snapshot.schema, grant.images[index]).extents
            runs = ((extent.offset, rows_of(snapshot, extent)) for extent in extents)
            for offset, views in transfer.merge_runs(runs):
                transfer.write_rows(fd, offset, views)
    reply, _ = wire.request(messages.Commit(grant.put, grant.boot), deadline)
    return as_put_result(reply)


def as_put_result(reply: messages.Reply) -> results.Stored | results.Declined:
    """Return the result for a reply that ends a put."""
    match reply:
        case messages.Stored(new_bytes=new_bytes, length=length):
            return results.Stored(new_bytes=new_bytes, length=length)
        case messages.Declined(reason=reason):
            return results.Declined(reason=reason)
        case _:
            raise AssertionError(f"the connection admits no {type(reply).__name__} here")


def each_lent(
    wire: Wire,
    of: int,
    boot: str,
    first: Sequence[int],
    count: int,
    deadline: float,
) -> Iterator[int]:
    """Yield the ``count`` descriptors of a lease or put in order, each open until the next.

    ``first`` came with the reply; the others are fetched when their turn comes.
    """
    waiting = deque(first)
    for index in range(count):
        if time.monotonic() >= deadline:
            raise CallTimeout(f"{count - index} of {count} images were left at the deadline")
        if not waiting:
            reply, batch = wire.request(messages.Fetch(of, index, boot), deadline)
            assert isinstance(reply, messages.Descriptors), "the connection admits nothing else"
            if reply.first != index or not 0 < len(batch) <= count - index:
                raise ProtocolFailure(
                    f"the daemon sent descriptors {reply.first}..{reply.first + len(batch)} "
                    f"of {count}, from {index} on were asked for"
                )
            waiting.extend(batch)
        fd = waiting.popleft()
        yield fd
        wire.close_descriptor(fd)


def check_hit(hit: messages.Hit, schema: Schema) -> None:
    """Raise SchemaError unless the parts can be what a hit of its length consists of."""
    used = []
    for part in hit.parts:
        image.check_spec(schema, part.spec)
        if part.use_start == part.use_end:
            continue
        if not part.spec.start <= part.use_start <= part.use_end <= part.spec.end:
            raise SchemaError(
                f"tokens {part.use_start}..{part.use_end} of an image that holds "
                f"{part.spec.start}..{part.spec.end}"
            )
        used.append((part.use_start, part.use_end))
    if schema.append_token_bytes and ranges.merge(used) != ((0, hit.length),):
        raise SchemaError(f"the parts cover {ranges.merge(used)} of a hit of {hit.length} tokens")


def check_granted(spec: ImageSpec, snapshot: Snapshot) -> None:
    """Raise SchemaError where the daemon asks for rows or a checkpoint that were not offered."""
    if spec.end > snapshot.length:
        raise SchemaError(f"tokens up to {spec.end} are asked for, {snapshot.length} were offered")
    for asked, had in zip(spec.windows, snapshot.windows, strict=False):
        if not ranges.covers(had.ranges, asked.ranges):
            raise SchemaError(
                f"window rows {asked.ranges} are asked for, {had.ranges} were offered"
            )
    if spec.kind is ImageKind.SEGMENT:
        return
    offered = snapshot.checkpoint
    if offered is None or (spec.kind, spec.start, spec.tensors) != (
        offered.kind,
        offered.start,
        offered.tensors,
    ):
        raise SchemaError(f"a {spec.kind} at {spec.start} is asked for that was not offered")


def rows_of(snapshot: Snapshot, extent: Extent) -> list[memoryview]:
    """Return the snapshot's bytes of ``extent``; never more or fewer than its place has."""
    views = snapshot.rows(extent)
    nbytes = sum(view.nbytes for view in views)
    if nbytes != extent.nbytes:
        raise SchemaError(f"{extent.name} gave {nbytes} bytes for a place of {extent.nbytes}")
    return views


@contextlib.contextmanager
def failing_as(kind: type[PrefixCachedError], doing: str) -> Iterator[None]:
    """Turn whatever goes wrong in the block into ``kind``, with a log line: it is no one's choice.

    Not only the errors foreseen: a class of caches that this process cannot rebuild may raise
    anything, and must cost a miss (DESIGN 1.2).
    """
    try:
        yield
    except PrefixCachedError:
        raise
    except Exception as error:
        _logger.warning("%s: %r", doing, error)
        if isinstance(error, OSError) and error.errno in _NO_MEMORY:
            raise NoSpace(f"{doing}: {error}") from error
        raise kind(f"{doing}: {error}") from error


def finish(restoration: Restoration) -> tuple[Sequence[Any], Any]:
    """Return the caches and attachments. Raises RestoreFailed where they do not come about."""
    with failing_as(RestoreFailed, "the caches cannot be rebuilt"):
        return restoration.finish(), restoration.attachments
