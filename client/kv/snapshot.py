"""The caller's caches as protocol terms, for the time of one put. Reads only.

A `Snapshot` owns views of the caller's buffers from `__enter__` to `__exit__` and nothing else.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from prefixcached.client.arguments import check_description
from prefixcached.client.kv import attachments as attachments_module
from prefixcached.client.kv import description
from prefixcached.client.kv.adapter import Leaf, OwnCaches
from prefixcached.client.kv.attachments import Attachments
from prefixcached.client.kv.buffers import DTYPE_NAMES, all_integers, flat_bytes, integers
from prefixcached.client.kv.description import ReadLeaf
from prefixcached.client.kv.errors import (
    IncomparableKvError,
    UncuttableKvError,
    UnsupportedCacheError,
)
from prefixcached.client.kv.placement import (
    Span,
    Transfer,
    intersect,
    packed,
    positions,
    transfers,
    without,
)
from prefixcached.protocol import limits
from prefixcached.protocol.image import Extent, ImageKind, ImageSpec, StateTensor, WindowRows
from prefixcached.protocol.ranges import clip, covers, merge
from prefixcached.protocol.schema import Kind, Range, Schema, TensorSpec, Window, WindowShape

MAX_OFFSET_GAP: Final = 8
"""Tokens that a cache and its count may differ by: speculative decoding leaves a few (rule P1).
More is a mix-up, and storing it would hand out wrong KV."""


class Snapshot:
    """What caches hold and where, without copying. A context manager, for the calling thread.

    Attributes:
        length: Tokens that can be stored: covered by every cache, at most the tokens given.
        schema: The tensors, and the classes that hold them.
        windows: Rows that are there, for each window group of the schema.
        checkpoint: The snapshot at ``length``, where there is state or an attachment.
        attachments: Whether anything is attached.
    """

    def __init__(
        self, caches: Sequence[Any], tokens: Sequence[int], attachments: Attachments | None = None
    ) -> None:
        encoded, leaves = description.read(caches)
        self.length = _covered(leaves, len(tokens))
        self.attachments = bool(attachments)
        state: dict[str, mx.array] = {}
        trees = {}
        for path, adapter, leaf in leaves:
            if adapter.is_state:
                trees[path] = leaf.state
                state |= {f"{path}.{name}": array for name, array in leaf.arrays.items()}
        metadata: dict[str, Any] = {"states": trees}
        if attachments:
            metadata["attachments"] = attachments_module.encode(attachments, state)
        rows = [entry for entry in leaves if not entry.adapter.is_state and self.length]
        self._leaves = {
            f"{path}.{name}": (leaf, array)
            for path, _, leaf in rows
            for name, array in leaf.arrays.items()
        }
        self._state = state
        self._views: dict[str, NDArray[Any]] = {}
        self._lent: list[memoryview] = []
        mx.eval([array for _, array in self._leaves.values()], list(state.values()))
        is_own = isinstance(caches, OwnCaches)
        self._spans = {path: _real_spans(leaf, is_own=is_own) for path, _, leaf in rows}
        self.windows, groups = self._stored_windows(rows)
        self.schema = Schema(
            tensors=tuple(_specs(rows, groups)),
            windows=tuple(groups),
            has_state=bool(trees),
            description=encoded,
        )
        self.checkpoint: ImageSpec | None = None
        if self.length and (trees or attachments):
            if trees and any(leaf.offset not in (None, self.length) for _, _, leaf in leaves):
                raise UncuttableKvError(f"recurrent state cannot be cut to {self.length} tokens")
            self.checkpoint = ImageSpec(
                kind=ImageKind.CHECKPOINT,
                start=self.length,
                end=self.length,
                tensors=tuple(
                    StateTensor(name, DTYPE_NAMES[array.dtype], array.shape)
                    for name, array in state.items()
                ),
                metadata=json.dumps(metadata, separators=(",", ":")).encode(),
            )
            check_description(self.checkpoint, UnsupportedCacheError)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for view in self._lent:
            view.release()
        self._lent.clear()
        self._views.clear()
        self._leaves.clear()
        self._state.clear()

    def rows(self, extent: Extent) -> list[memoryview]:
        """Return the bytes of ``extent`` in order, as read-only views of MLX's own buffers.

        The views end with this context. Only rows that do not stand together in memory are copied.

        Raises:
            UnusableImageError: The extent asks for rows that are not here.
        """
        if extent.nbytes == 0:
            return []
        if extent.spec is None:
            runs = [flat_bytes(integers(self._state[extent.name]))]
        else:
            runs = list(self._runs(extent.name, extent.spec, extent.ranges))
        views = [run.toreadonly() for run in runs]
        self._lent += runs
        self._lent += views
        return views

    def _runs(self, name: str, spec: TensorSpec, ranges: Sequence[Range]) -> Iterator[memoryview]:
        leaf, array = self._leaves[name]
        if not self._views:
            views = all_integers([array for _, array in self._leaves.values()])
            self._views = dict(zip(self._leaves, views, strict=True))
        view = self._views[name]
        capacity, row_bytes = array.shape[-2], spec.row_bytes
        moves = transfers(leaf.spans, packed(ranges), ranges)
        if view.flags.c_contiguous:
            memory = flat_bytes(view)
            if moves == [Transfer(0, 0, capacity)]:
                yield memory
                return
            for run in range(spec.runs):
                for source, _, count in moves:
                    start = (run * capacity + source) * row_bytes
                    yield memory[start : start + count * row_bytes]
            return
        for index in np.ndindex(*view.shape[:-2]):
            for source, _, count in moves:
                yield flat_bytes(view[index][source : source + count])

    def _stored_windows(
        self, rows: Sequence[ReadLeaf]
    ) -> tuple[tuple[WindowRows, ...], dict[Window, int]]:
        """Return what is stored of each window group, and the groups' indices."""
        held: dict[Window, tuple[Range, ...]] = {}
        phases: dict[Window, set[int]] = {}
        for path, _, leaf in rows:
            if leaf.window is None:
                continue
            own = clip(positions(self._spans[path]), 0, self.length)
            held[leaf.window] = intersect(held.get(leaf.window, own), own)
            at_end = leaf.offset == self.length
            phases.setdefault(leaf.window, set()).add(leaf.phase if at_end else -1)
        stored = []
        for window, ranges in held.items():
            needed = window.needed(self.length)
            if not covers(ranges, needed):
                raise UncuttableKvError(
                    f"a window of {window.size} rows has {ranges}, and {self.length} tokens need "
                    f"{needed}"
                )
            tail = needed[-1][0] if needed else self.length
            low = max(0, tail - limits.WINDOW_EXTRA_ROWS)
            kept = (*clip(ranges, 0, window.keep), *clip(ranges, low, self.length))
            (phase,) = phases[window] if len(phases[window]) == 1 else (-1,)
            stored.append(WindowRows(merge(kept), phase))
        return tuple(stored), {window: index for index, window in enumerate(held)}


