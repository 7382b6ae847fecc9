"""The same KV through LMCache's multiprocess mode: a server of its own, KV of torch on the CPU.

`LMCACHE_PYTHON` names the interpreter of an environment that has LMCache: it wants torch and pins
that differ from ours. Its server keeps a pool in shared memory, filled before the first measured
round. `lmcache_peer` says which of its paths are measured.

What the calls include. Theirs: for a retrieve the look-up, the wait for it, and the copy from the
pool into the worker's KV blocks, whose pages are warm, or into a fresh tensor (*contiguous*); for
a store the copy from there into the pool. Ending the request is outside the clock. Ours: the put
of mlx-lm's caches, and the take with the copy into fresh mlx arrays and one token appended to
each layer. Look-ups, chunk hashes and token ids are within the calls on both sides. Before each
put and store both servers forget all; LMCache's pool keeps its pages, our images are new files.
"""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import kv
from benchmarks.daemons import daemon
from benchmarks.harness import (
    ROOT,
    Case,
    Row,
    Worker,
    faster_than,
    interleave,
    scratch,
    size,
    workers,
)  # fmt: skip
from prefixcached.client import connect

NAME: Final = "against_lmcache"
PUT, TAKE = "put", "take"
PATHS: Final = ("blocks", "contiguous")
TESTED: Final = "0.5.6"
START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 60.0
POOL_GIB: Final = 2
"""Holds the prompts of its workers, 0.7 GiB, below the watermark at which it evicts."""
ENVIRONMENT: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    # Its copies run on all cores. Threads that spin at the end of each would take the cores
    # from whatever else runs, and made its copies many times slower on a loaded machine.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class Unavailable(Exception):  # noqa: N818, not a failure
    """LMCache is not there to be measured."""


def run(quick: bool) -> list[Row]:
    """Measure."""
    # Whole chunks of LMCache, which are 256 tokens by default.
    tokens, rounds = (512, 5) if quick else (2_048, 11)
    shape = kv.LLAMA_3B
    try:
        python, version = _interpreter()
    except Unavailable as error:
        print(f"  left out: {error}")
        return []
    nbytes = kv.kv_bytes(shape, tokens)
    about = {"bytes": nbytes, "tokens": tokens, "shape": shape.name, "lmcache": version}
    rows = []
    with scratch() as place, _server(python, place) as url, daemon(place) as served:
        ours = {"tokens": tokens, "socket": str(served.socket)}
        theirs = {
            "tokens": tokens, "url": url, "layers": shape.layers, "heads": shape.heads,
            "dim": shape.dim, "prompt": kv.random_tokens(tokens, 1),
        }  # fmt: skip
        for our_role, operation in ((PUT, "store"), (TAKE, "retrieve")):
            with contextlib.ExitStack() as stack:
                sides = stack.enter_context(workers(NAME, (our_role,), ours))
                for path in PATHS:
                    sides.append(_Peer(python, f"{path} {operation}", theirs))
                    stack.callback(sides[-1].close)
                seconds = interleave(sides, rounds)
            for path in PATHS:
                peer = f"{operation}, {path}"
                pair = {our_role: seconds[our_role], peer: seconds[f"{path} {operation}"]}
                name = f"{our_role} against LMCache, {path}, {size(nbytes)}"
                rows.append(faster_than(NAME, name, pair, our_role, peer, None, **about))
    return rows


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Case]:
    """Give our side."""
    tokens, shape = options["tokens"], kv.LLAMA_3B
    original = kv.random_kv(shape, tokens)
    prompt = kv.random_tokens(tokens, 1)
    numbers = itertools.count()
    namespace = ""

    def check(caches: Any) -> None:
        kv.require_equal(caches, original, tokens)

    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:

        def fresh() -> None:
            nonlocal namespace
            cache.clear()
            namespace = f"lmcache {next(numbers)}"

        def put() -> None:
            cache.put(prompt, original, namespace=namespace)

        def take() -> Any:
            return kv.taken(cache.take([*prompt, 7], namespace=namespace)).kv

        def ready() -> Any:
            caches = take()
            kv.append_one(caches, shape)
            return caches

        if role == PUT:
            yield Case(role, put, fresh, lambda _: check(take()))
        else:
            fresh()
            put()
            yield Case(role, ready, check=check)


class _Peer(Worker):
    """A `Worker` that runs a role of `lmcache_peer` by LMCache's interpreter."""

    def __init__(self, python: str, role: str, options: Mapping[str, Any]) -> None:
        self.name = role
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", "lmcache_peer", role, json.dumps(dict(options))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        self._answer()


def _interpreter() -> tuple[str, str]:
    """Return LMCache's interpreter and its version.

    Raises:
        Unavailable: `LMCACHE_PYTHON` is not set, or has no LMCache that can be imported.
    """
    python = os.environ.get("LMCACHE_PYTHON")
    if not python:
        raise Unavailable(
            f"LMCACHE_PYTHON does not name an interpreter that has LMCache {TESTED} and torch "
            "(benchmarks/README.md says how to make one)"
        )
    ask = (
        "import importlib.metadata, lmcache.v1.multiprocess.server;"
        "print(importlib.metadata.version('lmcache'))"
    )
    try:
        done = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=False, cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"LMCACHE_PYTHON={python}: {error.strerror}") from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise Unavailable(f"LMCACHE_PYTHON={python} cannot import LMCache: {last}")
    return python, done.stdout.split()[-1]


@contextlib.contextmanager
def _server(python: str, directory: Path) -> Iterator[str]:
    """Run LMCache's server on the loopback; give its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pool = f"prefixcached_bench_{os.getpid()}"
    log_path = directory / "lmcache.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [
                python, "-m", "lmcache.v1.multiprocess.server",
                "--host", "127.0.0.1", "--port", str(port),
                "--supported-transfer-mode", "engine_driven", "--shm-name", pool,
                "--no-l1-use-lazy", "--l1-size-gb", str(POOL_GIB), "--eviction-policy", "LRU",
                "--disable-observability",
            ],
            stdout=log, stderr=log, cwd=directory, env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"LMCache did not start: {log_path.read_text()[-2000:]}")
            time.sleep(0.05)
        yield f"tcp://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Its name is ours, and it outlives a server that had to be killed.
        Path("/dev/shm", f"lmcache_l1_pool_{pool}").unlink(missing_ok=True)
