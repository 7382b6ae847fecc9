"""What a caller attaches to a position: named sets of tensors (rule A1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from prefixcached.client.kv import trees
from prefixcached.client.kv.errors import UnsupportedCacheError, UnusableImageError


@dataclass(frozen=True)
class Attachment:
    """A set of tensors that belongs to one position of a prompt.

    Attributes:
        schema: Names the set's meaning and version, "vision-features/1" for instance.
        tensors: Arrays of any dtype and shape, by name.
        metadata: Plain values: None, bool, int, float, str, lists and dicts of such.
    """

    schema: str
    tensors: Mapping[str, mx.array] = field(default_factory=dict)
    metadata: Any = None


Attachments = Mapping[str, Attachment]


def encode(attachments: Attachments, arrays: dict[str, mx.array]) -> Any:
    """Return JSON for ``attachments`` and add their tensors to ``arrays``."""
    value = {}
    for name, attachment in attachments.items():
        if not isinstance(attachment, Attachment):
            raise UnsupportedCacheError(
                f"attachment {name!r} is a {type(attachment).__qualname__}, not an Attachment"
            )
        value[name] = [attachment.schema, dict(attachment.tensors), attachment.metadata]
    return trees.encode(value, "attachments", arrays)


def decode(tree: Any, arrays: Mapping[str, mx.array]) -> dict[str, Attachment]:
    """Return the attachments that `encode` made ``tree`` of.

    Raises:
        UnusableImageError: It is no such tree.
    """
    value = trees.decode(tree, arrays)
    try:
        return {name: Attachment(*parts) for name, parts in value.items()}
    except (AttributeError, TypeError) as error:
        raise UnusableImageError(f"no attachments: {error}") from error
