"""Settings and statistics of `SsdTier`: plain values."""

from typing import Final

import msgspec

from prefixcached.actors.write_policy import RETRY_FIRST_SECONDS, RETRY_MOST_SECONDS

COUNTERS = (
    "writes",
    "written_bytes",
    "writes_cancelled",
    "writes_refused_by_budget",
    "writes_refused_by_disk",
    "writes_failed",
    "deletions",
    "deletions_failed",
    "clears",
    "directories_lost",
    "trash_emptied_bytes",
    "loaded_files",
    "damaged_files",
    "unreadable_files",
    "temporary_files_reaped",
)
"""What is counted since the start, by the names of `SsdTierStatistics`."""

PATIENCE_SECONDS: Final = 2.0
"""For the directory to be ready at the start: a drive that has to spin up takes ten."""


class SsdTierConfig(msgspec.Struct, frozen=True):
    """Settings of the writer.

    ``daily_write_bytes`` is rule D6's bound, ``cap_bytes`` the tier's cap: what is no entry goes
    first when a directory is over it at start-up. None is no bound. After ``patience_seconds`` RAM
    goes on without a directory that is not ready.
    """

    daily_write_bytes: int | None = None
    cap_bytes: int | None = None
    patience_seconds: float = PATIENCE_SECONDS
    retry_first_seconds: float = RETRY_FIRST_SECONDS
    retry_most_seconds: float = RETRY_MOST_SECONDS


class SsdTierStatistics(msgspec.Struct, frozen=True):
    """Counters since the start, and the present state (rule C5)."""

    writes: int
    written_bytes: int
    write_seconds: float
    written_today_bytes: int
    daily_write_bytes: int | None
    writes_queued: int
    writes_cancelled: int
    writes_refused_by_budget: int
    writes_refused_by_disk: int
    writes_failed: int
    deletions: int
    deletions_failed: int
    clears: int
    directories_lost: int
    trash_emptied_bytes: int
    loaded_files: int
    damaged_files: int
    unreadable_files: int
    temporary_files_reaped: int
    undeletable_files: int
    deletion_failure: str
    foreign_files: int
    foreign_bytes: int
    quarantined_files: int
    quarantine_bytes: int
    dropped_files: int
    other_bytes: int
    is_loading: bool
    is_healthy: bool
    failure: str
