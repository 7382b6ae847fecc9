"""The table of benchmarks/README.md: `python -m benchmarks.table` writes it from the results.

Each row is the newest full run; the last column says how many of the newest runs (three at most)
met the goal.
"""

import json
import sys
from collections import defaultdict
from typing import Any, Final

from benchmarks.harness import RESULTS

PAGE: Final = RESULTS.parent / "README.md"
BEGIN: Final = "<!-- table: python -m benchmarks.table -->"
END: Final = "<!-- end of the table -->"
RUNS: Final = 3


def main() -> int:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(_runs())}\n{END}{after}", encoding="utf-8")
    return 0


def table(runs: list[list[dict[str, Any]]]) -> str:
    """Return a heading with the machine and the rows as Markdown."""
    if not runs:
        return "No full run is on record: `make bench`.\n"
    about = max((rows[-1]["environment"] for rows in runs), key=lambda found: str(found["when"]))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    machine = (
        f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] >> 30} GiB, "
        f"{about['system']}, Python {about['python']}, {about['when'][:10]}; {versions}."
    )
    lines = [
        machine,
        "",
        "| what | ours | peer or floor | ratio (quartiles) | goal | met in |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(rows) for rows in runs)]) + "\n"


def _line(rows: list[dict[str, Any]]) -> str:
    row = rows[-1]
    unit = "" if row["unit"] == "x" else f" {row['unit']}"
    spread = f" ({row['spread'][0]:.2f} to {row['spread'][1]:.2f})" if row["spread"] else ""
    goal, met = "", ""
    if row["goal"]:
        sign = "≥" if row["goal"]["direction"] == "at least" else "≤"
        goal = f"{sign} {row['goal']['value']:g}"
        met = f"{sum(one['verdict'] == 'met' for one in rows)} of {len(rows)}"
    peer = f"{row['peer_name']} {row['peer']}".strip()
    return (
        f"| {row['name']} | {row['ours']} | {peer} | {row['figure']:.2f}{unit}{spread} "
        f"| {goal} | {met} |"
    )


def _runs() -> list[list[dict[str, Any]]]:
    """Return the newest full records of each row, oldest first."""
    found: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    with (RESULTS / "runs.jsonl").open(encoding="utf-8") as file:
        for text in file:
            row = json.loads(text)
            if not row["environment"]["quick"] and "points" not in row["details"]:
                found[row["benchmark"], row["name"]].append(row)
    return [rows[-RUNS:] for rows in found.values()]


if __name__ == "__main__":
    sys.exit(main())
