"""The rows of the fault matrix: every step of the protocol at which somebody may die."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from prefixcached.client import Cache
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages
from prefixcached.protocol.schema import encode_schema
from prefixcached.protocol.tokens import pack_tokens, token_array
from tests.support import derived_numpy
from tests.support.daemon_process import DaemonProcess
from tests.support.numpy_kv import NumpyAdapter
from tests.support.stepping_client import HELD, LAST, LONG, NAMESPACE, NEW, OBJECT, PIECE_TOKENS
from tests.support.until import wait_until_loaded

UNFLUSHED: Final = derived_numpy.tokens(350, seed=4)


class Visible(Enum):
    """Whether what the client puts may be found once it was killed at a step."""

    NO = "nothing is findable before commit (P4)"
    YES = "what was answered `stored` stays"
    EITHER = "the daemon may have got the commit or not"


@dataclass(frozen=True)
class Step:
    """One row.

    Attributes:
        name: What the page says.
        call: What the client does (`stepping_client.call`).
        stops: Where it stops; the fault strikes at the last.
        holds: RamTier's statistics while it is there.
        is_frozen: The daemon is frozen after the first stop, so that the request is sent and
            nobody has read it when the fault strikes.
        visible: What may be found of the put.
        prepare: What there is before, beside `HELD` in both tiers.
        peer: Another client, for the time of the cell.
    """

    name: str
    call: str
    stops: tuple[str, ...]
    holds: Mapping[str, int] = field(default_factory=dict)
    is_frozen: bool = False
    visible: Visible = Visible.NO
    prepare: Callable[[DaemonProcess, Cache], None] = lambda _daemon, _cache: None
    peer: Callable[[DaemonProcess], AbstractContextManager[None]] = lambda _: (
        contextlib.nullcontext()
    )

    @property
    def messages(self) -> set[str]:
        """Tags of the messages at which the client stops."""
        return {stop.split()[1] for stop in self.stops}


def put(cache: Cache, prompt: list[int]) -> None:
    """Store the KV of a prompt."""
    assert cache.put(prompt, derived_numpy.caches(prompt), namespace=NAMESPACE)


def _put_object(_daemon: DaemonProcess, cache: Cache) -> None:
    features = derived_numpy.features(OBJECT)
    assert cache.put_object(OBJECT, features, namespace=NAMESPACE)


def _put_without_flush(_daemon: DaemonProcess, cache: Cache) -> None:
    put(cache, UNFLUSHED)


def _restart(daemon: DaemonProcess, cache: Cache) -> None:
    """What there is, is on SSD alone then."""
    daemon.terminate()
    daemon.start()
    wait_until_loaded(cache)


def _put_in_pieces(_daemon: DaemonProcess, cache: Cache) -> None:
    for length in range(len(HELD), len(LONG) + 1, PIECE_TOKENS):
        put(cache, LONG[:length])


@contextlib.contextmanager
def _other_claims(daemon: DaemonProcess) -> Iterator[None]:
    """Another client is computing what the client asks for."""
    with Cache(daemon.socket, adapter=NumpyAdapter(), timeout=30.0) as other:
        miss = other.take([*NEW, LAST], namespace=NAMESPACE)
        assert not miss
        assert miss.claim is not None
        yield


@contextlib.contextmanager
def _other_puts(daemon: DaemonProcess) -> Iterator[None]:
    """Another client was granted what the client puts, and commits it never."""
    wire = Wire(daemon.socket)
    try:
        deadline = time.monotonic() + 30
        wire.open(deadline)
        kv = derived_numpy.caches(NEW)
        with NumpyAdapter().snapshot(kv, token_array(NEW)) as snapshot:
            schema = encode_schema(snapshot.schema)
        offer = messages.Offer(NAMESPACE, pack_tokens(NEW), schema)
        reply, _ = wire.request(offer, deadline)
        assert isinstance(reply, messages.Grant)
        yield
    finally:
        wire.close()


def _sent(name: str, call: str, tag: str, **more: object) -> Step:
    stops = (f"before {tag}", f"sent {tag}")
    return Step(name, call, stops, is_frozen=True, **more)  # type: ignore[arg-type]


STEPS: Final = (
    Step("connected, nothing said", "take", ("before hello",)),
    _sent("hello sent", "take", "hello"),
    Step("greeted, nothing asked", "take", ("after hello",)),
    Step("half of a request sent", "take", ("half take",)),
    _sent("take sent", "take", "take"),
    Step("take missed, too short for a claim", "take-short", ("after take",)),
    Step("take missed, claim held", "take-new", ("after take",), {"claims": 1}),
    Step(
        "take waiting for another's claim", "take-new", ("sent take",), {"takes_waiting": 1},
        peer=_other_claims,
    ),
    Step("hit lent from RAM, nothing copied", "take", ("after take",), {"leases": 1}),
    Step(
        "hit lent from SSD, nothing copied", "take", ("after take",), {"leases": 1},
        prepare=_restart,
    ),
    Step(
        "17 images lent, the last not fetched", "take-long", ("before fetch",), {"leases": 1},
        prepare=_put_in_pieces,
    ),
    Step("hit copied, not released", "take", ("before release",), {"leases": 1}),
    _sent("prefetch sent", "prefetch", "prefetch"),
    Step("pin held", "prefetch", ("before unpin",), {"pins": 1}),
    _sent("offer sent", "put", "offer"),
    Step(
        "offer waiting for another's put", "put", ("sent offer",), {"offers_waiting": 1},
        peer=_other_puts,
    ),
    Step("put granted, nothing written", "put", ("after offer",), {"puts_in_flight": 1}),
    Step("images written, not committed", "put", ("before commit",), {"puts_in_flight": 1}),
    _sent("commit sent", "put", "commit", visible=Visible.EITHER),
    Step("stored, being written to SSD", "put", ("after commit",), visible=Visible.YES),
    Step("object granted, nothing written", "put-object", ("after offer-object",),
         {"puts_in_flight": 1}),
    Step(
        "object lent, nothing copied", "take-object", ("after take-object",), {"leases": 1},
        prepare=_put_object,
    ),
    _sent("flush sent", "flush", "flush", prepare=_put_without_flush),
    _sent("clear sent", "clear", "clear"),
    _sent("status sent", "status", "status"),
)  # fmt: skip

UNLISTED: Final = {
    "abandon": "one-way; as the end of a connection with a put in flight",
    "drop-claim": "one-way; before it the claim is held",
    "peek": "a question: nothing is held for it",
    "contains": "a question",
    "list": "a question",
    "explain": "a question",
    "activity": "a question",
    "latency": "a question",
    "history": "a question",
    "close-label": "drops what is no holding",
}
"""Messages of a client at which no row stops, and why."""
