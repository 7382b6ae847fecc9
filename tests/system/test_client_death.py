"""A client that is killed leaves nothing in the daemon: no lease, no bytes, no descriptor."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from prefixcached.client import Cache, connect
from tests.support import derived_kv
from tests.support.daemon_process import DaemonProcess

CLIENT = """
import socket, sys, time
from pathlib import Path
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages, framing
from prefixcached.protocol.tokens import pack_tokens
from prefixcached.client import kv
from prefixcached.protocol.schema import encode_schema
from tests.support import derived_kv

path, step = Path(sys.argv[1]), sys.argv[2]
deadline = time.monotonic() + 20
wire = Wire(path)
wire.open(deadline)
prompt = derived_kv.tokens(500, seed=8)
if step == "lease":
    reply, _ = wire.request(messages.Take("n", pack_tokens([*prompt, 7])), deadline)
    assert isinstance(reply, messages.Hit), reply
elif step == "grant":
    other = derived_kv.tokens(500, seed=9)
    with kv.snapshot(derived_kv.caches(other), other) as snapshot:
        offer = messages.Offer("n", pack_tokens(other), encode_schema(snapshot.schema))
        reply, _ = wire.request(offer, deadline)
    assert isinstance(reply, messages.Grant), reply
elif step == "frame":
    frame = framing.encode(messages.Peek("n", pack_tokens(prompt)))
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(path))
    raw.sendall(framing.encode(messages.Hello(version=(1, 0))))
    assert raw.recv(65536)
    raw.sendall(frame[: len(frame) // 2])
print("ready", flush=True)
time.sleep(60)
"""


def settled(cache: Cache, daemon: DaemonProcess, descriptors: int) -> dict[str, Any]:
    """Wait until the daemon is as it was; return its RAM statistics."""
    report: dict[str, Any] = {}
    for _ in range(200):
        report = cache.stats()["ram_tier"]
        quiet = not report["leases"] and not report["puts_in_flight"]
        if quiet and len(os.listdir(f"/proc/{daemon.pid}/fd")) == descriptors:
            break
        time.sleep(0.02)
    return report


@pytest.mark.parametrize("step", ["lease", "grant", "frame"])
@pytest.mark.parametrize("stopped_first", [False, True])
def test_a_killed_client_leaves_nothing(step: str, stopped_first: bool) -> None:
    """L1, P4, C3: killed with a lease, between grant and commit, or in mid-frame, also if hung."""
    prompt = derived_kv.tokens(500, seed=8)
    with DaemonProcess("--ram-bytes", "256MiB") as daemon, connect(socket=daemon.socket) as cache:
        assert cache.put(prompt, derived_kv.caches(prompt), namespace="n")
        before = cache.stats()["ram_tier"]["ram_bytes_by_state"]
        descriptors = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(daemon.socket), step], stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == b"ready\n"
            if stopped_first:
                client.send_signal(signal.SIGSTOP)
            held = cache.stats()["ram_tier"]
            assert held["leases"] == (step == "lease")
            assert held["puts_in_flight"] == (step == "grant")
        finally:
            client.kill()
            client.wait()
            client.stdout.close()
        after = settled(cache, daemon, descriptors)
        assert (after["leases"], after["puts_in_flight"]) == (0, 0)
        assert after["ram_bytes_by_state"] == before
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) == descriptors
