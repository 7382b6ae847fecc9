"""What determines KV, as a namespace (rules N2 and N3). Pure, but for the arithmetic on weights.

Read from the live model, never from files: weights that were edited in memory are seen, and a copy
of the same weights elsewhere agrees. Names, paths, times and the tokenizer have no part in it.
"""

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

FORMAT_VERSION: Final = 1
"""Counts up whenever the bytes of an image mean something else than before."""

_DIGEST_BYTES: Final = 20
_READABLE_SALT: Final = 64
"""Characters of a salt that a namespace shows; all of it is in the digest."""


def namespace_for(model: nn.Module, kv_format: str, salt: str = "") -> str:
    """Return the namespace of a model's KV, at most 512 bytes.

    Args:
        model: As loaded, adapters included.
        kv_format: Classes, parameters and quantisation of the caches.
        salt: Anything else that keeps KV apart.
    """
    return namespace(fingerprint(model), kv_format, salt)


def namespace(model_fingerprint: str, kv_format: str, salt: str = "") -> str:
    """Return the namespace for a `fingerprint` that is known already."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in (str(FORMAT_VERSION), model_fingerprint, kv_format, salt):
        _add(digest, part.encode())
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in salt[:_READABLE_SALT])
    return "mlx-lm:" + digest.hexdigest() + (f":{readable}" if readable else "")


def fingerprint(model: nn.Module) -> str:
    """Return a digest of everything in ``model`` that its KV depends on.

    That is: every parameter, seen as integers and summed along two axes; the plain attributes and
    arguments of each layer (an adapter's scale, for one) and of the model; the source of their
    classes, which may come from the model's own folder; the version of mlx-lm. Takes one pass over
    the weights at about memory speed.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _add(digest, importlib.metadata.version("mlx-lm").encode())
    _add(digest, _plain(getattr(model, "args", None)).encode())
    modules = sorted(model.named_modules(), key=lambda item: item[0])
    for source in sorted({_source(cls) for cls in {type(module) for _, module in modules}}):
        _add(digest, source.encode())
    told: dict[int, str] = {}
    sums: list[mx.array] = []
    for name, module in modules:
        _add(digest, f"{name}={type(module).__module__}.{type(module).__qualname__}".encode())
        for key, value in _leaves({**vars(module), **module}):
            if isinstance(value, mx.array):
                _add(digest, f"{key}:{value.dtype}{value.shape}".encode())
                sums += _sums(value)
            elif isinstance(value, np.ndarray):
                _add(digest, f"{key}:{value.dtype}{value.shape}".encode())
                _add(digest, value.tobytes())
            elif _is_plain(value):
                _add(digest, f"{key}={value!r}".encode())
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                # Some models keep their arguments as `config`; layers often share one object.
                if id(value) not in told:
                    told[id(value)] = _plain(value)
                _add(digest, f"{key}={told[id(value)]}".encode())
    mx.eval(sums)
    for array in sums:
        _add(digest, np.array(array).tobytes())
    return digest.hexdigest()


def is_distributed(model: nn.Module) -> bool:
    """Whether ``model`` holds only one rank's share, so that its KV is not the whole (rule N3)."""
    for _, module in model.named_modules():
        attributes = vars(module)
        if attributes.get("pipeline_size", 1) > 1:
            return True
        groups = (v for v in attributes.values() if isinstance(v, mx.distributed.Group))
        if any(group.size() > 1 for group in groups):
            return True
    return False


def _add(digest: Any, part: bytes) -> None:
    """Add ``part`` so that no two different lists of parts look alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _leaves(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a layer, those within lists and dicts one by one.

    Layers keep parameters in lists too, such as an adapter's for several outputs. A layer within
    is yielded as a whole: it comes by itself, as a module.
    """
    for name, value in sorted(attributes.items()):
        # What begins with an underscore is derived from the rest, some of it at first use.
        if not name.startswith("_"):
            yield from _parts(name, value)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) not in (list, tuple, dict) or _is_plain(value):
        yield name, value
        return
    items = value.items() if type(value) is dict else enumerate(value)
    for key, item in sorted(items, key=lambda pair: str(pair[0])):
        yield from _parts(f"{name}.{key}", item)


def _sums(array: mx.array) -> list[mx.array]:
    """Return the sums of ``array`` along two axes modulo 2^32, its items seen as integers.

    Two, because one alone does not see rows (or columns) that changed places.
    """
    if array.ndim == 0:
        array = array[None]
    rows = array.reshape(-1, array.shape[-1]) if array.size else array.reshape(0, 1)
    row_bytes = rows.shape[-1] * array.itemsize
    unsigned = mx.uint32 if row_bytes % 4 == 0 else mx.uint16 if row_bytes % 2 == 0 else mx.uint8
    words = rows.view(unsigned)
    return [words.sum(axis=0), words.sum(axis=1)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    # Not a subclass: layers are dicts too.
    if type(value) is dict:
        return all(_is_plain(part) for item in value.items() for part in item)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(args: Any) -> str:
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        args = dataclasses.asdict(args)
    elif hasattr(args, "__dict__"):
        args = vars(args)
    return json.dumps(args, sort_keys=True, default=repr)


def _source(cls: type) -> str:
    """Return the source of the file that defines ``cls``, else of the class, else nothing.

    The file is asked from the class's own code: mlx-lm loads a model's own folder as a module that
    nothing else can find by its name.
    """
    if cls.__module__.startswith("mlx.nn"):
        return ""
    for function in vars(cls).values():
        code = getattr(function, "__code__", None)
        try:
            if code is not None:
                return Path(code.co_filename).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    for item in (sys.modules.get(cls.__module__), cls):
        try:
            if item is not None:
                return inspect.getsource(item)
        except (OSError, TypeError):
            continue
    return ""
