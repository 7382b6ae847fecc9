"""The index of both tiers: what exists, what it is charged, who holds it, what may go.

Owned by RamTier; pure and synchronous. What must happen outside (memory to free, files to delete)
is told to the `Outlet`, and its outcome comes back by a method here. Rules E1, L2, D5, D8. What is
to go for room decides `Eviction`.

It is longer than other modules, because every change of an entry has to keep four things true
together: both ledgers, the counts of dependents, what is held, and the two queues of victims.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from prefixcached.actors import tree
from prefixcached.actors.departures import Departures
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
from prefixcached.actors.quotas import Quotas
from prefixcached.actors.retention_policy import RetentionPolicy
from prefixcached.actors.victims import Victims
from prefixcached.protocol.actor_messages import DeleteFile, FileEntry
from prefixcached.protocol.schema import Schema

RAM_STATES: Final = ("resident", "lingering", "in_flight", "promoting", "freeing")
SSD_STATES: Final = (
    "durable", "writing", "lingering", "deleting", "undeletable", "trash", "other",
)  # fmt: skip

TOUCH_SECONDS: Final = 60.0
"""Between two updates of a file's recency: a restart may forget a minute of it (rule D5)."""


class Outlet(Protocol):
    """Where the index's decisions are carried out."""

    def free(self, memory: Memory, charged_bytes: int) -> None:
        """Free ``memory``; `Index.freed` is called when that is done, at the latest later."""

    def delete_file(self, message: DeleteFile) -> None:
        """Delete a file; `Index.deleted` is called when that is done."""
        ...

    def drop_others(self, wanted_bytes: int) -> None:
        """Delete files that are no entries; `Index.set_other_bytes` tells what is left of them."""

    def touch_file(self, file: FileEntry) -> None:
        """Record in the file's modification time that it is in use (rule D5)."""


class Label(Protocol):
    """What marks an entry as in use by a conversation (`labels.Label`)."""

    entry: Entry | None


