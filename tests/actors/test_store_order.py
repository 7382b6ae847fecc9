"""The steps of the store, in the order of docs/storage-format.md, and the crash points between."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.actors.crash_points import CrashPoint
from prefixcached.actors.filesystem import ImageMemory
from prefixcached.actors.memory import Hasher
from prefixcached.actors.storage_format import namespace_directory
from prefixcached.actors.store import Store
from prefixcached.actors.store_directory import SEGMENTS, TRASH
from tests.support.filesystems import QuickFs
from tests.support.store_samples import segment, write

IMAGE = [
    CrashPoint.AFTER_SCHEMA,
    "create",
    CrashPoint.AFTER_CREATE,
    "write image",
    "write",
    CrashPoint.AFTER_DATA,
    "write",
    CrashPoint.AFTER_HEADER,
    "barrier",
    CrashPoint.AFTER_BARRIER,
    "rename",
    CrashPoint.AFTER_RENAME,
    f"sync {namespace_directory('demo')}",
    CrashPoint.AFTER_DIRECTORY_BARRIER,
]
"""Steps 2 to 7 of a write: tokens behind the image, the header last."""


class StepsFs(QuickFs):
    """Notes each step that changes the disk or makes a change last."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._names: dict[int, str] = {}

    def open_directory(self, name: str, within: int | None = None) -> int:
        descriptor = super().open_directory(name, within)
        self._names[descriptor] = name
        return descriptor

    def create_file(self, name: str, within: int) -> int:
        self.steps.append("create")
        return super().create_file(name, within)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        self.steps.append("write")
        super().write(descriptor, data, offset)

    def write_image(self, descriptor: int, offset: int, image: ImageMemory, hasher: Hasher) -> None:
        self.steps.append("write image")
        super().write_image(descriptor, offset, image, hasher)

    def barrier(self, descriptor: int) -> None:
        self.steps.append("barrier")
        super().barrier(descriptor)

    def barrier_directory(self, descriptor: int, *, drain: bool = False) -> None:
        self.steps.append(f"sync {self._names[descriptor]}")
        super().barrier_directory(descriptor, drain=drain)

    def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
        self.steps.append("rename")
        super().rename(name, within, new_name, new_within)

    def unlink(self, name: str, within: int) -> None:
        self.steps.append("unlink")
        super().unlink(name, within)


@pytest.fixture
def system() -> StepsFs:
    """A file system that tells its steps."""
    return StepsFs()


@pytest.fixture
def store(tmp_path: Path, system: StepsFs) -> Iterator[Store]:
    """A prepared store whose crash points are steps as well."""
    store = Store(tmp_path / "state", system, min_free_bytes=0, crash_point=system.steps.append)
    store.prepare()
    system.steps.clear()
    yield store
    store.close()


def test_the_first_write_of_a_namespace(store: Store, system: StepsFs) -> None:
    """D2: its directory's name and its schema are made to last before any image."""
    write(store, segment())
    schema = ["create", "write", "barrier", "rename"]
    assert system.steps == [CrashPoint.BEFORE_CREATE, f"sync {SEGMENTS}", *schema, *IMAGE]


def test_a_later_write_of_a_namespace(store: Store, system: StepsFs) -> None:
    """D2: what stands there already, directory and schema, is not written again."""
    write(store, segment())
    system.steps.clear()
    write(store, segment(seed=1))
    assert system.steps == [CrashPoint.BEFORE_CREATE, *IMAGE]


def test_a_deletion(store: Store, system: StepsFs) -> None:
    """D2: a deletion is one unlink."""
    entry = write(store, segment())
    system.steps.clear()
    store.delete(entry.path)
    assert system.steps == [CrashPoint.BEFORE_DELETE, "unlink", CrashPoint.AFTER_DELETE]


@pytest.mark.parametrize(("namespace", "above"), [("demo", SEGMENTS), (None, "state")])
def test_a_clear(store: Store, system: StepsFs, namespace: str | None, above: str) -> None:
    """D11: the rename lasts, on both of its sides, before the clear is answered."""
    write(store, segment())
    system.steps.clear()
    store.clear(namespace)
    steps = [step.replace(store.directory.path, "state") for step in system.steps]
    assert steps[:5] == [
        CrashPoint.BEFORE_CLEAR,
        "rename",
        CrashPoint.AFTER_CLEAR,
        f"sync {TRASH}",
        f"sync {above}",
    ]


def test_a_probe(store: Store, system: StepsFs) -> None:
    """D7: a disk works again when it took a block, not when it promised to."""
    store.probe(1)
    assert system.steps[-5:] == ["unlink", "create", "write", "barrier", "unlink"]
