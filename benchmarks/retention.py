"""Hit ratio by tokens of each retention policy, over synthetic agent traces on the real core.

    python benchmarks/retention.py [--seeds N] [--policies lru,segmented] [--traces chat]

Every trace is replayed for each policy and for caps of 5, 10, 20 and 40 % of the bytes that an
unbounded cache would hold at its end. The core is the product's own, synchronous and without
memory behind it; nothing is timed, so the machine does not matter. docs/behaviour.md, E3, keeps
the figures by which the default was chosen.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prefixcached.actors.retention_policy import POLICIES
from tests.support.agent_traces import TRACES, HollowCore, Score, replay
from tests.support.core import small_config

CAPS = (0.05, 0.10, 0.20, 0.40)
UNBOUNDED = 1 << 50


def core_with(policy: str, ram_bytes: int) -> HollowCore:
    return HollowCore(
        small_config(
            ram_bytes=ram_bytes, max_images=1 << 30, retention=policy, segment_min_tokens=256
        )
    )


def distinct_bytes(trace: str, seed: int) -> int:
    core = core_with("lru", UNBOUNDED)
    replay(core, TRACES[trace](seed), Score())
    return core.index.ram.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--traces", default=",".join(TRACES))
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    print(f"| trace | cap | {' | '.join(policies)} | live: {' | live: '.join(policies)} |")
    print(f"|---|---|{'---|' * 2 * len(policies)}")
    sums = dict.fromkeys(policies, 0.0)
    rows = 0
    for trace in arguments.traces.split(","):
        seeds = range(1, arguments.seeds + 1)
        whole = [distinct_bytes(trace, seed) for seed in seeds]
        for share in CAPS:
            totals, lives = [], []
            for policy in policies:
                score = Score()
                for seed, nbytes in zip(seeds, whole, strict=True):
                    replay(core_with(policy, int(nbytes * share)), TRACES[trace](seed), score)
                totals.append(score.ratio())
                lives.append(score.ratio("live") if "live" in score.requested else None)
                sums[policy] += score.ratio()
            rows += 1
            print(f"| {trace} | {share:.0%} | {_cells(totals)} | {_cells(lives)} |", flush=True)
    print(f"| mean | | {_cells([sums[policy] / rows for policy in policies])} |")


def _cells(ratios: Sequence[float | None]) -> str:
    best = max((r for r in ratios if r is not None), default=0.0)
    cells = ["" if r is None else f"**{r:.1%}**" if r == best else f"{r:.1%}" for r in ratios]
    return " | ".join(cells)


if __name__ == "__main__":
    main()
