"""What a daemon holds, counted from outside and inside, to see that nothing is left of anybody."""

import os
from pathlib import Path
from typing import Final

import msgspec

from prefixcached.client import Cache
from tests.support.daemon_process import DaemonProcess

HOLDINGS: Final = (
    "leases", "pins", "claims", "puts_in_flight", "takes_waiting", "offers_waiting",
    "reads_outstanding", "promotions_in_flight", "writes_queued",
)  # fmt: skip
"""What RamTier keeps for somebody, or has under way."""


class Census(msgspec.Struct, frozen=True):
    """``strangers`` are connections beside the counting client's own; descriptors are without any.

    Shared memory counts the daemon's memory objects; ``unfinished`` the temporary, cleared and
    quarantined files. ``ssd_bytes`` are those of images, from the first to the trash: beside them
    stands the write meter's page, which a file system may not have allocated yet.
    """

    holdings: dict[str, int]
    ram_bytes: dict[str, int]
    images: int
    entries: int
    ssd_bytes: dict[str, int]
    strangers: int
    descriptors: int
    shared_memory: int
    unfinished: tuple[str, ...]


def take_census(daemon: DaemonProcess, cache: Cache) -> Census:
    """Count once."""
    report = cache.stats()
    ram_tier, connections = report["ram_tier"], report["listener"]["current"]
    own = cache.statistics()
    descriptors = targets_of(daemon.pid)
    return Census(
        holdings={name: ram_tier[name] for name in HOLDINGS},
        ram_bytes=ram_tier["ram_bytes_by_state"],
        images=ram_tier["images"],
        entries=ram_tier["entries"],
        ssd_bytes={n: b for n, b in ram_tier["ssd_bytes_by_state"].items() if n != "other"},
        strangers=connections - own.idle - own.lent,
        descriptors=len(descriptors) - connections,
        shared_memory=sum("memfd:" in target for target in descriptors),
        unfinished=unfinished_files(daemon.state_dir),
    )


def targets_of(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    folder = Path("/proc", str(pid), "fd")
    targets: list[str] = []
    for entry in os.listdir(folder):
        try:
            targets.append(os.readlink(folder / entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    return targets


def thread_count(pid: int) -> int:
    """How many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))


def private_bytes(pid: int) -> int:
    """Memory that is a process's own, without what it shares."""
    found = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kilobytes = [int(line.split()[1]) for line in found if line.startswith("Private_")]
    return sum(kilobytes) * 1024


def allocated_bytes(directory: Path) -> int:
    """Bytes that the files below a directory take on its disk."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:  # deleted meanwhile
                continue
    return total


def unfinished_files(state_dir: Path) -> tuple[str, ...]:
    """Files that a write, a clear or a damage left, by name."""
    left: list[str] = []
    # `os.walk` passes over what is deleted meanwhile.
    for folder, directories, names in os.walk(state_dir):
        is_aside = Path(folder).name in ("trash", "quarantine")
        left += [name for name in names if name.startswith("tmp-")]
        left += [name for name in (*directories, *names) if is_aside and name[0] != "."]
    return tuple(sorted(left))
