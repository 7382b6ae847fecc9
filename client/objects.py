"""Tensor objects by key: put and take as programs (rules O1, O2).

An object is a set of named arrays and JSON, immutable, with no tokens: vision features, for
example. Arrays of mlx and of numpy keep their kind, dtype, shape and every bit. mlx is imported
only where its arrays occur.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefixcached.client import results, transfer
from prefixcached.client.arguments import check_description
from prefixcached.client.errors import ProtocolFailure, RestoreFailed
from prefixcached.client.lending import as_put_result, check_batch, failing_as
from prefixcached.client.programs import Copy, Program, Tell, ask
from prefixcached.protocol import image, messages
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor

NUMPY_NAMES: Final = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<f2": "F16",
    "<u4": "U32", "<i4": "I32", "<f4": "F32", "<u8": "U64", "<i8": "I64", "<f8": "F64",
    "<c8": "C64",
}  # fmt: skip
"""The name that safetensors has for each dtype of numpy."""

_NUMPY_DTYPES: Final = {name: np.dtype(code) for code, name in NUMPY_NAMES.items()}

Array = Any
"""An `mx.array` or a numpy array."""


class _Metadata(msgspec.Struct, frozen=True):
    """What the daemon keeps as an object's metadata: the caller's JSON, and which arrays are mlx's.

    ``value`` is a text of JSON, so that it comes back as `json` reads it.
    """

    value: str
    mlx: tuple[str, ...]


class Packed:
    """Arrays of one object seen as bytes, for the time of one put; on the caller's own thread.

    Raises:
        TypeError: Something is no array, no name or no JSON.
        ValueError: An array has a dtype or a name that cannot be stored, or it is too much.
    """

    def __init__(self, tensors: Mapping[str, Array], metadata: Any) -> None:
        self.views: dict[str, memoryview] = {}
        described: list[StateTensor] = []
        of_mlx = [name for name, array in tensors.items() if _is_mlx(array)]
        if of_mlx:
            import mlx.core as mx

            mx.eval([tensors[name] for name in of_mlx])
        for name, array in tensors.items():
            _check_name(name, array)
            dtype, self.views[name] = (_mlx_bytes if name in of_mlx else _numpy_bytes)(name, array)
            described.append(StateTensor(name, dtype, tuple(array.shape)))
        packed = msgspec.json.encode(_Metadata(json.dumps(metadata), tuple(of_mlx)))
        self.spec = ImageSpec(ImageKind.OBJECT, tensors=tuple(described), metadata=packed)
        check_description(self.spec)


@contextlib.contextmanager
def pack(tensors: Mapping[str, Array], metadata: Any) -> Iterator[Packed]:
    """Look at the arrays of an object without a copy. Errors as `Packed`."""
    packed = Packed(tensors, metadata)
    try:
        yield packed
    finally:
        packed.views.clear()


def put(packed: Packed, namespace: str, key: str) -> Program[results.Stored | results.Declined]:
    """Offer an object and copy it. Raises PrefixCachedError of any kind."""
    reply, descriptors = yield from ask(messages.OfferObject(namespace, key, packed.spec))
    if not isinstance(reply, messages.Grant):
        return as_put_result(reply)
    if reply.images != (packed.spec,) or len(descriptors) != 1:
        raise ProtocolFailure("the daemon asks for another object than the one that was offered")
    with failing_as(ProtocolFailure, "the granted image cannot be filled"):
        moves = _moves(descriptors[0], packed.spec, packed.views, 0)
        yield Copy(transfer.write_all, moves, descriptors)
        del moves
    reply, _ = yield from ask(messages.Commit(reply.put, reply.boot))
    return as_put_result(reply)


def take(namespace: str, key: str) -> Program[results.ObjectHit | results.Miss]:
    """Ask for an object and copy it into new arrays. Raises PrefixCachedError of any kind."""
    reply, descriptors = yield from ask(messages.TakeObject(namespace, key))
    if isinstance(reply, messages.Miss):
        return results.Miss(reason=reply.reason)
    assert isinstance(reply, messages.Hit), "the connection admits nothing else"
    check_batch(0, descriptors, 1)
    if len(reply.parts) != 1 or len(descriptors) != 1:
        raise ProtocolFailure(f"the daemon lent an object of {len(reply.parts)} parts")
    (part,) = reply.parts
    with failing_as(RestoreFailed, "the object cannot be restored"):
        metadata = msgspec.json.decode(part.spec.metadata, type=_Metadata)
        tensors, views = _allocate(part.spec, metadata.mlx)
        moves = _moves(descriptors[0], part.spec, views, part.data_offset)
        yield Copy(transfer.read_all, moves, descriptors)
        # mlx would copy a buffer that a view keeps alive.
        del moves, views
        value = json.loads(metadata.value)
    yield Tell(messages.Release(reply.lease, reply.boot))
    return results.ObjectHit(tensors=tensors, metadata=value, tier=reply.tier)


def _moves(
    fd: int, spec: ImageSpec, views: Mapping[str, memoryview], data_offset: int
) -> list[transfer.Move]:
    extents = image.layout(None, spec).extents
    runs = ((data_offset + extent.offset, [views[extent.name]]) for extent in extents)
    return [transfer.Move(fd, *run) for run in transfer.merge_runs(runs)]


def _allocate(
    spec: ImageSpec, of_mlx: Sequence[str]
) -> tuple[dict[str, Array], dict[str, memoryview]]:
    """Return new arrays for all tensors of ``spec``, in its order, and views on them as bytes."""
    image.check_spec(None, spec)
    arrays: dict[str, Array] = {}
    views: dict[str, memoryview] = {}
    wanted = [tensor for tensor in spec.tensors if tensor.name in of_mlx]
    if wanted:
        from prefixcached.client.kv.buffers import flat_bytes, integers, unfilled

        for tensor, array in zip(wanted, unfilled(wanted), strict=True):
            arrays[tensor.name], views[tensor.name] = array, flat_bytes(integers(array))
    for tensor in spec.tensors:
        if tensor.name not in arrays:
            empty = np.empty(tensor.shape, _NUMPY_DTYPES[tensor.dtype])
            arrays[tensor.name], views[tensor.name] = empty, _flat(empty)
    return {tensor.name: arrays[tensor.name] for tensor in spec.tensors}, views


def _is_mlx(array: Array) -> bool:
    # Who has an array of mlx has imported it.
    core = sys.modules.get("mlx.core")
    return core is not None and isinstance(array, core.array)


def _check_name(name: str, array: Array) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a tensor's name must be a str, not {type(name).__name__}")
    if not _is_mlx(array) and not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be an mlx or numpy array, not {type(array).__name__}")


def _mlx_bytes(name: str, array: Array) -> tuple[str, memoryview]:
    from prefixcached.client.kv.buffers import DTYPE_NAMES, flat_bytes, integers

    return DTYPE_NAMES[array.dtype], flat_bytes(integers(array))


def _numpy_bytes(name: str, array: NDArray[Any]) -> tuple[str, memoryview]:
    little = array.dtype.newbyteorder("<")
    dtype = NUMPY_NAMES.get(little.str)
    if dtype is None:
        raise ValueError(f"{name} has dtype {array.dtype}; known are {', '.join(_NUMPY_DTYPES)}")
    return dtype, _flat(np.ascontiguousarray(array, dtype=little))


def _flat(array: NDArray[Any]) -> memoryview:
    if array.size == 0:
        return memoryview(b"")
    return array.reshape(-1).view(np.uint8).data
