"""`prefixcached replay`: a recorded trace once more, against a daemon of its own.

The daemon is a child of this process, in a temporary directory that is removed at the end. It
traces as well, so that both sides of the comparison are measured alike.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket  # noqa: N812  (a path is called socket here)
from typing import TYPE_CHECKING, Any, Final

import click

from prefixcached.daemon import options
from prefixcached.daemon.command_group import WrongUsage
from prefixcached.daemon.commands.common import counted, terminal, waiting_for
from prefixcached.daemon.commands.option_flags import OTHERS, option_flags
from prefixcached.daemon.commands.trace import opened
from prefixcached.daemon.options import OptionError
from prefixcached.daemon.sizes import bytes_text
from prefixcached.protocol.paths import SOCKET_VARIABLE

if TYPE_CHECKING:
    # `serve` imports this module as well, and stays small.
    from prefixcached.daemon.trace.guide import Followed
    from prefixcached.daemon.trace.replay_player import Comparison
    from prefixcached.daemon.trace.summary import Summary
    from prefixcached.daemon.trace.trace_file import Header, Record

STOP_SECONDS: Final = 30.0
"""For the daemon to write what is queued: it takes 15 s at most."""

START_SECONDS: Final = 60.0
"""For the daemon to start: it takes a second, and a loaded machine some."""

POLL_SECONDS: Final = 0.02
"""Between two attempts to connect to a daemon that starts."""

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
    epilog=f"{OTHERS}\n\nExample: prefixcached replay day.trace --ram-bytes 4GiB --retention lru"
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option_flags
@click.option(
    "--speed",
    type=click.FloatRange(min=0.0),
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
    with (
        tempfile.TemporaryDirectory(prefix="pfxc-replay-") as name,
        opened(file) as (header, records),
    ):
        home = Path(name)
        chosen = chosen_options(header, flags, config_file)
        follow, report = None if speed else file.absolute(), report_path(home / "trace")
        with _daemon(home, chosen, follow) as socket, waiting_for("Replaying"):
            replayer = Replayer(socket, speed, lambda: follow is not None and not report.exists())
            try:
                trio.run(replayer.run, steps_of(_counted(records, recorded)))
            except ReplayFailedError as error:
                raise click.ClickException(f"{error}\n{_log(home)}") from error
        with opened(home / "trace") as (_, own):
            replayed = summarise(own)
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
        raise click.ClickException(f"the trace's configuration is damaged: {error}") from error
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


@contextmanager
def _daemon(home: Path, chosen: Mapping[str, str], follow: Path | None) -> Iterator[Path]:
    """A daemon of its own, and its socket; it has written its trace after the block.

    It serves connections before it is READY, which it may only be once requests have come: a record
    that it follows may have them first.
    """
    socket = home / "socket"
    (home / "config.toml").touch()
    command = [
        sys.executable, "-m", "prefixcached.daemon.cli", "serve",
        "--socket", str(socket), "--config", str(home / "config.toml"),
        "--state-dir", str(home / "state"), "--trace", str(home / "trace"),
        *(() if follow is None else ("--follow", str(follow))),
        *(f"{options.flag_of(name)}={value}" for name, value in chosen.items()),
    ]  # fmt: skip
    # The user's own settings are for the user's own daemon.
    environment = {n: v for n, v in os.environ.items() if not n.startswith(options.PREFIX)}
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            env=environment | {SOCKET_VARIABLE: str(socket)},
        ) as process,
    ):  # fmt: skip
        try:
            if not _serves(socket, process):
                raise click.ClickException(f"the daemon did not start:\n{_log(home)}")
            yield socket
        except BaseException:
            process.kill()  # nothing of it is wanted
            raise
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _serves(socket: Path, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until the daemon takes connections; say whether it ever does."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with Socket(AF_UNIX) as probe:
            if probe.connect_ex(str(socket)) == 0:
                return True
        time.sleep(POLL_SECONDS)
    return False


def _log(home: Path) -> str:
    return (home / "log").read_text(errors="replace")[-2000:].strip()


def _print(
    before: "Summary", after: "Summary", comparison: "Comparison", followed: "Followed | None"
) -> None:
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
    if followed is not None:
        console.print(_text_of(followed), markup=False)
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
