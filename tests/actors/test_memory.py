"""Shared memory: what holders of each descriptor can and cannot do, and that nothing stays."""

import errno
import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from prefixcached.actors import memory
from prefixcached.actors.memory import darwin
from prefixcached.actors.memory.interface import CHUNK_BYTES, SharedImage
from prefixcached.protocol import limits
from tests.support.descriptors import none_leaked, open_descriptors

Create = Callable[[int], SharedImage]

SIZES = [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 12345]

REFUSALS = {
    errno.EBADF, errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EOPNOTSUPP,
    errno.ESPIPE,
}  # fmt: skip
"""What the systems answer to an attempt to write; macOS refuses some for want of any file there."""


@pytest.fixture(params=["create", "posix-shm"])
def create(request: pytest.FixtureRequest) -> Create:
    """This platform's own shared memory, and the POSIX kind, which Linux has too."""
    return memory.create if request.param == "create" else darwin.ShmImage


@pytest.fixture(autouse=True)
def _no_descriptor_stays() -> Iterator[None]:
    with none_leaked():
        yield


def pattern(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def contents(image: SharedImage) -> bytes:
    buffer = bytearray(image.nbytes)
    image.read_into(0, memoryview(buffer))
    return bytes(buffer)


def filled(create: Create, data: bytes) -> SharedImage:
    image = create(len(data))
    image.write_at(0, [data])
    image.seal()
    return image


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_was_written_is_read_before_and_after_the_seal(create: Create, nbytes: int) -> None:
    """T12: bytes come back as they were put in, for every size from 0 on."""
    data = pattern(nbytes)
    image = create(nbytes)
    image.write_at(0, [data[: nbytes // 3], memoryview(data)[nbytes // 3 :]])
    assert contents(image) == data
    image.seal()
    assert contents(image) == data
    assert b"".join(bytes(view) for view in image.views()) == data
    assert image.nbytes == nbytes
    assert image.allocated_bytes % limits.PAGE_BYTES == 0
    assert nbytes <= image.allocated_bytes < nbytes + limits.PAGE_BYTES
    image.free()


def test_reads_and_writes_in_the_middle_touch_only_their_range(create: Create) -> None:
    """A write at an offset changes those bytes alone, and a new image is zero."""
    image = create(100)
    image.write_at(40, [b"abc", b"", b"de"])
    assert contents(image) == bytes(40) + b"abcde" + bytes(55)
    part = bytearray(4)
    image.read_into(41, memoryview(part))
    assert part == b"bcde"
    image.free()


@pytest.mark.parametrize(("offset", "count"), [(-1, 1), (0, 101), (100, 1), (1 << 40, 1)])
def test_a_range_outside_the_image_is_refused(create: Create, offset: int, count: int) -> None:
    """No read or write goes past the image's end, though pages reach further."""
    image = create(100)
    with pytest.raises(ValueError, match="do not lie in"):
        image.write_at(offset, [bytes(count)])
    with pytest.raises(ValueError, match="do not lie in"):
        image.read_into(offset, memoryview(bytearray(count)))
    assert contents(image) == bytes(100)
    image.free()


def test_states_are_enforced(create: Create) -> None:
    """P4: nothing is lent before the seal, nothing is filled after it."""
    image = create(10)
    with pytest.raises(RuntimeError, match="must be sealed"):
        _ = image.descriptor
    image.seal()
    image.seal()
    assert image.is_sealed
    with pytest.raises(RuntimeError, match="no longer be written"):
        _ = image.writable_descriptor
    with pytest.raises(RuntimeError, match="no longer be written"):
        image.write_at(0, [b"x"])
    image.free()
    image.free()
    assert image.is_freed
    with pytest.raises(RuntimeError, match="no bytes any more"):
        contents(image)
    with pytest.raises(ValueError, match="-1 bytes"):
        create(-1)


def test_one_descriptor_remains_after_the_seal(create: Create) -> None:
    """E1: a resident image costs one descriptor, and no descriptor survives an exec."""
    before = open_descriptors()
    image = create(5000)
    assert not os.get_inheritable(image.writable_descriptor)
    image.seal()
    assert len(open_descriptors() - before) == 1
    assert not os.get_inheritable(image.descriptor)
    image.free()
    assert open_descriptors() == before


def test_a_file_gets_the_bytes_and_gives_them_back(create: Create, tmp_path: Path) -> None:
    """D2: an image is written behind a header and read back bit for bit, hashed on the way."""
    data = pattern(3 * CHUNK_BYTES + 77)
    image = filled(create, data)
    fd = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    written, read, alone = xxhash.xxh3_128(), xxhash.xxh3_128(), xxhash.xxh3_128()
    os.pwrite(fd, b"header..", 0)
    image.copy_to_file(fd, 8, written)
    image.hash_update(alone)
    assert (tmp_path / "image").read_bytes() == b"header.." + data
    promoted = create(len(data))
    promoted.load_from_file(fd, 8, read)
    promoted.seal()
    assert contents(promoted) == data
    expected = xxhash.xxh3_128_digest(data)
    assert [h.digest() for h in (written, read, alone)] == [expected] * 3
    os.close(fd)
    image.free()
    promoted.free()


def test_an_empty_image_moves_through_a_file(create: Create, tmp_path: Path) -> None:
    """An image without bytes is hashed, written and loaded like any other."""
    image = filled(create, b"")
    fd = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    hasher = xxhash.xxh3_128()
    image.copy_to_file(fd, 8, hasher)
    assert hasher.digest() == xxhash.xxh3_128_digest(b"")
    assert os.fstat(fd).st_size == 0
    other = create(0)
    other.load_from_file(fd, 8)
    for each in (image, other):
        each.free()
    os.close(fd)


def test_a_short_file_is_an_error(create: Create, tmp_path: Path) -> None:
    """D3: a truncated file never becomes an image with zeros at its end."""
    (tmp_path / "image").write_bytes(pattern(CHUNK_BYTES + 9))
    fd = os.open(tmp_path / "image", os.O_RDONLY)
    image = create(CHUNK_BYTES + 10)
    with pytest.raises(EOFError, match="1 bytes short"):
        image.load_from_file(fd, 0)
    os.close(fd)
    image.free()


def test_a_taker_reads_the_image_after_it_is_freed(create: Create) -> None:
    """L2: a lent image lives as long as its last holder, whatever the daemon does."""
    data = pattern(70000)
    image = filled(create, data)
    lent = os.dup(image.descriptor)
    image.free()
    with mmap.mmap(lent, len(data), prot=mmap.PROT_READ) as mapping:
        assert mapping[:] == data
    os.close(lent)


def test_a_taker_cannot_write(create: Create) -> None:
    """T2: through a lent descriptor every way to write fails."""
    data = pattern(70000)
    image = filled(create, data)
    fd = image.descriptor
    for attempt in (
        lambda: os.write(fd, b"x"),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, 1 << 20),
        lambda: mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011, the number is checked below
            attempt()
        assert caught.value.errno in REFUSALS
    assert contents(image) == data
    image.free()


@pytest.mark.parametrize("spare", [0, 1])
def test_creating_without_descriptors_left_leaks_nothing(create: Create, spare: int) -> None:
    """D4: at the descriptor limit, creating fails as a whole, at every step of it."""
    before = open_descriptors()
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(max(before) + 2 - len(before))]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1 + spare, hard))
    created: list[SharedImage] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            created.extend(create(4096) for _ in range(spare + 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for image in created:
            image.free()
        for fd in fillers:
            os.close(fd)
    assert open_descriptors() == before


def test_a_size_that_the_kernel_refuses_leaks_nothing(
    create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: out of memory between making and sizing the object: an error, and no object stays."""

    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="No space left"):
        create(4096)


if sys.platform == "linux":
    import ctypes
    import fcntl

    def shared_memory_bytes() -> int:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("Shmem:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no Shmem in /proc/meminfo")

    def test_the_seal_reaches_the_descriptor_a_client_kept() -> None:
        """T2: on Linux even the writable descriptor that a client kept cannot write any more."""
        data = pattern(70000)
        image = memory.create(len(data))
        kept = os.dup(image.writable_descriptor)
        os.pwrite(kept, data, 0)
        image.seal()
        reopened = os.open(f"/proc/self/fd/{image.descriptor}", os.O_RDWR)
        for fd in (kept, reopened):
            for attempt in (
                lambda fd=fd: os.pwrite(fd, b"x", 0),
                lambda fd=fd: os.ftruncate(fd, 1),
                lambda fd=fd: os.ftruncate(fd, 1 << 20),
                lambda fd=fd: mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
                lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW),
            ):
                with pytest.raises(PermissionError):
                    attempt()
            os.close(fd)
        assert contents(image) == data
        image.free()

    @pytest.mark.parametrize("error", [errno.EINVAL, errno.EMFILE])
    def test_a_kernel_before_6_3_does_without_the_seal_against_execution(
        error: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It answers EINVAL to a flag that it does not know; any other error is one."""
        create_memfd = os.memfd_create
        asked: list[int] = []

        def old(name: str, flags: int) -> int:
            asked.append(flags)
            if flags & 0x0008:  # MFD_NOEXEC_SEAL
                raise OSError(error, os.strerror(error))
            return create_memfd(name, flags)

        monkeypatch.setattr(os, "memfd_create", old)
        if error == errno.EINVAL:
            memory.create(4096).free()
            assert asked == [asked[1] | 0x0008, asked[1]]
        else:
            with pytest.raises(OSError, match="Too many open files"):
                memory.create(4096)
            assert len(asked) == 1

    def test_a_client_cannot_resize_what_it_fills() -> None:
        """P4: a granted image is sealed against growing and shrinking before it is handed out."""
        image = memory.create(4096)
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(image.writable_descriptor, size)
        with pytest.raises(PermissionError):
            os.pwrite(image.writable_descriptor, b"x", 4096)
        image.free()

    def test_a_lent_mapping_cannot_be_made_writable() -> None:
        """T2: mprotect cannot turn a reader's mapping into a writable one."""
        image = filled(memory.create, pattern(8192))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        address = libc.mmap(None, 8192, mmap.PROT_READ, mmap.MAP_SHARED, image.descriptor, 0)
        assert ctypes.string_at(address, 8192) == pattern(8192)
        assert libc.mprotect(address, 8192, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES
        libc.munmap(address, 8192)
        image.free()

    def test_a_writable_mapping_blocks_the_seal() -> None:
        """P4: an image that somebody still maps writable is not published."""
        image = memory.create(8192)
        mapping = mmap.mmap(image.writable_descriptor, 8192)
        with pytest.raises(OSError, match="busy") as caught:
            image.seal()
        assert caught.value.errno == errno.EBUSY
        assert not image.is_sealed
        image.write_at(0, [b"still writable"])
        mapping.close()
        image.seal()
        assert contents(image)[:14] == b"still writable"
        image.free()

    def test_a_seal_without_spare_descriptors_still_holds() -> None:
        """P4: at the descriptor limit the sealed descriptor itself is lent; it cannot write."""
        image = memory.create(4096)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            image.seal()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with pytest.raises(PermissionError):
            os.pwrite(image.descriptor, b"x", 0)
        image.free()

    def test_freed_memory_returns_to_the_system() -> None:
        """M4: the machine's shared memory falls back when an image is freed."""
        nbytes = 256 << 20
        before = shared_memory_bytes()
        image = memory.create(nbytes)
        block = bytes(CHUNK_BYTES)
        for offset in range(0, nbytes, CHUNK_BYTES):
            image.write_at(offset, [block])
        image.seal()
        # Other processes of the machine may share some memory meanwhile, not half of this.
        assert shared_memory_bytes() - before > nbytes // 2
        image.free()
        assert shared_memory_bytes() - before < nbytes // 2
