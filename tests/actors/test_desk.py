"""What RamTier does where it is told nothing: the defaults of its configuration."""

from pathlib import Path
from typing import Final

import pytest

from prefixcached.actors.desk import RamConfig

DOCS: Final = Path(__file__).parents[2] / "docs"
OPTIONS: Final = (DOCS / "operations.md").read_text(encoding="utf-8")
RULES: Final = (DOCS / "behaviour.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "put_min_tokens", "checkpoint_min_tokens", "claim_min_tokens", "idle_seconds",
        "label_ttl_seconds", "namespace_quota", "pressure_target",
    ],
)  # fmt: skip
def test_a_default_is_the_one_that_users_read(name: str) -> None:
    """docs/operations.md states what an option is where nobody sets it."""
    assert f"| `{name}` | `{getattr(RamConfig(), name):g}` |" in OPTIONS


@pytest.mark.parametrize(
    "name", ["segment_min_tokens", "checkpoint_min_tokens", "claim_min_tokens", "idle_seconds"]
)
def test_a_default_is_the_one_of_its_rule(name: str) -> None:
    """P11, E8, E11, Q1: the number in parentheses behind a setting is its default."""
    assert f"`{name}` ({getattr(RamConfig(), name):g})" in RULES
