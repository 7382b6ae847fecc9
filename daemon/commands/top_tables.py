"""The lists of `prefixcached top`: processes and conversations. Pure.

What clients chose (labels, namespaces, their own names) is drawn without control characters: it
must not be able to write to the terminal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from prefixcached.daemon.commands.common import age_text, plain
from prefixcached.daemon.commands.sparks import count_text, duration_text
from prefixcached.daemon.commands.watching import Look
from prefixcached.protocol.messages import ActivityReport, ClientActivity

SORTS: Final = ("busy", "requests", "connected", "pid")
"""Orders of processes."""

HOLDINGS_WIDTH: Final = 72


@dataclass(frozen=True)
class Process:
    """The connections of one process."""

    pid: int
    client: str
    connected_seconds: float
    requests: int
    doing: str
    doing_seconds: float
    leases: int
    pins: int
    puts: int
    claims: int


def processes(activity: ActivityReport, own_pid: int) -> list[Process]:
    """By process; one that said no id stands alone. This view is left out."""
    by_pid: dict[tuple[int, int], list[ClientActivity]] = {}
    for client in activity.clients:
        if client.pid != own_pid:
            by_pid.setdefault((client.pid, 0 if client.pid else client.session), []).append(client)
    pids = {client.session: client.pid for client in activity.clients}
    claimed = {claim.session: claim.tokens for claim in activity.claims}
    return [_process(pid, group, pids, claimed) for (pid, _), group in by_pid.items()]


def _process(
    pid: int, group: Sequence[ClientActivity], pids: Mapping[int, int], claimed: Mapping[int, int]
) -> Process:
    busiest = max(group, key=lambda client: client.doing_seconds)
    doing = busiest.doing
    if busiest.waits_for:
        doing = f"waits for {pids.get(busiest.waits_for) or busiest.waits_for}"
    tokens = max((claimed.get(client.session, 0) for client in group), default=0)
    if not doing and tokens:
        doing = f"computes {count_text(tokens)}"
    return Process(
        pid=pid,
        client=plain(group[0].client),
        connected_seconds=max(client.connected_seconds for client in group),
        requests=sum(client.requests for client in group),
        doing=plain(doing),
        doing_seconds=busiest.doing_seconds,
        leases=sum(client.leases for client in group),
        pins=sum(client.pins for client in group),
        puts=sum(client.puts for client in group),
        claims=sum(client.claims for client in group),
    )


def clients_table(
    seen: list[Process], most: int, sort: str, width: int, *, is_reversed: bool
) -> Table:
    """Return at most ``most`` processes, in the order of one of `SORTS`.

    In less than `HOLDINGS_WIDTH` columns what they hold is left out, so that names can be read.
    """
    keys = {
        "busy": lambda one: (-one.doing_seconds, -one.requests),
        "requests": lambda one: -one.requests,
        "connected": lambda one: -one.connected_seconds,
        "pid": lambda one: one.pid,
    }
    ordered = sorted(seen, key=keys[sort], reverse=is_reversed)
    is_wide = width >= HOLDINGS_WIDTH
    holdings = ("leases", "pins", "puts", "claims") if is_wide else ()
    table = _table(
        (f"Clients {len(seen)}", "left"), ("doing", "left"), ("since", "right"),
        ("requests", "right"), *((name, "right") for name in holdings), ("up", "right"),
    )  # fmt: skip
    for one in ordered[:most]:
        is_busy = bool(one.doing)
        table.add_row(
            Text(f"{one.pid or '?'} {one.client}"), Text(one.doing or "idle"),
            duration_text(one.doing_seconds) if one.doing_seconds else "", f"{one.requests:,}",
            *(f"{getattr(one, name)}" for name in holdings),
            age_text(one.connected_seconds), style="" if is_busy else "dim",
        )  # fmt: skip
    return table


def sessions_table(look: Look, most: int) -> Table:
    """Return the conversations used last, at most ``most`` of them."""
    count = look.report["ram_tier"]["labels"]
    table = _table(
        (f"Sessions {count:,}", "left"), ("namespace", "left"), ("tokens", "right"),
        ("used", "right"),
    )  # fmt: skip
    for label in look.activity.labels[:most]:
        table.add_row(
            Text(plain(label.label)), Text(plain(label.namespace)), f"{label.tokens:,}",
            f"{age_text(label.idle_seconds)} ago",
        )  # fmt: skip
    return table


def _table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bold")
    for index, (name, side) in enumerate(columns):
        table.add_column(
            name, justify=side, no_wrap=True, overflow="ellipsis",
            ratio=1 if side == "left" and index == 0 else None,
        )  # fmt: skip
    return table
