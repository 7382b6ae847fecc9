"""What must be true of the core after every step, recomputed from the entries alone."""

from collections.abc import Iterable

from prefixcached.actors.entries import Checkpoint, Entry, Segment, WriteState, entries_below
from prefixcached.protocol.ranges import covers, merge
from prefixcached.protocol.schema import Range, Schema
from tests.support.core import Core, FakeMemory
from tests.support.core_disk import FakeDisk
from tests.support.core_payload import Tokens


def check_core(core: Core, *, caps: bool = True) -> None:
    """Every invariant of the index, its ledgers and its tree."""
    index = core.index
    entries = list(index.entries.values())
    for ledger in (index.ram, index.ssd):
        assert ledger.bytes == sum(ledger.bytes_by_state.values())
        assert ledger.images == sum(ledger.images_by_state.values())
        assert min(ledger.bytes_by_state.values()) >= 0
        assert not caps or ledger.bytes <= ledger.bytes_cap, ledger
        assert not caps or ledger.images <= ledger.images_cap, ledger
    resident = [e for e in entries if e.memory is not None]
    assert index.ram.bytes_by_state["resident"] == sum(e.charged_bytes for e in resident)
    assert index.ram.images_by_state["resident"] == len(resident)
    held = [e for e in resident if e.holders]
    assert index.held_bytes == sum(e.charged_bytes for e in held)
    assert index.held_images == len(held)
    live = [m for m in core.memories if not m.is_freed]
    core.memories = live
    assert index.ram.images == len(live), "images charged and memories that exist"
    durable = sum(e.file.allocated_bytes for e in entries if e.file is not None)
    assert index.ssd.bytes_by_state["durable"] == durable
    for entry in entries:
        _check_entry(entry)
    for name, namespace in index.namespaces.items():
        assert namespace.name == name
        assert not namespace.cleared
        assert namespace.entries or namespace.puts, "a namespace that holds nothing is forgotten"
        tree = [e for top in namespace.root.children.values() for e in entries_below(top)]
        below = [*tree, *namespace.objects.values()]
        assert len(below) == namespace.entries
        assert all(index.entries[e.id] is e for e in below)
        _check_dependents(namespace.root)
    reachable = sum(n.entries for n in index.namespaces.values())
    assert reachable == len(entries), "every entry can be reached"


def _check_entry(entry: Entry) -> None:
    assert entry.attached
    assert entry.memory is not None or entry.file is not None, "in neither tier"
    assert entry.holders >= 0
    if entry.memory is not None:
        assert isinstance(entry.memory, FakeMemory)
        assert entry.memory.is_sealed, "visible before it is immutable"
        assert not entry.memory.is_freed
    if entry.write is WriteState.WRITING:
        assert entry.holders
    assert not (entry.file and entry.superseded), "durable, and what it superseded still waits"
    for old in entry.superseded:
        assert old.successor is entry
        assert not old.attached
    if isinstance(entry, Checkpoint):
        owner = entry.segment
        assert owner is not None
        assert owner.start < entry.position <= owner.end
        assert owner.checkpoints[entry.key] is entry
    elif isinstance(entry, Segment):
        _check_segment(entry)


def _check_segment(segment: Segment) -> None:
    parent = segment.parent
    assert parent is not None
    assert segment.tokens.size == segment.end - segment.start > 0
    assert segment.spec.start <= segment.start < segment.end == segment.spec.end
    first = int(segment.tokens[0])
    assert parent.children[segment.start, first] is segment
    is_root = parent is segment.namespace.root
    assert parent.start < segment.start <= parent.end or (is_root and segment.start == 0)
    if segment.start < parent.end:
        assert int(parent.tokens[segment.start - parent.start]) != first
    _check_dependents(segment)


def _check_dependents(segment: Segment) -> None:
    hanging: list[Entry] = [*segment.children.values(), *segment.checkpoints.values()]
    assert segment.resident_dependents == sum(e.memory is not None for e in hanging)
    assert segment.durable_dependents == sum(e.is_bound_for_disk for e in hanging)


