"""Several clients in one process that do what comes to their minds, for ever, and check every byte.

    python -m tests.support.soak_worker SOCKET SEED

Every prompt, and so every byte of KV, follows from a few numbers: whoever finds something knows
what it must be. The process says "progress" every second with what its clients did in it; a wrong
byte or an exception ends it with status 1. It ends when its parent says so or is gone.
"""

import random
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, Final, NamedTuple

from prefixcached.client import Cache
from prefixcached.client.errors import PrefixCachedError
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages
from prefixcached.protocol.schema import encode_schema
from prefixcached.protocol.tokens import pack_tokens, token_array
from tests.support import derived_numpy
from tests.support.numpy_kv import NumpyAdapter
from tests.support.talking_process import TalkingProcess, heard, say

CLIENTS: Final = 4
"""Threads of a process."""
TIMEOUT_SECONDS: Final = 2.0
LAYERS: Final = 8
"""512 bytes for each token."""
FAMILIES: Final = 12
"""Long prompts that everybody knows the beginnings of."""
BRANCHES: Final = 6
LONGEST_TOKENS: Final = 2500
OBJECTS: Final = 20
PAUSE_SECONDS: Final = 0.02
"""Most that a client does nothing between two calls: 16 of them leave a core to the daemon."""


class Model(NamedTuple):
    """A namespace and what its KV is like."""

    namespace: str
    salt: int
    state: bool


MODELS: Final = (
    Model("soak/plain", 1, state=False),
    Model("soak/other", 2, state=False),
    Model("soak/hybrid", 3, state=True),
)


