"""Finds Debian's OpenBLAS, which makes float32 on a Linux CPU about 45 times faster.

MLX's CPU wheels for Linux carry a reference BLAS. Preloading OpenBLAS replaces it in a child
process; the test process itself has MLX loaded long before anything could be preloaded.
"""

import functools
import os
import re
import shutil
import subprocess
import sys

_LIBRARY = "libopenblas.so.0"
# `ldconfig -p` prints "\tlibopenblas.so.0 (libc6,x86-64) => /lib/.../libopenblas.so.0".
_LINE = re.compile(rf"^\s*{re.escape(_LIBRARY)} \([^)]*\) => (?P<path>/\S+)\s*$", re.MULTILINE)
# Several model processes run at once in the demo and in the stress tests: threads beyond the
# cores of the machine only spin on each other's locks.
_MAX_THREADS = 8


@functools.cache
def openblas_path() -> str | None:
    """The library's path as the dynamic linker knows it; None where it is not installed."""
    if sys.platform != "linux":
        return None
    # /sbin is not on every user's PATH, and ldconfig needs no privilege to print its cache.
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    ldconfig = shutil.which("ldconfig", path=search)
    if ldconfig is None:
        return None
    found = subprocess.run(
        [ldconfig, "-p"], capture_output=True, text=True, check=False, timeout=10
    )
    match = _LINE.search(found.stdout)
    return match["path"] if match else None


def openblas_environment() -> dict[str, str]:
    """What to add to the environment of a process that runs a model; empty without OpenBLAS.

    A preload that is already set is kept, behind OpenBLAS. `OPENBLAS_NUM_THREADS` is left
    alone where the caller has set it.
    """
    path = openblas_path()
    if path is None:
        return {}
    present = os.environ.get("LD_PRELOAD", "")
    additions = {"LD_PRELOAD": f"{path}:{present}" if present else path}
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        additions["OPENBLAS_NUM_THREADS"] = str(min(os.cpu_count() or 1, _MAX_THREADS))
    return additions