def _covered(leaves: Sequence[ReadLeaf], count: int) -> int:
    """Return how many of ``count`` tokens every cache covers (rule P1).

    Raises:
        IncomparableKvError: The caches and the count do not belong together.
    """
    empty = [path for path, _, leaf in leaves if not leaf.arrays]
    if len(empty) == len(leaves):
        return 0
    offsets = {path: leaf.offset for path, _, leaf in leaves if leaf.offset is not None}
    if empty:
        raise IncomparableKvError(
            f"cache {empty[0]} is empty (0 tokens) and another holds "
            f"{max(offsets.values(), default=count)}: every cache must have seen the same tokens"
        )
    for path, offset in offsets.items():
        if abs(offset - count) > MAX_OFFSET_GAP:
            raise IncomparableKvError(
                f"cache {path} covers {offset} tokens and {count} tokens were given: pass exactly "
                "the tokens that were forwarded through these caches"
            )
    return min([count, *offsets.values()])


def _real_spans(leaf: Leaf, *, is_own: bool) -> tuple[Span, ...]:
    """Return the leaf's spans, less what may be no token's.

    That is a restored ring's filler row, which holds zeros, and in caches that may come from a
    batch (`OwnCaches`) what stands before the window. A batch keeps no first rows.
    """
    for start, end in leaf.doubtful:
        (move,) = transfers(leaf.spans, packed([(start, end)]), [(start, end)])
        rows = (integers(array)[..., move.source, :] for array in leaf.arrays.values())
        if not any(row.any() for row in rows):
            return without(leaf.spans, leaf.doubtful)
    window = leaf.window
    if is_own or window is None or window.keep or window.shape is not WindowShape.RING:
        return leaf.spans
    oldest = (leaf.offset or 0) - window.size
    return without(leaf.spans, [(0, oldest)]) if oldest > 0 else leaf.spans


def _specs(rows: Sequence[ReadLeaf], groups: dict[Window, int]) -> Iterator[TensorSpec]:
    for path, _, leaf in rows:
        for name, array in leaf.arrays.items():
            if array.dtype not in DTYPE_NAMES:
                raise UnsupportedCacheError(f"{path}.{name} has dtype {array.dtype}")
            yield TensorSpec(
                name=f"{path}.{name}",
                kind=Kind.APPEND if leaf.window is None else Kind.WINDOW,
                dtype=DTYPE_NAMES[array.dtype],
                shape=(*array.shape[:-2], array.shape[-1]),
                axis=array.ndim - 2,
                window=-1 if leaf.window is None else groups[leaf.window],
            )


def snapshot(
    caches: Sequence[Any], tokens: Sequence[int], attachments: Attachments | None = None
) -> Snapshot:
    """Read ``caches``, which hold the KV of ``tokens``, without changing or copying them.

    Args:
        caches: mlx-lm's cache objects, one batch row.
        tokens: The tokens that were forwarded through them.
        attachments: What to keep with the last position.

    Raises:
        IncomparableKvError: ``tokens`` and ``caches`` do not belong together (rule P1).
        UnsupportedCacheError: A cache cannot be stored.
        UncuttableKvError: Not all caches end at one position that their kinds can be cut to.
    """
    return Snapshot(caches, tokens, attachments)
