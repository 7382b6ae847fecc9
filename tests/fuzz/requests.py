"""Requests that a hostile client may send: most are in order, some lie, all can be encoded."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor, WindowRows
from prefixcached.protocol.messages import AnyRequest
from prefixcached.protocol.tokens import pack_tokens
from tests.fuzz.choices import Choices, packed
from tests.fuzz.peer import Peer
from tests.support.core_client import sequence
from tests.support.core_payload import SCHEMAS, Tokens, encoded, offered_rows

_LENGTHS: Final = (9, 1, 2, 5, 17, 200, 30, 40)
"""The longest takes more images than one frame has descriptors for."""

NAMES: Final = tuple(f"{name}/{salt}" for salt in "ab" for name in SCHEMAS)
_LABELS: Final = (None, "one", "two")
_KEYS: Final = ("k", "l")
_SECONDS: Final = (5.0, 0.0, 0.01)
_PLAIN: Final[Sequence[AnyRequest]] = (m.Status(), m.List(), m.Activity(), m.Latency(), m.History())


def request(choices: Choices, peer: Peer) -> AnyRequest:
    """A request that may be sent, with ids that exist or do not."""
    boot = choices.pick((*peer.boots, "other")) if choices.one_in(3) else ""
    match choices.below(20):
        case 0:
            return good_offer(choices, peer)
        case 1:
            return _lying_offer(choices, peer)
        case 2 | 3:
            name, tokens = prompt(choices, peer)
            return m.Take(
                name, tokens, label=choices.pick(_LABELS), wait=choices.pick((0.0, 0.01, 50.0)),
                seconds_left=choices.pick(_SECONDS), schema_digest=choices.blob(16),
            )  # fmt: skip
        case 4:
            return m.Commit(_number(choices, peer.puts), boot)
        case 5:
            return m.Abandon(_number(choices, peer.puts), boot)
        case 6:
            held: Sequence[int] = [*peer.puts, *peer.lent]
            return m.Fetch(_number(choices, held), choices.pick((0, 1, 2, 16, 17, 1 << 40)), boot)
        case 7:
            return m.Release(_number(choices, peer.lent), boot, choices.pick(_SECONDS), 1 << 40)
        case 8:
            name, tokens = prompt(choices, peer)
            asks: Sequence[type[m.Peek | m.Contains | m.Explain]] = (m.Peek, m.Contains, m.Explain)
            return choices.pick(asks)(name, tokens)
        case 9 | 10:
            name, tokens = prompt(choices, peer)
            return m.Prefetch(name, tokens, choices.pick(_LABELS), choices.pick(_SECONDS))
        case 11:
            return m.Unpin(_number(choices, peer.pins), boot)
        case 12:
            return m.DropClaim(_number(choices, peer.claims), boot)
        case 13:
            label, where = choices.pick(("one", "two", "x")), choices.pick((None, *peer.names))
            return m.CloseLabel(label, where)
        case 14 | 15:
            return _offer_object(choices, peer)
        case 16:
            name = choices.pick(peer.names)
            return m.TakeObject(name, choices.pick(_KEYS), choices.pick(_SECONDS))
        case 17:
            return m.Flush(choices.pick(_SECONDS))
        case 18:
            return m.Clear(choices.pick((*peer.names, None)))
        case _:
            return choices.pick(_PLAIN)


def _number(choices: Choices, known: Sequence[int] | dict[int, Any]) -> int:
    """An id that the peer was given, or one that it was not."""
    if known and not choices.one_in(4):
        return choices.pick(list(known))
    return choices.below(40) + 1


def prompt(choices: Choices, peer: Peer) -> tuple[str, bytes]:
    """A namespace, and tokens that mostly share their beginning with others."""
    return choices.pick(peer.names), pack_tokens(_tokens(choices))


def _tokens(choices: Choices) -> Tokens:
    tokens = sequence(choices.pick(_LENGTHS), salt=choices.below(2))
    if choices.one_in(3):
        place = choices.below(len(tokens))
        tokens = (*tokens[:place], 50_000 + choices.below(3), *tokens[place + 1 :])
    return tokens


def offer(
    namespace: str, tokens: Tokens, *, extra: int = 0, checkpoint: ImageSpec | None = None,
    attachments: bool = False, minimum: int = 0, label: str | None = None,
) -> m.Offer:  # fmt: skip
    name = namespace.split("/", maxsplit=1)[0]
    windows = tuple(offered_rows(w, len(tokens), extra) for w in SCHEMAS[name].windows)
    return m.Offer(
        namespace, pack_tokens(tokens), encoded(name), windows, checkpoint,
        attachments, minimum, label, seconds_left=1.0,
    )  # fmt: skip


def good_offer(choices: Choices, peer: Peer) -> m.Offer:
    namespace, tokens = choices.pick(peer.names), _tokens(choices)
    has_state = SCHEMAS[namespace.split("/", maxsplit=1)[0]].has_state
    checkpoint = None
    if has_state or choices.one_in(4):
        checkpoint = ImageSpec(
            ImageKind.CHECKPOINT, len(tokens), len(tokens),
            tensors=(StateTensor("state", "U8", (choices.pick((50, 0, 40_000)),)),),
            metadata=choices.pick((b"", b"a", b"b")),
        )  # fmt: skip
    return offer(
        namespace, tokens, extra=choices.below(9), checkpoint=checkpoint,
        attachments=choices.one_in(4) and checkpoint is not None,
        minimum=choices.pick((0, 0, 0, 6)), label=choices.pick(_LABELS),
    )  # fmt: skip


def _lying_offer(choices: Choices, peer: Peer) -> m.Offer:
    """One whose schema, rows or checkpoint say other things than each other, or are enormous."""
    offer = good_offer(choices, peer)
    changes: dict[str, Any] = {}
    if choices.one_in(2):
        plain: Any = msgspec.msgpack.decode(offer.schema)
        for _ in range(choices.below(3) + 1):
            plain = choices.changed(plain)
        changes["schema"] = packed(plain)[: limits.MAX_SCHEMA_BYTES]
    if choices.one_in(2):
        spec: Any = msgspec.to_builtins(
            offer.checkpoint or ImageSpec(ImageKind.CHECKPOINT, 9, 9), builtin_types=(bytes,)
        )
        for _ in range(choices.below(3) + 1):
            spec = choices.changed(spec)
        changes["checkpoint"] = _converted(spec, ImageSpec)
    if choices.one_in(2):
        rows = [[choices.below(50), choices.integer() % (1 << 40)] for _ in range(choices.below(4))]
        made = _converted({"ranges": rows}, WindowRows)
        changes["windows"] = (made,) * choices.below(3) if made is not None else ()
    return msgspec.structs.replace(offer, **changes)


def _converted(plain: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(plain, kind, builtin_types=(bytes,))
    except msgspec.ValidationError:
        return None


def _offer_object(choices: Choices, peer: Peer) -> m.OfferObject:
    shape = choices.pick(((3, 5), (0,), (70_000,), (1 << 40, 1 << 40), ()))
    spec = ImageSpec(
        choices.pick((ImageKind.OBJECT, ImageKind.SEGMENT, ImageKind.CHECKPOINT)),
        tensors=(StateTensor("o", choices.pick(("U8", "F32", "X")), shape),),
        metadata=choices.blob(4),
    )
    return m.OfferObject(choices.pick(peer.names), choices.pick(_KEYS), spec)
