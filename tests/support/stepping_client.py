"""A client process that stops at a named step of one call, says so, and waits.

    python -m tests.support.stepping_client SOCKET ORDER

ORDER is an `Order` as JSON. At each of its stops the process says "at"; it then waits for a line,
except where a request is "sent": there it waits for the daemon. It says "done" with what became of
the call, whose bytes it checks, and then answers "again" by reusing what everybody knows, until it
hears "end". The client is the real one; only its wire says what it is doing.
"""

import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from prefixcached.client import Cache
from prefixcached.client.wire import Wire
from prefixcached.protocol.framing import tag_of
from prefixcached.protocol.messages import AnyRequest, OneWay, Reply
from tests.support import derived_numpy
from tests.support.numpy_kv import NumpyAdapter
from tests.support.talking_process import TalkingProcess, heard, say

NAMESPACE: Final = "matrix"
HELD: Final = derived_numpy.tokens(400, seed=1)
"""What everybody knows: stored and flushed before the client starts."""
NEW: Final = derived_numpy.tokens(500, seed=2)
"""What the client puts, or asks for in vain; long enough for a claim."""
SHORT: Final = derived_numpy.tokens(100, seed=3)
"""A miss that leaves too little to compute for a claim."""
PIECE_TOKENS: Final = 260
"""A put of so many more is not absorbed by the next one: segment_min_tokens is 256."""
LONG: Final = derived_numpy.tokens(len(HELD) + 16 * PIECE_TOKENS, seed=1)
"""Goes on where `HELD` ends. In pieces it is one more image than a frame has descriptors for."""
LAST: Final = 7
"""Token behind a prompt, so that all of it may hit (rule T3)."""
OBJECT: Final = "picture"
RECOVERY_SECONDS: Final = 30.0
"""For a client to reach a daemon that is back: its longest pause is 5 s."""
PAUSE_SECONDS: Final = 0.02
"""Between two attempts."""


class Order(msgspec.Struct, frozen=True):
    """What the process does: ``call`` with this ``timeout`` and ``wait``, and where it stops."""

    call: str
    stops: tuple[str, ...]
    timeout: float
    wait: float = 0.0


class SteppingWire(Wire):
    """A wire that stops before a message, when half of it or all of it is sent, and after."""

    def __init__(self, path: Path, stops: list[str]) -> None:
        super().__init__(path)
        self._stops = stops

    def request(self, message: AnyRequest, deadline: float) -> tuple[Reply, list[int]]:
        self._reach(f"before {tag_of(type(message))}")
        answer = super().request(message, deadline)
        self._reach(f"after {tag_of(type(message))}")
        return answer

    def tell(self, message: OneWay) -> None:
        self._reach(f"before {tag_of(type(message))}")
        super().tell(message)

    def _send(self, message: AnyRequest, deadline: float) -> None:
        tag = tag_of(type(message))
        if self._stops[:1] != [f"half {tag}"]:
            super()._send(message, deadline)
            self._reach(f"sent {tag}", waits=False)
            return
        data = self._encode(message)
        self._socket.sendall(data[: len(data) // 2])
        self._reach(f"half {tag}")
        try:
            self._socket.settimeout(self._check_time(deadline))
            self._socket.sendall(data[len(data) // 2 :])
        except OSError as error:
            self._fail(self._explain(error, "sending"), error)

    def _reach(self, step: str, *, waits: bool = True) -> None:
        """Stop here if this is the next stop."""
        if self._stops[:1] == [step]:
            self._stops.pop(0)
            say(event="at", step=step)
            if waits:
                heard()


def call(cache: Cache, order: Order) -> dict[str, Any]:
    """Carry the order out and return what became of it; AssertionError if bytes are wrong."""
    match order.call:
        case "take":
            return checked_take(cache, HELD)
        case "take-new":
            return checked_take(cache, NEW, order.wait)
        case "take-long":
            return checked_take(cache, LONG)
        case "take-short":
            return checked_take(cache, SHORT)
        case "put":
            put = cache.put(NEW, derived_numpy.caches(NEW), namespace=NAMESPACE)
            return {"good": bool(put), "reason": getattr(put, "reason", "")}
        case "prefetch":
            with cache.prefetch([*HELD, LAST], namespace=NAMESPACE) as pin:
                return {"good": pin.length > 0, "reason": pin.reason}
        case "put-object":
            features = derived_numpy.features(OBJECT)
            stored = cache.put_object(OBJECT, features, namespace=NAMESPACE)
            return {"good": bool(stored), "reason": getattr(stored, "reason", "")}
        case "take-object":
            found = cache.take_object(OBJECT, namespace=NAMESPACE)
            if not found:
                return {"good": False, "reason": found.reason}
            wanted = derived_numpy.features(OBJECT)["features"]
            assert found.tensors["features"].tobytes() == wanted.tobytes()
            return {"good": True, "reason": ""}
        case "flush":
            flushed = cache.flush()
            return {"good": flushed.complete and not flushed.failed, "reason": flushed.reason}
        case "clear":
            cleared = cache.clear(NAMESPACE)
            return {"good": not cleared.reason, "reason": cleared.reason}
        case "status":
            return {"good": bool(cache.stats()), "reason": ""}
        case _:
            raise ValueError(f"there is no call {order.call}")


def checked_take(cache: Cache, prompt: list[int], wait: float = 0.0) -> dict[str, Any]:
    """Take what is known of ``prompt`` and check every byte."""
    found = cache.take([*prompt, LAST], namespace=NAMESPACE, wait=wait)
    if not found:
        return {"good": False, "reason": found.reason}
    derived_numpy.assert_derived(found.kv, prompt[: found.length])
    return {"good": True, "reason": "", "length": found.length}


def main(socket: str, encoded: str) -> None:
    """The process."""
    order = msgspec.json.decode(encoded, type=Order)
    stops = list(order.stops)
    cache = Cache(Path(socket), timeout=order.timeout, adapter=NumpyAdapter())
    cache._pool._make = lambda path: SteppingWire(path, stops)
    with cache:
        say(event="ready")
        heard()
        began = time.monotonic()
        outcome = call(cache, order)
        say(event="done", seconds=time.monotonic() - began, **outcome)
        while heard() == "again":
            deadline = time.monotonic() + RECOVERY_SECONDS
            while not (outcome := checked_take(cache, HELD))["good"]:
                assert time.monotonic() < deadline, outcome
                time.sleep(PAUSE_SECONDS)
            say(event="recovered")


class SteppingClient(TalkingProcess):
    """Such a process, seen from its parent."""

    def __init__(self, socket: Path, order: Order) -> None:
        super().__init__(__name__, str(socket), msgspec.json.encode(order).decode())

    def at(self, step: str) -> None:
        """Wait until it is at ``step``."""
        said = self.expect("at")
        assert said["step"] == step, said


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
