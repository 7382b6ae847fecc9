"""What `doctor` says, and how often."""

from pathlib import Path

import pytest

from tests.daemon.command_line import invoke


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
