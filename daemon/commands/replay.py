"""`prefixcached replay`: a recorded trace once more, against a daemon of its own.

The daemon is a child of this process, in a temporary directory that is removed at the end. It
traces as well, so that both sides of the comparison are measured alike.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from prefixcached.daemon import options
from prefixcached.daemon.command_group import WrongUsage
from prefixcached.daemon.commands.common import bytes_text, terminal, waiting_for
from prefixcached.daemon.commands.option_flags import option_flags
from prefixcached.daemon.commands.trace import opened
from prefixcached.daemon.options import OptionError
from prefixcached.protocol.paths import SOCKET_VARIABLE

if TYPE_CHECKING:
    # `serve` imports this module as well, and stays small.
    from prefixcached.daemon.trace.replay_player import Comparison
    from prefixcached.daemon.trace.summary import Summary
    from prefixcached.daemon.trace.trace_file import Header, Record

STOP_SECONDS: Final = 30.0
"""For the daemon to write what is queued: it takes 15 s at most."""

_OF_THE_REPLAY: Final = frozenset({"state_dir", "metrics_port"})
"""Options that name a place, which is not the recorded daemon's."""

NOTE_ON_FILES: Final = (
    "What was on SSD when the record began is not in it: hits on that are misses here."
)
NOTE_ON_TIME: Final = (
    "Time between requests is left out, so what depends on it (idle demotion, expiring labels, the "
    "daily write budget, late writes) may differ; --speed 1 keeps it."
)


