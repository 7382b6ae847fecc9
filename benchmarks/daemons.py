"""The processes that a benchmark starts: our daemon, a bare Trio echo, Redis."""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import ROOT
from prefixcached.client import Cache, connect

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 60.0


class Daemon:
    """One `prefixcached serve` on a directory of its own. Start it as often as wanted."""

    def __init__(self, directory: Path, *, ram: str = "4GiB", ssd: str = "0") -> None:
        self.directory = directory
        self.ram = ram
        self.ssd = ssd
        self.socket = directory / "s" / "d.sock"
        self.state = directory / "state"
        self.started_seconds = 0.0
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The running daemon's process id."""
        assert self._process is not None
        return self._process.pid

    def start(self, *prefix: str) -> None:
        """Start it and wait for READY. ``prefix`` goes before the command (a profiler)."""
        log = (self.directory / "daemon.log").open("a")
        with log:
            command = [
                *prefix, sys.executable, "-m", "prefixcached.daemon.cli", "serve",
                "--socket", str(self.socket), "--state-dir", str(self.state),
                "--ram-bytes", self.ram, "--ssd-bytes", self.ssd,
            ]  # fmt: skip
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
            )
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        if not first.startswith("READY"):
            raise RuntimeError(f"the daemon did not start: {self.log()[-2000:]}")
        self.started_seconds = time.perf_counter()

    def stop(self) -> None:
        """Let it finish its writes and end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_SECONDS)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self.stop()

    def restart(self) -> None:
        """Stop and start; with an SSD tier, wait until the index is loaded."""
        self.stop()
        self.start()
        self.wait_until_loaded()

    def wait_until_loaded(self) -> None:
        """Return when puts are accepted and all files are known."""
        with self.connect() as cache:
            while cache.stats()["ram_tier"]["loading"]:
                time.sleep(0.005)

    def connect(self, timeout: float = 60.0) -> Cache:
        """Return a client that raises instead of missing: a benchmark must not measure misses."""
        return connect(socket=self.socket, timeout=timeout, fail_open=False)

    def log(self) -> str:
        """Return what it has logged."""
        return (self.directory / "daemon.log").read_text()

    def files(self) -> list[Path]:
        """Return the segment files on SSD."""
        return sorted(self.state.rglob("*.safetensors"))

    def private_bytes(self) -> int:
        """Return the daemon's own memory: what is not shared, images not among it."""
        fields = {}
        for text in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = text.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
        return fields["Private_Clean"] + fields["Private_Dirty"]


@contextlib.contextmanager
def daemon(directory: Path, *, ram: str = "4GiB", ssd: str = "0") -> Iterator[Daemon]:
    """Run a daemon on ``directory`` and end it."""
    running = Daemon(directory, ram=ram, ssd=ssd)
    running.start()
    try:
        running.wait_until_loaded()
        yield running
    finally:
        running.stop()


def allow_descriptors(count: int) -> int:
    """Raise this process's limit of descriptors, which children inherit; return what is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return soft
    for wanted in ((count, max(hard, count)), (hard, hard)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
            break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# -- the echo: what any daemon on Trio and a Unix socket must cost ---------------------------------

ECHO_SERVER: Final = """
import sys, trio

async def serve(stream):
    async with stream:
        while True:
            head = b""
            while len(head) < 4:
                piece = await stream.receive_some(262144)
                if not piece:
                    return
                head += piece
            size = int.from_bytes(head[:4], "little") + 4
            pieces, got = [head], len(head)
            while got < size:
                piece = await stream.receive_some(262144)
                pieces.append(piece)
                got += len(piece)
            await stream.send_all(b"".join(pieces))

async def main():
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await sock.bind(sys.argv[1])
    sock.listen(128)
    print("READY", flush=True)
    await trio.serve_listeners(serve, [trio.SocketListener(sock)])

trio.run(main)
"""


@contextlib.contextmanager
def echo_server(directory: Path) -> Iterator[Path]:
    """Run a bare Trio server that returns what it gets; give its socket's path."""
    path = directory / "echo.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", ECHO_SERVER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield path
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


class EchoClient:
    """A bare blocking client of the echo: 4 bytes of length, then the bytes."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 256 * 1024)
        self._socket.connect(str(path))
        self._buffer = bytearray()

    def call(self, data: bytes) -> memoryview:
        """Send ``data`` and return what came back, valid until the next call."""
        size = len(data) + 4
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        self._socket.sendall(len(data).to_bytes(4, "little") + data)
        got = 0
        while got < size:
            got += self._socket.recv_into(view[got:])
        return view[4:]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


# -- Redis ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[tuple[Path, Any]]:
    """Run redis-server, in memory alone, on a Unix socket; give its socket and a client.

    Raises:
        FileNotFoundError: redis-server or its Python client is not installed.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("redis-server is not installed (Debian: apt-get install it)")
    try:
        import redis  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise FileNotFoundError("the redis client is not installed (group bench)") from error
    path = directory / "redis.sock"
    command = [
        program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no",
        "--dir", str(directory), "--proto-max-bulk-len", "2gb", "--daemonize", "no",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LD_PRELOAD": ""},
    )
    try:
        client = redis.Redis(unix_socket_path=str(path))
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield path, client
        client.close()
    finally:
        process.terminate()
        process.wait()
