"""What `doctor` says, and how often."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from prefixcached import __version__
from prefixcached.daemon import config
from prefixcached.daemon.commands import doctor as command
from prefixcached.daemon.commands.differences import Finding, check_differences
from prefixcached.daemon.options import Options
from tests.daemon.command_line import invoke, numpy_cache
from tests.support.daemon_process import DaemonProcess


@pytest.fixture
def home(directory: Path) -> dict[str, str | None]:
    """A home without anything of ours; on macOS the configuration lies elsewhere in it."""
    return {
        "HOME": str(directory),
        "XDG_CONFIG_HOME": str(directory / "config"),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "PREFIXCACHED_SOCKET": str(directory / "s"),
    }


def test_no_configuration_file_is_in_order(home: dict[str, str | None]) -> None:
    """It says that there is none, and where one would be; exit code 3, since nothing runs."""
    shown = invoke("doctor", environment=home)
    assert shown.exit_code == 3
    (line,) = [one for one in shown.output.splitlines() if "configuration:" in one]
    assert line.startswith("ok ")
    assert "there is no file at" in line
    assert "config.toml" in line


def test_a_named_file_is_shown(home: dict[str, str | None], directory: Path) -> None:
    """The file that the environment names is the one that counts."""
    file = directory / "mine.toml"
    file.write_text('ram_bytes = "1GiB"')
    shown = invoke("doctor", environment={**home, "PREFIXCACHED_CONFIG": str(file)})
    assert f"configuration: {file}\n" in shown.output


def test_a_bad_key_is_said_once(home: dict[str, str | None], directory: Path) -> None:
    """One finding with its fix and the section; what needs a configuration is not looked at."""
    file = directory / "mine.toml"
    file.write_text("ram_bites = 1")
    shown = invoke("doctor", "--config", str(file), environment=home)
    assert shown.exit_code == 1
    assert shown.output.count("ram_bites") == 1
    assert 'see "Configuration" in docs/operations.md' in shown.output


def doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    shown = invoke("doctor", "--json", *arguments, environment={**environment})
    findings = json.loads(shown.output)["findings"]
    return shown.exit_code, {
        f"{one['what']}/{one['level']}": one for one in findings if one["level"] != "ok"
    }


def test_doctor_without_a_daemon_ends_with_3(directory: Path) -> None:
    """It says how to start one."""
    code, found = doctor("--socket", str(directory / "s"))
    assert code == 3
    assert "service install" in found["daemon/warning"]["fix"]


def test_doctor_names_what_is_broken_and_the_fix(directory: Path, daemon: DaemonProcess) -> None:
    """An open directory, a bad file, a daemon that hangs: each by its name, exit code 1."""
    directory.chmod(0o755)
    bad = directory / "bad.toml"
    bad.write_text('ram_bytes = "much"')
    code, found = doctor("--socket", str(directory / "s"), "--config", str(bad))
    assert code == 1
    assert found["socket directory/failed"]["fix"] == f"chmod 700 '{directory}'"
    assert "much" in found["configuration/failed"]["detail"]
    directory.chmod(0o700)
    daemon.socket.chmod(0o644)
    code, found = doctor("--socket", str(daemon.socket))
    assert code == 1
    assert found["socket/failed"]["fix"] == f"chmod 600 '{daemon.socket}'"


def test_doctor_judges_the_caps(directory: Path) -> None:
    """Too much memory, and no SSD tier, are warnings with their key."""
    _, found = doctor(
        "--socket", str(directory / "s"),
        PREFIXCACHED_RAM_BYTES="90%", PREFIXCACHED_SSD_BYTES="0",
    )  # fmt: skip
    assert "ram_bytes" in found["memory/warning"]["fix"]
    assert "ssd_bytes" in found["disk/warning"]["fix"]


def test_doctor_looks_at_what_the_daemon_uses(directory: Path) -> None:
    """Its directory and caps, not those of the configuration; that they differ is said."""
    other = str(directory / "other")
    with DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "64MiB") as daemon:
        place = ("--socket", str(daemon.socket))
        sizes = {"PREFIXCACHED_RAM_BYTES": "64MiB", "PREFIXCACHED_SSD_BYTES": "64MiB"}
        same = {**sizes, "PREFIXCACHED_STATE_DIR": str(daemon.state_dir)}
        assert "configuration/warning" not in doctor(*place, **same)[1]
        code, found = doctor(
            *place, PREFIXCACHED_STATE_DIR=other, PREFIXCACHED_RAM_BYTES="90%",
            PREFIXCACHED_SSD_BYTES="0",
        )  # fmt: skip
        shown = invoke("doctor", *place, environment={**sizes, "PREFIXCACHED_STATE_DIR": other})
    assert code == 0
    assert found.keys() == {"configuration/warning"}
    detail = found["configuration/warning"]["detail"]
    assert f"state_dir is {daemon.state_dir}, not {other}" in detail
    assert "ram_bytes is 64 MiB, not " in detail
    assert "ssd_bytes is 64 MiB, not 0 B" in detail
    assert "config.toml" in found["configuration/warning"]["fix"]
    assert f"state directory: {daemon.state_dir} is yours alone" in shown.output


def test_doctor_names_a_daemon_with_few_descriptors(daemon: DaemonProcess) -> None:
    """E1: one that a process started which had imported mlx-lm may hold fewer images for good."""
    with numpy_cache(daemon.socket) as cache:
        report = cache.stats()
    configured = config.load(
        Options(ram_bytes=report["ram_tier"]["ram_bytes_cap"]), socket=daemon.socket
    )
    configured = replace(configured, ssd_bytes=0, max_images=9680)
    report["ram_tier"]["images_cap"] = 9680
    assert not list(check_differences(configured, report))
    report["ram_tier"]["images_cap"] = 1728
    (finding,) = check_differences(configured, report)
    assert (finding.level, finding.what) == ("warning", "descriptors")
    assert "may hold 1,728 images, and one started from here 9,680" in finding.detail


# -- one look at a time ---------------------------------------------------------------------------


def test_a_socket_path_that_does_not_fit_is_named(directory: Path) -> None:
    """PLATFORM 1.1: the kernel takes 103 bytes on macOS; the setting that shortens it is named."""
    code, found = doctor("--socket", str(directory / ("s" * 120)))
    assert code == 1
    assert f"takes {len(os.fsencode(directory)) + 121} bytes" in found["socket/failed"]["detail"]
    assert "PREFIXCACHED_SOCKET" in found["socket/failed"]["fix"]


def test_a_file_in_the_sockets_place_is_named(directory: Path) -> None:
    """No daemon can listen there, and nothing may delete what it did not make."""
    (directory / "s").write_text("a letter")
    code, found = doctor("--socket", str(directory / "s"))
    assert code == 1
    assert found["socket/failed"]["detail"] == f"{directory / 's'} is no socket"


def test_a_directory_of_somebody_else_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: whoever owns the directory can put another socket there."""
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    (finding,) = command.check_socket(directory / "s")
    assert finding.level == "failed"
    assert f"belongs to user {directory.stat().st_uid}" in finding.detail


