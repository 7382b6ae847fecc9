"""The library for inference processes: `connect` to the daemon, `take` and `put` KV.

Importing it needs neither mlx nor a daemon. Nothing raises because of the daemon unless asked for
(``fail_open=False``): no daemon, a slow one or a full one is a miss.
"""

from typing import TYPE_CHECKING, Any

from prefixcached.client.cache import Cache, connect
from prefixcached.client.errors import (
    CallTimeout,
    NoDaemon,
    NoSpace,
    NotStorable,
    PrefixCachedError,
    ProtocolFailure,
    RestoreFailed,
    UseAfterClose,
)
from prefixcached.client.pins import Pin
from prefixcached.client.results import (
    Cleared,
    Declined,
    Flushed,
    Hit,
    Miss,
    ObjectHit,
    Stored,
)

if TYPE_CHECKING:
    from prefixcached.client.prompt_cache import PromptCache

__all__ = [
    "Cache",
    "CallTimeout",
    "Cleared",
    "Declined",
    "Flushed",
    "Hit",
    "Miss",
    "NoDaemon",
    "NoSpace",
    "NotStorable",
    "ObjectHit",
    "Pin",
    "PrefixCachedError",
    "PromptCache",
    "ProtocolFailure",
    "RestoreFailed",
    "Stored",
    "UseAfterClose",
    "connect",
]


def __getattr__(name: str) -> Any:
    # It needs mlx and mlx-lm, which are imported by whoever asks for it.
    if name == "PromptCache":
        from prefixcached.client.prompt_cache import PromptCache

        return PromptCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
