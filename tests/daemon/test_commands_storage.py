"""`flush` and `verify`, as a user or a script meets them."""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcached.daemon.commands.verification import Finding, Survey, repair
from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess
from tests.support.terminal_screen import TerminalScreen
from tests.support.until import wait_until_loaded


@pytest.fixture
def stored() -> Iterator[DaemonProcess]:
    """A daemon with both tiers that has flushed two prompts."""
    with DaemonProcess(*BOTH_TIERS) as process:
        with numpy_cache(process.socket) as cache:
            put(cache, range(400))
            put(cache, range(1000, 1400), state=True, namespace="hybrid")
        flushed = invoke("flush", socket=process.socket)
        assert flushed.exit_code == 0, flushed.output
        yield process
        print(process.log())


def images(state_dir: Path) -> list[Path]:
    """The files of images, not of schemas."""
    return sorted(
        path for path in (state_dir / "segments.noindex").rglob("*.safetensors") if path.is_file()
    )


def everything(state_dir: Path) -> dict[str, tuple[int, int]]:
    """Each file's size and modification time."""
    return {
        str(path.relative_to(state_dir)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in state_dir.rglob("*")
    }


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_flush_says_what_it_did_and_the_files_are_there(stored: DaemonProcess) -> None:
    """P8: everything visible is durable when it returns, and it counts what it wrote."""
    assert len(images(stored.state_dir)) == 3
    again = invoke("flush", socket=stored.socket)
    assert again.output.startswith("written 0") or "failed 0" in again.output
    assert again.exit_code == 0


def test_verify_beside_a_daemon_disturbs_nothing(stored: DaemonProcess) -> None:
    """It reads every file, changes none, and leaves what is being written alone."""
    (namespace, *_) = sorted((stored.state_dir / "segments.noindex").glob("[0-9a-f]*"))
    (namespace / ("tmp-" + "0" * 32)).write_bytes(b"half")
    before = everything(stored.state_dir)
    shown = invoke("verify", "--state-dir", str(stored.state_dir))
    assert shown.exit_code == 0, shown.output
    assert "5 files good" in shown.output
    assert "0 damaged" in shown.output
    assert "1 being written" in shown.output
    assert everything(stored.state_dir) == before


def test_verify_looks_where_the_daemon_does(stored: DaemonProcess, directory: Path) -> None:
    """It asks the daemon for its directory, falls back to the configured one, and names it."""
    environment: dict[str, str | None] = {"PREFIXCACHED_STATE_DIR": str(directory / "none")}
    shown = invoke("verify", socket=stored.socket, environment=environment)
    assert shown.exit_code == 0, shown.output
    assert f"looked at {stored.state_dir}, which the daemon at {stored.socket} uses" in shown.output
    assert "5 files good" in shown.output
    stored.kill()
    shown = invoke("verify", socket=stored.socket, environment=environment)
    assert shown.exit_code == 0, shown.output
    assert f"in {directory / 'none'}, which is configured (no daemon at" in shown.output
    report = invoke("verify", "--state-dir", str(stored.state_dir), environment=environment).output
    assert f"looked at {stored.state_dir}, as --state-dir says" in report


def test_verify_names_damage_and_repair_moves_it_aside(stored: DaemonProcess) -> None:
    """D3: a file with one wrong bit is named with the reason, and quarantined on demand."""
    stored.kill()
    damaged, *_ = images(stored.state_dir)
    flip_last_byte(damaged)
    shown = invoke("verify", "--state-dir", str(stored.state_dir))
    assert shown.exit_code == 1
    assert damaged.name in shown.output
    assert "checksum" in shown.output
    assert damaged.exists()
    repaired = invoke("verify", "--repair", "--state-dir", str(stored.state_dir))
    assert repaired.exit_code == 0, "nothing that is damaged stayed"
    assert f"moved 1 damaged file into {stored.state_dir / 'quarantine'}" in repaired.output
    assert "the daemon lists" not in repaired.output
    assert not damaged.exists()
    assert [p for p in (stored.state_dir / "quarantine").iterdir() if damaged.name in p.name]
    assert invoke("verify", "--state-dir", str(stored.state_dir)).exit_code == 0


def test_repair_beside_a_daemon_costs_a_miss_and_nothing_else(stored: DaemonProcess) -> None:
    """D1: deleting any file at any time is safe, so repair is."""
    stored.kill()
    stored.start()
    with numpy_cache(stored.socket) as cache:
        wait_until_loaded(cache)  # which checks the tokens, the last bytes of a file
    flip_last_byte(images(stored.state_dir)[0])
    repaired = invoke("verify", "--repair", socket=stored.socket)
    assert repaired.exit_code == 0
    assert "the daemon lists them as on SSD until" in repaired.output
    with numpy_cache(stored.socket) as cache:
        cache.take(list(range(401)), namespace="n")
        cache.take(list(range(1000, 1401)), namespace="hybrid")
    assert stored.is_running
    assert invoke("verify", "--state-dir", str(stored.state_dir)).exit_code == 0


@pytest.mark.parametrize("length", [0, 1, 8, 100, 4096])
def test_a_cut_file_is_damaged(stored: DaemonProcess, length: int) -> None:
    """D2: a file that is not whole is detectably not."""
    stored.kill()
    path = images(stored.state_dir)[0]
    path.write_bytes(path.read_bytes()[:length])
    shown = invoke("verify", "--state-dir", str(stored.state_dir))
    assert shown.exit_code == 1
    assert "1 damaged" in shown.output


def test_what_is_not_ours_and_what_lost_its_schema_is_no_damage(stored: DaemonProcess) -> None:
    """D10, D1: foreign and unattached files are told apart from damaged ones."""
    stored.kill()
    segments = stored.state_dir / "segments.noindex"
    (segments / "notes.txt").write_text("mine")
    for path in segments.rglob("*.schema"):
        path.unlink()
    shown = invoke("verify", "--state-dir", str(stored.state_dir))
    assert shown.exit_code == 0, shown.output
    assert "notes.txt" in shown.output
    assert "4 foreign" in shown.output


def test_a_file_that_vanishes_meanwhile_is_no_finding(stored: DaemonProcess) -> None:
    """A daemon evicts while somebody verifies."""
    survey = Survey(stored.state_dir)
    candidates = survey.candidates()
    gone = images(stored.state_dir)[0]
    gone.unlink()
    kinds = {one.name: survey.check(one, lambda: None).kind for one in candidates}
    assert kinds.pop(gone.name) == "gone"
    assert set(kinds.values()) == {"good"}


def test_what_only_looks_like_a_file_of_ours_is_foreign(stored: DaemonProcess) -> None:
    """D9, D10: links, pipes and directories under our names are named, never opened or followed."""
    stored.kill()
    segments = stored.state_dir / "segments.noindex"
    good, other, _ = images(stored.state_dir)
    link = good.with_name(f"{'1' * 32}.segment.safetensors")
    link.symlink_to(good)
    pipe = good.with_name(f"{'2' * 32}.segment.safetensors")
    os.mkfifo(pipe, 0o600)
    folder = good.with_name(f"{'3' * 32}.segment.safetensors")
    folder.mkdir()
    (segments / ("4" * 32)).symlink_to(other.parent)
    shown = invoke("verify", "--state-dir", str(stored.state_dir))
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[1]: line for line in shown.output.splitlines() if "foreign  " in line}
    odd = {str(path.relative_to(segments)) for path in (link, pipe, folder, segments / ("4" * 32))}
    assert lines.keys() == odd
    assert "5 files good" in shown.output


