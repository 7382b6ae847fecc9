"""File systems that fail: `FaultyFs` refuses calls, `CrashFs` loses what was not synced.

Both work on real files in a temporary directory; what they did not break is really there.
"""

import contextlib
import errno
import fcntl
import os
import random
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prefixcached.actors.filesystem import FileSystem, ImageMemory
from prefixcached.actors.memory import Hasher

_INTERCEPTED = frozenset(
    name
    for name in vars(FileSystem)
    if not name.startswith("_") and name not in ("close", "advise_read")
)
"""Every call that may fail."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory in memory where there is such a thing, for thousands of short-lived files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


class QuickFs(FileSystem):
    """The real file system without waiting for the drive: what the tests ask needs no barrier."""

    def barrier(self, descriptor: int) -> None:
        os.fstat(descriptor)

    def barrier_directory(self, descriptor: int, *, drain: bool = False) -> None:
        os.fstat(descriptor)


class InterceptedFs(QuickFs):
    """Calls `before` ahead of every call that may fail."""

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name in _INTERCEPTED:
            return partial(self._intercept, name, attribute)
        return attribute

    def before(self, name: str) -> None:
        raise NotImplementedError

    def _intercept(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.before(name)
        return call(*args, **kwargs)


class CountingFs(InterceptedFs):
    """Counts the calls by name."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def before(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


