"""Which modules are mutated, which tests may kill their mutants, and why others are left out."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
TESTS: Final = ("tests/protocol", "tests/actors")
"""Their tests run in the process that holds the mutant. A test that starts a daemon of its own
would test the real module there."""

NOT_RUN: Final = ("test_store_crashes.py", "test_failing_disk.py")
"""The first kills processes of its own, the second takes as long as all others together."""

TESTED_IN: Final = {"protocol/actor_messages.py": "tests/"}
"""Where the tests of a module without functions are, if not in the folder of its own part."""

LEFT_OUT: Final = {
    "the Trio actors, thin shells": (
        "actors/mailbox.py",
        "actors/prefetcher.py",
        "actors/pressure_monitor.py",
        "actors/ram_tier.py",
        "actors/ssd_tier.py",
    ),
    "system calls and what a platform calls them, not decisions": (
        "actors/crash_points.py",
        "actors/disk_platform.py",
        "actors/filesystem.py",
        "actors/memory/__init__.py",
        "actors/memory/darwin.py",
        "actors/memory/interface.py",
        "actors/memory/linux.py",
        "actors/pressure_hints.py",
        "actors/pressure_sensors.py",
    ),
    "names and values without decisions": (
        "actors/__init__.py",
        "actors/ram_samples.py",
        "actors/ram_statistics.py",
        "actors/ssd_settings.py",
        "protocol/__init__.py",
        "protocol/errors.py",
    ),
}


def mutated() -> list[str]:
    """Every module of `protocol` and `actors` that is not left out, relative to the root."""
    left_out = {module for modules in LEFT_OUT.values() for module in modules}
    found = [path.relative_to(ROOT) for part in ("protocol", "actors") for path in part_of(part)]
    return [str(path) for path in found if str(path) not in left_out]


def part_of(part: str) -> list[Path]:
    """The files of one part, in order."""
    return sorted((ROOT / part).rglob("*.py"))


def dotted(module: str) -> str:
    """The name by which a module is imported."""
    return f"prefixcached.{module.removesuffix('.py').replace('/', '.')}"
