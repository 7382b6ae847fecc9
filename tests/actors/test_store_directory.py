"""The state directory itself: whose it is, that it is there, and what is made durable (D7, D9)."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.actors.store_directory import (
    QUARANTINE,
    SEGMENTS,
    TRASH,
    Directory,
    StoreInUseError,
)
from tests.support.filesystems import QuickFs

PARTS = {SEGMENTS, QUARANTINE, TRASH}


class RecordingFs(QuickFs):
    """Notes which directories are synced; it can pretend that the volume is another one."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self.device_shift = 0
        self.fails_to_sync = ""
        self.fails_to_restrict = False

    def restrict(self, descriptor: int) -> None:
        if self.fails_to_restrict:
            raise OSError(errno.EMFILE, "injected")
        super().restrict(descriptor)

    def barrier_directory(self, descriptor: int, *, drain: bool = False) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path == self.fails_to_sync:
            raise OSError(errno.EIO, "injected")
        self.synced.append(path)
        super().barrier_directory(descriptor, drain=drain)

    def status(self, descriptor: int) -> os.stat_result:
        return self._shifted(super().status(descriptor))

    def status_of(self, name: str, within: int | None = None) -> os.stat_result:
        return self._shifted(super().status_of(name, within))

    def _shifted(self, found: os.stat_result) -> os.stat_result:
        fields = list(found)
        fields[stat.ST_DEV] += self.device_shift
        return os.stat_result(fields)


class ZeroLockFs(QuickFs):
    """Calls the lock's descriptor 0, as the system does in a process without standard input."""

    lock = -1

    def lock_file(self, name: str, within: int) -> int:
        self.lock = super().lock_file(name, within)
        return 0

    def status(self, descriptor: int) -> os.stat_result:
        return super().status(descriptor or self.lock)

    def close(self, descriptor: int) -> None:
        super().close(descriptor or self.lock)


@pytest.fixture
def system() -> RecordingFs:
    """A file system that the test can ask and unplug."""
    return RecordingFs()


@pytest.fixture
def directory(tmp_path: Path, system: RecordingFs) -> Iterator[Directory]:
    """A state directory that nobody has prepared."""
    directory = Directory(tmp_path / "state", system)
    yield directory
    directory.close()


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux for names")


def test_what_is_made_is_made_durable_once(directory: Directory, system: RecordingFs) -> None:
    """D2: the names of a new directory and of its parts survive a power loss."""
    assert set(directory.prepare()) == PARTS
    assert set(system.synced) == {os.path.dirname(directory.path), directory.path}
    system.synced.clear()
    assert directory.prepare() == ()
    assert system.synced == []


def test_a_part_that_was_deleted_is_made_again(directory: Directory, system: RecordingFs) -> None:
    """D7: only what is missing is made, and said."""
    directory.prepare()
    system.synced.clear()
    shutil.rmtree(Path(directory.path, SEGMENTS))
    assert directory.prepare() == (SEGMENTS,)
    assert system.synced == [directory.path]


def test_what_a_failed_try_made_is_said_by_the_next(
    directory: Directory, system: RecordingFs
) -> None:
    """D7: who hears of a part that was made again must hear of each, once."""
    directory.prepare()
    shutil.rmtree(directory.path)
    system.fails_to_restrict = True
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            directory.prepare()
    system.fails_to_restrict = False
    assert set(directory.prepare()) == PARTS
    assert directory.prepare() == ()


def test_a_part_that_somebody_else_made_again_is_said(
    tmp_path: Path, directory: Directory, system: RecordingFs
) -> None:
    """D7, D9: another daemon may have come and gone, and nothing of ours is in its directory."""
    directory.prepare()
    Path(directory.path).rename(tmp_path / "moved")
    other = Directory(directory.path, QuickFs())
    other.prepare()
    other.close()
    assert set(directory.prepare()) == PARTS
    assert directory.prepare() == ()
    system.device_shift = 1
    assert directory.prepare() == (), "a volume that came back as another device"


def test_parts_are_closed_to_others(directory: Directory) -> None:
    """D9: an older, wider mode of a part is narrowed, also where everything else stands."""
    directory.prepare()
    for part in PARTS:
        Path(directory.path, part).chmod(0o755)
    directory.prepare()
    for part in PARTS:
        assert stat.S_IMODE(Path(directory.path, part).stat().st_mode) == 0o700


def test_the_directories_above_are_made(tmp_path: Path) -> None:
    """D1: a state directory may be named where nothing stands yet."""
    directory = Directory(tmp_path / "not" / "there" / "state", QuickFs())
    assert set(directory.prepare()) == PARTS
    directory.close()


