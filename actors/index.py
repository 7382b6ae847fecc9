"""The index of both tiers: what exists, what it is charged, who holds it, what goes first.

Owned by RamTier; pure and synchronous. What must happen outside (memory to free, files to delete)
is told to the `Outlet`, and its outcome comes back by a method here. Rules E1, E2, E4, L2, D5, D8.
"""

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, Protocol

from prefixcached.actors import tree
from prefixcached.actors.entries import (
    Checkpoint,
    Entry,
    Memory,
    Namespace,
    ObjectEntry,
    Segment,
    WriteState,
    entries_below,
)
from prefixcached.actors.evicted import EvictedMemory
from prefixcached.actors.ledger import Ledger
from prefixcached.actors.retention_policy import RetentionPolicy
from prefixcached.actors.victims import Victims
from prefixcached.protocol.actor_messages import DeleteFile, FileEntry
from prefixcached.protocol.schema import Schema

RAM_STATES: Final = ("resident", "lingering", "in_flight", "promoting", "freeing")
SSD_STATES: Final = ("durable", "writing", "lingering", "deleting", "trash", "other")


class Outlet(Protocol):
    """Where the index's decisions are carried out."""

    def free(self, memory: Memory, charged_bytes: int) -> None:
        """Free ``memory``; `Index.freed` is called when that is done, at the latest later."""

    def delete_file(self, message: DeleteFile) -> None:
        """Delete a file; `Index.deleted` is called when that is done."""


class Label(Protocol):
    """What marks an entry as in use by a conversation (`labels.Label`)."""

    entry: Entry | None


class Room(StrEnum):
    """Answer to a reservation that is not made yet (rule E6: all or nothing)."""

    FITS = "fits"
    SOON = "soon"
    """Enough is being freed, or will be once the writer has caught up."""
    NEVER = "no-space"
    """The rest is leased, pinned or in flight."""


