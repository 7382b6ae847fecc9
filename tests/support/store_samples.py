"""Small images of every kind, with the headers and tokens under which a store keeps them."""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefixcached.actors import memory
from prefixcached.actors.memory import SharedImage
from prefixcached.actors.storage_format import FORMAT, schema_digest, tokens_count
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import SEGMENTS
from prefixcached.protocol.actor_messages import FileEntry, FileHeader
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor, WindowRows, layout
from prefixcached.protocol.schema import (
    Kind,
    Schema,
    TensorSpec,
    Window,
    decode_schema,
    encode_schema,
)

PLAIN = Schema(
    tensors=(
        TensorSpec("0.keys", Kind.APPEND, "BF16", (1, 2, 4), 2),
        TensorSpec("0.values", Kind.APPEND, "BF16", (1, 2, 4), 2),
        TensorSpec("1.keys", Kind.APPEND, "F32", (1, 1, 3), 2),
        TensorSpec("1.values", Kind.APPEND, "F32", (1, 1, 0), 2),
    ),
    description=b"{}",
)
"""Two layers; the last tensor has zero size, as some models' values do."""

WINDOWED = Schema(
    tensors=(
        TensorSpec("0.keys", Kind.APPEND, "F16", (1, 2, 4), 2),
        TensorSpec("1.keys", Kind.WINDOW, "F16", (1, 2, 4), 2, 0),
    ),
    windows=(Window(8, 2),),
    has_state=True,
)


@dataclass(frozen=True)
class Sample:
    """One image to store: what `Store.write` takes, and the bytes that must come back."""

    header: FileHeader
    tokens: bytes
    schema: bytes
    data: bytes

    def image(self) -> SharedImage:
        """The bytes in sealed shared memory; whoever asks frees it."""
        image = memory.create(len(self.data))
        image.write_at(0, [self.data])
        image.seal()
        return image


def sample(
    spec: ImageSpec,
    schema: Schema | None = PLAIN,
    *,
    namespace: str = "demo",
    seed: int = 0,
    position: int | None = None,
    parent: str = "",
    id: str | None = None,  # noqa: A002
) -> Sample:
    """A sample of ``spec`` with random bytes and tokens, always the same for one seed."""
    source = random.Random(seed)
    encoded = encode_schema(schema) if schema is not None else b""
    header = FileHeader(
        format=FORMAT,
        id=id or f"{source.getrandbits(128):032x}",
        kind=spec.kind,
        namespace=namespace,
        spec=spec,
        parent=parent,
        position=spec.start if position is None else position,
        schema_digest=schema_digest(encoded),
    )
    data = source.randbytes(layout(schema, spec).nbytes)
    tokens = source.randbytes(4 * tokens_count(header))
    return Sample(header, tokens, encoded, data)


def segment(
    start: int = 0,
    end: int = 7,
    *,
    namespace: str = "demo",
    seed: int = 0,
    schema: Schema = PLAIN,
    parent: str = "",
) -> Sample:
    """A segment of tokens [start, end)."""
    rows = tuple(WindowRows(((max(0, end - 3), end),)) for _ in schema.windows) if end else ()
    spec = ImageSpec(ImageKind.SEGMENT, start, end, rows)
    return sample(spec, schema, namespace=namespace, seed=seed, parent=parent)


def checkpoint(position: int = 5, *, namespace: str = "demo", seed: int = 1) -> Sample:
    """A checkpoint with two snapshots, one of zero size, and metadata."""
    spec = ImageSpec(
        ImageKind.CHECKPOINT,
        position,
        position,
        tensors=(StateTensor("s.0", "F32", (3, 5)), StateTensor("s.1", "I8", (0, 2))),
        metadata=bytes(range(256)),
    )
    return sample(spec, PLAIN, namespace=namespace, seed=seed)


def stored_object(*, namespace: str = "demo", seed: int = 2) -> Sample:
    """An object: no tokens, no schema."""
    spec = ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("features", "BF16", (2, 3)),))
    return sample(spec, None, namespace=namespace, seed=seed)


def every_kind() -> Sequence[Sample]:
    """One sample of each kind."""
    return (
        segment(),
        segment(4, 9, seed=5, schema=WINDOWED, namespace="windowed"),
        checkpoint(),
        stored_object(),
    )


def schema_of(one: Sample) -> Schema | None:
    """The decoded schema of a sample."""
    return decode_schema(one.schema) if one.schema else None


def token_values(one: Sample) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    """A sample's tokens as numbers."""
    return np.frombuffer(one.tokens, dtype="<u4")


def fresh_id() -> str:
    """An id that nobody else has."""
    return secrets.token_hex(16)


def write(store: Store, one: Sample) -> FileEntry:
    """Store a sample."""
    image = one.image()
    try:
        return store.write(one.header, one.tokens, one.schema, image)
    finally:
        image.free()


def path_of(store: Store, entry: FileEntry) -> Path:
    """Where its file is."""
    return Path(store.directory.path, SEGMENTS, entry.path)
