"""The state machine over both tiers: the clients of core_machine.py, and a disk that may fail.

The outcome of every write, deletion, read and promotion is injected, in any order; files are lost,
and the daemon restarts at any time.
"""

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from prefixcached.protocol import messages as wire
from tests.support.core import PAGE, Core, Slot
from tests.support.core_checks import (
    check_core,
    check_disk,
    check_disk_idle,
    check_idle,
    longest_by_definition,
)
from tests.support.core_disk import FakeDisk
from tests.support.core_machine import SESSIONS, ClientMachine, Pending
from tests.support.core_payload import Tokens


class DiskMachine(ClientMachine):
    """The same clients over both tiers."""

    ssd_caps = (1 << 30, 1 << 30, 10 * PAGE, 24 * PAGE)

    def started(self) -> None:
        self.disk = FakeDisk(self.core)
        self.has_lost = self.has_lost_ever = False
        self.losses_seen = 0
        self.confirmed: set[tuple[str, Tokens]] = set()
        self.flushes: list[tuple[int, Slot, set[tuple[str, Tokens]]]] = []

    @rule(fails=st.integers(0, 9))
    def write(self, fails: int) -> None:
        self.disk.step(fails=fails <= 1, retry=fails == 0)
        self.collect()

    @rule(seconds=st.sampled_from([1.0, 1.0, 50.0]))
    def write_much(self, seconds: float) -> None:
        """Everything is written, and leaves RAM if the time is long."""
        self.core.advance(1.0)
        while self.disk.step():
            pass
        self.core.advance(seconds)
        self.collect()

    @rule()
    def read_all(self) -> None:
        """The disk answers whoever waits for it."""
        self.disk.accept()
        for name in list(self.disk.reads):
            self.disk.finish_read(name)
        self.collect()

    @precondition(lambda self: self.pending_reads())
    @rule(
        which=st.integers(0, 20), outcome=st.sampled_from(["good"] * 4 + ["transient", "damaged"])
    )
    def read(self, which: int, outcome: str) -> None:
        names = sorted(self.disk.reads)
        if outcome == "damaged":
            self.confirmed.clear()
            self.has_lost_ever = True
        self.disk.finish_read(names[which % len(names)], outcome)
        self.collect()

    def pending_reads(self) -> bool:
        self.disk.accept()
        return bool(self.disk.reads)

    def pending_promotions(self) -> bool:
        self.disk.accept()
        return bool(self.disk.promotions)

    @precondition(lambda self: self.pending_promotions())
    @rule(
        which=st.integers(0, 20), outcome=st.sampled_from(["good"] * 4 + ["transient", "damaged"])
    )
    def promotion(self, which: int, outcome: str) -> None:
        names = sorted(self.disk.promotions)
        if outcome == "damaged":
            self.confirmed.clear()
            self.has_lost_ever = True
        self.disk.finish_promotion(names[which % len(names)], outcome)
        self.collect()

    @precondition(lambda self: self.disk.trash_is_due)
    @rule()
    def empty_trash(self) -> None:
        self.disk.empty_trash()
        self.collect()

    @precondition(lambda self: self.disk.files)
    @rule(which=st.integers(0, 50))
    def lose(self, which: int) -> None:
        paths = sorted(self.disk.files)
        self.confirmed.clear()
        self.has_lost = True  # a flush cannot know it, a restart will
        self.has_lost_ever = True
        self.disk.lose(paths[which % len(paths)])

    @rule(refuses=st.booleans())
    def deletions(self, refuses: bool) -> None:
        """From now on files can be deleted or cannot, and what could not be is tried again."""
        self.disk.refuses_deletions = refuses
        self.disk.retry_deletions()
        self.collect()

    @rule(healthy=st.booleans())
    def health(self, healthy: bool) -> None:
        self.disk.set_healthy(healthy)
        self.collect()

    @rule(session=SESSIONS)
    def flush(self, session: int) -> None:
        if not self.is_free(session):
            return
        known = {
            (namespace, tokens) for namespace, stored in self.visible.items() for tokens in stored
            if longest_by_definition(self.core, namespace, tokens, len(tokens)) == len(tokens)
        }  # fmt: skip
        slot = self.core.call(session, wire.Flush(60.0))
        evictions = self.losses()
        self.flushes.append((evictions, slot, known))
        self.pending.append(Pending(session, wire.Flush(60.0), (), slot))
        self.confirm()

    def has_losses(self) -> bool:
        return bool(self.losses()) or self.has_lost_ever

    def has_damage(self) -> bool:
        return self.has_lost_ever

    def losses(self) -> int:
        counters = self.core.index.counters
        return counters["ssd_evictions"] + counters["evictions"]

    def collect(self) -> None:
        super().collect()
        self.confirm()

    def confirm(self) -> None:
        waiting = []
        for losses, slot, known in self.flushes:
            reply = slot.reply
            if reply is None:
                waiting.append((losses, slot, known))
            elif isinstance(reply, wire.Flushed):
                sure = reply.complete and not reply.skipped and not reply.failed
                if sure and losses == self.losses() and not self.has_lost:
                    self.confirmed |= known
        self.flushes = waiting
        if self.losses() != self.losses_seen:
            self.losses_seen = self.losses()
            self.confirmed.clear()

    def cleared(self, name: str | None) -> None:
        self.confirmed = {c for c in self.confirmed if name not in (None, c[0])}
        for _, _, known in self.flushes:
            for gone in [k for k in known if name in (None, k[0])]:
                known.discard(gone)

    @rule(seed=st.integers(0, 1000), batch=st.integers(1, 4), really=st.integers(0, 2))
    def restart(self, seed: int, batch: int, really: int) -> None:
        if really:
            return
        self.confirm()
        # A clear that has been ordered but not carried out would die with the process.
        while any(type(e.message).__name__ == "ClearNamespace" for e in self.pending_writer()):
            self.disk.step()
        self.core = Core(
            self.config, auto_seal=self.auto, auto_free=self.auto, is_loaded=False
        )  # fmt: skip
        self.granted, self.lent, self.pins, self.pending, self.flushes = [], [], [], [], []
        self.losses_seen, self.has_lost = 0, False
        for namespace in self.namespaces:
            self.promised[namespace].clear()
        self.disk.restart(self.core, random.Random(seed), batch)
        for namespace, tokens in self.confirmed:
            found = longest_by_definition(self.core, namespace, tokens, len(tokens))
            assert found == len(tokens), f"{namespace} {tokens} was flushed, {found} are found"
        self.confirm()

    def pending_writer(self) -> list[Any]:
        self.disk.accept()
        return self.disk.writer

    @invariant()
    def charged(self) -> None:
        if hasattr(self, "disk"):
            check_disk(self.core, self.disk)

    def teardown(self) -> None:
        if not hasattr(self, "disk"):
            return
        self.disk.set_healthy(True)
        self.deletions(refuses=False)
        for _ in range(5):
            self.quiet()
            self.disk.settle()
        check_core(self.core)
        check_idle(self.core)
        check_disk(self.core, self.disk)
        check_disk_idle(self.core, self.disk)
        self.core.call(99, wire.Clear())
        self.disk.settle()
        while self.core.freeing:
            self.core.finish_free()
        assert self.core.index.ram.bytes == 0
        assert self.core.index.ssd.bytes == self.core.index.ssd.bytes_by_state["other"]
        assert not self.disk.files
        assert not [m for m in self.core.memories if not m.is_freed]
