"""What determines KV, as a namespace (rules N2 and N3). Pure, but for the arithmetic on weights.

Read from the live model, never from files: weights that were edited in memory are seen, and a copy
of the same weights elsewhere agrees. Names, paths, times and the tokenizer have no part in it.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

FORMAT_VERSION: Final = 1
"""Counts up whenever the bytes of an image mean something else than before."""

_DIGEST_BYTES: Final = 20
_MLX: Final = str(Path(nn.layers.base.__file__).parents[2]) + os.sep
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

    That is: every array, seen as integers and summed along two axes; the plain attributes and
    arguments of each layer (an adapter's scale, for one) and of the model; the source of their
    classes, which may come from the model's own folder; the version of mlx-lm. Takes one pass over
    the weights at about memory speed.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _add(digest, importlib.metadata.version("mlx-lm").encode())
    _add(digest, _plain(getattr(model, "args", None)).encode())
    modules = sorted(model.named_modules(), key=lambda item: item[0])
    sources = _Sources({type(module) for _, module in modules})
    for source in sources:
        _add(digest, source.encode())
    told: dict[int, str] = {}
    sums: list[mx.array] = []
    for name, module in modules:
        _add(digest, f"{name}={type(module).__module__}.{type(module).__qualname__}".encode())
        for key, value in _leaves(module, sources.filled_later(type(module))):
            if isinstance(value, mx.array):
                _add(digest, f"{key}:{value.dtype}{value.shape}".encode())
                sums += _sums(value)
            elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
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


def _leaves(module: nn.Module, derived: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a layer but for ``derived``, those within lists and dicts one by one.

    Layers keep parameters in lists too, such as an adapter's for several outputs. A layer within
    is yielded as a whole: it comes by itself, as a module.
    """
    ignored = {"_no_grad", "_training", *derived}
    if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d) and module._p_1 < 1:
        ignored.discard("_training")  # the only layers that then compute something else
    for name, value in sorted({**vars(module), **module}.items()):
        if name not in ignored:
            yield from _parts(name, value)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    # Layers are dicts too.
    if isinstance(value, nn.Module) or not isinstance(value, list | tuple | dict):
        yield name, sorted(map(repr, value)) if isinstance(value, set | frozenset) else value
    elif _is_plain(value):
        yield name, value
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in sorted(
            ((str(key), item) for key, item in items if _is_plain(key)), key=lambda pair: pair[0]
        ):
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
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def _plain(args: Any) -> str:
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        args = dataclasses.asdict(args)
    elif hasattr(args, "__dict__"):
        args = vars(args)
    return json.dumps(args, sort_keys=True, default=repr)


class _Sources:
    """What defines the classes of one model. Files are read once for it, and never remembered.

    Asked of the methods that a class has now: one may have been replaced from another file, and
    mlx-lm loads a model's own folder as a module that nothing else can find by its name.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._texts: dict[str, str | None] = {}
        self._of = {cls: self._defining(cls) for cls in classes}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(set().union(*self._of.values())))

    def filled_later(self, cls: type) -> set[str]:
        """Return what a layer computes from the rest at its first use; until then it is None."""
        return set(re.findall(r"self\.(_\w+) = None", "\n".join(self._of[cls])))

    def _defining(self, cls: type) -> set[str]:
        """Return what defines ``cls`` and all that it inherits, but for what is MLX's own."""
        found = set()
        for base in cls.__mro__:
            for value in vars(base).values():
                for function in _layers_of(value):
                    if not function.__code__.co_filename.startswith(_MLX):
                        found.add(self._text(function.__code__))
                        found |= _enclosed(function)
        return found

    def _text(self, code: CodeType) -> str:
        """Return the file that ``code`` stands in, or the code itself where there is none."""
        file = code.co_filename
        if file not in self._texts:
            try:
                self._texts[file] = Path(file).read_text(encoding="utf-8")
            except (OSError, ValueError):  # a notebook, `python -c`, another encoding
                self._texts[file] = None
        text = self._texts[file]
        return _instructions(code) if text is None else text


def _layers_of(attribute: object) -> Iterator[FunctionType]:
    """Yield the function behind a class's attribute, and whatever functions it wraps."""
    seen: set[int] = set()
    value: object = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)


def _enclosed(function: FunctionType) -> set[str]:
    """Return the plain values that a function closes over: one file may make many of its kind."""
    found = set()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # empty still
            if _is_plain(cell.cell_contents):
                found.add(f"{function.__qualname__}.{name}={cell.cell_contents!r}")
    return found


def _instructions(code: CodeType) -> str:
    """Return instructions, names and constants; the order of a set's text differs by process."""
    constants = [
        _instructions(one) if isinstance(one, CodeType)
        else sorted(map(repr, one)) if isinstance(one, frozenset)
        else one
        for one in code.co_consts
    ]  # fmt: skip
    return repr((code.co_code, code.co_names, constants))
