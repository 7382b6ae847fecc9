"""The direction of imports that docs/architecture.md promises, read from the source itself."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "prefixcached"
PARTS = ("protocol", "actors", "daemon", "client", "deploy")

# What each part may import of ours, besides itself. `deploy` is used by the daemon's
# `service` command and stands on its own.
ALLOWED = {
    "protocol": frozenset[str](),
    "actors": frozenset({"protocol"}),
    "daemon": frozenset({"protocol", "actors", "deploy"}),
    "client": frozenset({"protocol"}),
    "deploy": frozenset[str](),
}
WITHOUT_MLX = frozenset({"protocol", "actors", "daemon", "deploy"})
# Decisions are pure code: whoever reads one of these needs to know nothing about tasks.
PURE_NAMES = frozenset({"tree", "layout", "format"})
PURE_ENDINGS = ("_policy", "_tree", "_layout", "_format")


class Import(NamedTuple):
    """One module named by an import statement."""

    module: str
    line: int
    inside_function: bool


def imports_of(source: str) -> list[Import]:
    """Every import of a module's source, also those inside functions and type-only blocks."""
    return list(_walk(ast.parse(source), inside_function=False))


def _walk(node: ast.AST, *, inside_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, child.lineno, inside_function)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = "." * level + (module or "")
                yield Import(base, child.lineno, inside_function)
                # `from prefixcached import daemon` names a module as well.
                for alias in names:
                    yield Import(f"{base}.{alias.name}", child.lineno, inside_function)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _walk(child, inside_function=True)
            case _:
                yield from _walk(child, inside_function=inside_function)


def is_below(module: str, package: str) -> bool:
    """Whether `module` is `package` or inside it."""
    return module == package or module.startswith(f"{package}.")


def part_of(module: str) -> str | None:
    """The part of ours that a module's full name lies in."""
    names = module.split(".")
    if len(names) > 1 and names[0] == PACKAGE and names[1] in PARTS:
        return names[1]
    return None


def is_pure(path: Path) -> bool:
    """Whether a module of ours must do without trio; `path` is relative to the root."""
    if path.parts[0] == "protocol":
        return True
    return path.stem in PURE_NAMES or path.stem.endswith(PURE_ENDINGS)


def violations(path: Path, source: str) -> list[str]:
    """What a module of ours imports and must not; `path` is relative to the root."""
    part = path.parts[0]
    may_use_client = path.parts[:2] == ("daemon", "commands")
    found = []
    for module, line, inside_function in imports_of(source):
        where = f"{path}:{line}: "
        other = part_of(module)
        if module.startswith("."):
            found.append(f"{where}relative import of {module}")
        elif module.split(".")[0] in PARTS:
            found.append(f"{where}bare import of {module}; use {PACKAGE}.{module}")
        elif other == "client" and may_use_client:
            if not inside_function:
                found.append(f"{where}{module} at the top; import it in the command's function")
        elif other is not None and other != part and other not in ALLOWED[part]:
            found.append(f"{where}{part} must not import {other}")
        elif part in WITHOUT_MLX and (is_below(module, "mlx") or is_below(module, "mlx_lm")):
            found.append(f"{where}{part} must not import {module}")
        elif is_below(module, "trio") and is_pure(path):
            found.append(f"{where}a pure module must not import {module}")
    return found


def sources_of(folder: str) -> list[Path]:
    """The Python files of a root folder, relative to the root."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    """Each part names only the parts below it, and only the client names mlx."""
    sources = sources_of(part)
    assert sources
    found = [
        violation
        for path in sources
        for violation in violations(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "src"])
def test_nothing_imports_a_part_by_its_bare_name(folder: str) -> None:
    """A bare `import protocol` would give a second copy of each class."""
    found = [
        f"{path}:{line}: {module}"
        for path in sources_of(folder)
        for module, line, _ in imports_of((ROOT / path).read_text(encoding="utf-8"))
        if module.split(".")[0] in PARTS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", PARTS)
def test_the_package_reaches_each_part_through_a_relative_link(part: str) -> None:
    """A clone anywhere imports its own parts."""
    link = ROOT / "src" / PACKAGE / part
    if not link.exists():
        pytest.skip("an unpacked sdist has no links")
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{part}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("protocol/messages.py", "import prefixcached.actors.tree"),
        ("protocol/messages.py", "from prefixcached import client"),
        ("protocol/image.py", "import trio"),
        ("protocol/image.py", "import mlx.core as mx"),
        ("actors/tree.py", "from trio import to_thread"),
        ("actors/eviction_policy.py", "import trio.lowlevel"),
        ("actors/ram_tier.py", "from prefixcached.daemon import config"),
        ("actors/ram_tier.py", "if True:\n    def f():\n        import mlx_lm"),
        ("daemon/session.py", "def f():\n    from prefixcached.client import connect"),
        ("daemon/commands/ls.py", "from prefixcached.client import connect"),
        ("daemon/commands/demo.py", "def f():\n    import mlx.core"),
        ("client/connection.py", "from prefixcached.actors import tree"),
        ("client/connection.py", "from protocol import messages"),
        ("client/connection.py", "from . import adapter"),
        ("client/connection.py", "import daemon.cli"),
    ],
)
def test_a_wrong_import_is_seen(path: str, source: str) -> None:
    """The check itself finds each kind of violation."""
    assert violations(Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("protocol/image.py", "import msgspec\nfrom prefixcached.protocol import messages"),
        ("actors/ram_tier.py", "import trio\nfrom prefixcached.protocol import messages"),
        ("actors/tree.py", "import numpy as np"),
        ("daemon/commands/ls.py", "def f():\n    from prefixcached.client import connect"),
        ("daemon/wiring.py", "from prefixcached.actors import ram_tier"),
        ("client/mlx_lm.py", "import mlx.core as mx\nfrom prefixcached import __version__"),
        ("client/trio.py", "import trio"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    """The check lets through what the layout allows."""
    assert not violations(Path(path), source)