@click.command(epilog="Example: prefixcached replay day.trace --ram-bytes 4GiB --retention lru")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option_flags
@click.option(
    "--speed",
    type=click.FloatRange(min=0.0),
    default=0.0,
    metavar="FACTOR",
    help="1: in the record's own time; 0: no waiting [0]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def replay(file: Path, config_file: Path | None, speed: float, as_json: bool, **flags: Any) -> None:
    """Issue the requests of a trace again, with other options, and compare.

    The options are those of `serve`; without them the recorded ones hold. Prompts are digests and
    the bytes made up, of the same size as in the record: the daemon needs as much room as they say.
    """
    import msgspec
    import trio

    from prefixcached.daemon.trace.replay_link import ReplayFailedError
    from prefixcached.daemon.trace.replay_steps import steps_of
    from prefixcached.daemon.trace.replayer import Replayer
    from prefixcached.daemon.trace.summary import Tally, summarise

    recorded = Tally()
    with (
        tempfile.TemporaryDirectory(prefix="pfxc-replay-") as name,
        opened(file) as (header, records),
    ):
        home = Path(name)
        chosen = _options(header, flags, config_file)
        with _daemon(home, chosen) as socket, waiting_for("Replaying"):
            replayer = Replayer(socket, speed)
            try:
                trio.run(replayer.run, steps_of(_counted(records, recorded)))
            except ReplayFailedError as error:
                raise click.ClickException(f"{error}\n{_log(home)}") from error
        with opened(home / "trace") as (_, own):
            replayed = summarise(own)
    before = recorded.summary()
    if as_json:
        result = {
            "options": chosen,
            "recorded": before,
            "replayed": replayed,
            "comparison": asdict(replayer.comparison),
        }
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
    else:
        _print(before, replayed, replayer.comparison, speed)


def _counted(records: "Iterable[Record]", tally: Any) -> "Iterator[Record]":
    for record in records:
        tally.add(record)
        yield record


def _options(
    header: "Header", flags: Mapping[str, Any], config_file: Path | None
) -> dict[str, str]:
    """Return the options of the replay: the flags, else the file's, else the recorded ones."""
    config = header.config
    chosen = {
        **config.get("options", {}),
        # As they came out, not as they were given: a share is of another machine's memory.
        "ram_bytes": config.get("ram_bytes"),
        "ssd_bytes": config.get("ssd_bytes"),
    }
    try:
        if config_file is not None:
            chosen |= options.read_file(config_file)
    except OptionError as error:
        raise WrongUsage(str(error)) from error
    chosen |= {name: value for name, value in flags.items() if value is not None}
    known = options.names()
    return {
        name: str(value)
        for name, value in chosen.items()
        if name in known and name not in _OF_THE_REPLAY and value is not None
    }


@contextmanager
def _daemon(home: Path, chosen: Mapping[str, str]) -> Iterator[Path]:
    """A daemon of its own, READY, and its socket; it has written its trace after the block."""
    socket = home / "socket"
    (home / "config.toml").touch()
    command = [
        sys.executable, "-m", "prefixcached.daemon.cli", "serve",
        "--socket", str(socket), "--config", str(home / "config.toml"),
        "--state-dir", str(home / "state"), "--trace", str(home / "trace"),
        *(f"{options.flag_of(name)}={value}" for name, value in chosen.items()),
    ]  # fmt: skip
    # The user's own settings are for the user's own daemon.
    environment = {n: v for n, v in os.environ.items() if not n.startswith(options.PREFIX)}
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            env=environment | {SOCKET_VARIABLE: str(socket)}, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("READY "):
                raise click.ClickException(f"the daemon did not start:\n{_log(home)}")
            yield socket
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _log(home: Path) -> str:
    return (home / "log").read_text(errors="replace")[-2000:].strip()


def _print(before: "Summary", after: "Summary", comparison: "Comparison", speed: float) -> None:
    from rich.table import Table

    console = terminal()
    table = Table()
    table.add_column("")
    table.add_column("recorded", justify="right")
    table.add_column("replayed", justify="right")
    for (name, left), (_, right) in zip(_rows(before), _rows(after), strict=True):
        table.add_row(name, left, right)
    for title in ("misses", "declined"):
        one, other = getattr(before, title), getattr(after, title)
        for reason in sorted({*one, *other}):
            table.add_row(
                f"{title}: {reason}", f"{one.get(reason, 0):,}", f"{other.get(reason, 0):,}"
            )
    for kind in sorted({*before.times, *after.times}):
        table.add_row(
            f"{kind}: ms, 50/90/99%",
            *(
                "/".join(f"{1000 * s:.3g}" for s in one.times[kind].percentiles.values())
                if kind in one.times
                else "-"
                for one in (before, after)
            ),
        )
    console.print(table)
    console.print(
        f"Of {before.takes:,} takes {comparison.equal_takes:,} found as much as in the record, "
        f"{comparison.longer_takes:,} more, {comparison.shorter_takes:,} less."
    )
    if comparison.late:
        console.print(
            f"{comparison.late:,} replies came late; what followed may have overtaken it."
        )
    if before.left_out:
        console.print(f"The record lacks {before.left_out:,} messages: its daemon was too busy.")
    console.print(NOTE_ON_FILES)
    if not speed:
        console.print(NOTE_ON_TIME)


def _rows(summary: "Summary") -> Iterator[tuple[str, str]]:
    yield "takes", f"{summary.takes:,}"
    yield "tokens reused", f"{summary.tokens_reused:,} of {summary.tokens_requested:,}"
    yield "hit ratio by tokens", f"{100 * summary.hit_ratio:.1f}%"
    yield "hits in RAM", f"{summary.hits['ram']:,}"
    yield "hits on SSD", f"{summary.hits['ssd']:,}"
    yield "objects found", f"{summary.object_hits:,}"
    yield "prompts stored", f"{summary.stored:,}"
    for name, count in (
        ("evicted from RAM", summary.evictions),
        ("dropped unwritten", summary.dropped_unwritten),
        ("evicted from SSD", summary.ssd_evictions),
    ):
        yield name, "-" if count is None else f"{count:,}"
    for name, count in (
        ("written to SSD", summary.written_bytes),
        ("read from SSD", summary.read_bytes),
    ):
        yield name, "-" if count is None else bytes_text(count)
