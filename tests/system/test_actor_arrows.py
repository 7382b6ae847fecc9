"""Who sends to whom, and who may have to wait for it: the arrows between the actors have no cycle.

`ARROWS` declares them. That they are all there are is read from the source: every place that sends
an envelope, and whether it waits. Two actors that wait for each other's mailboxes hang for good.
"""

import ast
import graphlib
import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import trio

from prefixcached.actors.mailbox import MAILBOX_MESSAGES, UNBOUNDED
from prefixcached.actors.prefetcher import Prefetcher
from prefixcached.actors.ram_tier import RamTier
from prefixcached.actors.ssd_tier import SsdTier
from prefixcached.actors.store import Store
from prefixcached.protocol.actor_messages import Envelope, SyncAll
from tests.support.core import small_config

ROOT: Final = Path(__file__).parents[2]


class Arrow(NamedTuple):
    """``waits`` says that the sender may have to wait for room in the receiver's mailbox."""

    sender: str
    receiver: str
    waits: bool


ARROWS: Final = {
    Arrow("Session", "RamTier", waits=True),
    Arrow("PressureMonitor", "RamTier", waits=True),
    Arrow("Prefetcher", "RamTier", waits=True),
    Arrow("SsdTier", "RamTier", waits=True),
    Arrow("RamTier", "SsdTier", waits=False),
    Arrow("RamTier", "Prefetcher", waits=False),
}
ACTORS: Final = {
    "actors/ram_tier.py": "RamTier",
    "actors/ssd_tier.py": "SsdTier",
    "actors/prefetcher.py": "Prefetcher",
    "actors/pressure_monitor.py": "PressureMonitor",
    "daemon/session.py": "Session",
}
OUTBOXES: Final = {"_ram_tier": "RamTier", "_ssd": "SsdTier", "_prefetcher": "Prefetcher"}
"""Attributes that lead to another actor's mailbox."""

FORWARDERS: Final = {"daemon/trace/tracer.py", "daemon/trace/followed_mailboxes.py"}
"""They pass on what an actor sent."""


def sends(path: str) -> set[Arrow]:
    """The arrows that start in one actor's module."""
    found: set[Arrow] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(attr=outbox), attr=("send" | "send_nowait") as how
                )
            ) if outbox in OUTBOXES:
                found.add(Arrow(ACTORS[path], OUTBOXES[outbox], waits=how == "send"))
            case _:
                pass
    return found


def test_the_declared_arrows_are_all_there_are() -> None:
    """No actor sends where it is not declared to, and RamTier waits for nobody."""
    found = {arrow for path in ACTORS for arrow in sends(path)}
    # Whoever tries without waiting first, and then waits, waits.
    waiting = {arrow[:2] for arrow in found if arrow.waits}
    assert {a for a in found if a.waits or a[:2] not in waiting} == ARROWS


def test_nobody_else_sends_envelopes() -> None:
    """Every envelope comes from an actor that `ARROWS` knows."""
    senders = {
        str(path.relative_to(ROOT))
        for folder in ("actors", "daemon")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bEnvelope\(", path.read_text())
    }
    assert senders - FORWARDERS == ACTORS.keys()


def test_the_arrows_that_wait_form_no_cycle() -> None:
    """DESIGN 4: an actor that another waits for never waits, directly or not, for that one."""
    graph = graphlib.TopologicalSorter[str]()
    for arrow in ARROWS:
        if arrow.waits:
            graph.add(arrow.sender, arrow.receiver)
    order = list(graph.static_order())
    assert order[0] == "RamTier"


def test_a_cycle_would_be_found() -> None:
    """The check above can fail: one more arrow that waits, and there is no order."""
    graph = graphlib.TopologicalSorter[str]({"SsdTier": {"RamTier"}, "RamTier": {"SsdTier"}})
    with pytest.raises(graphlib.CycleError):
        graph.prepare()


def test_mailboxes_have_the_room_that_the_arrows_need(tmp_path: Path) -> None:
    """RamTier's mailbox is bounded; those that it sends to without waiting are not."""
    ram_tier = RamTier(small_config())
    store = Store(tmp_path / "state")
    told = {
        "SsdTier": SsdTier(store, ram_tier.mailbox).mailbox,
        "Prefetcher": Prefetcher(store, ram_tier.mailbox).mailbox,
    }
    found: dict[str, float] = {}
    for name, mailbox in told.items():
        assert isinstance(mailbox, trio.MemorySendChannel)
        found[name] = mailbox.statistics().max_buffer_size
    assert found == {arrow.receiver: UNBOUNDED for arrow in ARROWS if not arrow.waits}
    for _ in range(MAILBOX_MESSAGES):
        ram_tier.mailbox.send_nowait(Envelope(SyncAll()))
    with pytest.raises(trio.WouldBlock):
        ram_tier.mailbox.send_nowait(Envelope(SyncAll()))


def test_ram_tiers_loop_awaits_nothing_but_its_mailbox() -> None:
    """RamTier never awaits another actor: what must wait is state in a desk, not a handler."""
    tree = ast.parse((ROOT / "actors/ram_tier.py").read_text())
    (loop,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
        and node.name == "run"
    )  # fmt: skip
    awaited = [ast.unparse(node.value) for node in ast.walk(loop) if isinstance(node, ast.Await)]
    assert awaited == ["self._inbox.receive()"]
