"""A take and a put from request to end, as programs: ask, fetch, read or fill, give back.

Each runs over one connection, which it leaves in good order; where it raises, the connection is to
be closed, which ends the lease and abandons the put (rules L1, P4).
"""

import contextlib
import errno
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from prefixcached.client import results, transfer
from prefixcached.client.claims import ClaimBook
from prefixcached.client.errors import (
    NoSpace,
    NotStorable,
    PrefixCachedError,
    ProtocolFailure,
    RestoreFailed,
)
from prefixcached.client.gain import GainMeter
from prefixcached.client.programs import Copy, OnLoan, Program, Tell, ask
from prefixcached.client.schemas import SchemaBook
from prefixcached.client.seam import Adapter, Restoration, Snapshot
from prefixcached.protocol import image, messages, ranges
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import Extent, ImageKind, ImageSpec
from prefixcached.protocol.schema import Schema, encode_schema

NO_GAIN: Final = "no-gain"
"""Why a hit was not restored: computing it takes about as long (`connect`'s ``minimum_gain``)."""

LONGEST_REPORTED_SECONDS: Final = 86400.0
"""What a report may say at most (`messages.Seconds`): this process may have been stopped for days.
"""

_NO_MEMORY: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT})

_logger = logging.getLogger(__name__)


def take(
    request: messages.Take,
    schemas: SchemaBook,
    adapter: Adapter,
    claims: ClaimBook,
    gain: GainMeter,
) -> Program[results.Hit | results.Miss]:
    """Ask for a prefix and copy it into new caches.

    Args:
        request: Without the schema, which is filled in here.
        schemas: What this process knows; learns the hit's.
        adapter: Makes the caches.
        claims: Learns of the claim that comes with the reply.
        gain: Decides whether the prefix is worth restoring, and learns how long it took.

    Raises:
        PrefixCachedError: Of any kind; the reason says which.
    """
    known = schemas.known(request.namespace)
    request = msgspec.structs.replace(request, schema_digest=known.digest)
    reply, descriptors = yield from ask(request)
    assert isinstance(reply, messages.Hit | messages.Miss), "the connection admits nothing else"
    claim = None
    if reply.claim is not None:
        claim = yield OnLoan(lambda loan: claims.grant(loan, reply, request))
    if isinstance(reply, messages.Miss):
        return results.Miss(reason=reply.reason, matched=reply.matched, claim=claim)
    tokens = len(request.tokens) // 4
    if not 0 < reply.length < tokens:
        raise ProtocolFailure(f"the daemon lent {reply.length} tokens for a prompt of {tokens}")
    matched = max(reply.matched, reply.length)
    schema = schemas.resolve(request.namespace, known, reply.schema)
    nbytes = lent_bytes(reply, schema)
    if not gain.is_worth(request.namespace, reply.length, nbytes):
        yield Copy(transfer.read_all, [], descriptors)
        yield Tell(messages.Release(reply.lease, reply.boot))
        return results.Miss(reason=NO_GAIN, matched=matched, claim=claim)
    began = time.monotonic()
    restoration = yield from read_hit(reply, descriptors, schema, adapter)
    kv, attachments = finish(restoration)
    seconds = min(time.monotonic() - began, LONGEST_REPORTED_SECONDS)
    is_slow = gain.restored(request.namespace, reply.length, nbytes, seconds)
    # The copy is complete and stays good: should this fail, the closed wire ends the lease.
    yield Tell(messages.Release(reply.lease, reply.boot, seconds, nbytes, is_slow))
    return results.Hit(
        kv=kv,
        length=reply.length,
        tier=reply.tier,
        attachments=attachments,
        matched=matched,
        claim=claim,
    )


def put(
    snapshot: Snapshot, offer: messages.Offer, schemas: SchemaBook
) -> Program[results.Stored | results.Declined]:
    """Offer a snapshot and copy what the daemon lacks of it.

    Args:
        snapshot: Within its context.
        offer: Without the schema, which is filled in here.
        schemas: Learns the snapshot's schema once it was accepted.

    Raises:
        PrefixCachedError: Of any kind; the reason says which.
    """
    try:
        encoded = encode_schema(snapshot.schema)
    except SchemaError as error:
        raise NotStorable(f"these caches have no usable schema: {error}") from error
    reply, descriptors = yield from ask(msgspec.structs.replace(offer, schema=encoded))
    if isinstance(reply, messages.Grant):
        result = yield from fill_grant(reply, descriptors, snapshot)
    else:
        result = as_put_result(reply)
    if result:
        # What was accepted is the namespace's schema (rule N4): the next hit can leave it out.
        schemas.learn(offer.namespace, encoded, snapshot.schema)
    return result


