"""What the product has to know about one class of cache, and the forms in which it is told."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from prefixcached.client.kv.errors import UnsupportedCacheError
from prefixcached.client.kv.placement import Placement, Span
from prefixcached.protocol.schema import Range, Window

Attributes = Mapping[str, Any]
"""What a class needs beside its tokens: plain values, the same for all caches of a model."""

BATCH_ADVICE = "a batch cannot be stored; call extract(row) and store each row by itself"


@dataclass(frozen=True)
class Leaf:
    """One cache, read. Only lives while its caller's call lasts.

    Attributes:
        attributes: Goes into the schema's description.
        offset: Tokens covered; None where the class does not say.
        arrays: By name. Of rows, the token axis is -2; of state, any arrays. Empty in an empty
            cache.
        spans: Where the tokens' rows stand.
        window: The geometry of window rows, else None.
        phase: The ring's write index where it has rotated, else -1 (rule T12).
        doubtful: The position of a full ring's oldest row, which a restored ring may not have.
        state: The plain values of a snapshot (`trees`), else None.
    """

    attributes: Attributes = field(default_factory=dict)
    offset: int | None = None
    arrays: dict[str, mx.array] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    window: Window | None = None
    phase: int = -1
    doubtful: tuple[Range, ...] = ()
    state: Any = None


class OwnCaches(list[Any]):
    """Caches that were never part of a batch: the lists of `take`, `fetch` and `fresh`.

    What mlx-lm extracts from a batch of rotating caches may have padding before the window, which
    nothing tells from tokens. So of any other list only the rows of the window are believed (rule
    T13). Copies are plain lists.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


class Target(NamedTuple):
    """A cache to restore.

    Attributes:
        cls: Its class.
        attributes: As in its `Leaf`, from the schema's description.
        length: Tokens that it is to cover.
        held: Positions whose rows are there to restore.
        phase: As in `Leaf`, at exactly ``length`` tokens.
    """

    cls: type[Any]
    attributes: Attributes
    length: int
    held: Sequence[Range] = ()
    phase: int = -1


class Adapter(ABC):
    """Reads one class of cache, says where restored rows stand, and builds it. Has no state."""

    is_state: bool = False
    """Whether a snapshot is taken instead of rows."""

    @abstractmethod
    def read(self, cache: Any) -> Leaf:
        """Return what ``cache`` holds, changing nothing.

        Raises:
            UnsupportedCacheError: It cannot be stored.
        """

    def window(self, attributes: Attributes) -> Window | None:
        """Return the geometry of window rows, None where rows are append rows or state."""
        return None

    @abstractmethod
    def place(self, target: Target) -> Placement:
        """Return how long the restored buffers are and which position stands where."""

    @abstractmethod
    def build(
        self, target: Target, placement: Placement, arrays: Mapping[str, mx.array], state: Any
    ) -> Any:
        """Return the cache; it owns ``arrays`` (none of them in an empty one) from now on."""


def read_arrays(cache: Any, fields: Sequence[str]) -> dict[str, mx.array]:
    """Return the arrays of ``fields`` by name; a list of arrays has names like "keys.0".

    Raises:
        UnsupportedCacheError: An array holds more than one batch row.
    """
    arrays: dict[str, mx.array] = {}
    for name in fields:
        value = getattr(cache, name)
        if isinstance(value, mx.array):
            arrays[name] = value
        elif value is not None:
            arrays |= {f"{name}.{index}": item for index, item in enumerate(value)}
    for name, array in arrays.items():
        if array.ndim < 2 or array.shape[0] != 1:
            raise UnsupportedCacheError(f"{name} has shape {array.shape}: {BATCH_ADVICE}")
    return arrays


def assign_arrays(cache: Any, fields: Sequence[str], arrays: Mapping[str, mx.array]) -> None:
    """Set the attributes that `read_arrays` has read."""
    for name in fields:
        parts = tuple(array for key, array in arrays.items() if key.startswith(f"{name}."))
        setattr(cache, name, arrays.get(name, parts))


def roomy(cls: type[Any], length: int) -> int:
    """Rows of a buffer for ``length`` tokens and at least one more, in the class's own steps.

    An exactly full buffer would be copied whole at the next token. A class without ``step``
    concatenates, and its buffer is always exactly full.
    """
    step = int(getattr(cls, "step", 0))
    return (length // step + 1) * step if step else length
