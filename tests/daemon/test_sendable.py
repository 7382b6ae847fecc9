"""Reports that can be sent, whatever their sources say, and paths read back from them."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixcached.daemon.commands import verify
from prefixcached.daemon.sendable import path_said, sendable
from tests.daemon.command_line import invoke

ODD = Path(os.fsdecode(b"/tmp/\xff"))


def test_what_can_be_sent_stays_as_it_is() -> None:
    """Every kind of plain value, at any depth."""
    report: dict[str, Any] = {"a": {"b": [1, -1, 1.5, True, None, "ü", {"c": (1 << 63) - 1}]}}
    assert sendable(report) == report


@pytest.mark.parametrize("value", [str(ODD), {str(ODD): 1}, [str(ODD)], 1 << 64, -(1 << 64)])
def test_what_cannot_be_sent_is_replaced(value: object) -> None:
    """C5: one odd value does not keep the others from the reader."""
    said = sendable({"odd": value, "good": 7})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said))["good"] == 7


def test_a_path_is_known_again() -> None:
    """`doctor` and `verify` compare what a daemon says with what is configured."""
    said = sendable({"path": str(ODD)})["path"]
    assert path_said(said, ODD) == ODD
    assert path_said(said, Path("/other")) == Path(said)
    assert path_said("/plain", Path("/other")) == Path("/plain")


def test_verify_does_not_take_an_odd_name_for_an_empty_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the directory that it cannot learn, instead of finding nothing wrong."""
    said = sendable({"daemon": {"state_dir": str(directory / ODD.name)}})
    monkeypatch.setattr(verify, "reported_by", lambda _: said)
    shown = invoke("verify", socket=directory / "s")
    assert shown.exit_code == 2
    assert "--state-dir" in shown.output