def read_hit(
    hit: messages.Hit, descriptors: Sequence[int], schema: Schema, adapter: Adapter
) -> Program[Restoration]:
    """Copy what ``hit`` lends into new caches. The lease is still the caller's to end.

    Returns:
        The restoration, all reads done, `finish` still to be called.

    Raises:
        RestoreFailed: The bytes cannot be read or do not make up caches (rule T8).
    """
    checkpoint = next((part.spec for part in hit.parts if part.spec.is_snapshot), None)
    with failing_as(RestoreFailed, "what was lent cannot be restored"):
        check_hit(hit, schema)
        restoration = adapter.restoration(schema, hit.length, checkpoint, hit.parts)

    def moves_of(first: int, batch: Sequence[int]) -> list[transfer.Move]:
        return [
            transfer.Move(fd, hit.parts[index].data_offset + offset, views)
            for index, fd in enumerate(batch, first)
            for offset, views in transfer.merge_runs(restoration.targets(index))
        ]

    first, batch = 0, descriptors
    while True:
        check_batch(first, batch, len(hit.parts))
        with failing_as(RestoreFailed, f"parts {first}.. of the hit cannot be read"):
            yield Copy(transfer.read_all, moves_of(first, batch), batch)
        first += len(batch)
        if first == len(hit.parts):
            break
        batch = yield from fetch(hit.lease, first, hit.boot)
    return restoration


def fill_grant(
    grant: messages.Grant, descriptors: Sequence[int], snapshot: Snapshot
) -> Program[results.Stored | results.Declined]:
    """Copy the granted rows into the granted images and commit them.

    Raises:
        NoSpace: The machine has no memory left for them.
        ProtocolFailure: The grant asks for what was not offered.
    """

    def moves_of(first: int, batch: Sequence[int]) -> list[transfer.Move]:
        moves: list[transfer.Move] = []
        for fd, spec in zip(batch, grant.images[first:], strict=False):
            check_granted(spec, snapshot)
            extents = image.layout(snapshot.schema, spec).extents
            runs = ((extent.offset, rows_of(snapshot, extent)) for extent in extents)
            moves += [transfer.Move(fd, *run) for run in transfer.merge_runs(runs)]
        return moves

    first, batch = 0, descriptors
    while True:
        check_batch(first, batch, len(grant.images))
        with failing_as(ProtocolFailure, f"granted images {first}.. cannot be filled"):
            yield Copy(transfer.write_all, moves_of(first, batch), batch)
        first += len(batch)
        if first == len(grant.images):
            break
        batch = yield from fetch(grant.put, first, grant.boot)
    reply, _ = yield from ask(messages.Commit(grant.put, grant.boot))
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


def fetch(of: int, first: int, boot: str) -> Program[list[int]]:
    """Return the next descriptors of a lease or put, from index ``first`` on; at least one."""
    reply, batch = yield from ask(messages.Fetch(of, first, boot))
    assert isinstance(reply, messages.Descriptors), "the connection admits nothing else"
    if reply.first != first or not batch:
        raise ProtocolFailure(
            f"the daemon sent {len(batch)} descriptors from {reply.first} on, those from {first} "
            "on were asked for"
        )
    return batch


def check_batch(first: int, batch: Sequence[int], count: int) -> None:
    """Raise ProtocolFailure for more than ``count`` descriptors in all."""
    if first + len(batch) > count:
        raise ProtocolFailure(f"the daemon sent {first + len(batch)} descriptors of {count}")


def lent_bytes(hit: messages.Hit, schema: Schema) -> int:
    """Return about how many bytes a hit copies: its append slices and its snapshots."""
    state_bytes = sum(tensor.nbytes for part in hit.parts for tensor in part.spec.tensors)
    return schema.append_token_bytes * hit.length + state_bytes


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
    are_rows_alone = spec.kind is ImageKind.CHECKPOINT and spec.windows and not spec.is_snapshot
    if spec.kind is ImageKind.SEGMENT or are_rows_alone:  # these need no snapshot (rule P2)
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
        # As a text: a handler that keeps its records would keep the KV that a traceback refers to.
        _logger.warning("%s: %s", doing, repr(error))
        if isinstance(error, OSError) and error.errno in _NO_MEMORY:
            raise NoSpace(f"{doing}: {error}") from error
        raise kind(f"{doing}: {error}") from error


def finish(restoration: Restoration) -> tuple[Sequence[Any], Any]:
    """Return the caches and attachments. Raises RestoreFailed where they do not come about."""
    with failing_as(RestoreFailed, "the caches cannot be rebuilt"):
        return restoration.finish(), restoration.attachments
