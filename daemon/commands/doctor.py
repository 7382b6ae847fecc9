"""`prefixcached doctor`: what is wrong with this installation, each finding with its fix."""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import click

from prefixcached import __version__
from prefixcached.daemon import config, options, resources
from prefixcached.daemon.commands.asking import reported_by
from prefixcached.daemon.commands.common import (
    EXIT_FAILED,
    EXIT_NO_DAEMON,
    say,
    see,
    socket_option,
)
from prefixcached.daemon.commands.differences import Finding, check_differences, in_force
from prefixcached.daemon.commands.option_flags import config_option
from prefixcached.daemon.commands.service import of_this_platform
from prefixcached.daemon.options import OptionError, Options
from prefixcached.daemon.service.installed import Told, installed
from prefixcached.daemon.service.plan import ServiceError, make_plan
from prefixcached.daemon.sizes import bytes_text
from prefixcached.protocol.paths import MAX_SOCKET_PATH_BYTES, SOCKET_VARIABLE, service_files

FEW_IMAGES: Final = 1000
"""Images that the descriptor limit should allow: below it, small prompts push each other out."""

LARGE_SHARE: Final = 0.5
"""Of memory: a RAM cap beyond it leaves too little for the models themselves."""


@click.command(
    short_help="Check socket, rights, disk, memory limit and service.",
    epilog="Example: prefixcached doctor",
)
@socket_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def doctor(socket: Path, config_file: Path | None, *, as_json: bool) -> None:
    """Check socket, permissions, versions, disk, memory and service; say how to mend each.

    Ends with 1 if something is broken, 3 if only the daemon does not run, else 0.
    """
    socket = socket.absolute()
    told = installed()
    if config_file is None and told is not None and told.socket == socket:
        config_file = told.config_file
    findings, chosen = check_configuration(config_file)
    findings.extend(check_socket(socket))
    report, answer = ask(socket, again=_how_to_restart())
    findings.append(answer)
    if report is not None:
        findings.extend(check_report(report))
    # What follows needs a configuration; that it is wrong was said above.
    if chosen is not None:
        effective = config.load(chosen, socket=socket)
        if report is not None:
            findings.extend(check_differences(effective, report, config_file))
            effective = in_force(effective, report)
        findings.extend(check_storage(effective, report))
        findings.extend(check_service(socket, config_file))
    findings.extend(check_versions())
    if as_json:
        click.echo(json.dumps({"findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        for level, what, detail, fix in findings:
            say(f"{level:8} {what}: {detail}")
            if fix:
                say(f"{'':8} → {fix}")
    if any(finding.level == "failed" for finding in findings):
        raise click.exceptions.Exit(EXIT_FAILED)
    if report is None:
        raise click.exceptions.Exit(EXIT_NO_DAEMON)


def check_configuration(file: Path | None) -> tuple[list[Finding], Options | None]:
    """Read the options as `serve` would."""
    try:
        chosen = options.options_of(options.gather({}, file=file))
    except OptionError as error:
        return [
            Finding("failed", "configuration", str(error), f"mend it; {see('Configuration')}")
        ], None
    named = file or options.named_file()
    path = named or options.default_file()
    if named is None and not path.exists():
        said = f"there is no file at {path}: defaults, unless the environment sets something"
    else:
        said = str(path)
    return [Finding("ok", "configuration", said)], chosen


def check_socket(socket: Path) -> Iterator[Finding]:
    """Look at the socket's path, its directory and itself (rule C1)."""
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_PATH_BYTES:
        yield Finding(
            "failed", "socket", f"{socket} takes {length} bytes, and {MAX_SOCKET_PATH_BYTES} fit",
            "choose a shorter path with PREFIXCACHED_SOCKET",
        )  # fmt: skip
    yield from _private(socket.parent, "socket directory", 0o700)
    try:
        found = socket.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield Finding(
            "failed", "socket", f"{socket} is no socket", "move it away and start the daemon again"
        )
    elif stat.S_IMODE(found.st_mode) != 0o600:
        yield Finding(
            "failed", "socket", f"{socket} has mode {stat.S_IMODE(found.st_mode):04o}, not 0600",
            f"chmod 600 '{socket}'",
        )  # fmt: skip


def _private(directory: Path, what: str, mode: int) -> Iterator[Finding]:
    try:
        found = directory.stat()
    except FileNotFoundError:
        yield Finding("ok", what, f"{directory} will be made by the daemon")
        return
    except OSError as error:
        yield Finding("failed", what, f"{directory}: {error.strerror}", "choose another directory")
        return
    actual = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid():
        yield Finding(
            "failed", what, f"{directory} belongs to user {found.st_uid}",
            "choose a directory of your own",
        )  # fmt: skip
    elif actual & 0o777 & ~mode:
        yield Finding(
            "failed", what, f"{directory} has mode {actual:04o}", f"chmod {mode:o} '{directory}'"
        )
    else:
        yield Finding("ok", what, f"{directory} is yours alone")


def _how_to_restart() -> str:
    """What to do to a daemon that runs: a service has its own verb."""
    if any(file.is_file() for file in service_files()):
        return "prefixcached service restart; then prefixcached service logs"
    return "end it (Ctrl-C where it was started, or kill) and start it again: prefixcached serve"


def ask(socket: Path, again: str) -> tuple[dict[str, Any] | None, Finding]:
    """Return what the daemon reports, None where it does not answer.

    Args:
        socket: Where it listens.
        again: How it is started again.
    """
    from prefixcached.client.errors import NoDaemon, PrefixCachedError

    try:
        report = reported_by(socket)
    except NoDaemon as error:
        fix = "prefixcached service install, or prefixcached serve"
        return None, Finding("warning", "daemon", str(error), fix)
    except PrefixCachedError as error:
        return None, Finding("failed", "daemon", str(error), again)
    about = report["daemon"]
    if about["version"] != __version__:
        detail = f"version {about['version']} runs, and {__version__} is installed"
        return report, Finding("warning", "daemon", detail, again)
    return report, Finding("ok", "daemon", f"process {about['pid']}, version {about['version']}")


def check_storage(effective: config.Config, report: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Look at the caps against memory and disk, and at the state directory (rule D9)."""
    memory = resources.memory_bytes()
    ram = f"{bytes_text(effective.ram_bytes)} of {bytes_text(memory)}"
    if effective.ram_bytes > LARGE_SHARE * memory:
        yield Finding(
            "warning", "memory", f"the RAM cap is {ram}", "lower ram_bytes; models need room too"
        )
    else:
        yield Finding("ok", "memory", f"the RAM cap is {ram}")
    if effective.max_images < FEW_IMAGES:
        yield Finding(
            "warning", "descriptors", f"they allow only {effective.max_images} images in RAM",
            "raise the limit of open files (ulimit -n), or run it as a service",
        )  # fmt: skip
    if not effective.ssd_bytes:
        yield Finding(
            "warning", "disk", "the SSD tier is off: a restart forgets everything",
            'set ssd_bytes = "auto"',
        )  # fmt: skip
        return
    yield from _private(effective.state_dir, "state directory", 0o755)
    used = 0 if report is None else int(report["ram_tier"]["ssd_bytes"])
    free = resources.free_bytes(effective.state_dir)
    room = f"the SSD cap is {bytes_text(effective.ssd_bytes)}, {bytes_text(free)} are free"
    if free + used < effective.ssd_bytes:
        yield Finding("warning", "disk", room, "lower ssd_bytes, or free some space")
    else:
        yield Finding("ok", "disk", room)


def check_report(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Look at what the running daemon says of itself."""
    disk = report["ram_tier"]["disk"]
    if not disk["healthy"]:
        yield Finding(
            "failed", "disk", f"writing fails: {disk['reason']}",
            f"free space or mend the volume; the daemon tries again; {see('The disk is full')}",
        )  # fmt: skip
    if damaged := disk["damaged"] + disk["damaged_at_start"]:
        yield Finding(
            "warning", "disk", f"{damaged} damaged files were put into quarantine",
            f"prefixcached verify; if it grows, check the drive; {see('A file is damaged')}",
        )  # fmt: skip
    level = report["ram_tier"]["pressure"].get("level", "unknown")
    if level in ("warn", "critical"):
        yield Finding(
            "warning", "memory", f"the machine is short of memory ({level})",
            f"lower ram_bytes, or close what uses the memory; {see('It is slow')}",
        )  # fmt: skip


def check_service(socket: Path, config_file: Path | None) -> Iterator[Finding]:
    """Compare the service's file with what would be installed, and with what is loaded."""
    told = installed() or Told(socket, config_file, is_resident=False)
    try:
        supervisor = of_this_platform(
            make_plan(told.socket, config_file=told.config_file, is_resident=told.is_resident)
        )
        present = [path for path in supervisor.files if path.is_file()]
        if not present:
            yield Finding("ok", "service", "none is installed")
            return
        if reason := supervisor.absence():
            yield Finding(
                "warning", "service", f"{present[0]} is there, and {reason}",
                "prefixcached service uninstall",
            )  # fmt: skip
            return
        loaded = supervisor.is_loaded()
        mismatches = supervisor.mismatches() if loaded else []
        expected = supervisor.render()
    except ServiceError as error:
        yield Finding("warning", "service", str(error), "prefixcached service install")
        return
    again = "prefixcached service install"
    if told.socket != socket:
        yield Finding(
            "warning", "service", f"it listens at {told.socket}, not at {socket}",
            f"{again} --socket '{socket}', or unset {SOCKET_VARIABLE}",
        )  # fmt: skip
    differs = [path for path, text in expected.items() if _content(path) != text]
    if differs:
        yield Finding("warning", "service", f"{differs[0]} is not what this version writes", again)
    for mismatch in mismatches:
        yield Finding("warning", "service", mismatch, "prefixcached service restart")
    if not loaded:
        yield Finding("warning", "service", "installed, not loaded", "prefixcached service start")
    elif not differs and not mismatches:
        yield Finding("ok", "service", f"{present[0]} is loaded")


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def check_versions() -> Iterator[Finding]:
    """Name the versions that matter to clients in this environment."""
    for package in ("mlx", "mlx-lm"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding("ok", package, "not in this environment; only clients need it")
        else:
            yield Finding("ok", package, version)
