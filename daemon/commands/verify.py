"""`prefixcached verify`: read and check every file of the state directory."""

import sys
from collections import Counter
from pathlib import Path

import click

from prefixcached.daemon import config, logs
from prefixcached.daemon.commands.common import EXIT_FAILED, bytes_text
from prefixcached.daemon.commands.option_flags import config_option, settings
from prefixcached.daemon.commands.verification import Finding, Survey, repair
from prefixcached.daemon.options import options_of


@click.command(epilog="Example: prefixcached verify --repair")
@config_option
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="The directory to check; by default the daemon's.",
)
@click.option("--repair", "is_repair", is_flag=True, help="Move damaged files into quarantine.")
def verify(state_dir: Path | None, config_file: Path | None, *, is_repair: bool) -> None:
    """Read and check every file on SSD, with or without a daemon running on it.

    Names each damaged file and why; ends with 1 if there is any, or one that cannot be read.
    Changes nothing without --repair.
    """
    chosen = options_of(settings({"state_dir": state_dir}, config_file))
    directory = chosen.state_dir or config.default_state_dir()
    if state_dir is not None and not directory.is_dir():
        raise click.UsageError(f"--state-dir {directory} does not exist")
    survey = Survey(directory)
    try:
        findings = _check_all(survey)
    except FileNotFoundError:
        click.echo(f"nothing is stored in {directory}")
        return
    except OSError as error:
        raise click.ClickException(f"cannot list {directory}: {error.strerror}") from error
    for finding in findings:
        if finding.kind in ("damaged", "unreadable", "foreign"):
            click.echo(f"{finding.kind}  {finding.path}  {finding.reason}")
    damaged = [finding for finding in findings if finding.kind == "damaged"]
    failures: list[str] = []
    if is_repair and damaged:
        logs.configure()
        failures = repair(survey.directory, damaged)
    _summarise(survey, findings)
    if is_repair and damaged:
        click.echo(f"moved {len(damaged) - len(failures)} into {directory / 'quarantine'}")
        for failure in failures:
            click.echo(failure, err=True)
    elif damaged:
        click.echo("`prefixcached verify --repair` moves the damaged ones aside", err=True)
    if damaged or any(finding.kind == "unreadable" for finding in findings):
        raise click.exceptions.Exit(EXIT_FAILED)


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
