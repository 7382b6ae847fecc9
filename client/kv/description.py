"""A model's list of caches as JSON, and its leaves in order: what the schema's description holds.

The description names classes and their constant attributes, never anything that grows with the
tokens, so that every put of a namespace has the same one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prefixcached.client.kv.adapter import Adapter, Leaf
from prefixcached.client.kv.errors import UnsupportedCacheError, UnusableImageError
from prefixcached.client.kv.registry import CacheList, adapter_of, is_list, qualified_name, resolve

_MAX_DEPTH = 64
"""Nesting of cache lists; mlx-lm's models have one level. Data from a daemon must not be able to
exhaust the stack, and a tensor's name has a place for each level."""


class ReadLeaf(NamedTuple):
    """One cache of the caller's, read. ``path`` is its index, dotted where lists nest."""

    path: str
    adapter: Adapter
    leaf: Leaf


class Described(NamedTuple):
    """One cache to rebuild, as the description tells it."""

    path: str
    cls: type
    adapter: Adapter
    attributes: Mapping[str, Any]


def read(caches: Sequence[Any]) -> tuple[bytes, list[ReadLeaf]]:
    """Return the description of ``caches`` and what each leaf holds.

    Raises:
        UnsupportedCacheError: Some cache cannot be stored.
    """
    leaves: list[ReadLeaf] = []

    def visit(cache: Any, path: str, depth: int) -> dict[str, Any]:
        if is_list(cache):
            if depth == _MAX_DEPTH:
                raise UnsupportedCacheError(
                    f"cache {path} is a list inside {depth} others; {_MAX_DEPTH} is the limit"
                )
            children = [
                visit(child, f"{path}.{i}", depth + 1) for i, child in enumerate(cache.caches)
            ]
            return {"caches": children}
        adapter = adapter_of(cache)
        leaf = adapter.read(cache)
        leaves.append(ReadLeaf(path, adapter, leaf))
        return {"class": qualified_name(type(cache)), **leaf.attributes}

    described = [visit(cache, str(index), 0) for index, cache in enumerate(caches)]
    return json.dumps(described, sort_keys=True, separators=(",", ":")).encode(), leaves


def parse(description: bytes) -> list[Any]:
    """Return the description's nodes, one a cache.

    Raises:
        UnusableImageError: It is no description.
    """
    try:
        nodes = json.loads(description)
    except (ValueError, RecursionError) as error:
        raise UnusableImageError(f"not a description of caches: {error}") from error
    if not isinstance(nodes, list):
        raise UnusableImageError("not a description of caches: no list")
    return nodes


def leaves(nodes: list[Any]) -> Iterator[Described]:
    """Yield the leaves of parsed ``nodes`` in order.

    Raises:
        UnusableImageError: A node is malformed, or names a class that may not be built.
    """

    def visit(node: Any, path: str, depth: int) -> Iterator[Described]:
        match node:
            case {"caches": list(children)} if depth < _MAX_DEPTH:
                for index, child in enumerate(children):
                    yield from visit(child, f"{path}.{index}", depth + 1)
            case {"class": str(name), **attributes}:
                cls, adapter = resolve(name)
                known = {str(key): value for key, value in attributes.items()}
                yield Described(path, cls, adapter, known)
            case _:
                raise UnusableImageError(f"no cache at {path}: {str(node)[:80]}")

    for index, node in enumerate(nodes):
        yield from visit(node, str(index), 0)


def assemble(nodes: list[Any], built: Mapping[str, Any]) -> list[Any]:
    """Return the caches of ``nodes``, with the leaves of ``built`` (by path) in their places."""

    def visit(node: Any, path: str) -> Any:
        if "caches" in node:
            children = (visit(child, f"{path}.{i}") for i, child in enumerate(node["caches"]))
            return CacheList(*children)
        return built[path]

    return [visit(node, str(index)) for index, node in enumerate(nodes)]