class FaultyFs(InterceptedFs):
    """Fails the call number ``fail_at`` (from 1) with ``error``: once, or it and all after it."""

    def __init__(self, fail_at: int, error: int, *, persistent: bool = False) -> None:
        self.fail_at = fail_at
        self.error = error
        self.persistent = persistent
        self.calls = 0
        self.failed: list[str] = []

    def before(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.fail_at or (self.persistent and self.calls > self.fail_at):
            self.failed.append(name)
            raise OSError(self.error, f"{os.strerror(self.error)} (injected into {name})")

    def heal(self) -> None:
        """Fail no more."""
        self.fail_at = 0
        self.persistent = False


class FullFs(FileSystem):
    """A disk that is full until `full` is set to False."""

    def __init__(self) -> None:
        self.full = True

    def write_image(self, descriptor: int, offset: int, image: ImageMemory, hasher: Hasher) -> None:
        self._check()
        super().write_image(descriptor, offset, image, hasher)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        self._check()
        super().write(descriptor, data, offset)

    def _check(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SimulatedCrash(BaseException):
    """The process is gone: no handler of the store may see it as an error."""


class _Operation:
    """One change of names that is not durable yet: the directories it is in, and how to undo it."""

    def __init__(self, directories: tuple[int, ...], undo: Callable[[], None]) -> None:
        self.directories = directories
        self.undo = undo


class CrashFs(InterceptedFs):
    """Crashes before call number ``crash_at`` (from 1); `lose` then does what a power loss may do.

    A file's data is durable after its barrier, a name after its directory's. What is not is kept,
    dropped or garbled, block by block; names are lost from the end backwards, per directory. With
    ``barriers_lie`` nothing is ever durable, as on a drive that ignores them.
    """

    BLOCK_BYTES = 4096

    def __init__(self, spare: Path, crash_at: int = 0, *, barriers_lie: bool = False) -> None:
        """``spare`` is an empty directory on the same volume, for what may come back."""
        self.crash_at = crash_at
        self.calls = 0
        self.crashed = False
        self._spare = spare
        self._barriers_lie = barriers_lie
        self._writes: dict[int, list[tuple[int, int]]] = {}
        self._operations: list[_Operation] = []

    def before(self, name: str) -> None:
        self.calls += 1
        if self.crashed or self.calls == self.crash_at:
            self.crashed = True
            raise SimulatedCrash

    # -- what is not durable yet -------------------------------------------------------------------

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        super().write(descriptor, data, offset)
        self._wrote(descriptor, offset, len(data))

    def write_image(self, descriptor: int, offset: int, image: ImageMemory, hasher: Hasher) -> None:
        super().write_image(descriptor, offset, image, hasher)
        self._wrote(descriptor, offset, image.nbytes)

    def barrier(self, descriptor: int) -> None:
        super().barrier(descriptor)
        if not self._barriers_lie:
            self._writes.pop(os.fstat(descriptor).st_ino, None)

    def barrier_directory(self, descriptor: int, *, drain: bool = False) -> None:
        super().barrier_directory(descriptor, drain=drain)
        if not self._barriers_lie:
            inode = os.fstat(descriptor).st_ino
            self._operations = [o for o in self._operations if inode not in o.directories]

    def create_file(self, name: str, within: int) -> int:
        descriptor = super().create_file(name, within)
        path = _path_of(within) / name
        self._remember((within,), lambda: path.unlink(missing_ok=True))
        return descriptor

    def make_directory(self, name: str, within: int | None = None) -> bool:
        is_new = super().make_directory(name, within)
        if is_new and within is not None:
            path = _path_of(within) / name
            self._remember((within,), lambda: shutil.rmtree(path, ignore_errors=True))
        return is_new

    def rename(self, name: str, within: int, new_name: str, new_within: int) -> None:
        old, new = _path_of(within) / name, _path_of(new_within) / new_name
        replaced = self._keep(new)
        super().rename(name, within, new_name, new_within)

        def undo() -> None:
            if new.exists():
                new.rename(old)
            if replaced is not None:
                os.link(replaced, new)

        self._remember((within, new_within), undo)

    def unlink(self, name: str, within: int) -> None:
        path = _path_of(within) / name
        kept = self._keep(path)
        super().unlink(name, within)
        if kept is not None:
            self._remember((within,), partial(_link_back, kept, path))

    def remove_directory(self, name: str, within: int) -> None:
        path = _path_of(within) / name
        super().remove_directory(name, within)
        self._remember((within,), partial(path.mkdir, exist_ok=True))

    # -- the crash ---------------------------------------------------------------------------------

    def lose(self, root: Path, source: random.Random) -> None:
        """Change what is below ``root`` as a loss of power might."""
        self._lose_names(source)
        by_inode = {p.stat().st_ino: p for p in root.rglob("*") if p.is_file()}
        for inode, extents in self._writes.items():
            if path := by_inode.get(inode):
                _lose_data(path, extents, self.BLOCK_BYTES, source)

    def _lose_names(self, source: random.Random) -> None:
        count = len(self._operations)
        directories = {d for operation in self._operations for d in operation.directories}
        cut = {d: source.choice((0, count, source.randint(0, count))) for d in directories}
        changed = True
        while changed:
            changed = False
            for index, operation in enumerate(self._operations):
                lost = [d for d in operation.directories if index >= cut[d]]
                for directory in operation.directories if lost else ():
                    if cut[directory] > index:
                        cut[directory] = index
                        changed = True
        for index in reversed(range(count)):
            operation = self._operations[index]
            if index >= cut[operation.directories[0]]:
                with contextlib.suppress(FileNotFoundError):
                    operation.undo()

    def _wrote(self, descriptor: int, offset: int, count: int) -> None:
        if count:
            self._writes.setdefault(os.fstat(descriptor).st_ino, []).append((offset, count))

    def _remember(self, directories: tuple[int, ...], undo: Callable[[], None]) -> None:
        inodes = tuple(os.fstat(directory).st_ino for directory in directories)
        self._operations.append(_Operation(inodes, undo))

    def _keep(self, path: Path) -> Path | None:
        """Hold a file that is about to lose its name, in case the loss is lost."""
        if not path.is_file():
            return None
        kept = self._spare / str(len(os.listdir(self._spare)))
        os.link(path, kept)
        return kept


def _link_back(kept: Path, path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.link(kept, path)


def _lose_data(
    path: Path, extents: list[tuple[int, int]], block_bytes: int, source: random.Random
) -> None:
    mode = source.choice(("keep", "drop", "garble", "mix", "truncate"))
    if mode == "keep":
        return
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    with path.open("r+b") as file:
        for start, count in extents:
            for offset in range(start, start + count, block_bytes):
                size = min(block_bytes, start + count - offset)
                what = source.choice(("keep", "drop", "garble")) if mode == "mix" else mode
                if what == "keep" or what == "truncate":
                    continue
                file.seek(offset)
                file.write(bytes(size) if what == "drop" else source.randbytes(size))
        if mode == "truncate":
            file.truncate(source.randint(0, path.stat().st_size))


def _path_of(descriptor: int) -> Path:
    if sys.platform == "darwin":
        name = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
        return Path(os.fsdecode(name.split(b"\0", 1)[0]))
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
