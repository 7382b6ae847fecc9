"""What a service was told, read back from the files that install wrote."""

import plistlib
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcached.daemon.service import launch_agent, systemd_units
from prefixcached.daemon.service.installed import Told, told_by
from prefixcached.daemon.service.plan import ServicePlan

AWKWARD = Path("/a b/%h/$x\"'\\<&>")
"""What both formats must escape."""


@pytest.fixture(params=[None, AWKWARD], ids=["plain", "with a configuration"])
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> ServicePlan:
    file: Path | None = request.param
    return ServicePlan(
        program=AWKWARD / "prefixcached",
        socket=AWKWARD / "s",
        home=tmp_path,
        log_dir=tmp_path / "log",
        config_file=file or tmp_path / "default.toml",
        extra=() if file is None else ("--config", str(file)),
    )


def told(plan: ServicePlan, *, is_resident: bool) -> Told:
    return Told(plan.socket, Path(plan.extra[1]) if plan.extra else None, is_resident)


@pytest.mark.parametrize("is_resident", [False, True])
def test_what_launchd_was_told_is_read_back(plan: ServicePlan, is_resident: bool) -> None:
    """The next install writes the same again."""
    plan.agent_file.parent.mkdir(parents=True)
    plan.agent_file.write_bytes(launch_agent.render(replace(plan, is_resident=is_resident)))
    assert told_by(plan.agent_file) == told(plan, is_resident=is_resident)


@pytest.mark.parametrize("is_resident", [False, True])
def test_what_systemd_was_told_is_read_back(
    plan: ServicePlan, tmp_path: Path, is_resident: bool
) -> None:
    """The next install writes the same again; a link says that it starts at login."""
    for name, content in systemd_units.render(plan).items():
        (tmp_path / name).write_bytes(content)
    if is_resident:
        link = tmp_path / "default.target.wants" / systemd_units.SERVICE_UNIT
        link.parent.mkdir()
        link.symlink_to(tmp_path / systemd_units.SERVICE_UNIT)
    assert told_by(tmp_path / systemd_units.SOCKET_UNIT) == told(plan, is_resident=is_resident)


@pytest.mark.parametrize(
    "command",
    [
        "serve --config=/c%%/my.toml", "serve --config %t/my.toml", "serve --config=%h/my.toml",
        "serve \\\n  --config=%h/my.toml",
    ],
)  # fmt: skip
def test_a_configuration_is_read_back_as_people_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """An install again must not lose it, nor a purge take the default directory for its own."""
    monkeypatch.setenv("HOME", "/c%")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/c%")
    unit = tmp_path / "u.socket"
    unit.write_text("[Socket]\nListenStream=/s\n")
    unit.with_suffix(".service").write_text(f"[Service]\nExecStart={command}\n")
    assert told_by(unit) == Told(Path("/s"), Path("/c%/my.toml"), is_resident=False)


def test_a_file_of_somebodys_own_tells_what_it_can(tmp_path: Path) -> None:
    """A verb must not fail for it: what cannot be read was not told."""
    socket = {"Listener": {"SockPathName": "/s"}}
    agent = tmp_path / "a.plist"
    agent.write_bytes(plistlib.dumps({"Sockets": socket, "ProgramArguments": 7}))
    assert told_by(agent) == Told(Path("/s"), None, is_resident=False)
    unit = tmp_path / "u.socket"
    unit.write_text("[Socket]\nListenStream=/s\n")
    assert told_by(unit) == Told(Path("/s"), None, is_resident=False)
    unit.with_suffix(".service").write_text("ExecStart='serve --config /c\n")
    assert told_by(unit) == Told(Path("/s"), None, is_resident=False)
    unit.write_text("")
    assert told_by(unit) is None
