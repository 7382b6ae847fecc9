"""Configuration: sizes, places, and limits drawn from the machine."""

import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixcached.daemon import config, resources
from prefixcached.daemon.options import Options
from prefixcached.daemon.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (1234, 1234),
        ("8388607TiB", 8388607 << 40),
        ("0", 0),
        ("1234", 1234),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("1.5MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("2TiB", 2 << 40),
        ("12%", 120),
        ("0.1%", 1),
        ("100%", 1000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, expected: int) -> None:
    """Binary and decimal units, plain bytes, and shares of the whole."""
    assert parse_size(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-1", -1, "1e9", "101%", "8GiBs", "٣GiB"])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    """A typing error is not a cap of zero."""
    with pytest.raises(ValueError, match=r"size|negative|more than"):
        parse_size(text, 1000)


@pytest.mark.parametrize("text", [1 << 63, "8388608TiB", "9" * 400])
def test_a_size_that_no_report_can_hold_is_refused(text: str | int) -> None:
    """`status` says the caps in 64 bits."""
    with pytest.raises(ValueError, match="must not be more than"):
        parse_size(text, 1000)


def test_paths_are_absolute_and_the_lock_lies_beside_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may change its directory later; launchd starts it in /."""
    monkeypatch.chdir(tmp_path)
    options = Options(state_dir=Path("b"), ram_bytes="1MiB", ssd_bytes="50%")
    loaded = config.load(options, socket=Path("a/s"))
    assert loaded.socket == tmp_path / "a" / "s"
    assert loaded.lock_file == tmp_path / "a" / "s.lock"
    assert loaded.segments_dir == tmp_path / "b" / "segments.noindex"
    assert loaded.ram_bytes == 1 << 20
    assert 0 < loaded.ssd_bytes < resources.volume_bytes(tmp_path)
    assert not (tmp_path / "b").exists()


def test_the_default_caps_are_shares_of_memory_and_of_free_disk(tmp_path: Path) -> None:
    """FIELD 3: a fixed default makes a small machine swap; the SSD tier is on by default."""
    loaded = config.load(Options(state_dir=tmp_path), socket=tmp_path / "s")
    assert loaded.ram_bytes == resources.memory_bytes() * 12 // 100
    assert 0 < loaded.ssd_bytes <= 100 << 30
    assert loaded.ssd_bytes <= resources.volume_bytes(tmp_path) // 10


def test_the_ssd_tier_never_takes_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is a tenth of what is free, and at most 100 GiB of a large disk."""
    monkeypatch.setattr(resources, "free_bytes", lambda directory: 500 << 30)
    assert config.ssd_bytes("auto", Path("/")) == 50 << 30
    monkeypatch.setattr(resources, "free_bytes", lambda directory: 8 << 40)
    assert config.ssd_bytes("auto", Path("/")) == 100 << 30


def test_what_the_ssd_tier_holds_does_not_shrink_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with a full tier would have to evict a tenth of it."""
    file = tmp_path / "segments.noindex" / "namespace" / "image"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(1 << 20))
    held = file.stat().st_blocks * 512
    monkeypatch.setattr(resources, "free_bytes", lambda directory: (500 << 30) - held)
    assert config.ssd_bytes("auto", tmp_path) == 50 << 30


def test_counting_what_is_held_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk keeps no daemon from serving: what is not counted makes the cap smaller."""
    (tmp_path / "image").write_bytes(bytes(1 << 20))
    assert resources.held_bytes(tmp_path) > 0
    monkeypatch.setattr(resources, "COUNT_SECONDS", -1.0)
    assert resources.held_bytes(tmp_path) == 0


@pytest.mark.parametrize("size", ["auto", "10%", "1GiB"])
@pytest.mark.parametrize("obstacle", ["missing", "too-long", "file", "loop", "closed"])
def test_a_state_directory_that_cannot_be_looked_at_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str, size: str
) -> None:
    """D7: the caps are those of the volume above it; what is wrong says the SSD tier."""
    directory = tmp_path / ("x" * 300 if obstacle == "too-long" else obstacle) / "state"
    if obstacle == "file":
        directory.parent.write_bytes(b"")
    elif obstacle == "loop":
        directory.parent.symlink_to(directory.parent)
    elif obstacle == "closed":  # root, as which tests may run, can enter everything
        monkeypatch.setattr(shutil, "disk_usage", closed(directory.parent))
    loaded = config.load(Options(state_dir=directory, ssd_bytes=size), socket=tmp_path / "s")
    assert 0 < loaded.ssd_bytes <= resources.volume_bytes(tmp_path)
    assert loaded.state_dir == directory


def closed(directory: Path) -> Callable[..., Any]:
    """As `shutil.disk_usage`, for a user who may not enter ``directory``."""
    real = shutil.disk_usage

    def look(path: Path) -> Any:
        if directory in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    return look


@pytest.mark.parametrize(
    ("platform", "ending"),
    [("darwin", "Library/Caches/prefixcached"), ("linux", ".cache/prefixcached")],
)
def test_files_that_may_be_lost_lie_where_the_platform_keeps_them(
    monkeypatch: pytest.MonkeyPatch, platform: str, ending: str
) -> None:
    """PLATFORM 1.6: Caches on macOS, the XDG cache directory on Linux."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert config.default_state_dir() == Path("/home/somebody") / ending


def test_the_descriptor_limit_is_raised_to_the_hard_one() -> None:
    """E1: launchd's 256 would be a cap of a few dozen images."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert resources.raise_descriptor_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert resources.raise_descriptor_limit() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("descriptors", [16, 256, 1024, 10240, 1 << 20])
def test_images_and_connections_fit_the_descriptor_limit(descriptors: int) -> None:
    """E1: the image cap leaves room for the sessions and the process itself."""
    images, sessions = resources.image_limit(descriptors), resources.connection_limit(descriptors)
    assert images >= 1
    assert sessions >= 1
    if descriptors >= 256:
        used = images * resources.DESCRIPTORS_PER_IMAGE + sessions
        assert used + resources.RESERVED_DESCRIPTORS <= descriptors
    assert images <= resources.MAX_IMAGES
    assert sessions <= resources.MAX_CONNECTIONS
