"""`prefixcached replay`: a recorded trace once more, against a daemon of its own.

The daemon is a child of this process, in a temporary directory that is removed at the end. It
traces as well, so that both sides of the comparison are measured alike.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from prefixcached.daemon import options
from prefixcached.daemon.command_group import WrongUsage
from prefixcached.daemon.commands.common import FiniteRange, counted, plain, terminal, waiting_for
from prefixcached.daemon.commands.leaving import leaving_cleanly
from prefixcached.daemon.commands.option_flags import OTHERS, option_flags
from prefixcached.daemon.commands.replay_daemon import replay_daemon
from prefixcached.daemon.commands.trace import opened
from prefixcached.daemon.options import OptionError
from prefixcached.daemon.sizes import bytes_text

if TYPE_CHECKING:
    # `serve` imports this module as well, and stays small.
    from prefixcached.daemon.trace.guide import Followed
    from prefixcached.daemon.trace.replay_player import Comparison
    from prefixcached.daemon.trace.summary import Summary
    from prefixcached.daemon.trace.trace_file import Header, Record

MAX_OPTION_CHARACTERS: Final = 4096
"""Of a recorded option, all of which are short. It goes to a process as an argument, and arguments
have an end."""

_OF_THE_REPLAY: Final = frozenset({"state_dir", "metrics_port"})
"""Options that name a place, which is not the recorded daemon's."""

_CAPS: Final = ("ram_bytes", "ssd_bytes")
_Value = str | int | float | bool | None

NOTE_ON_FILES: Final = (
    "What was on SSD when the record began is not in it: hits on that are misses here."
)
NOTE_ON_TIME: Final = (
    "There time between requests is left out, so what depends on it (idle demotion, expiring "
    "labels, the daily write budget, late writes) may differ; --speed 1 keeps it from the start."
)


@click.command(
    short_help="Issue a trace's requests again with other options.",
    epilog=f"{OTHERS}\n\nExample: prefixcached replay day.trace --ram-bytes 4GiB --retention lru",
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option_flags
@click.option(
    "--speed",
    type=FiniteRange(min=0.0),
    default=0.0,
    metavar="FACTOR",
    help="1: in the record's time; 0: no waiting [0]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def replay(file: Path, config_file: Path | None, speed: float, as_json: bool, **flags: Any) -> None:
    """Issue the requests of a trace again, with other options, and compare.

    The options are those of `serve`; without them the recorded ones hold. Prompts are digests and
    the bytes made up, of the same size as in the record: the daemon needs as much room as they say.
    As long as the daemon decides as the record's did, it hears everything in the record's order and
    at the record's times: with the recorded options that is to the end, and the hits are the same.
    """
    import msgspec
    import trio

    from prefixcached.daemon.trace.following import report_path
    from prefixcached.daemon.trace.guide import Followed
    from prefixcached.daemon.trace.replay_link import ReplayFailedError
    from prefixcached.daemon.trace.replay_steps import steps_of
    from prefixcached.daemon.trace.replayer import Replayer
    from prefixcached.daemon.trace.summary import Tally, summarise

    recorded = Tally()
    # The daemon and this process read as much of it, though it may still be written.
    size = file.stat().st_size
    with leaving_cleanly(), _directory() as home, opened(file, size) as (header, records):
        chosen = chosen_options(header, flags, config_file)
        follow, report = None if speed else file.absolute(), report_path(home / "trace")
        with replay_daemon(home, chosen, follow, size) as daemon, waiting_for("Replaying"):
            replayer = Replayer(
                daemon.socket, speed, lambda: follow is not None and not report.exists()
            )  # fmt: skip
            try:
                trio.run(replayer.run, steps_of(_counted(records, recorded)))
            except ReplayFailedError as error:
                reason = daemon.trace_failure
                raise click.ClickException(
                    _cut(home, reason) if reason else f"{plain(str(error))}\n{daemon.last_words()}"
                ) from error
        with opened(home / "trace") as (_, own):
            replayed = summarise(own)
        reason = daemon.trace_failure
        if not reason and replayed.left_out:
            reason = f"{counted(replayed.left_out, 'message')} could not be written in time"
        if reason:
            raise click.ClickException(_cut(home, reason))
        followed = msgspec.json.decode(report.read_bytes(), type=Followed) if follow else None
    before = recorded.summary()
    if as_json:
        result = {
            "options": chosen,
            "recorded": before,
            "replayed": replayed,
            "comparison": asdict(replayer.comparison),
            "followed": followed,
        }
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
    else:
        _print(before, replayed, replayer.comparison, followed)


@contextmanager
def _directory() -> Iterator[Path]:
    """A directory for the block; what cannot be done there is not the trace's fault."""
    try:
        with tempfile.TemporaryDirectory(prefix="pfxc-replay-") as name:
            yield Path(name)
    except OSError as error:
        raise click.ClickException(
            f"the replay cannot use its temporary directory: {error}; name another one with TMPDIR"
        ) from error


def _cut(home: Path, reason: str) -> str:
    return (
        f"the replay has no result: its own trace, in {home.parent}, is not complete: {reason}; "
        "make room there, or name another directory with TMPDIR"
    )


def _counted(records: "Iterable[Record]", tally: Any) -> "Iterator[Record]":
    for record in records:
        tally.add(record)
        yield record


def chosen_options(
    header: "Header", flags: Mapping[str, Any], config_file: Path | None
) -> dict[str, str]:
    """Return the options of the replay: the flags, else the file's, else the recorded ones."""
    import msgspec

    try:
        recorded = msgspec.convert(header.config.get("options", {}), dict[str, _Value])
        # As they came out, not as they were given: a share is of another machine's memory.
        resolved = {name: msgspec.convert(header.config.get(name), int | None) for name in _CAPS}
    except msgspec.ValidationError as error:
        raise click.ClickException(
            f"the trace's configuration is damaged: {plain(str(error))}"
        ) from error
    for name, value in recorded.items():
        if isinstance(value, str) and ("\0" in value or len(value) > MAX_OPTION_CHARACTERS):
            raise click.ClickException(
                f"the trace's configuration is damaged: option {plain(name[:40])!r} has "
                f"{len(value):,} characters, or a NUL among them"
            )
    chosen: dict[str, Any] = {**recorded, **resolved}
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


def _print(
    before: "Summary", after: "Summary", comparison: "Comparison", followed: "Followed | None"
) -> None:
    from rich.table import Table
    from rich.text import Text

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
                Text(plain(f"{title}: {reason}")),
                f"{one.get(reason, 0):,}",
                f"{other.get(reason, 0):,}",
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
    if followed is not None:
        console.print(plain(_text_of(followed)), markup=False)
    console.print(NOTE_ON_FILES)
    if followed is not None and followed.reason:
        console.print(NOTE_ON_TIME)


def _text_of(followed: "Followed") -> str:
    """How far both daemons decided the same."""
    if not followed.reason:
        return (
            f"Every decision is the record's ({counted(followed.turns, 'turn')} of RamTier): the "
            "same hits, evictions and writes, in the same order."
        )
    where = f"{followed.seconds:.3f} s" + (f" (flow {followed.flow})" if followed.flow else "")
    return (
        f"Every decision is the record's up to {where}; there {followed.reason}. From there on the "
        "replay paces itself."
    )


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
