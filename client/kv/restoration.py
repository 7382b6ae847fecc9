"""A hit as mlx-lm caches: buffers to be filled from the lent images, then the caches around them.

A `Restoration` owns the new arrays and the views on them until `finish` hands the caches over.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from prefixcached.client.kv import attachments as attachments_module
from prefixcached.client.kv import description
from prefixcached.client.kv.adapter import OwnCaches, Target
from prefixcached.client.kv.attachments import Attachment
from prefixcached.client.kv.buffers import (
    all_integers,
    flat_bytes,
    prefer_huge_pages,
    unfilled,
)
from prefixcached.client.kv.errors import UnusableImageError
from prefixcached.client.kv.placement import Placement, packed, positions, transfers
from prefixcached.protocol.image import Extent, ImageKind, ImageSpec, StateTensor, layout
from prefixcached.protocol.messages import Part
from prefixcached.protocol.ranges import clip, covers, merge, subtract
from prefixcached.protocol.schema import Kind, Range, Schema, TensorSpec

Run = tuple[int, list[memoryview]]
"""An offset in bytes inside an image, and the buffers that lie there one after the other."""

_APPEND = -1
"""Index of the append rows beside the window groups."""


class Restoration:
    """Fill all `targets` of all parts, then `finish`. For the calling thread.

    Attributes:
        length: Tokens that the caches will cover.
        attachments: What was attached to this position, else None. Valid after `finish`.
    """

    def __init__(
        self, schema: Schema, length: int, checkpoint: ImageSpec | None, parts: Sequence[Part]
    ) -> None:
        self.length = length
        self.attachments: dict[str, Attachment] | None = None
        self._schema = schema
        self._parts = parts
        self._nodes = description.parse(schema.description)
        self._described = list(description.leaves(self._nodes))
        self._checkpoint = _snapshot_at(length, checkpoint, parts)
        self._arrays: dict[str, mx.array] = {}
        self._memory: dict[str, memoryview] = {}
        self._unused: list[tuple[NDArray[Any], list[Range]]] = []
        self._assign_rows()
        self._place()
        self._allocate()

    def targets(self, index: int) -> list[Run]:
        """Return where the bytes of part ``index`` go.

        Returns:
            Pairs of a byte offset inside the image, to which the part's ``data_offset`` is to be
            added, and writable views that take the bytes from there on.
        """
        part = self._parts[index]
        is_state = part.spec == self._checkpoint
        runs: list[Run] = []
        for extent in layout(self._schema, part.spec).extents:
            if extent.nbytes == 0:
                continue
            if extent.spec is not None:
                runs += self._row_targets(extent, self._assigned[index][extent.spec.window])
            elif is_state:
                runs.append((extent.offset, [self._memory[extent.name]]))
        return runs

    def finish(self) -> list[Any]:
        """Return the restored caches, which own their buffers from now on.

        Raises:
            UnusableImageError: The description does not fit the tensors.
        """
        self._clear_unused_rows()
        for memory in self._memory.values():
            memory.release()
        self._memory.clear()
        arrays, metadata = self._arrays, _metadata(self._checkpoint)
        states = metadata.get("states")
        own = _by_leaf([leaf.path for leaf in self._described], arrays)
        built = {}
        for leaf in self._described:
            state = states.get(leaf.path) if isinstance(states, dict) else None
            try:
                built[leaf.path] = leaf.adapter.build(
                    self._targets[leaf.path],
                    self._placements[leaf.path],
                    own[leaf.path],
                    state,
                )
            except (TypeError, KeyError, AttributeError) as error:
                raise UnusableImageError(f"cache {leaf.path} cannot be built: {error}") from error
        if "attachments" in metadata:
            self.attachments = attachments_module.decode(metadata["attachments"], arrays)
        self._arrays = {}
        return OwnCaches(description.assemble(self._nodes, built))

    def _assign_rows(self) -> None:
        """Decide which part each row comes from; the nearest to the end where several have it."""
        kinds = {tensor.window for tensor in self._schema.tensors}
        self._assigned: list[dict[int, tuple[Range, ...]]] = [{} for _ in self._parts]
        self._held: dict[int, tuple[Range, ...]] = {}
        for group in kinds:
            taken: tuple[Range, ...] = ()
            for part, assigned in zip(reversed(self._parts), reversed(self._assigned), strict=True):
                own = subtract(_usable(part, group, self.length), taken)
                assigned[group] = own
                taken = merge((*taken, *own))
            needed: tuple[Range, ...] = ((0, self.length),)
            if group != _APPEND:
                needed = self._schema.windows[group].needed(self.length)
            if not covers(taken, needed):
                raise UnusableImageError(
                    f"parts have rows {taken} of {self.length} tokens, needed are {needed}"
                )
            self._held[group] = taken

    def _place(self) -> None:
        self._targets: dict[str, Target] = {}
        self._placements: dict[str, Placement] = {}
        for leaf in self._described:
            try:
                window = leaf.adapter.window(leaf.attributes)
                group = self._schema.windows.index(window) if window is not None else _APPEND
                target = Target(
                    leaf.cls,
                    leaf.attributes,
                    self.length,
                    self._held.get(group, ()),
                    self._phase(group),
                )
                self._targets[leaf.path] = target
                self._placements[leaf.path] = leaf.adapter.place(target)
            except (TypeError, KeyError, ValueError) as error:
                raise UnusableImageError(f"cache {leaf.path} cannot be placed: {error}") from error

    def _phase(self, group: int) -> int:
        if group == _APPEND:
            return -1
        for part in self._parts:
            at_end = part.spec.end == self.length == _limit(part)
            if at_end and part.spec.windows and part.spec.windows[group].phase >= 0:
                return part.spec.windows[group].phase
        return -1

    def _allocate(self) -> None:
        wanted: list[StateTensor] = []
        owners: dict[str, Placement] = {}
        for leaf in self._described:
            placement = self._placements[leaf.path]
            window = leaf.adapter.window(leaf.attributes)
            for tensor in self._schema.tensors:
                if not tensor.name.startswith(f"{leaf.path}."):
                    continue
                own = self._schema.windows[tensor.window] if tensor.kind is Kind.WINDOW else None
                if own != window or leaf.adapter.is_state:
                    raise UnusableImageError(f"{tensor.name} does not fit a {leaf.cls.__name__}")
                owners[tensor.name] = placement
                wanted.append(
                    StateTensor(tensor.name, tensor.dtype, tensor.full_shape(placement.rows))
                )
        if len(owners) != len(self._schema.tensors):
            raise UnusableImageError("the schema has tensors that no cache of it owns")
        if self._checkpoint is not None:
            wanted += self._checkpoint.tensors
        elif self._schema.has_state:
            raise UnusableImageError(f"there is no state at {self.length} tokens")
        arrays = unfilled(wanted)
        self._owners = owners
        self._arrays = {tensor.name: array for tensor, array in zip(wanted, arrays, strict=True)}
        views = dict(zip(self._arrays, all_integers(arrays), strict=True))
        for view in views.values():
            prefer_huge_pages(view)
        self._memory = {name: flat_bytes(view) for name, view in views.items()}
        specs = {tensor.name: tensor for tensor in self._schema.tensors}
        # Done in `finish`: whoever touches a new page first waits for it, and many read at once.
        self._unused = [
            (views[name], self._unused_rows(specs[name], placement))
            for name, placement in owners.items()
        ]

    def _unused_rows(self, spec: TensorSpec, placement: Placement) -> list[Range]:
        """Return the rows of a buffer that no part fills."""
        filled = transfers(
            placement.spans,
            placement.spans,
            _clip_to(positions(placement.spans), self._held[spec.window]),
        )
        rows = [(move.source, move.source + move.rows) for move in filled]
        return list(subtract([(0, placement.rows)], rows))

    def _clear_unused_rows(self) -> None:
        """Write zeros to the rows that no part fills.

        Room to grow is small, and other code may multiply it by a mask of zeros; a ring's filler
        row is recognised by its zeros when the ring is stored again.
        """
        for view, rows in self._unused:
            for start, end in rows:
                view[..., start:end, :] = 0
        self._unused.clear()

    def _row_targets(self, extent: Extent, wanted: Sequence[Range]) -> list[Run]:
        spec = extent.spec
        assert spec is not None
        placement, memory = self._owners[extent.name], self._memory[extent.name]
        rows = extent.shape[spec.axis]
        moves = transfers(
            packed(extent.ranges), placement.spans, _clip_to(wanted, positions(placement.spans))
        )
        runs: list[Run] = []
        end, row_bytes = -1, spec.row_bytes
        for run in range(spec.runs):
            for source, target, count in moves:
                offset = extent.offset + (run * rows + source) * row_bytes
                start = (run * placement.rows + target) * row_bytes
                view = memory[start : start + count * row_bytes]
                if offset == end:
                    runs[-1][1].append(view)
                else:
                    runs.append((offset, [view]))
                end = offset + view.nbytes
        return runs


def _clip_to(ranges: Sequence[Range], allowed: Sequence[Range]) -> tuple[Range, ...]:
    """Return the parts of ``ranges`` that lie in ``allowed``, in the order of ``ranges``."""
    return tuple(piece for start, end in allowed for piece in clip(ranges, start, end))


def _limit(part: Part) -> int:
    """Return below which position the part's rows belong to this prompt."""
    return part.use_end if part.spec.kind is ImageKind.SEGMENT else part.spec.end


