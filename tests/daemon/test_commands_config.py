"""Options: the file, the environment and flags, in this order, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from prefixcached.actors.desk import RamConfig
from prefixcached.daemon import options
from prefixcached.daemon.config import load
from prefixcached.daemon.options import FILE_VARIABLE, OptionError, Options, gather, options_of
from prefixcached.daemon.storage import Storage
from tests.daemon.command_line import invoke
from tests.support.daemon_process import DaemonProcess

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
EMPTY: dict[str, str] = {}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def config(*arguments: str, **environment: str) -> dict[str, Any]:
    shown = invoke("config", "--json", *arguments, environment={**environment})
    assert shown.exit_code == 0, shown.output
    return {row["key"]: row for row in json.loads(shown.output)["options"]}


def test_later_sources_win(file: Path) -> None:
    """Default, file, environment, flag: the later one's value, and its name as the source."""
    file.write_text(
        'ram_bytes = "1GiB"\nretention = "lru"\nidle_seconds = 60\nput_min_tokens = 1\n'
    )
    rows = config(
        "--config", str(file), "--ram-bytes", "3GiB",
        PREFIXCACHED_RAM_BYTES="2GiB", PREFIXCACHED_RETENTION="cost-size",
    )  # fmt: skip
    assert (rows["ram_bytes"]["effective"], rows["ram_bytes"]["source"]) == (
        3 << 30,
        "flag --ram-bytes",
    )
    assert rows["retention"]["value"] == "cost-size"
    assert rows["retention"]["source"] == "environment PREFIXCACHED_RETENTION"
    assert rows["idle_seconds"]["source"] == f"file {file}"
    assert rows["promote"]["source"] == "default"


def test_the_file_is_named_by_variable_or_found_where_the_platform_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREFIXCACHED_CONFIG, else config.toml in the user's configuration directory."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    default = tmp_path / "prefixcached" / "config.toml"
    assert options.default_file() == default
    default.parent.mkdir()
    default.write_text("idle_seconds = 7")
    assert gather({}, environment=EMPTY)["idle_seconds"].value == 7
    other = tmp_path / "other.toml"
    other.write_text("idle_seconds = 8")
    assert gather({}, environment={"PREFIXCACHED_CONFIG": str(other)})["idle_seconds"].value == 8
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("HOME", "/Users/somebody")
    assert options.default_file() == Path(
        "/Users/somebody/Library/Application Support/prefixcached/config.toml"
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('ram_bytes = "8 apples"', ("ram_bytes", "'8 apples'", "8GiB")),
        ("ram_bytes = 1.5", ("ram_bytes", "1.5", "a size")),
        ("ram_bytes = -1", ("ram_bytes", "-1")),
        ('ssd_daily_write_bytes = "10%"', ("ssd_daily_write_bytes", "10%")),
        ('retention = "fifo"', ("retention", "'fifo'", "lru")),
        ("namespace_quota = 2.0", ("namespace_quota", "2.0", "0.01 to 1")),
        ("pressure_target = nan", ("pressure_target", "nan")),
        ("idle_seconds = true", ("idle_seconds", "True", "seconds")),
        ("claim_min_tokens = 1.5", ("claim_min_tokens", "1.5", "whole")),
        ('promote = ["always"]', ("promote", "always", "second-hit")),
        ('state_dir = "relative"', ("state_dir", "relative", "absolute")),
        ('state_dir = "~nobody-at-all/x"', ("state_dir", "~nobody-at-all/x", "absolute")),
        ('state_dir = "/a\\u0000b"', ("state_dir", "absolute")),
        ("ram_bytes = " + "[" * 5000 + "]" * 5000, ("is no TOML",)),
        ("ram_bytes = " + "9" * 5000, ("is no TOML",)),
        ("ram_bytes = 0x" + "f" * 5000, ("ram_bytes", "too many digits")),
        ("ram_bytes = 99999999999999999999", ("ram_bytes", "99999999999999999999")),
        ("ram_byte = 1", ("ram_byte ", "did you mean ram_bytes?", "put_min_tokens")),
        ('socket = "/s"', ("socket", "PREFIXCACHED_SOCKET")),
        ("[ram]\nbytes = 1", ("ram",)),
        ("ram_bytes =", ("TOML",)),
    ],
)
def test_a_bad_file_is_refused_by_name(file: Path, line: str, named: tuple[str, ...]) -> None:
    """Unknown keys and bad values name the key, the value and what is allowed, in one line."""
    file.write_text(line)
    shown = invoke("config", "--config", str(file))
    assert shown.exit_code == 2
    for part in (*named, str(file)):
        assert part in shown.output
    assert shown.output.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PREFIXCACHED_RAM_BITES", "1"), ("PREFIXCACHED_IDLE_SECONDS", "soon")],
)
def test_a_bad_variable_is_refused_by_name(variable: str, value: str) -> None:
    """A typing error in the environment is not silently the default."""
    with pytest.raises(OptionError, match=variable):
        gather({}, environment={variable: value}, file=Path("/dev/null"))


