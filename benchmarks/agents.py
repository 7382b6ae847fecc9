"""Twenty agents that share a system prompt: bytes held against the bytes of distinct tokens.

Once one after the other, once all at the same moment. Each agent is a process that takes, computes
what it lacks (here: makes up KV that depends on the position alone) and puts. The second run also
counts the tokens that all of them had to compute, and a third starts eight processes on one and the
same prompt.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.daemons import Daemon, daemon
from benchmarks.harness import Goal, Row, require, scratch, size, workers
from prefixcached.client import connect

NAME = "agents"
SHAPE = {"layers": 8, "heads": 2, "dim": 64}
WAIT_SECONDS = 120.0


def run(quick: bool) -> list[Row]:
    """Measure."""
    agents, shared, own, same = (2, 2_000, 500, 2) if quick else (20, 8_000, 1_000, 8)
    rows = []
    for at_once in (True,) if quick else (False, True):
        with scratch() as place, daemon(place, ssd="4GiB") as served:
            told = _run_agents(served, agents, shared, own, at_once=at_once)
            rows += _bytes_rows(served, told, agents, shared, own, at_once=at_once)
    with scratch() as place, daemon(place) as served:
        told = _run_agents(served, same, shared, 0, at_once=True)
        total = sum(one["computed"] for one in told)
        rows.append(
            Row(
                NAME, f"{same} processes on one cold prompt: tokens computed", total / shared,
                goal=Goal(1.0 + same / shared, "at most"), ours=f"{total:,}", peer=f"{shared:,}",
                peer_name="prompt", details={"each": [one["computed"] for one in told]},
            )
        )  # fmt: skip
    return rows


def _run_agents(
    served: Daemon, agents: int, shared: int, own: int, *, at_once: bool
) -> list[dict[str, Any]]:
    options = {"socket": str(served.socket), "shared": shared, "own": own, "wait": at_once}
    with workers(NAME, [str(number) for number in range(agents)], options) as running:
        if not at_once:
            return [worker.ask() for worker in running]
        for worker in running:
            worker.begin()
        return [worker.end() for worker in running]


def _bytes_rows(
    served: Daemon, told: list[dict[str, Any]], agents: int, shared: int, own: int, *,
    at_once: bool,
) -> list[Row]:  # fmt: skip
    token_bytes = 2 * 2 * SHAPE["layers"] * SHAPE["heads"] * SHAPE["dim"]
    distinct = shared + agents * own
    with served.connect() as cache:
        flushed = cache.flush()
        require(bool(flushed), f"{flushed}")
        ram = cache.stats()["ram_tier"]["ram_bytes"]
    ssd = sum(path.stat().st_blocks * 512 for path in served.files())
    when = "at once" if at_once else "in turn"
    goal, computed = Goal(1.05, "at most"), sum(one["computed"] for one in told)
    return [
        Row(
            NAME, f"{agents} agents {when}: bytes in {where}", held / (distinct * token_bytes),
            goal=goal, ours=size(held), peer=size(distinct * token_bytes),
            peer_name="distinct tokens", details={"computed": computed, "distinct": distinct},
        )
        for where, held in (("RAM", ram), ("SSD files", ssd))
    ] + [
        Row(
            NAME, f"{agents} agents {when}: tokens computed", computed / distinct,
            goal=Goal(1.0 + 2 * agents / distinct, "at most"), ours=f"{computed:,}",
            peer=f"{distinct:,}", peer_name="distinct tokens",
        )
    ]  # fmt: skip


class Agent:
    """One process: take, compute the rest, put."""

    def __init__(self, number: int, cache: Any, options: Mapping[str, Any]) -> None:
        import mlx.core as mx

        from benchmarks import kv

        self._cache = cache
        self._wait = WAIT_SECONDS if options["wait"] else 0.0
        prompt = kv.random_tokens(options["shared"], 1)
        self._tokens = prompt + kv.random_tokens(options["own"], 1_000 + number)
        shape = kv.Shape("agents", **SHAPE, dtype=mx.float16)
        # What a prefill of the same tokens would give is the same in every process.
        self._kv = kv.random_kv(shape, len(self._tokens), seed=77)

    def measure(self) -> dict[str, Any]:
        """Play the agent once; return how many tokens it had to compute."""
        from benchmarks import kv

        taken = self._cache.take(self._tokens, namespace="agents", wait=self._wait)
        if taken:
            kv.require_equal(taken.kv, self._kv, taken.length)
        reused = taken.length if taken else 0
        stored = self._cache.put(self._tokens, self._kv, namespace="agents")
        require(bool(stored), f"{stored}")
        return {"computed": len(self._tokens) - reused}


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Agent]:
    """Give the agent of that number."""
    with connect(socket=Path(options["socket"]), timeout=60, fail_open=False) as cache:
        yield Agent(int(role), cache, options)
