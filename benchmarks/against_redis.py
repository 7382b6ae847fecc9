"""The same KV through Redis over a Unix socket: MSET, and MGET plus building the arrays.

One value a tensor, in one command, parsed by hiredis where it is installed: what a careful user of
Redis would do. Redis keeps nothing on disk here.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from benchmarks import kv
from benchmarks.daemons import daemon, redis_server
from benchmarks.harness import Case, Goal, Row, faster_than, interleave, scratch, size, workers
from prefixcached.client import connect

NAME = "against_redis"
PUT, SET, TAKE, GET = "put", "MSET", "take", "MGET and arrays"


def run(quick: bool) -> list[Row]:
    """Measure."""
    tokens, rounds = (600, 5) if quick else (2_000, 11)
    shape = kv.LLAMA_3B
    nbytes = kv.kv_bytes(shape, tokens)
    about = {"bytes": nbytes, "tokens": tokens, "shape": shape.name}
    label = size(nbytes)
    with scratch() as place:
        try:
            server = redis_server(place)
            redis_socket, _ = server.__enter__()
        except FileNotFoundError as error:
            print(f"  left out: {error}")
            return []
        try:
            with daemon(place) as served:
                options = {
                    "tokens": tokens, "socket": str(served.socket), "redis": str(redis_socket),
                }  # fmt: skip
                with workers(NAME, (PUT, SET), options) as pair:
                    puts = interleave(pair, rounds)
                with workers(NAME, (TAKE, GET), options) as pair:
                    takes = interleave(pair, rounds)
        finally:
            server.__exit__(None, None, None)
    return [
        faster_than(NAME, f"put against Redis, {label}", puts, PUT, SET, Goal(2.0), **about),
        faster_than(NAME, f"take against Redis, {label}", takes, TAKE, GET, Goal(3.0), **about),
    ]


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Case]:
    """Give one side; each holds the KV it moves."""
    tokens, shape = options["tokens"], kv.LLAMA_3B
    original = kv.random_kv(shape, tokens)
    prompt = kv.random_tokens(tokens, 1)

    def check(caches: Any) -> None:
        kv.require_equal(caches, original, tokens)

    if role in (SET, GET):
        import redis  # type: ignore[import-not-found, unused-ignore]

        client = redis.Redis(unix_socket_path=options["redis"])
        if role == SET:
            yield Case(
                role, lambda: _set(client, original), lambda: _forget(client),
                lambda _: check(_get(client, shape, tokens)),
            )  # fmt: skip
        else:
            _set(client, original)

            def get() -> Any:
                caches = _get(client, shape, tokens)
                kv.append_one(caches, shape)
                return caches

            yield Case(role, get, check=check)
        client.close()
        return
    numbers = itertools.count()
    namespace = ""
    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:

        def fresh() -> None:
            nonlocal namespace
            cache.clear()
            namespace = f"redis {next(numbers)}"

        def take() -> Any:
            return kv.taken(cache.take([*prompt, 7], namespace=namespace)).kv

        if role == PUT:
            yield Case(
                role, lambda: cache.put(prompt, original, namespace=namespace), fresh,
                lambda _: check(take()),
            )  # fmt: skip
        else:
            fresh()
            cache.put(prompt, original, namespace=namespace)

            def ready() -> Any:
                caches = take()
                kv.append_one(caches, shape)
                return caches

            yield Case(role, ready, check=check)


def _forget(client: Any) -> None:
    client.flushall()


def _set(client: Any, caches: list[KVCache]) -> None:
    values = {}
    for index, cache in enumerate(caches):
        for name, array in (("k", cache.keys), ("v", cache.values)):
            values[f"{index}.{name}"] = np.array(array.view(mx.uint16), copy=False).tobytes()
    client.mset(values)


def _get(client: Any, shape: kv.Shape, tokens: int) -> list[KVCache]:
    names = [f"{index}.{part}" for index in range(shape.layers) for part in "kv"]
    values = client.mget(names)
    arrays = []
    for value in values:
        flat = np.frombuffer(value, np.uint16).reshape(1, shape.heads, -1, shape.dim)
        arrays.append(mx.array(flat).view(shape.dtype))
    mx.eval(arrays)
    caches = []
    for index in range(shape.layers):
        cache = KVCache()
        cache.keys, cache.values = arrays[2 * index : 2 * index + 2]
        cache.offset = tokens
        caches.append(cache)
    return caches
