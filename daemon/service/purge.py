"""Removing what a daemon left: by the names of what it makes, never a directory with all in it.

``--socket``, ``--config`` and ``state_dir`` may lie in any directory, and one that is called
prefixcached may be a checkout of this project.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prefixcached.actors import store_directory
from prefixcached.daemon import config, options
from prefixcached.daemon.service import running
from prefixcached.daemon.service.installed import installed, installed_file
from prefixcached.daemon.service.plan import ServiceError, ServicePlan
from prefixcached.protocol.paths import start_lock

OURS: Final = "prefixcached"
"""Name of every directory that the product makes for itself alone."""

_STATE_FILES: Final = (
    store_directory.LOCK_NAME,
    store_directory.METER_NAME,
    f"{store_directory.TEMPORARY_PREFIX}*",
)
_STATE_TREES: Final = (
    store_directory.QUARANTINE,
    store_directory.TRASH,
    store_directory.SEGMENTS,  # last: without it the others are taken for somebody else's
)


def state_dir_of(plan: ServicePlan) -> Path:
    """Where the daemon of ``plan`` keeps its files; a service sees no variables of this shell.

    Raises:
        OptionError: The configuration, which says so, is wrong.
        ServiceError: It is gone, or not known. What is anywhere else may be another daemon's.
    """
    told, file = installed(), installed_file()
    if told is None and file is not None and not plan.extra:
        raise ServiceError(
            f"{file} does not say where the service listens, so whose cache to remove is not "
            "known; name socket and configuration with --socket and --config FILE, or leave "
            "--purge away"
        )
    if plan.extra and running.is_gone(plan.config_file):
        raise ServiceError(
            f"the configuration file {plan.config_file}, which says where the cache is, does not "
            "exist; name one that says so with --config FILE, or leave --purge away"
        )
    chosen = options.options_of(
        options.gather(
            {},
            file=plan.config_file if plan.extra else None,
            environment=None if told is None else {},
        )
    )
    return chosen.state_dir or config.default_state_dir()


def purge(plan: ServicePlan, state_dir: Path) -> Iterator[str]:
    """Remove all that the daemon of ``plan`` may have left; yield a line for people on each.

    Directories go where that leaves them empty. ``state_dir`` is what it had on SSD. The
    configuration says where that is, and goes after it: whoever is told of a failure tries again.

    Raises:
        ServiceError: Something of it stays.
    """
    for path in _files(plan, state_dir):
        if running.remove(path):
            yield f"removed {path}"
    if _is_state_dir(state_dir):
        for name in _STATE_TREES:
            if running.remove_tree(state_dir / name):
                yield f"removed {state_dir / name}"
    if running.remove(plan.config_file):
        yield f"removed {plan.config_file}"
    for directory in _directories(plan, state_dir):
        if running.remove_empty(directory):
            yield f"removed {directory}"


def _files(plan: ServicePlan, state_dir: Path) -> Iterator[Path]:
    if _is_state_dir(state_dir):
        for pattern in _STATE_FILES:
            yield from sorted(state_dir.glob(pattern))
    if _is_socket(plan.socket):  # a wrong --socket must not cost anybody a file
        yield plan.socket
    yield from (plan.lock_file, start_lock(plan.socket))
    yield from (plan.log_file, plan.log_file.with_name(f"{plan.log_file.name}.1"))


def _directories(plan: ServicePlan, state_dir: Path) -> Iterator[Path]:
    """Those that may go if nothing is in them; the user keeps one that they named."""
    yield plan.log_dir
    parents = (plan.log_dir.parent, state_dir, plan.socket.parent, plan.config_file.parent)
    yield from (path for path in parents if path.name == OURS)


def _is_state_dir(directory: Path) -> bool:
    """Whether a daemon worked there: names like `trash` and `lock` are not its alone."""
    return os.path.isdir(directory / store_directory.SEGMENTS)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False
