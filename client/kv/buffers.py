"""MLX arrays seen as bytes, and MLX arrays that nobody has filled yet.

A view keeps the array's buffer alive and shared: while one exists, MLX copies the whole buffer at
the next append. Whoever takes a view here drops it before the caller sees the array again.
"""

import ctypes
import functools
import json
import mmap
import sys
from collections.abc import Sequence
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from prefixcached.protocol.image import StateTensor

DTYPE_NAMES: Final[dict[mx.Dtype, str]] = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32",
    mx.uint64: "U64", mx.int64: "I64", mx.float64: "F64", mx.complex64: "C64",
}  # fmt: skip
"""The name that safetensors has for each dtype of MLX."""

HUGE_PAGES_BYTES: Final = 256 * 1024
"""Buffers from this size on are worth a system call each; neighbours make up huge pages."""

_UNSIGNED: Final = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def integers(array: mx.array) -> NDArray[Any]:
    """Return a writable view of an evaluated ``array`` as unsigned integers, without a copy.

    Through integers, because numpy has no bfloat16. The view has the array's shape; its strides
    are the buffer's, contiguous or not.
    """
    return all_integers([array])[0]


def all_integers(arrays: Sequence[mx.array]) -> list[NDArray[Any]]:
    """Return `integers` of each array. MLX's worker is waited for once, not for every array."""
    # MLX 0.32 on CUDA ends the process when it is asked for the memory of an empty array.
    views = [array.view(_UNSIGNED[array.itemsize]) if array.size else None for array in arrays]
    mx.eval([view for view in views if view is not None])
    return [
        np.array(view, copy=False)
        if view is not None
        else np.empty(array.shape, f"u{array.itemsize}")
        for array, view in zip(arrays, views, strict=True)
    ]


def flat_bytes(view: NDArray[Any]) -> memoryview:
    """Return a C-contiguous view's memory as bytes; of anything else, a copy's."""
    if view.size == 0:
        return memoryview(b"")
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8).data


def prefer_huge_pages(view: NDArray[Any]) -> None:
    """Ask the system to back a buffer that nobody has touched with huge pages.

    On Linux the first touch of a 4 KiB page costs more than copying its contents: 229 MB into new
    buffers took 0.25 s of processor time, and 0.09 s with huge pages. It is advice: where the
    system has none to give, nothing changes.
    """
    if sys.platform == "linux":
        if view.nbytes < HUGE_PAGES_BYTES:
            return
        # Outwards to whole pages, so that the ranges of neighbouring buffers join.
        start = view.ctypes.data & -mmap.PAGESIZE
        end = -(-(view.ctypes.data + view.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise()(start, end - start, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def unfilled(tensors: Sequence[StateTensor]) -> list[mx.array]:
    """Return evaluated arrays of these dtypes and shapes with undefined contents.

    `mx.zeros` (and `mx.empty`, which is the same) writes every page, and what is restored writes
    it again: about half the speed. MLX allocates without writing only for data that it is about
    to load, so it loads a safetensors file here that has a header and whose reads do nothing.
    """
    if not tensors:
        return []
    file = _HeaderOnly(tensors)
    loaded = cast(dict[str, mx.array], mx.load(cast(Any, file), format="safetensors"))
    arrays = [loaded[str(index)] for index in range(len(tensors))]
    mx.eval(arrays)
    return arrays


class _HeaderOnly:
    """A readable file object: a safetensors header, then bytes that are never delivered.

    MLX asks for bytes with `readinto` alone, into the header's buffer and then into each array's.
    """

    closed = False

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        header: dict[str, Any] = {}
        offset = 0
        for index, tensor in enumerate(tensors):
            header[str(index)] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (offset, offset + tensor.nbytes),
            }
            offset += tensor.nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        self._header = len(encoded).to_bytes(8, "little") + encoded
        self._size = len(self._header) + offset
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        raise NotImplementedError(f"MLX is expected to call readinto, not read({size})")

    def readinto(self, target: memoryview) -> int:
        head = self._header[self._position : self._position + len(target)]
        target[: len(head)] = head
        self._position += len(target)
        return len(target)
