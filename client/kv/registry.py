"""Which adapter serves which class of cache.

The tables are owned by this module. Adapters come only through `register`. A class without one is
stored as opaque state, and rebuilt if it is one of mlx-lm's own or this process has seen a cache of
it: what a daemon sends never names anything else to import or to call.

Another engine's classes take one call each, in every process, before the first put or take::

    from prefixcached.client.kv import AppendAdapter, register

    register("my_engine.cache.PagedKV", AppendAdapter(parameters=("page_size",)))

A class whose rows stand in none of the orders of `prefixcached.client.kv.adapters` takes an
`Adapter` of its own.
"""

import importlib
import re
import sys
from typing import Any, Final

from mlx_lm.models import cache as mlx_lm_cache

from prefixcached.client.kv.adapter import BATCH_ADVICE, Adapter
from prefixcached.client.kv.adapters import (
    AppendAdapter,
    ChunkAdapter,
    RingAdapter,
    StateAdapter,
)
from prefixcached.client.kv.errors import UnsupportedCacheError, UnusableImageError

_ADAPTERS: Final[dict[str, Adapter]] = {}
_CLASSES: Final[dict[str, type]] = {}
_SEEN: Final[dict[str, type]] = {}
_STATE: Final = StateAdapter()
_OWN_MODULE: Final = re.compile(r"mlx_lm\.models\.\w+")
_BATCHES: Final = (mlx_lm_cache.BatchKVCache, mlx_lm_cache.BatchRotatingKVCache)

CacheList: Final[type] = mlx_lm_cache.CacheList
"""Holds further caches, to any depth."""


def is_list(cache: Any) -> bool:
    """Whether ``cache`` holds further caches."""
    return type(cache) is CacheList


def register(cls: type | str, adapter: Adapter) -> None:
    """Let ``adapter`` serve a class of cache in this process.

    Args:
        cls: The class itself, or its dotted name where importing it now is too early. Subclasses
            are not meant: they may keep more than their base does.
        adapter: Reads and builds it. The last one registered counts.
    """
    if isinstance(cls, str):
        _ADAPTERS[cls] = adapter
    else:
        _ADAPTERS[qualified_name(cls)] = adapter
        _CLASSES[qualified_name(cls)] = cls


def qualified_name(cls: type) -> str:
    """Return the dotted name by which a class travels."""
    return f"{cls.__module__}.{cls.__qualname__}"


def adapter_of(cache: Any) -> Adapter:
    """Return the adapter that serves this cache.

    Raises:
        UnsupportedCacheError: It is a batch.
    """
    if isinstance(cache, _BATCHES):
        raise UnsupportedCacheError(f"{type(cache).__qualname__}: {BATCH_ADVICE}")
    name = qualified_name(type(cache))
    if name in _ADAPTERS:
        return _ADAPTERS[name]
    if not _OWN_MODULE.fullmatch(type(cache).__module__):
        # A model's or an engine's own. Nothing has to be imported to build another one.
        _SEEN[name] = type(cache)
    return _STATE


def resolve(name: str) -> tuple[type[Any], Adapter]:
    """Return the class of this dotted name and its adapter.

    Raises:
        UnusableImageError: It is neither registered nor seen here, nor a class of mlx-lm.
    """
    adapter = _ADAPTERS.get(name)
    if adapter is not None and name in _CLASSES:
        return _CLASSES[name], adapter
    if adapter is None and name in _SEEN:
        return _SEEN[name], _STATE
    module, _, attribute = name.rpartition(".")
    if adapter is None and not _OWN_MODULE.fullmatch(module):
        raise UnusableImageError(
            f"{name} is neither registered nor seen in this process, nor a cache class of mlx-lm"
        )
    try:
        # Some modules of mlx-lm end the process when imported without their dependencies.
        found = sys.modules.get(module) or importlib.import_module(module)
        cls = getattr(found, attribute)
    except (Exception, SystemExit) as error:
        raise UnusableImageError(f"{name} cannot be imported here: {error}") from error
    if not isinstance(cls, type) or qualified_name(cls) != name:
        raise UnusableImageError(f"{name} is not a class")
    return cls, adapter or _STATE


register(mlx_lm_cache.KVCache, AppendAdapter())
register(mlx_lm_cache.ConcatenateKVCache, AppendAdapter())
register(mlx_lm_cache.QuantizedKVCache, AppendAdapter(parameters=("group_size", "bits")))
register(mlx_lm_cache.RotatingKVCache, RingAdapter())
register(mlx_lm_cache.ChunkedKVCache, ChunkAdapter())
