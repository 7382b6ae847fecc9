"""What a `Cache` asks of the side that knows mlx: `prefixcached.client.kv`, or a test's own.

An exception with a text attribute ``reason`` says that these caches cannot be stored: the put is
declined for that reason. Any other exception of `Adapter.snapshot` is the caller's mistake and
reaches it (rule P1). Whatever `Adapter.restoration` raises is a miss, "restore-failed" (rule T8).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from prefixcached.protocol.image import Extent, ImageSpec, WindowRows
from prefixcached.protocol.messages import Part
from prefixcached.protocol.schema import Schema
from prefixcached.protocol.tokens import TokenArray


class Snapshot(Protocol):
    """The caches of a put, seen as bytes; its views are valid until its context ends."""

    length: int
    """Tokens to store: the first ``length`` of those given."""
    schema: Schema
    """All append and window tensors."""
    windows: tuple[WindowRows, ...]
    """Rows that each window group has."""
    checkpoint: ImageSpec | None
    """The state tensors and metadata at ``length``, None where there is no state."""
    attachments: bool
    """Whether the checkpoint carries attachments (rule A1)."""

    def rows(self, extent: Extent) -> list[memoryview]:
        """Return the bytes of ``extent``, as contiguous runs in the image's order."""
        ...


class Restoration(Protocol):
    """Caches being filled from the parts of a hit."""

    @property
    def attachments(self) -> Any:
        """What the put attached, else None; after `finish`."""
        ...

    def targets(self, index: int) -> list[tuple[int, list[memoryview]]]:
        """Return what to read of part ``index``: offsets in its image and where to put them."""
        ...

    def finish(self) -> Sequence[Any]:
        """Return the mlx-lm caches, after all reads."""
        ...


class Adapter(Protocol):
    """Makes snapshots and restorations, on the caller's own thread."""

    def snapshot(
        self, caches: list[Any], tokens: TokenArray, attachments: Any = None, /
    ) -> AbstractContextManager[Snapshot]:
        """Look at ``caches``, which cover ``tokens``, without a copy.

        Raises:
            ValueError: They do not belong together (rule P1).
        """
        ...

    def restoration(
        self, schema: Schema, length: int, checkpoint: ImageSpec | None, parts: Sequence[Part], /
    ) -> Restoration:
        """Allocate caches for ``length`` tokens, with room to grow."""
        ...


class MlxAdapter:
    """mlx-lm's caches. mlx is imported by its methods, not by ``import prefixcached.client``.

    Both methods raise ImportError where mlx or mlx-lm is not installed (the extra ``mlx``).
    """

    def snapshot(
        self, caches: list[Any], tokens: TokenArray, attachments: Any = None, /
    ) -> AbstractContextManager[Snapshot]:
        """See `Adapter.snapshot`."""
        from prefixcached.client import kv

        # An array of token ids is a sequence of integers in all but its type.
        return kv.snapshot(caches, cast("Sequence[int]", tokens), attachments)

    def restoration(
        self, schema: Schema, length: int, checkpoint: ImageSpec | None, parts: Sequence[Part], /
    ) -> Restoration:
        """See `Adapter.restoration`."""
        from prefixcached.client import kv

        return kv.restoration(schema, length, checkpoint, parts)
