"""How mlx-lm's classes of cache keep their tokens: one adapter a class, without state.

Another engine's class takes one call, for example::

    register("my_engine.cache.PagedKV", AppendAdapter(parameters=("page_size",)))
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from prefixcached.client.kv import trees
from prefixcached.client.kv.adapter import (
    BATCH_ADVICE,
    Adapter,
    Attributes,
    Leaf,
    Target,
    assign_arrays,
    read_arrays,
    roomy,
)
from prefixcached.client.kv.errors import UnsupportedCacheError, UnusableImageError
from prefixcached.client.kv.placement import Placement, Span
from prefixcached.protocol.schema import Window, WindowShape

_FIELDS = ("keys", "values")


@dataclass(frozen=True)
class AppendAdapter(Adapter):
    """One row a token, in order: KVCache and its like, and QuantizedKVCache.

    Attributes:
        parameters: The constructor's arguments, each also an attribute.
        fields: Attributes that hold an array, or a list of arrays, with token axis -2.
    """

    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = _FIELDS

    def read(self, cache: Any) -> Leaf:
        """Take the rows below ``offset``; the buffer may be longer."""
        arrays = read_arrays(cache, self.fields)
        offset = int(cache.offset) if arrays else 0
        return Leaf(
            attributes=_attributes(cache, self.parameters),
            offset=offset,
            arrays=arrays,
            spans=(Span(0, offset, 0),) if offset else (),
        )

    def place(self, target: Target) -> Placement:
        """Every row at its own position."""
        return Placement(roomy(target.cls, target.length), (Span(0, target.length, 0),))

    def build(
        self, target: Target, placement: Placement, arrays: Mapping[str, mx.array], state: Any
    ) -> Any:
        """Construct it with its parameters."""
        cache = _construct(target, self.parameters)
        if arrays:
            assign_arrays(cache, self.fields, arrays)
            cache.offset = target.length
        return cache


@dataclass(frozen=True)
class RingAdapter(Adapter):
    """RotatingKVCache: the last ``max_size`` rows, the first ``keep`` always among them.

    Three orders occur. Until it is full, and after every update of several tokens, rows stand in
    temporal order and may be fewer or more than ``max_size``. A full ring that takes single tokens
    is overwritten from row ``keep`` on, and ``_idx`` is where the oldest row stands.
    """

    def read(self, cache: Any) -> Leaf:
        """Find the rows' order; `phase` is set in a rotated ring."""
        arrays = read_arrays(cache, _FIELDS)
        attributes = _attributes(cache, ("max_size", "keep"))
        window = self.window(attributes)
        if not arrays:
            return Leaf(attributes=attributes, offset=0, window=window)
        size, keep, offset, index = cache.max_size, cache.keep, int(cache.offset), int(cache._idx)
        rows = arrays["keys"].shape[-2]
        has_rotated = index < min(rows, offset)
        if has_rotated and (rows != size or index <= keep):
            raise UnsupportedCacheError(
                f"a rotating cache of {offset} tokens writes at row {index} of {rows}, which its "
                f"own code never does with max_size={size} and keep={keep}"
            )
        if not has_rotated:
            rows = min(rows, index)
        if rows >= offset:
            spans = [Span(0, offset, rows - offset)]  # padding of a batch may stand before them
        else:
            spans = _ring(offset, rows, keep, index if has_rotated else rows)
        oldest = offset - (rows - keep)
        return Leaf(
            attributes=attributes,
            offset=offset,
            arrays=arrays,
            spans=tuple(spans),
            window=window,
            phase=index if has_rotated else -1,
            doubtful=((oldest, oldest + 1),) if rows == size <= offset else (),
        )

    def window(self, attributes: Attributes) -> Window | None:
        """A ring."""
        return Window(size=attributes["max_size"], keep=attributes["keep"])

    def place(self, target: Target) -> Placement:
        """A full ring has exactly ``max_size`` rows; a shorter one grows as the class does."""
        size, keep = target.attributes["max_size"], target.attributes["keep"]
        length, phase = target.length, target.phase
        if length < size:
            return Placement(min(size, roomy(target.cls, length)), (Span(0, length, 0),))
        return Placement(
            size, tuple(_ring(length, size, keep, phase if keep < phase < size else size))
        )

    def build(
        self, target: Target, placement: Placement, arrays: Mapping[str, mx.array], state: Any
    ) -> Any:
        """Construct it; it goes on writing behind the newest row."""
        cache = _construct(target, ("max_size", "keep"))
        if arrays:
            assign_arrays(cache, _FIELDS, arrays)
            cache.offset = target.length
            newest = placement.spans[-1]
            cache._idx = newest.row + newest.end - newest.start
        return cache


