"""Run benchmarks: `python -m benchmarks.run [--quick] [NAME ...]`, all of them without a name."""

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Final

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Row, WrongBytes, report

FULL: Final = (
    "lookup",
    "lookup_load",
    "ram_hit",
    "ssd_hit",
    "put",
    "against_redis",
    "agents",
    "turns",
    "memory",
    "start",
    "growth",
    "views",
    "first_token",
)
QUICK: Final = ("lookup", "ram_hit", "ssd_hit", "put", "agents", "turns", "memory", "start")


def main() -> int:
    """Return 0, or 1 for wrong bytes, and in quick runs for a figure worse than half its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    options = parser.parse_args()
    names = options.names or (QUICK if options.quick else FULL)
    rows: list[Row] = []
    wrong = 0
    began = time.monotonic()
    for number, name in enumerate(names, 1):
        started = time.monotonic()
        print(f"[{number}/{len(names)}] {name}", flush=True)
        try:
            found = importlib.import_module(f"benchmarks.{name}").run(options.quick)
        except WrongBytes as error:
            print(f"  WRONG BYTES: {error}")
            wrong += 1
            continue
        report(found, quick=options.quick)
        rows += found
        print(f"  ({time.monotonic() - started:.0f} s)", flush=True)
    missed = [row for row in rows if row.verdict == "missed"]
    bad = [row for row in missed if row.goal is not None and not row.goal.within_half(row.figure)]
    judged = sum(row.goal is not None for row in rows)
    print(f"{judged - len(missed)} of {judged} goals met in {time.monotonic() - began:.0f} s")
    for row in missed:
        print(f"  missed: {row.name}: {row.figure:.2f}, goal {row.goal}")
    if wrong or (options.quick and bad):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