class Index:
    """All namespaces, entries and budgets of both tiers."""

    def __init__(
        self, outlet: Outlet, policy: RetentionPolicy, *, ram_bytes: int, max_images: int,
        ssd_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._outlet = outlet
        self._policy = policy
        self._clock = 0
        self.ssd_on = ssd_bytes > 0
        self.namespaces: dict[str, Namespace] = {}
        self.entries: dict[str, Entry] = {}
        self.ram = Ledger(RAM_STATES, ram_bytes, max_images)
        self.ssd = Ledger(SSD_STATES, ssd_bytes, 1 << 62)
        self.held_bytes = 0
        self.held_images = 0
        self.ram_victims = Victims(_may_leave_ram)
        self.ssd_victims = Victims(_may_leave_ssd)
        self.evicted_memory = EvictedMemory()
        self.writing: Entry | None = None
        self._labels: dict[str, set[Label]] = {}
        self.unattached: dict[str, FileEntry] = {}
        self.counters = dict.fromkeys(
            ("evictions", "demotions", "dropped_unwritten", "ssd_evictions", "superseded"), 0
        )

    def new_namespace(self, name: str, schema_bytes: bytes, schema: Schema) -> Namespace:
        """Return a namespace that holds nothing yet; `namespaces` gets it with its first put."""
        return Namespace(name, schema_bytes, schema)

    # -- entries come ---------------------------------------------------------------------------

    def add_segment(self, segment: Segment, parent: Segment) -> None:
        """Make ``segment`` findable below ``parent``; its memory or file is set next."""
        tree.attach(segment, parent)
        self._added(segment)

    def add_checkpoint(self, checkpoint: Checkpoint, segment: Segment) -> None:
        """Make ``checkpoint`` findable on ``segment``."""
        tree.attach_checkpoint(checkpoint, segment)
        self._added(checkpoint)

    def add_object(self, entry: ObjectEntry) -> None:
        """Make an object findable under its key."""
        entry.namespace.objects[entry.key] = entry
        self._added(entry)

    def _added(self, entry: Entry) -> None:
        entry.attached = True
        entry.namespace.entries += 1
        self.entries[entry.id] = entry

    def set_memory(self, entry: Entry, memory: Memory, charged_as: str) -> None:
        """Make ``entry`` resident; its bytes are charged in state ``charged_as`` so far."""
        self.ram.move(charged_as, "resident", entry.charged_bytes)
        entry.memory = memory
        if entry.holders:
            self.held_bytes += entry.charged_bytes
            self.held_images += 1
        if entry.owner is not None:
            entry.owner.resident_dependents += 1
        self.ram_victims.offer(entry)

    def set_file(self, entry: Entry, file: FileEntry, reserved_bytes: int) -> None:
        """``entry`` is durable; ``reserved_bytes`` were charged for its writing.

        If it left the tree while it was written, its file is deleted, unless a successor that is
        not durable yet still needs it (rule D8).
        """
        self.ssd.remove("writing", reserved_bytes)
        entry.write = WriteState.IDLE if not entry.attached else entry.write
        if entry.attached:
            self.ssd.add("durable", file.allocated_bytes)
            with _Dependence(entry):
                entry.file = file
                entry.write = WriteState.IDLE
            if isinstance(entry, Segment):
                self._give_up_superseded(entry)
            self._offer_to_victims(entry)
        elif isinstance(entry, Segment) and entry.successor is not None:
            self.ssd.add("lingering", file.allocated_bytes)
            entry.file = file
        else:
            self.ssd.add("deleting", file.allocated_bytes)
            self._outlet.delete_file(DeleteFile(entry.id, file.path, file.allocated_bytes))

    def add_loaded(
        self, entry: Entry, owner: Segment | None, file: FileEntry, age_seconds: float
    ) -> None:
        """Make an entry findable that was found on the disk, ``age_seconds`` after its last use."""
        if isinstance(entry, ObjectEntry):
            self.add_object(entry)
        elif isinstance(entry, Segment) and owner is not None:
            self.add_segment(entry, owner)
        elif isinstance(entry, Checkpoint) and owner is not None:
            self.add_checkpoint(entry, owner)
        self.ssd.add("durable", file.allocated_bytes)
        with _Dependence(entry):
            entry.file = file
        entry.used = -int(age_seconds * 1000)  # older than anything used since the start
        entry.priority = self._policy.accessed(entry)
        self._offer_to_victims(entry)

    def set_write(self, entry: Entry, state: WriteState) -> None:
        """Change what the writer chain has to do with ``entry``."""
        with _Dependence(entry):
            entry.write = state
        self._offer_to_victims(entry)

    # -- entries are used -----------------------------------------------------------------------

    def use(self, entries: Iterable[Entry], now_seconds: float) -> None:
        """Refresh the recency of ``entries``, ancestors before descendants."""
        self._clock += 1
        for entry in entries:
            entry.used = self._clock
            entry.used_seconds = now_seconds
            entry.uses += 1
            entry.priority = self._policy.accessed(entry)
            self.ram_victims.offer(entry)
            self.ssd_victims.offer(entry)

    def move_label(self, label: Label, entry: Entry | None) -> None:
        """Let ``label`` mark ``entry``, or nothing; marked entries are evicted last (rule E2)."""
        old, label.entry = label.entry, entry
        if old is not None:
            marks = self._labels[old.id]
            marks.discard(label)
            if not marks:
                del self._labels[old.id]
                old.is_labelled = False
                self._offer_to_victims(old)
        if entry is not None:
            self._labels.setdefault(entry.id, set()).add(label)
            entry.is_labelled = True
            self._offer_to_victims(entry)

    def hold(self, entries: Iterable[Entry]) -> None:
        """Keep ``entries`` in both tiers until `release`."""
        for entry in entries:
            entry.holders += 1
            if entry.holders == 1 and entry.attached and entry.memory is not None:
                self.held_bytes += entry.charged_bytes
                self.held_images += 1

    def release(self, entries: Iterable[Entry]) -> None:
        """End a `hold`; what has left the tree meanwhile is given up with its last holder."""
        for entry in entries:
            entry.holders -= 1
            if entry.holders:
                continue
            if not entry.attached:
                self._dispose(entry, "lingering", "lingering")
                continue
            if entry.memory is not None:
                self.held_bytes -= entry.charged_bytes
                self.held_images -= 1
            self._offer_to_victims(entry)

    # -- entries go -----------------------------------------------------------------------------

    def drop_memory(self, entry: Entry) -> None:
        """Take ``entry`` out of RAM; without a file it leaves the tree, with all below it."""
        if entry.file is None:
            self.remove(entry)
            return
        memory = entry.memory
        assert memory is not None
        assert not entry.holders, "held bytes stay in RAM"
        self._forget_memory(entry)
        self._free(memory, entry, "resident")

    def drop_file(self, entry: Entry) -> None:
        """Take ``entry`` off the SSD; without memory it leaves the tree, with all below it."""
        if entry.memory is None:
            self.remove(entry)
            return
        self._delete_file(entry, "durable")
        self._offer_to_victims(entry)

    def lose_file(self, entry: Entry) -> None:
        """The file of ``entry`` is gone or in quarantine: it no longer counts as held on SSD."""
        if entry.file is None:
            return
        self.ssd.remove("durable" if entry.attached else "lingering", entry.file.allocated_bytes)
        with _Dependence(entry):
            entry.file = None
        if entry.attached and entry.memory is None:
            self.remove(entry)

    def remove(self, entry: Entry, *, cleared: bool = False) -> None:
        """Take ``entry`` and all that hangs on it out of the tree, for both tiers.

        What somebody holds lingers, counted, until the last holder ends (rule L2). ``cleared``
        says that the files are already out of reach, in the trash.
        """
        parent = entry.owner
        below = entries_below(entry) if isinstance(entry, Segment) else [entry]
        for gone in reversed(below):
            self._detach(gone)
            for label in list(self._labels.get(gone.id, ())):
                self.move_label(label, None)
            if cleared and gone.file is not None and not gone.holders:
                self.ssd.move("durable", "trash", gone.file.allocated_bytes)
                gone.file = None
            if gone.holders:
                if gone.memory is not None:
                    self.ram.move("resident", "lingering", gone.charged_bytes)
                if gone.file is not None:
                    self.ssd.move("durable", "lingering", gone.file.allocated_bytes)
            else:
                self._dispose(gone, "resident", "durable")
            if isinstance(gone, Segment) and gone is not entry:
                self._give_up_superseded(gone)
        if isinstance(entry, Segment):
            self._revive_superseded(entry, None if cleared else parent)
        self.forget_if_empty(entry.namespace)

    def clear(self, namespace: Namespace) -> tuple[int, int]:
        """Make everything of ``namespace`` unfindable; return the images and RAM bytes it had."""
        images, nbytes = namespace.entries, 0
        namespace.cleared = True
        for top in [*namespace.root.children.values(), *namespace.objects.values()]:
            below = entries_below(top) if isinstance(top, Segment) else [top]
            nbytes += sum(entry.charged_bytes for entry in below if entry.memory is not None)
            self.remove(top, cleared=True)
        self.namespaces.pop(namespace.name, None)
        return images, nbytes

    def absorb(self, leaf: Segment, successor: Segment) -> None:
        """Put ``successor`` in the place of ``leaf``, whose tokens it begins with (rule P11).

        A file of ``leaf`` stays until ``successor`` is durable (rule D8).
        """
        parent = leaf.parent
        assert parent is not None
        assert leaf.is_leaf
        self._detach(leaf)
        self.add_segment(successor, parent)
        self.counters["superseded"] += 1
        for label in list(self._labels.get(leaf.id, ())):
            self.move_label(label, successor)
        successor.superseded = [*leaf.superseded, leaf]
        leaf.superseded = []
        for old in successor.superseded:
            old.successor = successor
        if leaf.memory is not None:
            if leaf.holders:
                self.ram.move("resident", "lingering", leaf.charged_bytes)
            else:
                memory, leaf.memory = leaf.memory, None
                self._free(memory, leaf, "resident")
        if leaf.file is not None:
            self.ssd.move("durable", "lingering", leaf.file.allocated_bytes)

    def give_back(self, memory: Memory, charged_as: str, charged_bytes: int) -> None:
        """Free memory that was reserved in state ``charged_as`` and became part of no entry."""
        self.ram.move(charged_as, "freeing", charged_bytes)
        self._outlet.free(memory, charged_bytes)

    # -- room -----------------------------------------------------------------------------------

    def make_room(self, nbytes: int, images: int, below: float = math.inf) -> Room:
        """Evict from RAM until ``nbytes`` and ``images`` more fit, if they can at all.

        Durable victims are dropped without I/O; one that will be written is left until it is, and
        one that never will be is dropped at once: the cap wins over persistence (rule E4). Only
        entries of less priority than ``below`` are victims.
        """
        if not self._could_fit(nbytes, images):
            return Room.NEVER
        if not self.ram.fits(nbytes, images, leaving="freeing"):
            for victim in self.ram_victims.in_order():
                if victim.rank >= (False, below):
                    break
                if victim.file is None and victim.write in (WriteState.QUEUED, WriteState.WRITING):
                    continue
                self._evict(victim)
                if self.ram.fits(nbytes, images, leaving="freeing"):
                    break
        return Room.FITS if self.ram.fits(nbytes, images) else Room.SOON

    def make_room_on_disk(self, nbytes: int) -> bool:
        """Delete files until ``nbytes`` more fit once they are gone; False if they cannot.

        Files that no entry owns go first (rule D10).
        """
        over = self.ssd.bytes - self._leaving_disk() + nbytes - self.ssd.bytes_cap
        if over <= 0:
            return True
        fixed = sum(self.ssd.bytes_by_state[s] for s in ("writing", "lingering"))
        fixed += sum(e.file.allocated_bytes for e in self.entries.values() if e.file and e.holders)
        if fixed + nbytes > self.ssd.bytes_cap:
            return False
        while over > 0 and self.unattached:
            file_id, file = self.unattached.popitem()
            self.ssd.move("other", "deleting", file.allocated_bytes)
            self._outlet.delete_file(DeleteFile(file_id, file.path, file.allocated_bytes))
            over -= file.allocated_bytes
        if over > 0:
            for victim in self.ssd_victims.in_order():
                assert victim.file is not None
                over -= victim.file.allocated_bytes
                self.counters["ssd_evictions"] += 1
                self._policy.evicted(victim)
                if victim.memory is None:
                    self.evicted_memory.remember(victim, "ssd-cap")
                self.drop_file(victim)
                if over <= 0:
                    break
        return over <= 0

    def fits_on_disk(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more are within the cap at this moment."""
        return self.ssd.bytes + nbytes <= self.ssd.bytes_cap

    def set_other_bytes(self, nbytes: int) -> None:
        """What the directory holds beside entries (foreign files, quarantine) has changed."""
        known = sum(file.allocated_bytes for file in self.unattached.values())
        self.ssd.add("other", known + nbytes - self.ssd.bytes_by_state["other"], 0)

    def trash_emptied(self, nbytes: int) -> None:
        """Cleared files are gone; what was lent of them is counted as lingering until then."""
        gone = min(nbytes, self.ssd.bytes_by_state["trash"])
        self.ssd.remove("trash", gone, 0)

    def forget_unattached(self) -> None:
        """Everything was cleared, files that no entry owns included."""
        nbytes = sum(file.allocated_bytes for file in self.unattached.values())
        self.ssd.move("other", "trash", nbytes, len(self.unattached))
        self.unattached.clear()

    def demote_idle(self, unused_since_seconds: float) -> int:
        """Drop the memory of durable entries unused since then (rule E8); return how many."""
        idle = [
            entry
            for entry in self.ram_victims.in_order()
            if entry.file is not None and entry.used_seconds < unused_since_seconds
        ]
        for entry in idle:
            self.drop_memory(entry)
        self.counters["demotions"] += len(idle)
        return len(idle)

    def _leaving_disk(self) -> int:
        return self.ssd.bytes_by_state["deleting"] + self.ssd.bytes_by_state["trash"]

    def freed(self, nbytes: int, images: int) -> None:
        """Memory that was being freed is back with the system."""
        self.ram.remove("freeing", nbytes, images)

    def deleted(self, nbytes: int) -> None:
        """A file that was being deleted is gone."""
        self.ssd.remove("deleting", nbytes)

    # -- inside ---------------------------------------------------------------------------------

    def _could_fit(self, nbytes: int, images: int) -> bool:
        states = ("lingering", "in_flight", "promoting")
        fixed_bytes = self.held_bytes + sum(self.ram.bytes_by_state[s] for s in states)
        fixed_images = self.held_images + sum(self.ram.images_by_state[s] for s in states)
        writing = self.writing
        if writing is not None and writing.attached and writing.holders == 1:
            # Held by nobody but the writer: it can go as soon as it is written.
            fixed_bytes -= writing.charged_bytes
            fixed_images -= 1
        return (
            fixed_bytes + nbytes <= self.ram.bytes_cap
            and fixed_images + images <= self.ram.images_cap
        )

    def _evict(self, victim: Entry) -> None:
        self.counters["evictions"] += 1
        self._policy.evicted(victim)
        if victim.file is None:
            if self.ssd_on:
                self.counters["dropped_unwritten"] += 1
            self.evicted_memory.remember(victim, "ram-cap")
        self.drop_memory(victim)

    def _detach(self, entry: Entry) -> None:
        owner = entry.owner
        if entry.holders and entry.memory is not None:
            self.held_bytes -= entry.charged_bytes
            self.held_images -= 1
        if owner is not None:
            owner.resident_dependents -= entry.memory is not None
            owner.durable_dependents -= entry.is_bound_for_disk
        if isinstance(entry, Segment):
            tree.detach(entry)
        elif isinstance(entry, Checkpoint):
            tree.detach_checkpoint(entry)
        elif isinstance(entry, ObjectEntry):
            del entry.namespace.objects[entry.key]
        entry.attached = False
        entry.namespace.entries -= 1
        del self.entries[entry.id]
        if owner is not None:
            self._offer_to_victims(owner)

    def _forget_memory(self, entry: Entry) -> None:
        entry.memory = None
        if entry.owner is not None:
            entry.owner.resident_dependents -= 1
            self._offer_to_victims(entry.owner)

    def _free(self, memory: Memory, entry: Entry, state: str) -> None:
        self.ram.move(state, "freeing", entry.charged_bytes)
        self._outlet.free(memory, entry.charged_bytes)

    def _dispose(self, entry: Entry, ram_state: str, ssd_state: str) -> None:
        """Give up what a detached, unheld entry still has.

        The file of an absorbed segment stays until its successor is durable (rule D8).
        """
        if entry.memory is not None:
            memory, entry.memory = entry.memory, None
            self._free(memory, entry, ram_state)
        waits = isinstance(entry, Segment) and entry.successor is not None
        if entry.file is not None and not waits:
            self._delete_file(entry, ssd_state)

    def _delete_file(self, entry: Entry, state: str) -> None:
        file = entry.file
        assert file is not None
        with _Dependence(entry):
            entry.file = None
        if entry.namespace.cleared:  # already on its way out, with the rest of its directory
            self.ssd.remove(state, file.allocated_bytes)
            return
        self.ssd.move(state, "deleting", file.allocated_bytes)
        self._outlet.delete_file(DeleteFile(entry.id, file.path, file.allocated_bytes))

    def _give_up_superseded(self, segment: Segment, keep: Segment | None = None) -> None:
        """Delete the files of what ``segment`` absorbed, but for ``keep`` and what is lent."""
        for old in segment.superseded:
            old.successor = None
            if old is not keep and old.file is not None and not old.holders:
                self._delete_file(old, "lingering")
        segment.superseded = []

    def _revive_superseded(self, segment: Segment, parent: Segment | None) -> None:
        """``segment`` left before it was durable: the longest file it absorbed serves again."""
        durable = [old for old in segment.superseded if old.file is not None]
        old = max(durable, key=lambda old: old.end, default=None)
        alive = parent is not None and (parent.attached or parent is segment.namespace.root)
        self._give_up_superseded(segment, old if alive else None)
        if old is None or parent is None or not alive:
            return
        tree.attach(old, parent)
        self._added(old)
        assert old.file is not None
        self.ssd.move("lingering", "durable", old.file.allocated_bytes)
        parent.durable_dependents += 1
        if old.memory is not None:  # a lease on it kept its bytes
            self.ram.move("lingering", "resident", old.charged_bytes)
            parent.resident_dependents += 1
            self.held_bytes += old.charged_bytes
            self.held_images += 1
        self._offer_to_victims(old)

    def forget_if_empty(self, namespace: Namespace) -> None:
        """Drop a namespace that holds nothing and awaits nothing, schema and all."""
        idle = not namespace.entries and not namespace.puts
        if idle and self.namespaces.get(namespace.name) is namespace:
            del self.namespaces[namespace.name]

    def _offer_to_victims(self, entry: Entry) -> None:
        self.ram_victims.offer(entry)
        self.ssd_victims.offer(entry)
        if entry.owner is not None:
            self.ram_victims.offer(entry.owner)
            self.ssd_victims.offer(entry.owner)


class _Dependence:
    """Keeps the owner's count of dependents on disk true across a change of the entry."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        self._before = self._entry.is_bound_for_disk

    def __exit__(self, *_: object) -> None:
        owner = self._entry.owner
        if owner is not None:
            owner.durable_dependents += self._entry.is_bound_for_disk - self._before


def _may_leave_ram(entry: Entry) -> bool:
    return (
        entry.attached
        and entry.memory is not None
        and not entry.holders
        and not (isinstance(entry, Segment) and entry.resident_dependents)
    )


def _may_leave_ssd(entry: Entry) -> bool:
    return (
        entry.attached
        and entry.file is not None
        and not entry.holders
        and not (isinstance(entry, Segment) and entry.durable_dependents)
    )
