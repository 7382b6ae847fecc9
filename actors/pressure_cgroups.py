"""The memory limits of Linux control groups, version 2 and version 1, as pressure sensors.

A container's memory ends long before the machine's does, and the machine's figures do not show it.
Both classes take an injected root, find the groups of this process through /proc/self/cgroup and
look at each from its own up to the top, since any of them may be the one that is short. Where the
path does not exist (a container that sees only its own part of the tree) the mount's top stands for
it. Each object owns the event counts it compares with the next reading.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prefixcached.actors.pressure_policy import Level, Reading

USED_WARN: Final = 0.90
USED_CRITICAL: Final = 0.97
"""Shares of a limit that are in use and cannot simply be dropped. The kernel reclaims by itself at
the limit; what remains beyond 97 % is memory that only its owners can give back."""

USED_WITH_EVENTS: Final = 0.75
"""Share in use from which the kernel's own complaint counts (``high`` and ``max`` events). Below it
a group that reads many files runs into its limit all the time and only drops clean pages."""

UNLIMITED: Final = 1 << 60
"""Version 1 writes "no limit" as the largest page count, just below 2**63."""

SUBTREE: Final = ("", "unified")
"""Where version 2 is mounted below /sys/fs/cgroup: alone, or beside version 1."""


class Usage(NamedTuple):
    """One group: what it may have, what it uses beyond clean unused file pages, in bytes."""

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def share(self) -> float:
        """Used share of the limit."""
        return self.used_bytes / self.limit_bytes


class CgroupTwo:
    """Version 2: memory.current against the lower of memory.high and memory.max, and events."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._events: dict[Path, dict[str, int]] = {}

    def read(self, now: float) -> Reading:
        """Return the level of the group that is shortest of memory.

        Raises:
            OSError: No group of this process has a limit.
        """
        groups = list(self._limited())
        if not groups:
            raise OSError("no control group of version 2 limits this process")
        usages = [_usage_two(group) for group in groups]
        tightest = max(usages, key=lambda usage: usage.share)
        news = self._news(groups)
        level = _level(tightest.share)
        if news["oom"] or news["oom_kill"]:
            level = Level.CRITICAL
        elif (news["high"] or news["max"]) and tightest.share >= USED_WITH_EVENTS:
            level = max(level, Level.WARN, key=lambda candidate: candidate.rank)
        seen = ", ".join(f"{count} {name}" for name, count in news.items() if count)
        return Reading(level, _reason(tightest) + (f"; events: {seen}" if seen else ""))

    def limits(self) -> list[int]:
        """Return the limits in bytes that apply to this process; none where nothing limits it."""
        return [limit for group in self._limited() if (limit := _limit_two(group)) is not None]

    def _limited(self) -> Iterator[Path]:
        path = _own_path(self._root, "")
        if path is None:
            return
        for mount in SUBTREE:
            top = self._root / "sys/fs/cgroup" / mount
            if (top / "cgroup.controllers").exists():
                for group in _upwards(top, path):
                    if _limit_two(group) is not None:
                        yield group

    def _news(self, groups: list[Path]) -> dict[str, int]:
        """Return how often each event happened since the last reading."""
        news: dict[str, int] = dict.fromkeys(("high", "max", "oom", "oom_kill"), 0)
        for group in groups:
            counts = _table(group / "memory.events")
            if not counts:
                continue  # not readable just now: the next reading compares with the last one
            # A group that is seen for the first time has a past that says nothing of now.
            before = self._events.get(group, counts)
            for name in news:
                news[name] += max(0, counts.get(name, 0) - before.get(name, 0))
            self._events[group] = counts
        return news


class CgroupOne:
    """Version 1: memory.usage_in_bytes against memory.limit_in_bytes; it has no events."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, now: float) -> Reading:
        """Return the level of the group that is shortest of memory.

        Raises:
            OSError: No group of this process has a limit.
        """
        usages = [_usage_one(group, limit) for group, limit in self._limited()]
        if not usages:
            raise OSError("no control group of version 1 limits this process")
        tightest = max(usages, key=lambda usage: usage.share)
        return Reading(_level(tightest.share), _reason(tightest))

    def limits(self) -> list[int]:
        """Return the limits in bytes that apply to this process; none where nothing limits it."""
        return [limit for _, limit in self._limited()]

    def _limited(self) -> Iterator[tuple[Path, int]]:
        path = _own_path(self._root, "memory")
        if path is None:
            return
        for group in _upwards(self._root / "sys/fs/cgroup/memory", path):
            try:
                limit = int((group / "memory.limit_in_bytes").read_text())
            except (OSError, ValueError):
                continue
            if 0 < limit < UNLIMITED:
                yield group, limit


def _own_path(root: Path, controller: str) -> str | None:
    """Return this process's path in the hierarchy of ``controller`` ("" for version 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return None


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """Yield the group at ``path`` and those above it, up to ``top``."""
    group = top / path.lstrip("/")
    # ".." means that the group lies outside what this container may see.
    if ".." in group.parts or not group.is_dir():
        group = top
    yield group
    while group != top:
        group = group.parent
        yield group


def _limit_two(group: Path) -> int | None:
    limits: list[int] = []
    for name in ("memory.high", "memory.max"):
        try:
            limits.append(int((group / name).read_text()))
        except (OSError, ValueError):  # the top group has no such file; "max" is no number
            continue
    return min((limit for limit in limits if limit > 0), default=None)


def _usage_two(group: Path) -> Usage:
    limit = _limit_two(group)
    if limit is None:
        raise OSError(f"{group} has lost its limit")
    used = int((group / "memory.current").read_text())
    unused_files = _table(group / "memory.stat").get("inactive_file", 0)
    return Usage(str(group), limit, max(0, used - unused_files))


def _usage_one(group: Path, limit: int) -> Usage:
    used = int((group / "memory.usage_in_bytes").read_text())
    unused_files = _table(group / "memory.stat").get("total_inactive_file", 0)
    return Usage(str(group), limit, max(0, used - unused_files))


def _table(file: Path) -> dict[str, int]:
    """Return the ``name number`` lines of a file; nothing where there is no such file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(number) for name, _, number in (line.partition(" ") for line in lines)}


def _level(share: float) -> Level:
    if share >= USED_CRITICAL:
        return Level.CRITICAL
    return Level.WARN if share >= USED_WARN else Level.NORMAL


def _reason(usage: Usage) -> str:
    return (
        f"{usage.name} uses {usage.share:.1%} of its {usage.limit_bytes >> 20} MiB, "
        "clean unused file pages not counted"
    )