class Index:
    """All namespaces, entries and budgets of both tiers."""

    def __init__(
        self, outlet: Outlet, policy: RetentionPolicy, *, ram_bytes: int, max_images: int,
        ssd_bytes: int = 0, namespace_quota: float = 1.0,
    ) -> None:  # fmt: skip
        self.outlet = outlet
        self.policy = policy
        self._clock = 0
        self.ssd_on = ssd_bytes > 0
        self.namespaces: dict[str, Namespace] = {}
        self.entries: dict[str, Entry] = {}
        self.ram = Ledger(RAM_STATES, ram_bytes, max_images)
        self.ssd = Ledger(SSD_STATES, ssd_bytes, 1 << 62)
        self.held_bytes = 0
        self.held_images = 0
        self._held: dict[str, Entry] = {}
        self.ram_victims = Victims(may_leave_ram)
        self.durable_victims = Victims(may_leave_ram_without_io)
        self.ssd_victims = Victims(_may_leave_ssd)
        self.quotas = Quotas(namespace_quota, may_leave_ram)
        self.evicted_memory = EvictedMemory()
        self.writing: Entry | None = None
        self.lost: list[Entry] = []
        """Resident entries that lost their files since the caller last took them."""
        self.departures = Departures(self.ssd)
        self._labels: dict[str, set[Label]] = {}
        self._kept: dict[int, list[Entry]] = {}
        self.unattached: dict[str, FileEntry] = {}
        self.counters = dict.fromkeys(
            ("evictions", "demotions", "dropped_unwritten", "ssd_evictions", "superseded"), 0
        )

    def new_namespace(self, name: str, schema_bytes: bytes, schema: Schema) -> Namespace:
        """Return a namespace that holds nothing yet; `namespaces` gets it with its first put."""
        return Namespace(name, schema_bytes, schema)

    # -- entries come ---------------------------------------------------------------------------

    def add_segment(self, segment: Segment, parent: Segment) -> None:
        """Make ``segment`` findable below ``parent``; its memory or file is set next.

        The only continuation of a path is as likely to be read as the path was: whoever goes on
        with a conversation reads its end. A branch has to earn its uses (rule E9).
        """
        if not parent.children and segment.start == parent.end:
            segment.uses = parent.uses
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
        self.quotas.became_resident(entry)
        self._offer(entry)

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
            self._give_up_superseded(entry)
            self._offer_to_victims(entry)
        elif entry.successor is not None:
            self.ssd.add("lingering", file.allocated_bytes)
            entry.file = file
        else:
            self.ssd.add("deleting", file.allocated_bytes)
            self.outlet.delete_file(DeleteFile(entry.id, file.path, file.allocated_bytes))

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
        self._set_priority(entry)
        self._offer_to_victims(entry)

    def set_write(self, entry: Entry, state: WriteState) -> None:
        """Change what the writer chain has to do with ``entry``."""
        with _Dependence(entry):
            entry.write = state
        self._offer_to_victims(entry)

    # -- entries are used -----------------------------------------------------------------------

    def use(
        self, entries: Iterable[Entry], now_seconds: float, *, is_hit: bool = True
    ) -> None:  # fmt: skip
        """Refresh the recency of ``entries``, given with ancestors before descendants.

        Only hits count as uses: whoever stores a prompt touches its path several times within one
        turn, and that says nothing of whether anybody will want it again (rule E9).
        """
        self._clock += 1
        for entry in reversed(tuple(entries)):  # of one path, what hangs at its end goes first
            entry.used = self._clock
            entry.used_seconds = now_seconds
            entry.uses += is_hit
            self._set_priority(entry)
            self._offer(entry)
            if entry.file is not None and now_seconds - entry.touched_seconds >= TOUCH_SECONDS:
                entry.touched_seconds = now_seconds
                self.outlet.touch_file(entry.file)

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

    def mark_surplus(self, checkpoint: Checkpoint, is_surplus: bool) -> None:
        """Let ``checkpoint`` leave before segments unless it was hit, or no longer (rule E11)."""
        if checkpoint.is_surplus != is_surplus:
            checkpoint.is_surplus = is_surplus
            self._offer(checkpoint)

    def hold(self, entries: Iterable[Entry]) -> None:
        """Keep ``entries`` in both tiers until `release`."""
        for entry in entries:
            entry.holders += 1
            if entry.holders == 1:
                self._held[entry.id] = entry
                if entry.attached and entry.memory is not None:
                    self.held_bytes += entry.charged_bytes
                    self.held_images += 1

    def release(self, entries: Iterable[Entry]) -> None:
        """End a `hold`; what has left the tree meanwhile is given up with its last holder."""
        for entry in entries:
            entry.holders -= 1
            if entry.holders:
                continue
            del self._held[entry.id]
            if not entry.attached:
                self._dispose(entry, "lingering", "lingering")
                continue
            if entry.memory is not None:
                self.held_bytes -= entry.charged_bytes
                self.held_images -= 1
            self._offer_to_victims(entry)

    def keep(self, path: list[Entry]) -> None:
        """Hold what a prompt is found by until `let_go` (rules F1 and P6).

        Whatever takes the place of an entry meanwhile is held instead, and stands in ``path``.
        """
        self.hold(path)
        self._kept[id(path)] = path

    def let_go(self, path: list[Entry]) -> None:
        """End a `keep`."""
        del self._kept[id(path)]
        self.release(path)

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
        elif entry.attached:
            self.lost.append(entry)
            self._offer_to_victims(entry)

    def lose_all_files(self) -> int:
        """Their directory was deleted: nothing counts as held on SSD; return the images lost."""
        files = [entry for entry in self.entries.values() if entry.file is not None]
        for entry in files:
            if entry.attached:  # not gone yet with what it hung on
                self.lose_file(entry)
        self.take_unattached()
        return len(files)

    def take_unattached(self) -> list[FileEntry]:
        """Return the files without a place and forget them, bytes included."""
        files = list(self.unattached.values())
        for file in files:
            self.ssd.remove("other", file.allocated_bytes)
        self.unattached.clear()
        return files

    def remove(self, entry: Entry) -> None:
        """Take ``entry`` and all that hangs on it out of the tree, for both tiers.

        What somebody holds lingers, counted, until the last holder ends (rule L2).
        """
        parent = entry.owner
        below = entries_below(entry) if isinstance(entry, Segment) else [entry]
        for gone in reversed(below):
            self._detach(gone)
            for label in list(self._labels.get(gone.id, ())):
                self.move_label(label, None)
            if gone.holders:
                if gone.memory is not None:
                    self.ram.move("resident", "lingering", gone.charged_bytes)
                if gone.file is not None:
                    self.ssd.move("durable", "lingering", gone.file.allocated_bytes)
                    if gone.namespace.cleared:
                        self.departures.lent_at_clear(gone.file.allocated_bytes)
            else:
                self._dispose(gone, "resident", "durable")
            if gone is not entry:
                self._give_up_superseded(gone)
        if isinstance(entry, Segment):
            self._revive_superseded(entry, None if entry.namespace.cleared else parent)
        else:
            self._give_up_superseded(entry)
        self.forget_if_empty(entry.namespace)

    def clear(self, namespace: Namespace) -> tuple[int, int]:
        """Make everything of ``namespace`` unfindable; return the images and RAM bytes it had."""
        images, nbytes = namespace.entries, 0
        namespace.cleared = True
        for top in [*namespace.root.children.values(), *namespace.objects.values()]:
            below = entries_below(top) if isinstance(top, Segment) else [top]
            nbytes += sum(entry.charged_bytes for entry in below if entry.memory is not None)
            self.remove(top)
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
        self._supersede(leaf, successor)

    def replace(self, old: Entry, new: Checkpoint | ObjectEntry) -> None:
        """Put ``new`` in the place of ``old``, which has the same key: the newest wins (P3).

        A file of ``old`` stays until ``new`` is durable (rule D8).
        """
        owner = old.owner
        self._detach(old)
        if isinstance(new, ObjectEntry):
            self.add_object(new)
        else:
            assert owner is not None
            self.add_checkpoint(new, owner)
        self._supersede(old, new)

    def _supersede(self, old: Entry, new: Entry) -> None:
        self.counters["superseded"] += 1
        for label in list(self._labels.get(old.id, ())):
            self.move_label(label, new)
        for path in self._kept.values():
            if old in path:
                path[path.index(old)] = new
                old.holders -= 1
                new.holders += 1
                self._held[new.id] = new
                if not old.holders:
                    del self._held[old.id]
        new.uses = old.uses
        earlier = [*old.superseded, old]
        old.superseded = []
        new.superseded = [e for e in earlier if e.file or e.write is WriteState.WRITING]
        for entry in earlier:
            entry.successor = new
        if old.memory is not None:
            if old.holders:
                self.ram.move("resident", "lingering", old.charged_bytes)
            else:
                memory, old.memory = old.memory, None
                self._free(memory, old, "resident")
        if old.file is not None:
            self.ssd.move("durable", "lingering", old.file.allocated_bytes)

    def give_back(self, memory: Memory, charged_as: str, charged_bytes: int) -> None:
        """Free memory that was reserved in state ``charged_as`` and became part of no entry."""
        self.ram.move(charged_as, "freeing", charged_bytes)
        self.outlet.free(memory, charged_bytes)

    # -- outcomes -------------------------------------------------------------------------------

    @property
    def held_file_bytes(self) -> int:
        """What the files occupy that somebody holds."""
        return sum(e.file.allocated_bytes for e in self._held.values() if e.attached and e.file)

    def set_other_bytes(self, nbytes: int, dropped_bytes: int | None = None) -> None:
        """What the directory holds beside entries (foreign files, quarantine) has changed.

        ``dropped_bytes`` where this answers an order to drop some of it.
        """
        self.departures.set_other_bytes(nbytes, dropped_bytes)
        known = sum(file.allocated_bytes for file in self.unattached.values())
        self.ssd.add("other", known + nbytes - self.ssd.bytes_by_state["other"], 0)

    def expect_trash(self, namespace: str | None) -> None:
        """The disk will be told to clear a namespace (all when None); to be called before `clear`.

        Files of it that are no entries yet are on their way out from now on.
        """
        self.departures.expect_trash()
        for file in list(self.unattached.values()):
            if namespace in (None, file.header.namespace):
                del self.unattached[file.header.id]
                self.ssd.move("other", "trash", file.allocated_bytes)

    def freed(self, nbytes: int, images: int) -> None:
        """Memory that was being freed is back with the system."""
        self.ram.remove("freeing", nbytes, images)

    def deleted(self, file_id: str, nbytes: int, error: str = "") -> None:
        """A file that was being deleted is gone or written anew, or stays (see `Departures`)."""
        is_anew = self.writing is not None and self.writing.id == file_id
        self.departures.deleted(file_id, nbytes, error, is_anew=is_anew)

    # -- inside ---------------------------------------------------------------------------------

    def _detach(self, entry: Entry) -> None:
        owner = entry.owner
        if entry.memory is not None:
            self.quotas.left(entry)
            self.policy.left_ram(entry)
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
        self._offer(entry)
        if owner is not None:
            self._offer_to_victims(owner)

    def _forget_memory(self, entry: Entry) -> None:
        self.quotas.left(entry)
        self.policy.left_ram(entry)
        entry.memory = None
        self._offer(entry)
        if entry.owner is not None:
            entry.owner.resident_dependents -= 1
        self._offer_to_victims(entry)

    def _free(self, memory: Memory, entry: Entry, state: str) -> None:
        self.ram.move(state, "freeing", entry.charged_bytes)
        self.outlet.free(memory, entry.charged_bytes)

    def _dispose(self, entry: Entry, ram_state: str, ssd_state: str) -> None:
        """Give up what a detached, unheld entry still has.

        The file of an absorbed segment stays until its successor is durable (rule D8).
        """
        if entry.memory is not None:
            memory, entry.memory = entry.memory, None
            self._free(memory, entry, ram_state)
        if entry.file is not None and entry.successor is None:
            self._delete_file(entry, ssd_state)

    def _delete_file(self, entry: Entry, state: str) -> None:
        file = entry.file
        assert file is not None
        with _Dependence(entry):
            entry.file = None
        if entry.namespace.cleared:  # already on its way out, with the rest of its directory
            self.departures.cleared(state, file.allocated_bytes)
            return
        self.ssd.move(state, "deleting", file.allocated_bytes)
        self.outlet.delete_file(DeleteFile(entry.id, file.path, file.allocated_bytes))

    def _give_up_superseded(self, entry: Entry, keep: Entry | None = None) -> None:
        """Delete the files of what ``entry`` superseded, but for ``keep`` and what is lent."""
        for old in entry.superseded:
            old.successor = None
            if old is not keep and old.file is not None and not old.holders:
                self._delete_file(old, "lingering")
        entry.superseded = []

    def _revive_superseded(self, segment: Segment, parent: Segment | None) -> None:
        """``segment`` left before it was durable: the longest file it absorbed serves again."""
        durable = [
            old for old in segment.superseded if isinstance(old, Segment) and old.file is not None
        ]
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
            self.quotas.became_resident(old)
            self.held_bytes += old.charged_bytes
            self.held_images += 1
        self._offer_to_victims(old)

    def forget_if_empty(self, namespace: Namespace) -> None:
        """Drop a namespace that holds nothing and awaits nothing, schema and all."""
        idle = not namespace.entries and not namespace.puts
        if idle and self.namespaces.get(namespace.name) is namespace:
            del self.namespaces[namespace.name]

    def _offer_to_victims(self, entry: Entry) -> None:
        self._offer(entry)
        if entry.owner is not None:
            self._offer(entry.owner)

    def _set_priority(self, entry: Entry) -> None:
        for other in self.policy.accessed(entry, self.ram.bytes_cap):
            self._offer(other)

    def _offer(self, entry: Entry) -> None:
        self.ram_victims.offer(entry)
        self.durable_victims.offer(entry)
        self.quotas.offer(entry)
        self.ssd_victims.offer(entry)


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


def may_leave_ram(entry: Entry, gone: int = 0) -> bool:
    """Whether ``entry`` may leave RAM once ``gone`` of the residents that hang on it have left."""
    return (
        entry.attached
        and entry.memory is not None
        and not entry.holders
        and not entry.is_to_be_written
        and not (isinstance(entry, Segment) and entry.resident_dependents > gone)
    )


def may_leave_ram_without_io(entry: Entry) -> bool:
    """Whether ``entry`` is durable, and nobody holds it or has resident bytes that hang on it."""
    return entry.file is not None and may_leave_ram(entry)


def _may_leave_ssd(entry: Entry) -> bool:
    return (
        entry.attached
        and entry.file is not None
        and not entry.holders
        and not (isinstance(entry, Segment) and entry.durable_dependents)
    )