def check_idle(core: Core) -> None:
    """Nobody is connected and nothing is under way: nothing may be held or reserved."""
    assert not core.takes.leases
    assert not core.pins.pins
    assert not core.puts.puts
    assert not core.puts.waiting
    assert not core.takes.waiting
    assert not core.reads.outstanding
    assert not core.promotions.in_flight
    assert not core.claims.claims
    assert not core.index.held_bytes
    assert all(not e.holders for e in core.index.entries.values())
    states = core.index.ram.bytes_by_state
    assert {s: states[s] for s in ("in_flight", "lingering", "promoting", "freeing")} == {
        "in_flight": 0, "lingering": 0, "promoting": 0, "freeing": 0,
    }  # fmt: skip
    assert all(n.entries for n in core.index.namespaces.values())
    open_files = [t for t in core.descriptors.open.values() if not isinstance(t, FakeMemory)]
    assert not open_files, "a file was left open"


def check_disk(core: Core, disk: FakeDisk) -> None:
    """Every file is charged, and its chain is durable too unless somebody lost a file."""
    assert disk.bytes <= core.index.ssd.bytes, (disk.bytes, core.index.ssd)
    for entry in core.index.entries.values():
        owner = entry.owner
        if entry.file is not None and owner is not None and owner.parent is not None:
            assert owner.file is not None or disk.has_losses, f"{entry} without its parent's file"


def check_disk_idle(core: Core, disk: FakeDisk) -> None:
    """With the writer idle every file belongs to somebody, and nothing else is charged."""
    entries = core.index.entries.values()
    owned = {e.file.path for e in entries if e.file is not None}
    waiting = {
        old.file.path
        for e in entries for old in e.superseded if old.file is not None
    }  # fmt: skip
    unattached = {f.path for f in core.index.unattached.values()}
    assert set(disk.files) <= owned | waiting | unattached, "a file that nobody can find"
    states = core.index.ssd.bytes_by_state
    for state in ("writing", "deleting", "undeletable", "trash"):
        assert states[state] == 0, (state, states)
    lingering = sum(
        old.file.allocated_bytes
        for e in entries for old in e.superseded if old.file is not None
    )  # fmt: skip
    assert states["lingering"] == lingering


# -- what is resumable, by definition --------------------------------------------------------------


def longest_by_definition(core: Core, namespace: str, tokens: Tokens, limit: int) -> int:
    """Rules T1, T5, T6, T13 read aloud: try every position, longest first (both tiers).

    Window rows count where the prompt's own path passes their image: a sibling that has rows of
    the shared part is not searched.
    """
    known = core.index.namespaces.get(namespace)
    if known is None:
        return 0
    images = [
        (entry, _path_of(entry)) for entry in core.index.entries.values()
        if entry.namespace is known
    ]  # fmt: skip
    for position in range(min(limit, len(tokens)), 0, -1):
        if _is_resumable(known.schema, images, tokens, position):
            return position
    return 0


def _is_resumable(
    schema: Schema, images: list[tuple[Entry, Tokens]], prompt: Tokens, position: int
) -> bool:
    slices: list[Range] = []
    window_rows: list[list[Range]] = [[] for _ in schema.windows]
    has_state = not schema.has_state
    owned = False
    for entry, path in images:
        common = _common(path, prompt)
        if isinstance(entry, Segment):
            if common <= entry.start:
                continue
            slices.append((entry.start, min(common, position)))
            if entry.start < position <= min(entry.end, common):
                owned = True
                if position < entry.minimum:
                    return False
        elif isinstance(entry, Checkpoint):
            if entry.position == position and path == prompt[:position] and entry.has_state:
                has_state = True
            if common < entry.position:
                continue
        for group, held in enumerate(entry.spec.windows):
            window_rows[group].extend(_below(held.ranges, min(common, position)))
    if not owned or not has_state or merge(slices) != ((0, position),):
        return False
    return all(
        covers(merge(held), window.needed(position))
        for window, held in zip(schema.windows, window_rows, strict=True)
    )


def _path_of(entry: Entry) -> Tokens:
    segment = entry if isinstance(entry, Segment) else None
    end = entry.spec.end
    if isinstance(entry, Checkpoint):
        segment, end = entry.segment, entry.position
    assert segment is not None
    return tuple(segment.path_tokens().tolist())[:end]


def _common(left: Tokens, right: Tokens) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _below(ranges: Iterable[Range], limit: int) -> list[Range]:
    return [(start, min(end, limit)) for start, end in ranges if start < limit]
