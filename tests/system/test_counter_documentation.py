"""Every counter of `status --json` stands in docs/operations.md, and nothing else does.

So do all reasons of a miss and of a declined put; and every section that a message names is there.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefixcached.actors.ram_samples import MISS_REASONS
from prefixcached.client import Hit, calls, lending, prompt_cache, shared_prompt_cache
from prefixcached.client.errors import PrefixCachedError
from prefixcached.daemon.commands import common
from prefixcached.daemon.commands.status import SCHEMA
from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess

MANUAL = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"

DYNAMIC = {
    "ram_tier.takes.misses",
    "ram_tier.puts.declined",
    "ram_tier.resident_bytes_by_namespace",
    "pressure_monitor.sensors",
}
"""Mappings whose keys come with what happens."""


def documented() -> dict[str, str]:
    """The names in the first column of the table of counters, and what the row says to do.

    The first name of a row is whole; those behind it take the place of its last part.
    """
    section = MANUAL.read_text("utf-8").split("\n## Counters\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for row in section.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", cells[0])
        if not row.startswith("| `") or not names:
            continue
        assert len(cells) == 3, row
        parent = names[0].rpartition(".")[0]
        for name in [names[0], *(f"{parent}.{name}" for name in names[1:])]:
            assert name not in found, f"{name} stands there twice"
            found[name] = cells[1]
    return found


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The dotted names of all that is counted."""
    if isinstance(value, Mapping) and path not in DYNAMIC:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path


def report() -> dict[str, Any]:
    """Statistics of a daemon with both tiers that served something."""
    tokens = list(range(600))
    with DaemonProcess(*BOTH_TIERS) as process, numpy_cache(process.socket) as cache:
        put(cache, tokens)
        assert isinstance(cache.take([*tokens, 7], namespace="n"), Hit)
        cache.take([1, 2, 3], namespace="other")
        assert cache.flush()
        return cache.stats()


def test_every_counter_is_explained_and_every_explained_counter_is_there() -> None:
    """C5: a counter that nobody explains helps nobody, and one that is gone misleads."""
    counted, explained = set(leaves(report())), documented()
    assert counted - explained.keys() == set(), "these lack a row in docs/operations.md"
    assert explained.keys() - counted == set(), "these are in docs/operations.md alone"
    assert [name for name, says in explained.items() if len(says) < 10] == []


def section(title: str) -> str:
    """The text of a section of the manual, up to the next one of its level."""
    level = re.search(rf"^(#+) {title}$", MANUAL.read_text("utf-8"), re.MULTILINE)
    assert level is not None
    return MANUAL.read_text("utf-8").split(f"\n{level[0]}\n")[1].split(f"\n{level[1]} ")[0]


def sources(package: str) -> str:
    """All modules of ``package``."""
    return "\n".join(
        file.read_text("utf-8") for file in sorted((MANUAL.parent.parent / package).rglob("*.py"))
    )


ERRORS: list[type[PrefixCachedError]] = PrefixCachedError.__subclasses__()
FAILURES = {error.reason for error in ERRORS}
"""What a client gives for every kind of trouble with the daemon."""

SERVERS_OWN = {
    shared_prompt_cache.PAUSED, shared_prompt_cache.UNKNOWN_MODEL, "draft-differs",
    prompt_cache.DISABLED, shared_prompt_cache.CLOSED,
}  # fmt: skip
"""What `mlx-lm-server` has of its own, in the section's second table."""


def test_every_reason_of_a_miss_is_explained() -> None:
    """T9: each has a row with its meaning and what to do, and no row is left over."""
    rows = re.findall(r"^\| (`.*?) \| (.+?) \| (.+?) \|$", section("Misses"), re.MULTILINE)
    explained = {name for cell, _, _ in rows for name in re.findall(r"`([a-z-]+)`", cell)}
    # The two are of calls that store.
    of_puts = {"no-space", "invalid"}
    known = {*MISS_REASONS, lending.NO_GAIN, *(FAILURES - of_puts), *SERVERS_OWN}
    assert explained == known
    assert f'reason = "{lending.NO_GAIN}"' not in sources("actors"), "a client's own"


def test_every_reason_of_a_declined_put_is_explained() -> None:
    """P10: whatever the source declines with stands in the section, and nothing else does."""
    explained = set(re.findall(r"`([a-z-]+)`", section("Declined puts")))
    code = sources("actors") + sources("client")
    said = {
        reason
        for arguments in re.findall(r"_declined?\((\"[^)]*)\)", code)
        for reason in re.findall(r'"([a-z-]+)"', arguments)
    }
    assert len(said) >= 9, "the source says it another way now"
    assert explained == {*said, calls.UNSUPPORTED_TOKENS, *(FAILURES - {"restore-failed"})}


def test_the_sample_of_the_status_has_the_order_of_the_status() -> None:
    """Who reads the sample beside the output finds one name behind the other."""
    (sample,) = re.findall(r'^    (\{ "schema": .*)$', section("Counters"), re.MULTILINE)
    plain = re.sub(r", \.\.\.|\.\.\.", "", sample)
    with DaemonProcess(*BOTH_TIERS) as process:
        shown = json.loads(invoke("status", "--json", socket=process.socket).output)

    def check(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        assert list(found)[: len(expected)] == list(expected)
        for name, inner in expected.items():
            if isinstance(inner, Mapping):
                check(inner, found[name])

    check(json.loads(plain), shown)


def test_the_schema_that_is_documented_is_the_one_that_is_printed() -> None:
    """A program checks it before it trusts a name."""
    assert f'`"schema": {SCHEMA}`' in MANUAL.read_text("utf-8")


def test_sections_that_messages_name_are_there() -> None:
    """An error points to a section by its title."""
    commands = Path(common.__file__).resolve().parent
    sources = [file.read_text("utf-8") for file in commands.glob("*.py")]
    named = {name for text in sources for name in re.findall(r"\bsee\(['\"](.+?)['\"]\)", text)}
    titles = re.findall(r"^#+ (.*)$", MANUAL.read_text("utf-8"), re.MULTILINE)
    assert len(named) >= 6
    assert named <= set(titles)
