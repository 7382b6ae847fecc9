"""`prefixcached trace`: a recorded trace, one message a line."""

import fnmatch
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from prefixcached.daemon.commands.common import plain

if TYPE_CHECKING:
    # `serve` imports this module as well, and stays small without msgpack's reader.
    from prefixcached.daemon.trace.trace_file import Header, Record

NAME_CHARACTERS: Final = 12
"""Of namespaces and ids, which are long digests: enough to tell them apart."""

_UNINTERESTING: Final = frozenset(
    {"type", "format", "path", "checksum", "schema", "schemas", "schema_digest", "capabilities",
     "boot", "version", "data_offset", "used_seconds", "seconds_left", "session"}
)  # fmt: skip
_NOTES: Final = frozenset({"turn", "new-image"})
_SHORTENED: Final = frozenset({"namespace", "id", "parent"})


@click.command(
    epilog="Example: prefixcached trace day.trace --type take --session 3; "
    "prefixcached trace day.trace --flow 3.17"
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--channel", metavar="PATTERN", help="As in ram_tier->*, or *ssd_tier*.")
@click.option("--type", "kind", metavar="PATTERN", help="Of message, as in take, or *-image.")
@click.option("--session", type=int, metavar="NUMBER", help="What belongs to one connection.")
@click.option("--flow", metavar="ID", help="One request through all actors, as in 3.17.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with all fields.")
def trace(
    file: Path,
    channel: str | None,
    kind: str | None,
    session: int | None,
    flow: str | None,
    as_json: bool,
) -> None:
    """Print what `serve --trace FILE` recorded.

    A line has seconds since the daemon's start, channel, flow (session and number of the request
    that it belongs to), type, and the fields that matter, with sizes in place of bytes. What the
    trace notes for `replay` alone is shown with --channel tracer. Exit code 1 where nothing
    matches.
    """
    is_asked = channel is not None or kind is not None
    found = False
    with opened(file) as (header, records):
        if not as_json:
            click.echo(f"prefixcached {header.version}, tokens are {header.tokens}", err=True)
        for record in records:
            if (
                (channel is None or fnmatch.fnmatchcase(record.channel, channel))
                and (kind is None or fnmatch.fnmatchcase(record.type, kind))
                and (session is None or record.session == session)
                and (flow is None or record.flow == flow)
                and (is_asked or record.type not in _NOTES)
            ):
                found = True
                click.echo(json_of(record) if as_json else line_of(record))

    if not found:
        raise click.ClickException(
            f"nothing in {file} matches; without options all of it is shown, and flows are in the "
            "third column"
        )


@contextmanager
def opened(
    file: Path, file_bytes: int | None = None
) -> "Iterator[tuple[Header, Iterator[Record]]]":
    """Open a trace for the block, and say plainly what is wrong with it.

    Arguments as `trace_file.reading`. What else goes wrong in the block is not the trace's fault.
    """
    from prefixcached.daemon.trace.trace_file import TraceError, reading

    with ExitStack() as stack:
        try:
            with _reported(file):
                header, records = stack.enter_context(reading(file, file_bytes))
            yield header, _each(file, records)
        except TraceError as error:
            raise click.ClickException(plain(str(error))) from error


def _each(file: Path, records: "Iterator[Record]") -> "Iterator[Record]":
    with _reported(file):
        yield from records


@contextmanager
def _reported(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}") from error


def line_of(record: "Record") -> str:
    """Return one record for people."""
    fields = " ".join(f"{name}={text}" for name, text in _fields(record.body).items())
    return plain(
        f"{record.seconds:12.6f}  {record.channel:<27} {record.flow:<8} {record.type:<16} {fields}"
    ).rstrip()


def _fields(plain: dict[str, Any]) -> dict[str, str]:
    """What matters of a message; of what lies deeper what has no name of its own yet."""
    shown: dict[str, str] = {}
    deeper: list[dict[str, Any]] = []
    for name, value in plain.items():
        if name in _UNINTERESTING or value in ("", b"", None, False, [], {}):
            continue
        match value:
            case bytes():
                shown[name] = f"{len(value) // 4}" if name == "tokens" else f"<{len(value)} bytes>"
            case list():
                shown[name] = f"[{len(value)}]"
            case dict() if name == "report":
                shown[name] = ",".join(str(section) for section in value)
            case dict():
                deeper.append(value)
            case float():
                shown[name] = f"{value:g}"
            case str() if name in _SHORTENED:
                shown[name] = value[:NAME_CHARACTERS]
            case str() if not value.isprintable() or " " in value:
                shown[name] = json.dumps(value)
            case _:
                shown[name] = f"{value}"
    for inner in deeper:
        shown = {**_fields(inner), **shown}
    return shown


def json_of(record: "Record") -> str:
    """Return one record for programs."""
    return json.dumps(
        {
            "seconds": round(record.seconds, 6),
            "channel": record.channel,
            "flow": record.flow,
            "message": record.message,
        },
        default=lambda data: {"bytes": len(data)},
    )