def test_a_file_in_a_home_directory_of_nobody_is_refused_by_its_path() -> None:
    """A typing error in the variable is a line for people, not a traceback."""
    named = "~no-such-user/config.toml"
    with pytest.raises(OptionError, match=f"{named} does not exist"):
        gather({}, environment={FILE_VARIABLE: named})


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    """Whoever names a file means it."""
    shown = invoke("config", "--config", str(tmp_path / "none.toml"))
    assert shown.exit_code == 2
    assert "does not exist" in shown.output


def test_every_option_reaches_the_actors(tmp_path: Path) -> None:
    """No flag that nothing reads: each option changes what the actors are told."""
    changed = Options(
        state_dir=tmp_path, ram_bytes=1 << 20, ssd_bytes=1 << 21, ssd_daily_write_bytes="3MiB",
        retention="lru", namespace_quota=0.25, promote="never", idle_seconds=7.0,
        write_policy="second-hit",
        label_ttl_seconds=8.0, claim_min_tokens=9, put_min_tokens=10, pressure_target=0.125,
        checkpoint_min_tokens=11, metrics_port=12,
    )  # fmt: skip
    for one in dataclasses.fields(Options):
        assert getattr(changed, one.name) != one.default, one.name
    storage = Storage(load(changed, socket=tmp_path / "s"))
    told = storage._ram_tier.config
    for name in (
        "namespace_quota", "promote", "idle_seconds", "label_ttl_seconds", "claim_min_tokens",
        "put_min_tokens", "pressure_target", "retention", "ram_bytes", "ssd_bytes",
        "checkpoint_min_tokens",
    ):  # fmt: skip
        assert getattr(told, name) == getattr(changed, name), name
    ssd = storage.statistics_sources["ssd_tier"]()
    assert ssd.daily_write_bytes == 3 << 20


def test_defaults_are_those_of_the_actors() -> None:
    """One default, in one place."""
    defaults = Options()
    for one in dataclasses.fields(RamConfig):
        if one.name in options.names() and not one.name.endswith("_bytes"):
            assert getattr(defaults, one.name) == one.default


def test_the_daemon_reads_its_file(file: Path) -> None:
    """A real daemon takes its caps from the file, and a flag over it."""
    file.write_text('ram_bytes = "32MiB"\nssd_bytes = "64MiB"\n')
    with DaemonProcess("--config", str(file)) as daemon:
        shown = invoke("status", "--json", socket=daemon.socket)
        ram_tier = json.loads(shown.output)["ram_tier"]
    assert ram_tier["ram_bytes_cap"] == 32 << 20
    assert ram_tier["ssd_bytes_cap"] == 0, "the fixture's flag wins over the file"


def test_config_for_people_shows_sizes_and_sources(file: Path) -> None:
    """One line for each option, with what a share comes to."""
    file.write_text('ram_bytes = "1GiB"')
    shown = invoke("config", "--config", str(file), "--ssd-bytes", "0")
    assert shown.exit_code == 0
    assert "1GiB = 1 GiB" in shown.output
    assert "flag --ssd-bytes" in shown.output
    for name in options.names():
        assert name in shown.output


def test_a_path_that_looks_like_markup_is_shown_as_it_is() -> None:
    """Brackets in a directory's name are no styles, and escape sequences reach no terminal."""
    shown = invoke("config", "--state-dir", "/x[/red]\x1b[2J")
    assert shown.exit_code == 0, shown.output
    assert "/x[/red]?[2J" in shown.output


def test_the_page_has_the_table_of_options() -> None:
    """docs/operations.md is generated here: `python -m prefixcached.daemon.options`."""
    assert options.table() in OPERATIONS.read_text("utf-8")


def test_options_of_settings_are_complete() -> None:
    """Values without their sources."""
    assert options_of(gather({}, environment=EMPTY, file=Path("/dev/null"))) == Options()
