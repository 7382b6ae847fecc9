"""What the daemon that answers uses, and how that differs from the configuration. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from os.path import realpath
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from prefixcached.daemon import config, options
from prefixcached.daemon.commands.common import see
from prefixcached.daemon.sendable import path_said
from prefixcached.daemon.sizes import bytes_text

SAME_SHARE: Final = 0.01
"""By which two caps may differ and be the same: a share of memory follows the machine's limit."""

Level = Literal["ok", "warning", "failed"]


class Finding(NamedTuple):
    """One thing that `doctor` looked at. ``fix`` is empty where nothing is to be done."""

    level: Level
    what: str
    detail: str
    fix: str = ""


def in_force(configured: config.Config, report: Mapping[str, Any]) -> config.Config:
    """Return the configuration with what the daemon that answers uses in its place."""
    about, ram = report["daemon"], report["ram_tier"]
    ssd_bytes = ram["ssd_bytes_cap"] if "ssd_tier" in report else 0
    return replace(
        configured,
        state_dir=path_said(
            about.get("state_dir") or str(configured.state_dir), configured.state_dir
        ),
        ram_bytes=ram["ram_bytes_cap"],
        ssd_bytes=ssd_bytes,
        max_images=ram["images_cap"],
    )


def check_differences(
    configured: config.Config, report: Mapping[str, Any], file: Path | None = None
) -> Iterator[Finding]:
    """Compare what the daemon uses with what it would use if it were started again now."""
    used = in_force(configured, report)
    differences: list[str] = []
    if used.ssd_bytes and realpath(used.state_dir) != realpath(configured.state_dir):
        differences.append(f"state_dir is {used.state_dir}, not {configured.state_dir}")
    if _differ(used.ram_bytes, configured.ram_bytes):
        differences.append(
            f"ram_bytes is {bytes_text(used.ram_bytes)}, not {bytes_text(configured.ram_bytes)}"
        )
    # What `auto` was depends on what was free at the start.
    is_automatic = configured.options.ssd_bytes == options.AUTO and used.ssd_bytes
    if _differ(used.ssd_bytes, configured.ssd_bytes) and not is_automatic:
        differences.append(
            f"ssd_bytes is {bytes_text(used.ssd_bytes)}, not {bytes_text(configured.ssd_bytes)}"
        )
    if differences:
        place = file or options.named_file() or options.default_file()
        yield Finding(
            "warning", "configuration",
            f"the daemon was started with other options: {'; '.join(differences)}",
            f"to keep them, write them to {place}; else start it again; "
            f"{see('The daemon uses other options')}",
        )  # fmt: skip
    if used.max_images < configured.max_images:
        yield Finding(
            "warning", "descriptors",
            f"the daemon may hold {used.max_images:,} images, and one started from here "
            f"{configured.max_images:,}: whoever started it had a lower limit of open files, as "
            "any process has that imported mlx-lm",
            f"end it, then `prefixcached serve` or `prefixcached service install`; "
            f"{see('Started by clients')}",
        )  # fmt: skip


def _differ(one: int, other: int) -> bool:
    return abs(one - other) > SAME_SHARE * max(one, other)
