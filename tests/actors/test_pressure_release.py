"""Memory that a real daemon gives back is back with the machine (rule M4)."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcached.actors.pressure_monitor import PRESSURE_FILE
from prefixcached.actors.pressure_sensors import parse_meminfo
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages as wire
from prefixcached.protocol.schema import Kind, Schema, TensorSpec, encode_schema
from prefixcached.protocol.tokens import pack_tokens
from tests.support.daemon_process import DaemonProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures Linux's Shmem")

MEBIBYTE = 1 << 20
IMAGE_BYTES = 8 * MEBIBYTE
IMAGES = 16
CAP = IMAGES * IMAGE_BYTES
TOKENS = 64
SCHEMA = encode_schema(Schema((TensorSpec("kv", Kind.APPEND, "U8", (IMAGE_BYTES // TOKENS,), 0),)))

TOLERANCE = 24 * MEBIBYTE
"""Shmem is the whole machine's; other tests may be running."""


class Client:
    """Speaks the protocol without mlx."""

    def __init__(self, socket: Path) -> None:
        self._wire = Wire(socket)
        self._wire.open(self._deadline)

    @property
    def _deadline(self) -> float:
        return time.monotonic() + 60.0

    def tokens(self, name: int) -> list[int]:
        return list(range(name * 1000, name * 1000 + TOKENS))

    def put(self, name: int) -> wire.Reply:
        offer = wire.Offer("demo", pack_tokens(self.tokens(name)), SCHEMA, seconds_left=30.0)
        reply, descriptors = self._wire.request(offer, self._deadline)
        if not isinstance(reply, wire.Grant):
            return reply
        for descriptor in descriptors:
            chunk = os.urandom(1 << 16)
            for offset in range(0, IMAGE_BYTES, len(chunk)):
                os.pwrite(descriptor, chunk, offset)
            self._wire.close_descriptor(descriptor)
        return self._wire.request(wire.Commit(reply.put), self._deadline)[0]

    def take(self, name: int) -> int:
        """Lease one entry and return the lease; its descriptors are closed, the lease stays."""
        take = wire.Take("demo", pack_tokens([*self.tokens(name), 7]))
        reply, descriptors = self._wire.request(take, self._deadline)
        assert isinstance(reply, wire.Hit)
        for descriptor in descriptors:
            self._wire.close_descriptor(descriptor)
        return reply.lease

    def release(self, lease: int) -> None:
        self._wire.tell(wire.Release(lease))

    def flush(self) -> wire.Reply:
        return self._wire.request(wire.Flush(seconds_left=60.0), self._deadline)[0]

    def pressure(self) -> dict[str, Any]:
        reply = self._wire.request(wire.Status(), self._deadline)[0]
        assert isinstance(reply, wire.StatusReport)
        pressure: dict[str, Any] = reply.report["ram_tier"]["pressure"]
        return pressure

    def close(self) -> None:
        self._wire.close()


@pytest.fixture
def level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is the daemon's only pressure sensor."""
    file = tmp_path / "level"
    file.write_text("normal")
    monkeypatch.setenv(PRESSURE_FILE, str(file))
    return file


@pytest.fixture
def daemon(level: Path) -> Iterator[DaemonProcess]:
    options = "--ram-bytes", str(CAP), "--ssd-bytes", str(16 * CAP)
    with DaemonProcess(*options) as process:
        yield process
        print(process.log())


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    client = Client(daemon.socket)
    yield client
    client.close()


def shared_bytes() -> int:
    """The machine's shared memory, which memfds are."""
    return parse_meminfo(Path("/proc/meminfo").read_text())["Shmem"]


def is_about(found: int, expected: int) -> bool:
    """Whether a difference of the machine's shared memory is what the daemon accounts for."""
    return abs(found - expected) <= TOLERANCE


def memfd_bytes(pid: int) -> int:
    """Bytes allocated to the memfds that a process has open."""
    total = 0
    seen: set[int] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:" in os.readlink(entry):
            found = entry.stat()
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_blocks * 512
    return total


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "the daemon did not get there"
        time.sleep(0.05)


@pytest.mark.slow
def test_released_memory_is_back_with_the_machine(
    daemon: DaemonProcess, client: Client, level: Path
) -> None:
    """M2 to M4: Shmem falls by what warn releases, then to what is leased, then by that too."""
    empty = shared_bytes()
    for name in range(IMAGES):
        assert isinstance(client.put(name), wire.Stored)
    flushed = client.flush()
    assert isinstance(flushed, wire.Flushed)
    assert flushed.written + flushed.skipped <= IMAGES
    lease = client.take(0)
    full = shared_bytes()
    assert memfd_bytes(daemon.pid) == CAP
    assert is_about(full - empty, CAP)

    level.write_text("warn")
    wait_until(lambda: client.pressure()["level"] == "warn")
    wait_until(lambda: client.pressure()["bytes_after"] == CAP // 2)
    assert memfd_bytes(daemon.pid) == CAP // 2
    assert client.pressure()["bytes_before"] == CAP
    wait_until(lambda: is_about(full - shared_bytes(), CAP // 2))

    level.write_text("critical")
    wait_until(lambda: client.pressure()["level"] == "critical")
    wait_until(lambda: client.pressure()["bytes_after"] == IMAGE_BYTES)
    assert memfd_bytes(daemon.pid) == IMAGE_BYTES
    wait_until(lambda: is_about(full - shared_bytes(), CAP - IMAGE_BYTES))
    assert client.put(99) == wire.Declined(boot=flushed.boot, reason="pressure")

    client.release(lease)
    wait_until(lambda: client.pressure()["bytes_after"] == 0)
    assert memfd_bytes(daemon.pid) == 0
    wait_until(lambda: is_about(full - shared_bytes(), CAP))
