"""Puts and takes of any tokens on a `Core`, one line each. The bytes are zeros."""

from collections.abc import Sequence
from typing import Any

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec, WindowRows, layout
from prefixcached.protocol.schema import Schema, encode_schema
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import Core
from tests.support.core_payload import SCHEMAS, STATE


def offer(
    core: Core,
    tokens: Sequence[int],
    *,
    schema: str | Schema = "plain",
    namespace: str = "n",
    session: int = 1,
    rows: Sequence[tuple[int, int]] | None = None,
    snapshot: bool | None = None,
    **fields: Any,
) -> Any:
    """Offer the KV of ``tokens`` and return the reply, None while it waits.

    ``rows`` are what the client has of each window, everything by default; ``snapshot`` says
    whether it has a checkpoint, as its schema asks for by default.
    """
    shape = SCHEMAS[schema] if isinstance(schema, str) else schema
    length = len(tokens)
    has_snapshot = shape.has_state if snapshot is None else snapshot
    ranges = ((0, length),) if rows is None else tuple(rows)
    request = wire.Offer(
        namespace,
        pack_tokens(tokens),
        encode_schema(shape),
        windows=tuple(WindowRows(ranges) for _ in shape.windows),
        checkpoint=ImageSpec(ImageKind.CHECKPOINT, length, length, tensors=(STATE,))
        if has_snapshot
        else None,
        **fields,
    )
    return core.call(session, request).reply


def put(core: Core, tokens: Sequence[int], *, session: int = 1, **fields: Any) -> Any:
    """Offer and commit; return the last reply."""
    granted = offer(core, tokens, session=session, **fields)
    if not isinstance(granted, wire.Grant):
        return granted
    return core.reply(session, wire.Commit(granted.put))


def take(
    core: Core, tokens: Sequence[int], *, namespace: str = "n", session: int = 1, **fields: Any
) -> Any:
    """Take a prompt and return the reply, None while it waits."""
    return core.call(session, wire.Take(namespace, pack_tokens(tokens), **fields)).reply


def length_of(core: Core, tokens: Sequence[int], *, namespace: str = "n") -> int:
    """What `take` would reuse of ``tokens``."""
    reply = core.reply(1, wire.Peek(namespace, pack_tokens(tokens)))
    assert isinstance(reply, wire.Length)
    return reply.length


def granted_bytes(schema: str | Schema, grant: wire.Grant) -> int:
    """Bytes that the client has to move for a grant."""
    shape = SCHEMAS[schema] if isinstance(schema, str) else schema
    return sum(layout(shape, spec).nbytes for spec in grant.images)


def tokens(count: int, start: int = 0) -> list[int]:
    """Consecutive token ids."""
    return list(range(start, start + count))
