"""`prefixcached demo`: what a newcomer runs first, with the real model."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_processes_share_a_prompt(smollm2: Path) -> None:
    """T1: the second and third process reuse the whole shared prefix, and answer as without."""
    with tempfile.TemporaryDirectory(prefix="pfxc-") as directory:
        told = subprocess.run(
            [
                sys.executable, "-m", "prefixcached.daemon.cli", "demo", "--json",
                "--model-dir", str(smollm2.parent),
            ],
            env=os.environ | {"TMPDIR": directory},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        assert list(Path(directory).iterdir()) == []
    report: dict[str, Any] = json.loads(told.stdout)
    processes = report["processes"]
    assert "Paris" in processes[0]["text"]
    assert [answer["reused"] for answer in processes] == report["shared_prefixes"]
    assert all(shared > 223 for shared in report["shared_prefixes"][1:])
    for answer, expected in zip(processes, report["without_daemon"], strict=True):
        assert answer["answer"] == expected["answer"]
    for answer in processes[1:]:
        assert answer["seconds_to_first_token"] < processes[0]["seconds_to_first_token"]
    assert report["daemon"]["ram_tier"]["leases"] == 0
