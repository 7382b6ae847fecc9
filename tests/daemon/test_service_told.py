"""`service` acts on the service that is installed, and installs it again as it was told."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

from prefixcached.daemon.commands import service
from prefixcached.daemon.service.plan import ServicePlan
from tests.daemon.command_line import invoke

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd")

# Loads nothing; knows what is enabled, as systemd does, by its links.
SYSTEMCTL = """#!/bin/sh
shift # --user
links="$XDG_CONFIG_HOME/systemd/user/default.target.wants"
case "$*" in
  is-active*) test -e "$0.active"; exit $? ;;
  "show --property=Version") echo Version=255 ;;
  "show --property=ActiveState"*) test ! -e "$0.active" || echo ActiveState=active ;;
  "enable --now prefixcached.socket" | start*) touch "$0.active" ;;
  "enable --now prefixcached.service")
    mkdir -p "$links"; ln -sf ../prefixcached.service "$links/prefixcached.service" ;;
  "disable prefixcached.service") rm -f "$links/prefixcached.service" ;;
  stop*) rm -f "$0.active" ;;
esac
exit 0
"""


class Home:
    """A user's home with a service of a socket and a configuration that are not the usual ones."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "own" / "s"
        self.other = directory / "other" / "s"
        self.state_dir = directory / "state"
        self.file = directory / "own.toml"
        self.file.write_text(f'state_dir = "{self.state_dir}"\n')
        self.units = directory / "config" / "systemd" / "user"
        tools = directory / "bin"
        tools.mkdir()
        (tools / "systemctl").write_text(SYSTEMCTL)
        (tools / "systemctl").chmod(0o755)
        self.environment: dict[str, str | None] = {
            "HOME": str(directory),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_CACHE_HOME": str(directory / "cache"),
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PREFIXCACHED_SOCKET": None,
            "PREFIXCACHED_CONFIG": None,
        }
        said = self.run(
            "install", "--socket", str(self.socket), "--config", str(self.file), "--resident"
        )
        assert "as it was installed" not in said

    def run(self, *arguments: str, code: int = 0) -> str:
        shown = invoke("service", *arguments, environment=self.environment)
        assert shown.exit_code == code, shown.output
        return shown.output

    def contents(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in self.units.iterdir() if file.is_file()}


