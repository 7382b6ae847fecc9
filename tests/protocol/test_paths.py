"""Where the socket is: one rule for daemon and clients."""

import os
import sys
from pathlib import Path

import pytest

from prefixcached.protocol.paths import MAX_SOCKET_PATH_BYTES, SOCKET_VARIABLE, socket_path


def test_the_variable_names_the_socket(tmp_path: Path) -> None:
    """DESIGN 6: every command and client honours PREFIXCACHED_SOCKET, home directory included."""
    named = tmp_path / "named.sock"
    assert socket_path({SOCKET_VARIABLE: str(named)}) == named
    assert socket_path({SOCKET_VARIABLE: "~/s"}) == Path.home() / "s"
    assert socket_path({SOCKET_VARIABLE: ""}) == socket_path({})


def test_the_default_fits_a_socket_and_no_cleaner_deletes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PLATFORM 1.6: never in a temporary directory, and short enough for macOS."""
    monkeypatch.setenv("HOME", "/home/somebody-with-a-long-name")
    path = socket_path({})
    assert path.is_absolute()
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    assert path.parts[1] not in {"tmp", "var", "private"}
    assert path.parent.name == "prefixcached"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no runtime directory")
def test_linux_prefers_the_users_runtime_directory(tmp_path: Path) -> None:
    """A runtime directory that is there is used; a relative or missing one is not."""
    used = socket_path({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert used == tmp_path / "prefixcached" / "prefixcached.sock"
    for unusable in ("relative", str(tmp_path / "missing")):
        assert socket_path({"XDG_RUNTIME_DIR": unusable}) == socket_path({})
