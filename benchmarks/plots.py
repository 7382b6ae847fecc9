"""Pictures of the last run: `python -m benchmarks.plots`, needs matplotlib (group bench).

`goals.png` shows every figure against its goal, `growth.png` the series of `growth`.
"""

import json
import math
import sys
from typing import Any

from benchmarks.harness import RESULTS

PICTURES = RESULTS.parent / "pictures"


def main() -> int:
    """Draw from results/runs.jsonl: the newest full record of each row."""
    try:
        import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        print("matplotlib is not installed; run: pip install --group bench", file=sys.stderr)
        return 1
    mpl.use("Agg")
    PICTURES.mkdir(exist_ok=True)
    rows = newest()
    draw_goals([row for row in rows if row["goal"]])
    draw_growth([row for row in rows if "points" in row["details"]])
    print(f"drawn: {PICTURES}")
    return 0


def newest(*, quick: bool = False) -> list[dict[str, Any]]:
    """Return the last record of each row, in the order of the first ones."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with (RESULTS / "runs.jsonl").open(encoding="utf-8") as file:
        for text in file:
            row = json.loads(text)
            if row["environment"]["quick"] is quick:
                found[row["benchmark"], row["name"]] = row
    return list(found.values())


def draw_goals(rows: list[dict[str, Any]]) -> None:
    """One bar a row: how many times its goal it reached; 1 is the goal."""
    import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    rows = [row for row in rows if row["benchmark"] != "growth"][::-1]
    reached = []
    for row in rows:
        goal, figure = row["goal"]["value"], max(row["figure"], 1e-9)
        reached.append(figure / goal if row["goal"]["direction"] == "at least" else goal / figure)
    figure, axes = plt.subplots(figsize=(9, 0.34 * len(rows) + 1.2), layout="constrained")
    colours = ["tab:green" if value >= 1 else "tab:red" for value in reached]
    axes.barh([row["name"] for row in rows], reached, color=colours)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("times the goal (log scale; right of the line is met)")
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(PICTURES / "goals.png", dpi=110)


def draw_growth(rows: list[dict[str, Any]]) -> None:
    """One small log-log plot for each series, with the fitted slope."""
    import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    if not rows:
        return
    columns = 3
    figure, grid = plt.subplots(
        math.ceil(len(rows) / columns), columns, figsize=(11, 2.9 * math.ceil(len(rows) / columns)),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axes, row in zip(grid.flat, rows, strict=False):
        points = {int(x): y for x, y in row["details"]["points"].items()}
        axes.plot(list(points), list(points.values()), "o", markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        if row["unit"] == "slope":
            axes.plot(*fitted(points, row["figure"]), "--", linewidth=1, color="gray")
        # At least a decade, so that what is flat looks flat.
        middle = math.sqrt(min(points.values()) * max(points.values()))
        half = max(math.sqrt(10), 1.3 * math.sqrt(max(points.values()) / min(points.values())))
        axes.set_ylim(middle / half, middle * half)
        axes.set_xticks(list(points), [f"{x:,}" for x in points])
        axes.minorticks_off()
        axes.set_title(row["details"]["series"], fontsize=8)
        slope = f"fitted slope {row['figure']:.2f}" if row["unit"] == "slope" else ""
        axes.set_ylabel(row["details"]["unit"], fontsize=8)
        axes.text(0.05, 0.9, slope, transform=axes.transAxes, fontsize=8)
        axes.tick_params(labelsize=7, which="both")
    for axes in list(grid.flat)[len(rows) :]:
        axes.set_visible(False)
    figure.savefig(PICTURES / "growth.png", dpi=110)


def fitted(points: dict[int, float], slope: float) -> tuple[list[int], list[float]]:
    """Return the line of that slope through the middle of ``points``, both in logarithms."""
    x = sum(map(math.log, points)) / len(points)
    y = sum(map(math.log, points.values())) / len(points)
    ends = [min(points), max(points)]
    return ends, [math.exp(y + slope * (math.log(end) - x)) for end in ends]


if __name__ == "__main__":
    sys.exit(main())