def _usable(part: Part, group: int, length: int) -> tuple[Range, ...]:
    if group == _APPEND:
        start, end = max(part.use_start, part.spec.start), min(part.use_end, part.spec.end)
        return clip([(start, end)], 0, length)
    if not part.spec.windows:
        return ()
    return clip(part.spec.windows[group].ranges, 0, min(length, _limit(part)))


def _snapshot_at(
    length: int, checkpoint: ImageSpec | None, parts: Sequence[Part]
) -> ImageSpec | None:
    """Return the snapshot at ``length``; other checkpoints may be lent for their window rows."""
    for spec in (checkpoint, *(part.spec for part in parts)):
        if spec is not None and spec.is_snapshot and spec.end == length:
            return spec
    return None


def _metadata(checkpoint: ImageSpec | None) -> dict[str, Any]:
    if checkpoint is None or not checkpoint.metadata:
        return {}
    try:
        metadata = json.loads(checkpoint.metadata)
    except (ValueError, RecursionError) as error:
        raise UnusableImageError(f"the checkpoint's metadata is not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise UnusableImageError("the checkpoint's metadata is no object")
    return metadata


def _by_leaf(
    paths: Sequence[str], arrays: Mapping[str, mx.array]
) -> dict[str, dict[str, mx.array]]:
    """Return the arrays of each cache by their names within it."""
    own: dict[str, dict[str, mx.array]] = {path: {} for path in paths}
    for name, array in arrays.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if path in own:
                own[path][".".join(parts[depth:])] = array
    return own


def restoration(
    schema: Schema, length: int, checkpoint: ImageSpec | None, parts: Sequence[Part]
) -> Restoration:
    """Prepare buffers for the first ``length`` tokens of a hit.

    Args:
        schema: The namespace's schema.
        length: The hit's length, at least 1.
        checkpoint: The hit's checkpoint; the one at ``length`` is found among ``parts`` as well.
        parts: All parts of the hit, in the order in which the prompt's tokens lie.

    Raises:
        UnusableImageError: The parts do not make up the caches that the schema describes.
        SchemaError: A part contradicts the schema.
    """
    return Restoration(schema, length, checkpoint, parts)
