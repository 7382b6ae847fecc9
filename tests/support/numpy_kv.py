"""A stand-in for `prefixcached.client.kv` whose caches are numpy arrays: no mlx is needed.

A cache is a dict: ``keys`` and ``values`` of shape (heads, tokens, width), float16, and where there
is state ``state`` of any shape, float32.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from prefixcached.protocol.image import (
    Extent,
    ImageKind,
    ImageSpec,
    StateTensor,
    WindowRows,
    layout,
)
from prefixcached.protocol.messages import Part
from prefixcached.protocol.schema import Kind, Schema, TensorSpec
from prefixcached.protocol.tokens import TokenArray

NumpyCache = dict[str, np.ndarray[Any, Any]]

HEADS = 2
WIDTH = 8


def make_caches(tokens: Sequence[int], *, layers: int = 2, state: bool = False) -> list[NumpyCache]:
    """Return caches whose contents are a function of the tokens before each position."""
    ids = np.asarray(tokens, dtype=np.int64)
    history = np.cumsum(ids * 7 + np.arange(ids.size)) % 2039
    caches: list[NumpyCache] = []
    for layer in range(layers):
        rows = history[None, :, None] + np.arange(HEADS)[:, None, None] + layer
        keys = (rows + np.arange(WIDTH)).astype(np.float16)
        cache: NumpyCache = {"keys": keys, "values": -keys}
        if state:
            cache["state"] = np.full((3, 5), history[-1] + layer, dtype=np.float32)
        caches.append(cache)
    return caches


def same(left: Sequence[NumpyCache], right: Sequence[NumpyCache]) -> bool:
    """Whether two lists of caches are equal, bit for bit."""
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


def cut(caches: Sequence[NumpyCache], length: int) -> list[NumpyCache]:
    """Return the first ``length`` tokens of ``caches`` without state."""
    return [{name: cache[name][:, :length] for name in ("keys", "values")} for cache in caches]


class NumpySnapshot:
    """See `prefixcached.client.seam.Snapshot`."""

    def __init__(self, caches: Sequence[NumpyCache], tokens: TokenArray, attachments: Any) -> None:
        covered = caches[0]["keys"].shape[1]
        if covered != len(tokens):
            raise ValueError(f"the caches cover {covered} tokens, not {len(tokens)}")
        self._caches = caches
        self.length = len(tokens)
        self.windows: tuple[WindowRows, ...] = ()
        self.attachments = attachments is not None
        has_state = "state" in caches[0]
        self.schema = Schema(
            tensors=tuple(
                TensorSpec(f"{layer}.{name}", Kind.APPEND, "F16", (HEADS, WIDTH), axis=1)
                for layer in range(len(caches))
                for name in ("keys", "values")
            ),
            has_state=has_state,
            description=str(len(caches)).encode(),
        )
        self.checkpoint: ImageSpec | None = None
        if has_state:
            self.checkpoint = ImageSpec(
                ImageKind.CHECKPOINT,
                self.length,
                self.length,
                tensors=tuple(
                    StateTensor(f"{layer}.state", "F32", cache["state"].shape)
                    for layer, cache in enumerate(caches)
                ),
            )

    def rows(self, extent: Extent) -> list[memoryview]:
        layer, name = extent.name.split(".")
        array = self._caches[int(layer)][name]
        if extent.spec is None:
            return [array.data]
        return [
            array[head, start:end].data for head in range(HEADS) for start, end in extent.ranges
        ]


class NumpyRestoration:
    """See `prefixcached.client.seam.Restoration`."""

    attachments = None

    def __init__(
        self, schema: Schema, length: int, checkpoint: ImageSpec | None, parts: Sequence[Part]
    ) -> None:
        self._schema = schema
        self._parts = parts
        self._caches: list[NumpyCache] = [
            {name: np.zeros((HEADS, length, WIDTH), np.float16) for name in ("keys", "values")}
            for _ in range(int(schema.description))
        ]
        for tensor in checkpoint.tensors if checkpoint is not None else ():
            layer, name = tensor.name.split(".")
            self._caches[int(layer)][name] = np.zeros(tensor.shape, np.float32)

    def targets(self, index: int) -> list[tuple[int, list[memoryview]]]:
        part = self._parts[index]
        runs: list[tuple[int, list[memoryview]]] = []
        for extent in layout(self._schema, part.spec).extents:
            layer, name = extent.name.split(".")
            array = self._caches[int(layer)][name]
            if extent.spec is None:
                runs.append((extent.offset, [array.data]))
                continue
            row_bytes = extent.spec.row_bytes
            rows = part.spec.end - part.spec.start
            for head in range(HEADS):
                first = head * rows + part.use_start - part.spec.start
                view = array[head, part.use_start : part.use_end].data
                runs.append((extent.offset + first * row_bytes, [view]))
        return runs

    def finish(self) -> list[NumpyCache]:
        return self._caches


class NumpyAdapter:
    """See `prefixcached.client.seam.Adapter`."""

    def snapshot(
        self, caches: list[Any], tokens: TokenArray, attachments: Any = None, /
    ) -> AbstractContextManager[NumpySnapshot]:
        @contextmanager
        def context() -> Iterator[NumpySnapshot]:
            yield NumpySnapshot(caches, tokens, attachments)

        return context()

    def restoration(
        self, schema: Schema, length: int, checkpoint: ImageSpec | None, parts: Sequence[Part], /
    ) -> NumpyRestoration:
        return NumpyRestoration(schema, length, checkpoint, parts)