@dataclass(frozen=True)
class ChunkAdapter(Adapter):
    """ChunkedKVCache: rows from ``start_position`` on, which lies behind the current chunk."""

    def read(self, cache: Any) -> Leaf:
        """Take the rows from ``start_position`` to ``offset``."""
        arrays = read_arrays(cache, _FIELDS)
        attributes = _attributes(cache, ("chunk_size",))
        window = self.window(attributes)
        if not arrays:
            return Leaf(attributes=attributes, offset=0, window=window)
        start, offset = int(cache.start_position), int(cache.offset)
        return Leaf(
            attributes=attributes,
            offset=offset,
            arrays=arrays,
            spans=(Span(start, offset, 0),) if start < offset else (),
            window=window,
        )

    def window(self, attributes: Attributes) -> Window | None:
        """The rows since the last multiple of ``chunk_size``."""
        return Window(size=attributes["chunk_size"], shape=WindowShape.CHUNK)

    def place(self, target: Target) -> Placement:
        """All rows that end at ``length`` without a gap: as many as the producer had, or needs."""
        length = target.length
        start = next((low for low, high in target.held if low < length <= high), length)
        spans = (Span(start, length, 0),) if start < length else ()
        return Placement(roomy(target.cls, length - start), spans)

    def build(
        self, target: Target, placement: Placement, arrays: Mapping[str, mx.array], state: Any
    ) -> Any:
        """Construct it; ``start_position`` is the first row's position."""
        cache = _construct(target, ("chunk_size",))
        if arrays:
            assign_arrays(cache, _FIELDS, arrays)
            cache.offset = target.length
            cache.start_position = placement.spans[0].start if placement.spans else target.length
        return cache


@dataclass(frozen=True)
class StateAdapter(Adapter):
    """A class that is resumable only where a snapshot of it was taken: all its attributes."""

    is_state = True

    def read(self, cache: Any) -> Leaf:
        """Take every attribute, arrays and plain values alike."""
        _check_attributes_are_all(type(cache))
        attributes = vars(cache)
        for name in ("lengths", "left_padding"):
            if attributes.get(name) is not None:
                raise UnsupportedCacheError(f"the cache has {name}: {BATCH_ADVICE}")
        if getattr(cache, "batch_size", 1) != 1:
            raise UnsupportedCacheError(f"the cache has {cache.batch_size} rows: {BATCH_ADVICE}")
        arrays: dict[str, mx.array] = {}
        state = {name: trees.encode(value, name, arrays) for name, value in attributes.items()}
        offset = attributes.get("offset")
        return Leaf(offset=offset if type(offset) is int else None, arrays=arrays, state=state)

    def place(self, target: Target) -> Placement:
        """No rows."""
        return Placement(0, ())

    def build(
        self, target: Target, placement: Placement, arrays: Mapping[str, mx.array], state: Any
    ) -> Any:
        """Set the attributes of an instance on which ``__init__`` was not called."""
        if not isinstance(state, dict):
            raise UnusableImageError(f"the checkpoint has no state of a {target.cls.__qualname__}")
        cache = object.__new__(target.cls)
        vars(cache).update({name: trees.decode(tree, arrays) for name, tree in state.items()})
        return cache


def _check_attributes_are_all(cls: type) -> None:
    """Raise UnsupportedCacheError if an instance holds more than its ``__dict__``.

    Such is a class with slots, or one that extends a list, say: its items would be lost.
    """
    slots = [name for base in cls.__mro__ for name in _slots(base)]
    try:
        vars(object.__new__(cls))
    except TypeError:
        slots.append("what its built-in base holds")
    if slots:
        raise UnsupportedCacheError(
            f"{cls.__module__}.{cls.__qualname__} holds {', '.join(slots)} beside its __dict__: "
            "tell how to read and build it with prefixcached.client.kv.register(cls, adapter)"
        )


def _slots(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    named = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in named if name not in ("__dict__", "__weakref__")]


def _ring(length: int, rows: int, keep: int, index: int) -> list[Span]:
    """Return the spans of a ring of ``rows`` rows whose newest row stands before ``index``."""
    oldest, newest = length - (rows - keep), length - (index - keep)
    spans = (Span(0, keep, 0), Span(oldest, newest, index), Span(newest, length, keep))
    return [span for span in spans if span.start < span.end]


def _attributes(cache: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in names}


def _construct(target: Target, names: Sequence[str]) -> Any:
    return target.cls(**{name: target.attributes[name] for name in names})