@pytest.fixture
def home(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    def verified(plan: ServicePlan) -> None:
        print(f"answers at {plan.socket}")

    monkeypatch.setattr(service, "_verify", verified)
    return Home(directory)


def test_what_is_installed_again_is_told_the_same(home: Home) -> None:
    """An upgrade by `service install` alone keeps socket, configuration and start at login."""
    before = home.contents()
    said = home.run("install")
    assert (
        f"as it was installed before: --socket {home.socket} --config {home.file} --resident\n"
        in said
    )
    assert "wrote" not in said
    assert home.contents() == before
    assert (home.units / "default.target.wants" / "prefixcached.service").is_symlink()


def test_what_is_given_counts_when_it_is_installed_again(home: Home) -> None:
    """Flags and the variables of this shell come before what was installed."""
    home.environment |= {"PREFIXCACHED_SOCKET": str(home.other)}
    other = home.file.with_name("other.toml")
    other.touch()
    home.environment |= {"PREFIXCACHED_CONFIG": str(other)}
    assert "as it was installed" not in home.run("install", "--no-resident")
    assert f"ListenStream={home.other}\n" in home.contents()["prefixcached.socket"]
    assert f'"--config" "{other}"' in home.contents()["prefixcached.service"]
    assert not (home.units / "default.target.wants" / "prefixcached.service").is_symlink()


def test_a_verb_means_the_installed_service(home: Home) -> None:
    """Whatever the shell names; a flag that contradicts is refused before anything is done."""
    home.environment |= {"PREFIXCACHED_SOCKET": str(home.other)}
    said = home.run("restart")
    assert f"the installed service listens at {home.socket}\n" in said
    assert f"answers at {home.socket}" in said
    refused = home.run("stop", "--socket", str(home.other), code=1)
    assert f"listens at {home.socket}, not at {home.other}; leave --socket away" in refused
    assert "loaded     yes" in home.run("status", code=3)


def test_a_wrong_configuration_keeps_no_service_from_stopping(home: Home) -> None:
    """Only a purge must know what it says."""
    home.file.unlink()
    home.run("stop")
    home.run("start")
    assert "removed" in home.run("uninstall")


def test_a_purge_is_refused_where_the_configuration_that_says_what_is_gone(home: Home) -> None:
    """What lies at the default place may be another daemon's; the ways out are named."""
    home.file.unlink()
    cache = home.file.with_name("cache") / "prefixcached" / "segments.noindex"
    cache.mkdir(parents=True)
    refused = home.run("uninstall", "--purge", code=1)
    assert f"{home.file}, which says where the cache is, does not exist" in refused
    assert "--config FILE, or leave --purge away" in refused
    assert cache.is_dir()
    assert "loaded     yes" in home.run("status", code=3)
    other = home.file.with_name("other.toml")
    other.write_text(f'state_dir = "{home.state_dir}"\n')
    (home.state_dir / "segments.noindex").mkdir(parents=True)
    said = home.run("uninstall", "--purge", "--config", str(other))
    assert f"removed {home.state_dir / 'segments.noindex'}\n" in said
    assert cache.is_dir()


def test_a_purge_is_refused_where_the_units_name_no_socket(home: Home) -> None:
    """What this shell names may be another daemon's; the ways out are named."""
    (home.units / "prefixcached.socket").write_text("[Socket]\nListenStream=%Y/s\n")
    cache = home.file.with_name("cache") / "prefixcached" / "segments.noindex"
    cache.mkdir(parents=True)
    refused = home.run("uninstall", "--purge", code=1)
    assert "does not say where the service listens" in refused
    assert "leave --purge away" in refused
    assert cache.is_dir()
    assert "removed" in home.run("uninstall")


def test_a_configuration_that_is_gone_is_not_told_again(home: Home) -> None:
    """It would keep every install from working; the service is installed without it."""
    home.file.unlink()
    said = home.run("install")
    assert f"no longer --config {home.file}: it does not exist\n" in said
    assert f"as it was installed before: --socket {home.socket} --resident\n" in said
    assert "--config" not in home.contents()["prefixcached.service"]


def test_a_purge_that_failed_can_be_run_again(home: Home) -> None:
    """It finds the service as it was told, and takes nothing of the default place for its own."""
    shells = home.file.with_name("cache") / "prefixcached" / "segments.noindex"
    (home.state_dir / "segments.noindex").mkdir(parents=True)
    shells.mkdir(parents=True)
    lock_file = home.socket.with_name("s.lock")
    home.run("stop")  # else `uninstall` waits for the daemon that has the lock
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "then run this again" in home.run("uninstall", "--purge", code=1)
    assert len(home.contents()) == 2
    said = home.run("uninstall", "--purge")
    assert f"removed {home.state_dir / 'segments.noindex'}\n" in said
    assert f"removed {home.file}\n" in said
    assert not list(home.units.glob("prefixcached.*"))
    assert shells.is_dir()


def test_a_purge_removes_what_the_installed_service_used(home: Home) -> None:
    """The state directory of its configuration, not that of this shell's."""
    other = home.state_dir.with_name("of-the-shell")
    home.environment |= {"PREFIXCACHED_STATE_DIR": str(other)}
    for directory in (home.state_dir, other):
        (directory / "segments.noindex").mkdir(parents=True)
    said = home.run("uninstall", "--purge")
    assert f"removed {home.state_dir / 'segments.noindex'}\n" in said
    assert f"removed {home.file}\n" in said
    assert (other / "segments.noindex").is_dir()


def test_doctor_finds_the_service_as_it_was_told(home: Home) -> None:
    """A resident one is what this version writes; one at another socket than the shell is named."""
    home.environment |= {"PREFIXCACHED_SOCKET": str(home.socket)}
    shown = invoke("doctor", environment=home.environment)
    assert f"service: {home.units / 'prefixcached.socket'} is loaded\n" in shown.output
    assert f"configuration: {home.file}\n" in shown.output
    home.environment |= {"PREFIXCACHED_SOCKET": str(home.other)}
    shown = invoke("doctor", environment=home.environment)
    assert f"it listens at {home.socket}, not at {home.other}" in shown.output
    assert "not what this version writes" not in shown.output
