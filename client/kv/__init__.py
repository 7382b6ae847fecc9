"""mlx-lm's cache objects in protocol terms, and back. Knows nothing of sockets or daemons."""

from prefixcached.client.kv.adapter import Adapter, Leaf, OwnCaches, Target
from prefixcached.client.kv.adapters import (
    AppendAdapter,
    ChunkAdapter,
    RingAdapter,
    StateAdapter,
)
from prefixcached.client.kv.attachments import Attachment, Attachments
from prefixcached.client.kv.errors import (
    IncomparableKvError,
    UncuttableKvError,
    UnsupportedCacheError,
    UnusableImageError,
)
from prefixcached.client.kv.registry import register
from prefixcached.client.kv.restoration import Restoration, restoration
from prefixcached.client.kv.snapshot import Snapshot, snapshot

__all__ = [
    "Adapter",
    "AppendAdapter",
    "Attachment",
    "Attachments",
    "ChunkAdapter",
    "IncomparableKvError",
    "Leaf",
    "OwnCaches",
    "Restoration",
    "RingAdapter",
    "Snapshot",
    "StateAdapter",
    "Target",
    "UncuttableKvError",
    "UnsupportedCacheError",
    "UnusableImageError",
    "register",
    "restoration",
    "snapshot",
]