class Client:
    """One thread. ``cache`` is its process's."""

    def __init__(self, cache: Cache, socket: Path, seed: int) -> None:
        self._cache = cache
        self._socket = socket
        self._choose = random.Random(seed)
        self._pins: deque[Any] = deque(maxlen=3)
        self.counts: Counter[str] = Counter()

    def act(self) -> None:
        """Make one call, or a few that belong together."""
        actions = (self._turn, self._take, self._put, self._object, self._prefetch, self._ask,
                   self._leave, self._keep_house)  # fmt: skip
        (action,) = self._choose.choices(actions, (30, 30, 15, 10, 5, 5, 4, 1))
        action()
        self.counts["calls"] += 1

    # -- what there is ----------------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        """A beginning of a family, half of the time with a tail of its own."""
        family = int(FAMILIES * self._choose.random() ** 2)  # the first ones are popular
        length = self._choose.randrange(20, LONGEST_TOKENS)
        prompt = derived_numpy.tokens(length, seed=family)
        if self._choose.random() < 0.5:
            branch = self._choose.randrange(BRANCHES)
            tail = self._choose.randrange(1, 600)
            prompt = prompt[: length // 100 * 100] + derived_numpy.tokens(tail, 1000 + branch)
        return prompt

    def _caches(self, model: Model, prompt: list[int]) -> list[Any]:
        return derived_numpy.caches(prompt, salt=model.salt, layers=LAYERS, state=model.state)

    # -- what it does -----------------------------------------------------------------------------

    def _turn(self) -> None:
        """As an agent: take, compute the rest, put."""
        model, prompt = self._choose.choice(MODELS), self._prompt()
        wait = self._choose.choice((0.0, 0.0, 0.3))
        found = self._cache.take(
            [*prompt, 1], namespace=model.namespace, wait=wait, session=self._label()
        )
        self._check(found, model, prompt)
        if self._choose.random() < 0.9:
            self._store(model, prompt)
        found.drop_claim()

    def _take(self) -> None:
        model, prompt = self._choose.choice(MODELS), self._prompt()
        found = self._cache.take([*prompt, 1], namespace=model.namespace)
        found.drop_claim()
        self._check(found, model, prompt)

    def _put(self) -> None:
        self._store(self._choose.choice(MODELS), self._prompt())

    def _store(self, model: Model, prompt: list[int]) -> None:
        minimum = self._choose.choice((0, 0, 0, len(prompt) // 2))
        result = self._cache.put(
            prompt, self._caches(model, prompt), namespace=model.namespace,
            session=self._label(), minimum_length=minimum,
        )  # fmt: skip
        self.counts["stored" if result else f"declined {getattr(result, 'reason', '')}"] += 1

    def _object(self) -> None:
        key = f"object {self._choose.randrange(OBJECTS)}"
        wanted = derived_numpy.features(key * 50)
        if self._choose.random() < 0.4:
            self._cache.put_object(key, wanted, namespace="soak/plain")
        found = self._cache.take_object(key, namespace="soak/plain")
        if found:
            assert found.tensors["features"].tobytes() == wanted["features"].tobytes()
            self.counts["bytes"] += wanted["features"].nbytes
            self.counts["objects"] += 1

    def _prefetch(self) -> None:
        """Pins are held for a while: the oldest goes when a fourth comes."""
        model, prompt = self._choose.choice(MODELS), self._prompt()
        if len(self._pins) == self._pins.maxlen:
            self._pins.popleft().release()
        self._pins.append(self._cache.prefetch([*prompt, 1], namespace=model.namespace))

    def _ask(self) -> None:
        model, prompt = self._choose.choice(MODELS), self._prompt()
        length = self._cache.peek([*prompt, 1], namespace=model.namespace)
        assert 0 <= length <= len(prompt)
        self._cache.contains(prompt, namespace=model.namespace)

    def _leave(self) -> None:
        """Go away in the middle of a put, or with a lease, over a connection of one's own."""
        model, prompt = self._choose.choice(MODELS), self._prompt()
        wire = Wire(self._socket)
        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            wire.open(deadline)
            if self._choose.random() < 0.5:
                kv = self._caches(model, prompt)
                with NumpyAdapter().snapshot(kv, token_array(prompt)) as snapshot:
                    request: messages.AnyRequest = messages.Offer(
                        model.namespace, pack_tokens(prompt), encode_schema(snapshot.schema),
                        checkpoint=snapshot.checkpoint,
                    )  # fmt: skip
            else:
                request = messages.Take(model.namespace, pack_tokens([*prompt, 1]))
            wire.request(request, deadline)
        except PrefixCachedError:
            self.counts["failed"] += 1
        finally:
            wire.close()

    def _keep_house(self) -> None:
        match self._choose.randrange(4):
            case 0:
                self._cache.clear(self._choose.choice(MODELS).namespace)
            case 1:
                self._cache.flush(timeout=TIMEOUT_SECONDS)
            case 2:
                self._cache.close_session(self._label() or "nobody")
            case _:
                self._cache.stats()

    def _label(self) -> str | None:
        return self._choose.choice((None, f"session {self._choose.randrange(8)}"))

    def _check(self, found: Any, model: Model, prompt: list[int]) -> None:
        if not found:
            self.counts[f"miss {found.reason}"] += 1
            return
        assert found.length <= len(prompt)
        derived_numpy.assert_derived(
            found.kv, prompt[: found.length], salt=model.salt, layers=LAYERS, state=model.state
        )
        self.counts[f"hit {found.tier}"] += 1
        self.counts["bytes"] += sum(array.nbytes for cache in found.kv for array in cache.values())


def main(socket: Path, seed: int) -> int:
    """The process."""
    stop = threading.Event()
    failures: list[str] = []

    def run(client: Client) -> None:
        pace = random.Random(seed)
        try:
            while not stop.wait(pace.uniform(0.0, PAUSE_SECONDS)):
                client.act()
        except BaseException as error:  # noqa: BLE001, the parent must know
            failures.append(repr(error))
            stop.set()

    def listen() -> None:
        heard()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    with Cache(socket, timeout=TIMEOUT_SECONDS, adapter=NumpyAdapter()) as cache:
        clients = [Client(cache, socket, seed * 100 + number) for number in range(CLIENTS)]
        threads = [threading.Thread(target=run, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        is_over = False
        while not is_over:
            is_over = stop.wait(1.0)
            counts: Counter[str] = Counter()
            for client in clients:
                done, client.counts = client.counts, Counter()
                counts += done
            say(event="progress", counts=counts)
        for thread in threads:
            thread.join()
    if failures:
        say(event="failed", failures=failures)
    return 1 if failures else 0


class SoakWorker(TalkingProcess):
    """Such a process, seen from its parent."""

    def __init__(self, socket: Path, seed: int) -> None:
        super().__init__(__name__, str(socket), str(seed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
