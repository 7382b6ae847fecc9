"""State of a cache as JSON and tensors: nested plain values, with arrays named apart. Pure."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from prefixcached.client.kv.errors import UnsupportedCacheError, UnusableImageError


def encode(value: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """Return JSON for ``value`` and add its arrays to ``arrays``, each under a name of its own.

    Args:
        value: None, bool, int, float, str, mx.array, or lists, tuples and dicts of such.
        name: Where the value stands; its arrays' names begin with it.
        arrays: Receives the arrays, in order.

    Raises:
        UnsupportedCacheError: Some value is of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, mx.array):
        arrays[name] = value
        return {"array": name}
    if type(value) in (list, tuple):
        items = [encode(item, f"{name}.{index}", arrays) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        if not all(type(key) in (bool, int, float, str) for key in value):
            raise UnsupportedCacheError(f"{name} has keys that are not plain values")
        return {
            "dict": [
                [key, encode(item, f"{name}.{index}", arrays)]
                for index, (key, item) in enumerate(value.items())
            ]
        }
    raise UnsupportedCacheError(
        f"{name} holds a {type(value).__module__}.{type(value).__qualname__}; only arrays and "
        "plain values can be stored: register an adapter (prefixcached.client.kv.register)"
    )


def decode(tree: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Return the value that `encode` made ``tree`` of.

    Raises:
        UnusableImageError: No such tree, or it names an array that is not there.
    """
    if isinstance(tree, list):
        return [decode(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"array": str(name)} if name in arrays:
            return arrays[name]
        case {"tuple": list(items)}:
            return tuple(decode(item, arrays) for item in items)
        case {"dict": list(items)} if all(type(i) is list and len(i) == 2 for i in items):
            return {key: decode(item, arrays) for key, item in items}
        case _:
            raise UnusableImageError(f"no value of a cache: {str(tree)[:80]}")
