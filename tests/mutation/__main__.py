"""Run the mutants of some or all modules; keep, print and write what became of them.

    python -m tests.mutation [MODULE ...] [--share 1.0] [--jobs 2] [--tests-seconds 5]
                             [--survivors] [--new-tests] [--work DIRECTORY]

A share of each module's mutants is a seeded choice, and a larger share holds every smaller one.
Results are kept in the work directory, so that a run can be stopped and taken up again; those of a
module that has changed since do not count. `--survivors` runs those again that survived and are not
accepted, with more time or with `--new-tests`, which measures anew what the tests reach. A run of
all modules writes results.md. The process that runs this must not have imported `prefixcached`
(see `running`).
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import hypothesis
import hypothesis.stateful
import msgpack
import msgspec
import numpy as np
import trio
import xxhash

from tests.mutation.baseline import EXAMPLES, PROFILE, Reach, measure, test_files
from tests.mutation.children import in_parallel
from tests.mutation.modules import ROOT, mutated
from tests.mutation.mutants import Mutant, digest_of, mutants_of, share_of
from tests.mutation.report import RESULTS, page, reasons, summary
from tests.mutation.running import Result, Running, needs_import, run_imported, run_loaded

PRELOADED: Final = (hypothesis.stateful, msgpack, np, trio, xxhash)
"""What every mutant's process would import otherwise."""


def main() -> None:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(prog="tests.mutation")
    parser.add_argument("modules", nargs="*", help="for instance actors/tree.py (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tests-seconds", type=float, default=5.0, help="of tests for a mutant")
    parser.add_argument("--survivors", action="store_true", help="only what survived before")
    parser.add_argument("--share", type=float, default=1.0, help="of each module's mutants")
    parser.add_argument("--new-tests", action="store_true", help="there are other tests")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutation")
    options = parser.parse_args()
    # Whoever ends the run so wants its children ended as well (`outcome_of` does that).
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work: Path = options.work
    work.mkdir(exist_ok=True)
    sys.path.insert(0, str(ROOT / "src"))
    hypothesis.settings.register_profile(
        PROFILE, derandomize=True, deadline=None, max_examples=EXAMPLES, database=None
    )
    for file in work.glob("*.json") if options.new_tests else ():
        file.unlink()
    reach = _reach(work, options.jobs)
    kept = _kept(work)
    accepted = reasons()
    survived = {
        mutant
        for mutant, result in kept.items()
        if result.outcome == "survived" and (mutant.module, result.change) not in accepted
    }
    mutants = [
        mutant
        for module in options.modules or mutated()
        for mutant in (mutants_of(module) if options.survivors else share_of(module, options.share))
        if (mutant in survived if options.survivors else mutant not in kept)
    ]
    print(f"{len(mutants)} mutants", flush=True)
    started = time.monotonic()
    _run(mutants, reach, work, options.jobs, options.tests_seconds)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    known = {mutant for module in mutated() for mutant in mutants_of(module)}
    results = [result for result in _kept(work).values() if result.mutant in known]
    print(summary(results))
    if not options.modules:
        RESULTS.write_text(page(results, EXAMPLES), encoding="utf-8")


def _reach(work: Path, jobs: int) -> Reach:
    """The tests' reach, from `work` where it is kept there."""
    kept = work / "reach.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Reach)
    files, parts = test_files(), [work / f"reach-{number}.json" for number in range(jobs)]

    def measured(part: Path, files: list[str]) -> None:
        part.write_bytes(msgspec.json.encode(measure(files)))

    in_parallel([partial(measured, part, files[number::jobs]) for number, part in enumerate(parts)])
    reach = Reach()
    for part in parts:
        reach.add(msgspec.json.decode(part.read_bytes(), type=Reach))
    kept.write_bytes(msgspec.json.encode(reach))
    return reach


def _run(mutants: list[Mutant], reach: Reach, work: Path, jobs: int, tests_seconds: float) -> None:
    """Run all mutants; each process appends its results to a file of its own."""
    anew = [mutant for mutant in mutants if needs_import(mutant, reach)]
    loaded = [mutant for mutant in mutants if not needs_import(mutant, reach)]

    def run(number: int) -> None:
        with (work / f"results-{number}.jsonl").open("ab", buffering=0) as log:

            def tell(result: Result) -> None:
                log.write(msgspec.json.encode(result) + b"\n")

            running = Running(reach, tests_seconds, tell)
            if loaded[number::jobs]:
                # In a fork: this process must not import what the others import anew.
                in_parallel([lambda: run_loaded(test_files(), loaded[number::jobs], running)])
            run_imported(anew[number::jobs], running)

    tasks: list[Callable[[], None]] = [partial(run, number) for number in range(jobs)]
    in_parallel(tasks)


def _kept(work: Path) -> dict[Mutant, Result]:
    """The result of each mutant of a module's present text, in this or an earlier run.

    Who was killed once is dead: what survived was run again with more tests or time.
    """
    lines = (line for log in work.glob("results-*.jsonl") for line in log.read_bytes().splitlines())
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    results.sort(key=lambda result: result.outcome != "survived")
    return {
        result.mutant: result
        for result in results
        if (ROOT / result.mutant.module).exists()
        and result.source == digest_of(result.mutant.module)
    }


main()
