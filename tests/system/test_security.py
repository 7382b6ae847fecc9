"""The claims of docs/security.md that no other test shows."""

import ast
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import pytest

from prefixcached.actors import memory
from prefixcached.client import connect
from tests.support import derived_kv
from tests.support.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
PARTS = ("protocol", "actors", "daemon", "client")

UNSAFE = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
"""Modules that turn bytes into code or arbitrary objects."""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_nothing_in_the_product_unpickles_or_evaluates() -> None:
    """FIELD 3: no pickle: msgpack and safetensors only; no bytes from outside become code."""
    files = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"
            assert not {name.split(".")[0] for name in names} & UNSAFE, path


@linux_only
def test_the_daemon_has_no_internet_socket(daemon: DaemonProcess) -> None:
    """No network listener by default: none of its descriptors is in the kernel's tables."""
    with connect(socket=daemon.socket, fail_open=False) as cache:
        cache.stats()
        links = [os.readlink(path) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    assert inodes
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        path = Path(f"/proc/{daemon.pid}/net/{table}")
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        assert not inodes & {line.split()[9] for line in lines}


@linux_only
def test_a_sealed_image_cannot_be_written_through_a_descriptor_of_ones_own() -> None:
    """T2: opening the memory anew for writing, which the same user may, does not get round it."""
    image = memory.create(1 << 16)
    os.pwrite(image.writable_descriptor, b"right", 0)
    image.seal()
    anew = os.open(f"/proc/self/fd/{image.descriptor}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(anew, b"wrong", 0)
        assert os.pread(anew, 5, 0) == b"right"
    finally:
        os.close(anew)
        image.free()


@linux_only
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
def test_another_user_cannot_connect(daemon: DaemonProcess) -> None:
    """FIELD 3: nobody else can read or remove it: other users cannot even connect (C1)."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_connect_as_nobody, args=(str(daemon.socket), queue))
    child.start()
    assert queue.get(timeout=60) == "PermissionError"
    child.join()


def _connect_as_nobody(path: str, queue: "multiprocessing.Queue[str]") -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError as error:
            queue.put(type(error).__name__)
        else:
            queue.put("connected")


def test_the_log_says_nothing_of_what_a_prompt_was(daemon: DaemonProcess) -> None:
    """Neither token ids nor metadata reach the log, also where a request is refused."""
    prompt = [*derived_kv.tokens(40, seed=3), 1234567891]
    with connect(socket=daemon.socket) as cache:
        assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
        assert cache.take([*prompt, 7], namespace="n")
        cache.put(prompt, derived_kv.caches(prompt, derived_kv.HYBRID), namespace="n")
        cache.put_object("k", {}, metadata={"secret": "metadata-in-clear"}, namespace="n")
        cache.clear()
    daemon.terminate()
    assert "1234567891" not in daemon.log()
    assert "metadata-in-clear" not in daemon.log()
