"""Every line of FIELD 3 (what hurt the users of other systems) has a system test that names it.

A test names a line by how its docstring begins: ``FIELD 3: <line>: ...``. `field_lines.txt` has the
lines in the order of the table in FIELD.md, in short.
"""

import ast
import re
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
LINES: Final = (FOLDER / "field_lines.txt").read_text().splitlines()
NAMED: Final = re.compile(r"FIELD 3: ([^:]+):")


def named_lines() -> dict[str, list[str]]:
    """By line, the tests of this folder that name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for line in NAMED.findall((ast.get_docstring(node) or "").replace("\n", " ")):
                    assert node.name.startswith("test_"), f"{path.name}: {node.name} is no test"
                    found.setdefault(line, []).append(f"{path.name}::{node.name}")
    return found


def test_every_line_has_a_test() -> None:
    """FIELD 3: the whole kind of failure is to be impossible here, and each has a test."""
    assert len(LINES) == len(set(LINES)) == 22
    missing = [line for line in LINES if line not in named_lines()]
    assert not missing


def test_every_test_names_a_line_that_exists() -> None:
    """A misspelt line is not counted for another."""
    assert set(named_lines()) <= set(LINES)
