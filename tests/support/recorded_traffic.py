"""Traffic for a trace: three clients at once, with everything that clients do to a cache."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from prefixcached.client import Cache, Hit
from tests.support.numpy_kv import NumpyAdapter, make_caches

SYSTEM = list(range(1000, 1400))
"""What all prompts of the plain namespace begin with."""

CLIENTS = 3


def make_traffic(socket: Path, rounds: int = 12) -> None:
    """Let the clients talk to a daemon at the same time."""
    with ThreadPoolExecutor(CLIENTS) as threads:
        for client in [threads.submit(_client, socket, n, rounds) for n in range(CLIENTS)]:
            client.result()


def _client(socket: Path, number: int, rounds: int) -> None:
    source = random.Random(number)
    label = f"conversation {number}"
    history = [*SYSTEM, *_some(source, 40)]
    with Cache(socket, timeout=30, fail_open=False, adapter=NumpyAdapter()) as cache:
        for turn in range(rounds):
            history += _some(source, 60)
            _answer(cache, history, "plain", session=label)
            # Prompts that all clients know, of a model with recurrent state.
            shared = [*range(300 + 100 * (turn % 4)), 7, turn % 3]
            _answer(cache, shared, "hybrid", state=True, wait=2.0)
            key = f"picture {source.randrange(4)}"
            if not cache.take_object(key, namespace="plain"):
                cache.put_object(key, {"x": np.arange(500 + turn)}, {"of": key}, namespace="plain")
            cache.put(_some(source, 100), make_caches(range(100)), namespace="scratch")
            if turn % 5 == 4 and number == 0:
                cache.clear(namespace="scratch")
            if turn % 5 == 3:
                with cache.prefetch([*history, 1], namespace="plain", session=label):
                    cache.peek(history, namespace="plain")
            if turn == rounds // 2:
                cache.close_session(label)
                history = [*SYSTEM, *_some(source, 40)]


def _answer(
    cache: Cache,
    prompt: list[int],
    namespace: str,
    *,
    state: bool = False,
    session: str | None = None,
    wait: float = 0.0,
) -> None:
    """Take what there is, compute the rest, put it."""
    found = cache.take([*prompt, 1], namespace=namespace, session=session, wait=wait)
    if isinstance(found, Hit) and found.length == len(prompt):
        return
    cache.put(prompt, make_caches(prompt, state=state), namespace=namespace, session=session)


def _some(source: random.Random, count: int) -> list[int]:
    return [source.randrange(1 << 20) for _ in range(count)]
