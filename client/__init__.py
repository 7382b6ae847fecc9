"""The library for inference processes: `connect` to the daemon, `take` and `put` KV.

Importing it needs neither mlx nor a daemon. Nothing raises because of the daemon unless asked for
(``fail_open=False``): no daemon, a slow one or a full one is a miss.
"""

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
    "ProtocolFailure",
    "RestoreFailed",
    "Stored",
    "UseAfterClose",
    "connect",
]
