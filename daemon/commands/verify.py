"""`prefixcached verify`: read and check every file of the state directory."""

import sys
from collections import Counter
from pathlib import Path

import click

from prefixcached.daemon import config, logs
from prefixcached.daemon.commands.asking import reported_by
from prefixcached.daemon.commands.common import EXIT_FAILED, counted, say, socket_option
from prefixcached.daemon.commands.option_flags import config_option, settings
from prefixcached.daemon.commands.verification import Finding, Survey, repair
from prefixcached.daemon.options import options_of
from prefixcached.daemon.sendable import REPLACEMENT, path_said
from prefixcached.daemon.sizes import bytes_text


@click.command(
    short_help="Read and check every file on SSD.", epilog="Example: prefixcached verify --repair"
)
@socket_option
@config_option
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="The directory to check; by default that of the daemon that answers.",
)
@click.option("--repair", "is_repair", is_flag=True, help="Move damaged files into quarantine.")
def verify(
    socket: Path, state_dir: Path | None, config_file: Path | None, *, is_repair: bool
) -> None:
    """Read and check every file on SSD, with or without a daemon running on it.

    Names each damaged file and why; ends with 1 if one stays that is damaged or cannot be read.
    Changes nothing without --repair.
    """
    directory, whose, is_live = _directory(socket, state_dir, config_file)
    survey = Survey(directory)
    try:
        findings = _check_all(survey)
    except FileNotFoundError:
        say(f"nothing is stored in {directory}, {whose}")
        return
    except OSError as error:
        raise click.ClickException(f"cannot list {directory}: {error.strerror}") from error
    for finding in findings:
        if finding.kind in ("damaged", "unreadable", "foreign"):
            say(f"{finding.kind}  {finding.path}  {finding.reason}")
    say(f"looked at {directory}, {whose}")
    _summarise(survey, findings)
    damaged = [finding for finding in findings if finding.kind == "damaged"]
    remain = len(damaged)
    if is_repair and damaged:
        remain = _repair(survey, damaged, is_live=is_live)
    elif damaged:
        click.echo("`prefixcached verify --repair` moves the damaged ones aside", err=True)
    if remain or any(finding.kind == "unreadable" for finding in findings):
        raise click.exceptions.Exit(EXIT_FAILED)


def _directory(
    socket: Path, state_dir: Path | None, config_file: Path | None
) -> tuple[Path, str, bool]:
    """Return the directory to check, whose it is, and whether a daemon works on it."""
    chosen = options_of(settings({"state_dir": state_dir}, config_file))
    configured = chosen.state_dir or config.default_state_dir()
    if state_dir is not None:
        if not configured.is_dir():
            raise click.UsageError(f"--state-dir {configured} does not exist")
        return configured, "as --state-dir says", False
    from prefixcached.client.errors import PrefixCachedError

    try:
        used = reported_by(socket)["daemon"].get("state_dir")
    except PrefixCachedError as error:
        return configured, f"which is configured ({error})", False
    if used is None:
        return configured, f"which is configured (the daemon at {socket} uses none)", False
    directory = path_said(used, configured)
    if REPLACEMENT in used and not directory.is_dir():
        raise click.UsageError(f"{used} is not all of its name; give it as --state-dir")
    return directory, f"which the daemon at {socket} uses", True


def _repair(survey: Survey, damaged: list[Finding], *, is_live: bool) -> int:
    """Move them into the quarantine, say so, and return how many could not be moved."""
    logs.configure()
    failures = repair(survey.directory, damaged)
    moved = len(damaged) - len(failures)
    quarantine = Path(survey.directory.path) / "quarantine"
    say(f"repaired: moved {counted(moved, 'damaged file')} into {quarantine}")
    if is_live:
        click.echo("the daemon lists them as on SSD until it next wants to read them, then misses")
    for failure in failures:
        say(failure, err=True)
    return len(failures)


def _check_all(survey: Survey) -> list[Finding]:
    from rich.console import Console
    from rich.progress import Progress

    candidates = survey.candidates()
    console = Console(stderr=True)
    findings: list[Finding] = []
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("Checking", total=sum(one.nbytes for one in candidates))
        done = 0
        for candidate in candidates:
            findings.append(survey.check(candidate, lambda: progress.advance(task, 1 << 20)))
            done += candidate.nbytes
            progress.update(task, completed=done)
    return findings + survey.foreign


def _summarise(survey: Survey, findings: list[Finding]) -> None:
    counts = Counter(finding.kind for finding in findings)
    good_bytes = sum(finding.nbytes for finding in findings if finding.kind == "good")
    click.echo(
        f"{counts['good']} files good ({bytes_text(good_bytes)}), {counts['damaged']} damaged, "
        f"{counts['unreadable']} unreadable, {counts['foreign']} foreign or unattached, "
        f"{survey.temporary} being written or left over"
    )
