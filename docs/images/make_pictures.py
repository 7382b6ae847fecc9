"""Draws all pictures of the documentation from one real run of `prefixcached demo`.

``make pictures``. While the demo keeps its daemon, a headless Chromium, which must be installed,
takes the pictures of the dashboard. At its end the demo reports what `status` and `ls` of its first
daemon would have shown; what draws them here is what these commands draw with.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console, RenderableType

from prefixcached.daemon.commands.listing import HEADER, tree_of
from prefixcached.daemon.commands.status import table
from prefixcached.protocol.messages import Listing
from tests.support.browser import Browser, chromium

HERE = Path(__file__).resolve().parent
COLUMNS = 84
PIXELS = 1040

PROGRAM = [sys.executable, "-m", "prefixcached.daemon.cli"]

FONT = "ui-monospace, Menlo, Consolas, monospace"
"""Whatever the reader has: the pictures load nothing from elsewhere."""


def draw(name: str, command: str, shown: list[RenderableType]) -> None:
    """Write one picture of a terminal."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, highlight=False, file=nowhere)
        console.print(f"$ {command}")
        for one in shown:
            console.print(one)
    picture = console.export_svg(title=command, unique_id=name)
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    picture = re.sub(r"font-family: [^;]*;", f"font-family: {FONT};", picture)
    (HERE / f"{name}.svg").write_text(picture, "utf-8")


def draw_dashboard(browser_path: str, socket: str) -> None:
    """Write the pictures of the dashboard of the daemon behind ``socket``."""
    with dashboard_of(socket) as address, Browser(browser_path, width=PIXELS) as browser:
        for theme in ("light", "dark"):
            page = browser.open(address, prefers_color_scheme=theme)
            page.wait_for("document.getElementById('state').textContent === 'live'")
            page.wait_for("document.querySelectorAll('#tree path.surface').length > 3")
            (HERE / f"dashboard-{theme}.png").write_bytes(page.picture())


@contextmanager
def dashboard_of(socket: str) -> Iterator[str]:
    """Run `prefixcached dashboard` and give its address."""
    command = [*PROGRAM, "dashboard", "--socket", socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def kept_socket(said: IO[str]) -> str:
    """Pass on what the demo says, up to where the daemon is that it keeps."""
    for line in said:
        sys.stderr.write(line)
        if found := re.search(r"PREFIXCACHED_SOCKET=(\S+)", line):
            return found[1]
    sys.exit("the demo failed")


def main() -> None:
    """Run the demo and draw."""
    browser_path = chromium()
    if browser_path is None:
        sys.exit("no Chromium: apt-get install chromium")
    with subprocess.Popen(
        [*PROGRAM, "demo", "--json", "--keep"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as demo:  # fmt: skip
        assert demo.stderr is not None
        draw_dashboard(browser_path, kept_socket(demo.stderr))
        shown, _ = demo.communicate("\n")
    if demo.returncode:
        sys.exit(demo.returncode)
    report: dict[str, Any] = json.loads(shown)
    listing = msgspec.convert(report["listing"], Listing)
    statistics = report["daemon"]
    # The temporary directory of that run means nothing to anybody.
    statistics["daemon"]["socket"] = "$XDG_RUNTIME_DIR/prefixcached/prefixcached.sock"
    statistics["daemon"]["state_dir"] = "~/.cache/prefixcached"
    draw("status", "prefixcached status", [table(statistics)])
    draw("ls", "prefixcached ls", [HEADER, *(tree_of(one) for one in listing.namespaces)])


if __name__ == "__main__":
    main()
