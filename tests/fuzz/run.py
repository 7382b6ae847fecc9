"""`make fuzz`: every target for its share of the time, one after the other.

    FUZZ_SECONDS    of all targets together, 3600 by default
    FUZZ_TARGETS    only these, comma-separated
    FUZZ_DIRECTORY  where inputs, logs and what failed are left, .fuzz by default
    FUZZ_KEEP       1: put the minimised corpora in the place of those in tests/fuzz/corpus

It starts from the kept corpora and findings, and ends with status 1 where an input failed: the
output names its file. To see what it does: python -m tests.fuzz.replay TARGET FILE.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz import corpus
from tests.fuzz.targets import TARGETS, Target

TIMEOUT_SECONDS: Final = 120
"""For one input, which takes milliseconds; a hang is a finding, a busy machine is none."""

RSS_MEBIBYTES: Final = 3000
"""More than any input should take: memory that an input blows up is a finding."""

_STATUS: Final = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/")
_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


class Outcome(NamedTuple):
    """What one target's run gave."""

    executions: int
    edges: int
    features: int
    inputs: int
    failed: bool


def fuzz(name: str, target: Target, seconds: int, folder: Path) -> Outcome:
    """Run one target for so many seconds in ``folder``."""
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    known = [*corpus.packed_inputs(name), *corpus.findings(name).values()]
    for number, data in enumerate(known):
        (inputs / f"kept-{number:04d}").write_bytes(data)
    log = folder / "log"
    status = _libfuzzer(
        name, log,
        f"-max_total_time={seconds}", f"-max_len={target.most_bytes}",
        f"-timeout={TIMEOUT_SECONDS}", f"-rss_limit_mb={RSS_MEBIBYTES}",
        f"-artifact_prefix={folder}/failed-", "-print_final_stats=1", "-reload=0", str(inputs),
    )  # fmt: skip
    said = log.read_text(errors="replace")
    edges, features, count = map(int, (_STATUS.findall(said) or [("0", "0", "0")])[-1])
    executed = _EXECUTED.search(said)
    return Outcome(int(executed[1]) if executed else 0, edges, features, count, status != 0)


def minimised(name: str, folder: Path) -> list[bytes]:
    """The fewest inputs that reach all edges that any of them reaches."""
    least = folder / "least"
    least.mkdir(exist_ok=True)
    _libfuzzer(
        name, folder / "merge-log", "-merge=1", "-use_counters=0", f"-timeout={TIMEOUT_SECONDS}",
        str(least), str(folder / "inputs"),
    )  # fmt: skip
    return [path.read_bytes() for path in least.iterdir()]


def _libfuzzer(name: str, log: Path, *options: str) -> int:
    with log.open("wb") as file:
        return subprocess.run(
            [sys.executable, "-m", "tests.fuzz.fuzz_one", name, *options],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False,
        ).returncode  # fmt: skip


def main() -> int:
    """Fuzz, report, and keep what is asked for."""
    total = int(os.environ.get("FUZZ_SECONDS", "3600"))
    chosen = [name for name in os.environ.get("FUZZ_TARGETS", "").split(",") if name] or [*TARGETS]
    directory = Path(os.environ.get("FUZZ_DIRECTORY", ".fuzz"))
    shares = sum(TARGETS[name].share for name in chosen)
    failed: list[str] = []
    for name in chosen:
        folder, seconds = directory / name, total * TARGETS[name].share // shares
        outcome = fuzz(name, TARGETS[name], max(1, seconds), folder)
        print(
            f"{name}: {outcome.executions} executions in {seconds} s, {outcome.edges} edges, "
            f"{outcome.features} features, {outcome.inputs} inputs",
            flush=True,
        )
        if outcome.failed:
            failed.append(name)
            print(f"{name} FAILED; see {folder}/log and {folder}/failed-*", flush=True)
        if os.environ.get("FUZZ_KEEP") == "1":
            print(f"{name}: kept {corpus.pack(name, minimised(name, folder))} inputs", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