def test_a_directory_that_cannot_be_looked_at_is_named(directory: Path) -> None:
    """A file stands where a directory should."""
    (directory / "file").write_text("")
    code, found = doctor("--socket", str(directory / "file" / "below" / "s"))
    assert code == 1
    assert "Not a directory" in found["socket directory/failed"]["detail"]


def test_a_daemon_of_another_version_is_a_warning(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade the old one runs on until it is started again."""
    about = {"version": "0.0.1", "pid": 77}
    monkeypatch.setattr(command, "reported_by", lambda _: {"daemon": about})
    report, finding = command.ask(directory / "s", again="start it again")
    assert report == {"daemon": about}
    detail = f"version 0.0.1 runs, and {__version__} is installed"
    assert finding == Finding("warning", "daemon", detail, "start it again")


def test_a_daemon_that_does_not_answer_is_broken(directory: Path) -> None:
    """It listens and says nothing: exit code 1, and what to do."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(directory / "s"))
        silent.listen()
        (directory / "s").chmod(0o600)
        code, found = doctor("--socket", str(directory / "s"))
    assert code == 1
    assert "start it again" in found["daemon/failed"]["fix"]


HEALTHY: Final = {"healthy": True, "reason": "", "damaged": 0, "damaged_at_start": 0}


@pytest.mark.parametrize(
    ("disk", "pressure", "expected"),
    [
        (HEALTHY, "normal", None),
        ({**HEALTHY, "healthy": False, "reason": "no space"}, "normal", ("failed", "no space")),
        ({**HEALTHY, "damaged": 2, "damaged_at_start": 1}, "normal", ("warning", "3 damaged")),
        (HEALTHY, "warn", ("warning", "short of memory (warn)")),
        (HEALTHY, "critical", ("warning", "short of memory (critical)")),
    ],
    ids=["healthy", "full", "damaged", "warn", "critical"],
)
def test_what_the_daemon_says_of_itself_is_judged(
    disk: Mapping[str, Any], pressure: str, expected: tuple[str, str] | None
) -> None:
    """A disk that fails is broken; damage and a machine short of memory are warnings."""
    report = {"ram_tier": {"disk": disk, "pressure": {"level": pressure}}}
    found = list(command.check_report(report))
    assert len(found) == (expected is not None)
    if expected is not None:
        assert (found[0].level, expected[1] in found[0].detail) == (expected[0], True)
        assert found[0].fix


def test_caps_that_do_not_fit_the_machine_are_warnings(directory: Path) -> None:
    """An SSD cap beyond what is free, and a limit of descriptors that holds few images."""
    configured = config.load(Options(state_dir=directory), socket=directory / "s")
    roomy = replace(configured, ram_bytes=1, ssd_bytes=1, max_images=100_000)
    assert {one.level for one in command.check_storage(roomy, None)} == {"ok"}
    tight = replace(roomy, ssd_bytes=1 << 50, max_images=999)
    found = {one.what: one for one in command.check_storage(tight, None) if one.level != "ok"}
    assert found.keys() == {"descriptors", "disk"}
    assert "ulimit -n" in found["descriptors"].fix
    assert "the SSD cap is 1024 TiB" in found["disk"].detail
    # What the cache holds already is room as well.
    held = {"ram_tier": {"ssd_bytes": 1 << 50}}
    assert "disk" not in {
        one.what for one in command.check_storage(tight, held) if one.level != "ok"
    }


def test_a_state_directory_that_leads_nowhere_is_compared_all_the_same(directory: Path) -> None:
    """D7: the daemon runs with it, on RAM alone; doctor says so and does not fail itself."""
    (directory / "loop").symlink_to(directory / "loop")
    configured = config.load(
        Options(state_dir=directory / "loop" / "state", ssd_bytes="1GiB"), socket=directory / "s"
    )
    ram = {
        "ram_bytes_cap": configured.ram_bytes, "ssd_bytes_cap": configured.ssd_bytes,
        "images_cap": configured.max_images,
    }  # fmt: skip
    report = {"daemon": {"state_dir": str(configured.state_dir)}, "ram_tier": ram, "ssd_tier": {}}
    assert not list(check_differences(configured, report))
    found = {one.what: one.level for one in command.check_storage(configured, None)}
    assert found["state directory"] == "failed"


def test_doctor_prints_each_finding_with_its_fix(directory: Path) -> None:
    """For people: a level, what, the detail, and an arrow with what to do."""
    shown = invoke("doctor", environment={"PREFIXCACHED_SOCKET": str(directory / "s")})
    lines = shown.output.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("warning  daemon:"))
    assert lines[at + 1] == f"{'':8} → prefixcached service install, or prefixcached serve"