def test_a_part_that_others_can_write_to_is_refused(directory: Directory) -> None:
    """D9: whoever could write there may have put files there, so it is not made ours in silence."""
    directory.prepare()
    part = Path(directory.path, SEGMENTS)
    part.chmod(0o770)
    with pytest.raises(PermissionError, match="770") as caught:
        directory.prepare()
    assert caught.value.filename == str(part)


@pytest.mark.parametrize("which", ["", "state", f"state/{SEGMENTS}"], ids=["above", "root", "part"])
def test_a_name_that_may_not_last_is_synced_at_the_next_try(
    tmp_path: Path, directory: Directory, system: RecordingFs, which: str
) -> None:
    """D2: a directory that stands already is not taken for durable when its sync failed."""

    def make_all() -> None:
        directory.prepare()
        with directory.opened_namespace("0" * 32, create=True):
            pass

    system.fails_to_sync = str(tmp_path / which)
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            make_all()
    system.fails_to_sync = ""
    make_all()
    assert system.synced.count(str(tmp_path / which)) == 1
    make_all()
    assert system.synced.count(str(tmp_path / which)) == 1


def test_what_an_earlier_daemon_made_is_made_durable_once(
    directory: Directory, system: RecordingFs
) -> None:
    """D2: that one may have died between making a directory and syncing its name."""
    for each in (Directory(directory.path, QuickFs()), directory):
        for _ in range(2):
            each.prepare()
            with each.opened_namespace("0" * 32, create=True):
                pass
        each.close()
    assert system.synced == [directory.path, str(Path(directory.path, SEGMENTS))]


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("left", ["nothing", "above", "root", "parts but one"])
def test_an_unplugged_volume_is_not_filled_at_its_mount_point(
    tmp_path: Path, left: str, shift: int
) -> None:
    """D7: where another volume shows through, nothing is made, however often it is tried."""
    system = RecordingFs()
    directory = Directory(tmp_path / "volume" / "state", system)
    directory.prepare()
    mount_point = Path(directory.path).parent
    mount_point.rename(tmp_path / "unplugged")
    names = {"nothing": (), "above": ("",), "root": ("state",)}
    for name in names.get(left, (f"state/{SEGMENTS}", f"state/{TRASH}")):
        (mount_point / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    system.device_shift = shift
    for _ in range(2):
        with pytest.raises(OSError, match="the volume of the state directory is gone") as caught:
            directory.prepare()
        assert caught.value.errno == errno.ENODEV
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(mount_point, ignore_errors=True)
    (tmp_path / "unplugged").rename(mount_point)
    system.device_shift = 2 * shift
    assert directory.prepare() == ()
    directory.close()


def test_a_volume_that_comes_after_the_daemon_is_used(
    directory: Directory, system: RecordingFs
) -> None:
    """D7: a directory that never worked, at a mount point without its volume, binds to nothing."""
    system.fails_to_sync = os.path.dirname(directory.path)
    with pytest.raises(OSError, match="injected"):
        directory.prepare()
    shutil.rmtree(directory.path)
    system.fails_to_sync = ""
    system.device_shift = 1
    assert set(directory.prepare()) == PARTS


def test_the_lock_is_taken_and_given_up(directory: Directory) -> None:
    """D9: one daemon at a time; the next one follows at once, and so does the same one."""
    directory.prepare()
    other = Directory(directory.path, QuickFs())
    with pytest.raises(StoreInUseError):
        other.prepare()
    other.close()
    directory.close()
    directory.close()
    other.prepare()
    with pytest.raises(StoreInUseError):
        directory.prepare()
    other.close()


def test_a_lock_may_have_the_descriptor_zero(tmp_path: Path) -> None:
    """D9: a daemon without standard input keeps its lock, and gives it up, like any other."""
    directory = Directory(tmp_path / "state", ZeroLockFs())
    directory.prepare()
    directory.prepare()
    directory.close()
    other = Directory(directory.path, QuickFs())
    other.prepare()
    other.close()


def test_a_lock_that_was_deleted_is_taken_anew(directory: Directory) -> None:
    """D9: a lock on a file that has no name any more keeps nobody out."""
    directory.prepare()
    before = len(os.listdir("/proc/self/fd"))
    Path(directory.path, "lock").unlink()
    directory.prepare()
    assert len(os.listdir("/proc/self/fd")) == before
    other = Directory(directory.path, QuickFs())
    with pytest.raises(StoreInUseError):
        other.prepare()
    other.close()
