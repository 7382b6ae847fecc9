"""Draws the pictures of the README from a real run of `prefixcached demo`: `make pictures`.

The demo reports what `status` and `ls` of its daemon would have shown; what draws them here is what
these commands draw with.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType

from prefixcached.daemon.commands.listing import tree_of
from prefixcached.daemon.commands.status import table
from prefixcached.protocol.messages import Listing

HERE = Path(__file__).resolve().parent
COLUMNS = 84

FONT = "ui-monospace, Menlo, Consolas, monospace"
"""Whatever the reader has: the pictures load nothing from elsewhere."""


def draw(name: str, command: str, shown: list[RenderableType]) -> None:
    """Write one picture."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, highlight=False, file=nowhere)
        console.print(f"$ {command}")
        for one in shown:
            console.print(one)
    picture = console.export_svg(title=command, unique_id=name)
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    picture = re.sub(r"font-family: [^;]*;", f"font-family: {FONT};", picture)
    (HERE / f"{name}.svg").write_text(picture, "utf-8")


def main() -> None:
    """Run the demo and draw what it reports."""
    command = [sys.executable, "-m", "prefixcached.daemon.cli", "demo", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    listing = msgspec.convert(report["listing"], Listing)
    statistics = report["daemon"]
    # The temporary directory of that run means nothing to anybody.
    statistics["daemon"]["socket"] = "$XDG_RUNTIME_DIR/prefixcached/prefixcached.sock"
    draw("status", "prefixcached status", [table(statistics)])
    draw("ls", "prefixcached ls", [tree_of(one) for one in listing.namespaces])


if __name__ == "__main__":
    main()
