"""Imports every module of an installed prefixcached and says what each part contributed.

Usage: check_wheel.py SITE, where SITE is the folder that the wheel was installed in.
"""

import importlib
import pkgutil
import sys
from collections import Counter
from pathlib import Path

import prefixcached

REQUIRED_PARTS = ("protocol", "actors", "daemon", "client", "deploy")


def main(site: Path) -> None:
    """Exits with a message when a module or a part is missing, or came from elsewhere."""
    counts: Counter[str] = Counter()
    modules = [prefixcached.__name__]
    modules += [
        found.name
        for found in pkgutil.walk_packages(prefixcached.__path__, "prefixcached.", _fail)
        if not found.name.endswith(".__main__")  # running it is what it is for
    ]
    for name in modules:
        file = importlib.import_module(name).__file__
        if file is None or not Path(file).resolve().is_relative_to(site):
            sys.exit(f"{name} was imported from {file}, not from {site}")
        counts[".".join(name.split(".")[1:2])] += 1
    if not (site / "prefixcached" / "daemon" / "dashboard" / "page.html").is_file():
        sys.exit("the wheel lacks the dashboard's page")
    missing = [part for part in REQUIRED_PARTS if not counts[part]]
    if missing:
        sys.exit(f"the wheel lacks {', '.join(missing)}")
    if not (site / "prefixcached" / "py.typed").is_file():
        sys.exit("the wheel lacks py.typed, so nobody's type checker would read it")
    shown = ", ".join(f"{part} {counts[part]}" for part in REQUIRED_PARTS)
    print(f"{len(modules)} modules of prefixcached {prefixcached.__version__}: {shown}")


def _fail(name: str) -> None:
    sys.exit(f"{name} cannot be imported: {sys.exc_info()[1]!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
