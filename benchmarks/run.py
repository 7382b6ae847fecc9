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
    "against_lmcache",
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
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer figures, few rounds",
    )
    options = parser.parse_args()
    names = options.names or (QUICK if options.quick else FULL)
    rows: list[Row] = []
    failed = []
    began = time.monotonic()
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        try:
            found = _measure(name, quick=options.quick)
            if options.quick and any(map(_is_bad, found)):
                print("  worse than half a goal: measured once more", flush=True)
                found = _measure(name, quick=True)
        except WrongBytes as error:
            print(f"  WRONG BYTES: {error}")
            failed.append(f"{name}: wrong bytes: {error}")
            continue
        if options.quick:
            failed += [f"{row.name}: worse than half its goal" for row in found if _is_bad(row)]
        rows += found
    missed = [row for row in rows if row.verdict == "missed"]
    judged = sum(row.goal is not None for row in rows)
    print(f"{judged - len(missed)} of {judged} goals met in {time.monotonic() - began:.0f} s")
    for row in missed:
        print(f"  missed: {row.name}: {row.figure:.2f}, goal {row.goal}")
    for text in failed:
        print(f"  FAILED: {text}")
    return 1 if failed else 0


def _measure(name: str, *, quick: bool) -> list[Row]:
    """Run one benchmark and report it."""
    started = time.monotonic()
    found: list[Row] = importlib.import_module(f"benchmarks.{name}").run(quick)
    report(found, quick=quick)
    print(f"  ({time.monotonic() - started:.0f} s)", flush=True)
    return found


def _is_bad(row: Row) -> bool:
    """Whether a figure, and the better of its quartiles too, is worse than half its goal."""
    if row.goal is None:
        return False
    return not any(row.goal.within_half(value) for value in (row.figure, *(row.spread or ())))


if __name__ == "__main__":
    sys.exit(main())