def test_a_file_under_another_name_or_in_another_namespace_is_damaged(
    stored: DaemonProcess,
) -> None:
    """D3: what a file says of itself must fit where it lies."""
    stored.kill()
    first, _, second = images(stored.state_dir)
    assert first.parent != second.parent
    id_, _, rest = first.name.partition(".")
    renamed = first.with_name(f"{'0' * len(id_)}.{rest}")
    shutil.copy2(first, renamed)
    moved = second.parent / first.name
    shutil.copy2(first, moved)
    shown = invoke("verify", "--state-dir", str(stored.state_dir))
    assert shown.exit_code == 1
    lines = [line for line in shown.output.splitlines() if line.startswith("damaged  ")]
    assert len(lines) == 2
    (of_renamed,) = [line for line in lines if renamed.name in line]
    assert of_renamed.endswith("under another name")
    (of_moved,) = [line for line in lines if moved.name in line]
    assert of_moved.endswith("a file of another namespace")


def test_a_file_that_cannot_be_read_stays_and_ends_with_1(
    stored: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is good is unknown: it is named with the system's words, and left alone."""
    stored.kill()
    survey = Survey(stored.state_dir)
    unreadable = images(stored.state_dir)[0]
    candidates = survey.candidates()
    open_file = survey.directory.filesystem.open_file

    def refuse(name: str, *rest: int) -> int:
        if name == unreadable.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(name, *rest)

    monkeypatch.setattr(survey.directory.filesystem, "open_file", refuse)
    found = {one.name: survey.check(one, lambda: None) for one in candidates}
    assert found.pop(unreadable.name)[1:3] == ("unreadable", "Input/output error")
    assert {one.kind for one in found.values()} == {"good"}


def test_repair_says_what_it_could_not_move(stored: DaemonProcess) -> None:
    """A damaged file stayed, so it ends with 1 and says what stood in the way."""
    stored.kill()
    damaged = images(stored.state_dir)[0]
    flip_last_byte(damaged)
    quarantine = stored.state_dir / "quarantine"
    shutil.rmtree(quarantine)
    quarantine.write_text("a file in its place")
    shown = invoke("verify", "--repair", "--state-dir", str(stored.state_dir))
    assert shown.exit_code == 1
    assert "moved 0 damaged files" in shown.output
    assert f"{damaged.name} stays: Not a directory" in shown.output
    assert damaged.exists()


def test_repair_leaves_out_what_vanished_meanwhile(stored: DaemonProcess) -> None:
    """The daemon beside it may have evicted the file: nothing is left to move, nothing failed."""
    directory = Survey(stored.state_dir).directory
    assert repair(directory, [Finding("0" * 32 + "/gone.segment.safetensors", "damaged")]) == []


def test_verify_of_nothing_says_so(directory: Path) -> None:
    """A machine on which no daemon ever ran is in order; a directory that is named must exist."""
    environment: dict[str, str | None] = {"PREFIXCACHED_STATE_DIR": str(directory / "none")}
    shown = invoke("verify", environment=environment)
    assert shown.exit_code == 0
    assert "nothing is stored" in shown.output
    shown = invoke("verify", "--state-dir", str(directory / "none"))
    assert shown.exit_code == 2
    assert "does not exist" in shown.output


def test_flush_without_a_daemon_ends_with_3(directory: Path) -> None:
    """A script can tell that nobody answers."""
    assert invoke("flush", socket=directory / "s").exit_code == 3


def test_clear_says_what_left(stored: DaemonProcess) -> None:
    """With counts; a namespace that is not there may be misspelt: exit code 1 and names like it."""
    shown = invoke("clear", "--namespace", "hybird", socket=stored.socket)
    assert shown.exit_code == 1
    assert "there is no namespace hybird; like it: hybrid (" in shown.output
    shown = invoke("clear", "--namespace", "n", socket=stored.socket)
    assert shown.output.startswith("cleared 1 piece in n, ")
    assert invoke("clear", socket=stored.socket).output.startswith("cleared 2 pieces, ")
    shown = invoke("clear", "--namespace", "n", socket=stored.socket)
    assert (shown.exit_code, "nothing is cached at all" in shown.output) == (1, True)


def test_flush_that_cannot_write_ends_with_1(stored: DaemonProcess) -> None:
    """P8: what failed is counted, and the exit code says it."""
    with numpy_cache(stored.socket) as cache:
        segments = stored.state_dir / "segments.noindex"
        moved = segments.rename(stored.state_dir / "moved")
        segments.write_text("in the way")
        put(cache, range(5000, 5400))
        shown = invoke("flush", "--timeout", "5", socket=stored.socket)
        segments.unlink()
        moved.rename(segments)
    assert shown.exit_code == 1, shown.output


def test_on_a_terminal_they_show_how_far_they_are(stored: DaemonProcess) -> None:
    """A bar while a person waits, gone at the end; the answer stays."""
    segments = stored.state_dir / "segments.noindex"
    moved = segments.rename(stored.state_dir / "moved")
    segments.write_text("in the way")
    with numpy_cache(stored.socket) as cache:
        put(cache, range(5000, 5400))
    prefixcached = [sys.executable, "-m", "prefixcached.daemon.cli"]
    flush = [*prefixcached, "flush", "--timeout", "5"]
    with TerminalScreen(flush, {**stored.environment, "TERM": "xterm-256color"}) as screen:
        screen.wait_for(lambda: b"Writing what is in RAM only" in screen.raw, "bar")
        segments.unlink()
        moved.rename(segments)
        screen.wait_for_end()
        assert "Writing" not in screen.text
        assert "written " in screen.text
    verify = [*prefixcached, "verify", "--state-dir", str(stored.state_dir)]
    with TerminalScreen(verify, {**stored.environment, "TERM": "xterm-256color"}) as screen:
        screen.wait_for_end()
        assert b"Checking" in screen.raw
        assert "Checking" not in screen.text
        assert "0 damaged" in screen.text
