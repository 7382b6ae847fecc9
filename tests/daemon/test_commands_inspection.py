"""`ls` and `explain`, as a user or a script meets them."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.daemon.command_line import BOTH_TIERS, invoke, numpy_cache, put
from tests.support.daemon_process import DaemonProcess

SHARED = list(range(1000, 1600))
FIRST = [*SHARED, *range(2000, 2400)]
SECOND = [*SHARED, *range(3000, 3300)]


@pytest.fixture(scope="module")
def filled() -> Iterator[DaemonProcess]:
    """A daemon that holds two prompts with a common head, a hybrid's prompt and an object."""
    with DaemonProcess(*BOTH_TIERS) as process:
        with numpy_cache(process.socket) as cache:
            put(cache, SHARED)
            put(cache, FIRST)
            put(cache, SECOND)
            put(cache, range(500), "hybrid", state=True)
            assert cache.flush()
        yield process
        print(process.log())


def explain(daemon: DaemonProcess, *arguments: str, text: str | None = None) -> dict[str, Any]:
    shown = invoke("explain", "--json", *arguments, socket=daemon.socket, text=text)
    assert shown.exit_code == 0, shown.output
    report: dict[str, Any] = json.loads(shown.output)
    return report


def test_ls_shows_the_tree_with_what_is_shared(filled: DaemonProcess) -> None:
    """The shared head stands once, above both branches, in both tiers."""
    shown = invoke("ls", "--namespace", "n", socket=filled.socket)
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("tokens A..B: positions A up to B, without B itself")
    head, *branches = [line for line in shown.output.splitlines()[1:] if "tokens " in line]
    assert "tokens 0..600" in head
    assert "shared by 2" in head
    assert "ram+ssd" in head
    assert len(branches) == 2
    assert all(line.index("tokens") > head.index("tokens") for line in branches)
    assert "hybrid" not in shown.output


def test_ls_json_has_every_piece(filled: DaemonProcess) -> None:
    """Programs get what people see, in plain values."""
    listing = json.loads(invoke("ls", "--json", socket=filled.socket).output)
    by_name = {one["namespace"]: one for one in listing["namespaces"]}
    assert listing["complete"]
    assert by_name["n"]["count"] == len(by_name["n"]["images"]) == 3
    assert {image["kind"] for image in by_name["hybrid"]["images"]} == {"segment", "checkpoint"}
    (branch, *_) = [image for image in by_name["n"]["images"] if image["end"] == len(FIRST)]
    assert (branch["start"], branch["depth"], branch["sharing"]) == (600, 1, 1)
    assert branch["nbytes"] > 0
    assert branch["in_ram"]
    assert branch["on_ssd"]


def test_ls_says_when_its_limit_left_something_out(filled: DaemonProcess) -> None:
    """A listing is bounded, and never silently."""
    shown = invoke("ls", "--limit", "2", socket=filled.socket)
    assert "and more" in shown.output
    listed = shown.output.partition("\n")[2]
    assert listed.count("tokens ") + listed.count("checkpoint at") == 2
    assert invoke("ls", "--limit", "0", socket=filled.socket).exit_code == 2


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_namespace_that_is_not_there_is_no_empty_one(
    filled: DaemonProcess, options: tuple[str, ...]
) -> None:
    """Exit code 1; the names that are like it, else some that there are."""
    shown = invoke("ls", "--namespace", "hyb", *options, socket=filled.socket)
    assert shown.exit_code == 1
    assert "there is no namespace hyb; like it: hybrid (" in shown.output
    shown = invoke("ls", "--namespace", "x", *options, socket=filled.socket)
    assert shown.exit_code == 1
    assert re.search(r"no namespace x; used last: (n, hybrid|hybrid, n) \(", shown.output)


def test_explain_says_what_would_hit(filled: DaemonProcess, tmp_path: Path) -> None:
    """T9: a prompt that is held whole would reuse all but its last token, from RAM."""
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(FIRST))
    shown = invoke("explain", str(file), socket=filled.socket)
    assert shown.exit_code == 0, shown.output
    assert "would hit: 999 tokens from ram, 1 to compute" in shown.output
    assert "why not more" not in shown.output
    assert "all of it is held; the last token is computed, since the next" in shown.output
    assert "rule" not in shown.output
    assert "resumable at" not in shown.output


def test_explain_shows_the_tokens_on_both_sides(filled: DaemonProcess) -> None:
    """T9: where a prompt leaves what is held, both continuations stand beside its own."""
    prompt = " ".join(map(str, [*SHARED, 7, 8, 9]))
    shown = invoke("explain", "--namespace", "n", socket=filled.socket, text=prompt)
    assert "leaves what is held at position 600" in shown.output
    assert "prompt  7 8 9" in shown.output
    assert "held    2000 2001" in shown.output
    assert "held    3000 3001" in shown.output
    assert "diverged" in shown.output
    (said,) = explain(filled, "--namespace", "n", text=prompt)["prompts"][0]["namespaces"]
    assert (said["length"], said["matched"], said["tier"]) == (600, 600, "ram")
    assert said["continuations"][0][0] in (2000, 3000)
    assert len(said["continuations"][0]) == 32


def test_explain_asks_every_namespace_and_names_the_best(filled: DaemonProcess) -> None:
    """A prompt that misses because it was stored for another model is told so."""
    report = explain(filled, text=json.dumps([*range(500), 7]))
    best, other = report["prompts"][0]["namespaces"]
    assert (best["namespace"], best["length"]) == ("hybrid", 500)
    assert (other["length"], other["reason"]) == (0, "diverged")


def test_explain_says_that_a_hybrid_needs_a_checkpoint(filled: DaemonProcess) -> None:
    """T5: tokens are held and cannot be resumed."""
    report = explain(filled, "--namespace", "hybrid", text=json.dumps([*range(400), 7]))
    (said,) = report["prompts"][0]["namespaces"]
    assert (said["length"], said["matched"], said["reason"]) == (0, 400, "no-checkpoint")


def test_one_is_singular(filled: DaemonProcess) -> None:
    """No `1 hits` and no `1 tokens`."""
    shown = invoke("ls", socket=filled.socket).output
    shown += invoke("explain", socket=filled.socket, text="7").output
    assert not [line for line in shown.splitlines() if re.search(r"\b1 (hits|tokens|pieces)", line)]
    assert "-: 1 token\n" in shown


def test_explain_compares_two_prompts(filled: DaemonProcess, tmp_path: Path) -> None:
    """The first differing tokens of two prompts, whatever is cached."""
    (tmp_path / "a").write_text("1,2,3,4,5")
    (tmp_path / "b").write_text("1 2 3\n40 50")
    shown = invoke("explain", str(tmp_path / "a"), str(tmp_path / "b"), socket=filled.socket)
    assert "share their first 3 tokens" in shown.output
    assert "a: 4 5" in shown.output
    assert "b: 40 50" in shown.output
    assert shown.output.count("would miss") == 2


def test_explain_changes_nothing(filled: DaemonProcess) -> None:
    """T11: no recency, no counters of hits."""
    before = json.loads(invoke("status", "--json", socket=filled.socket).output)["ram_tier"]
    uses = json.loads(invoke("ls", "--json", socket=filled.socket).output)["namespaces"]
    explain(filled, text=json.dumps(FIRST))
    after = json.loads(invoke("status", "--json", socket=filled.socket).output)["ram_tier"]
    assert before["takes"] == after["takes"]
    again = json.loads(invoke("ls", "--json", socket=filled.socket).output)["namespaces"]
    assert [[i["uses"] for i in n["images"]] for n in uses] == [
        [i["uses"] for i in n["images"]] for n in again
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1 2 three", "'three'"),
        ("[1, 2.5]", "2.5"),
        ("[1, 2", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1, [2]]", "no other in it"),
        ("1 -2", "found -2; prompts with others are neither stored nor found"),
        ("[true]", "True"),
        ("", "standard input has no tokens"),
        ("[]", "standard input has no tokens"),
    ],
)
def test_what_is_no_prompt_is_wrong_usage(filled: DaemonProcess, text: str, named: str) -> None:
    """The message names what is wrong in it, and the exit code is 2."""
    shown = invoke("explain", socket=filled.socket, text=text)
    assert shown.exit_code == 2
    assert named in shown.output


def test_text_is_shown_beside_tokens(
    filled: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD 3: a changing line in the head of a prompt is seen as text."""

    class Letters:
        """A tokenizer for lower-case text: one token a letter."""

        @classmethod
        def from_pretrained(cls, name: str) -> "Letters":
            if name != "letters":
                raise OSError(f"no model {name}")
            return cls()

        def encode(self, text: str) -> list[int]:
            return [1000 + ord(letter) - ord("a") for letter in text.strip()]

        def decode(self, tokens: list[int]) -> str:
            return "".join(chr(token - 1000 + ord("a")) for token in tokens)

    module = ModuleType("transformers")
    module.AutoTokenizer = Letters  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    (tmp_path / "a").write_text("abcxyz")
    options = ("explain", "--namespace", "n", "--text", "--tokenizer")
    shown = invoke(*options, "letters", str(tmp_path / "a"), socket=filled.socket)
    assert shown.exit_code == 0, shown.output
    assert "'abc'" in shown.output
    assert "'xyz'" in shown.output
    assert "'defghijklmno'" in shown.output
    assert "template" not in shown.output
    (tmp_path / "b").write_text("xyz")
    shown = invoke(*options, "letters", str(tmp_path / "b"), socket=filled.socket)
    assert "a chat's prompt begins with a template" in shown.output
    assert invoke(*options, "other", str(tmp_path / "a"), socket=filled.socket).exit_code == 1
    assert invoke("explain", "--text", socket=filled.socket).exit_code == 2


@pytest.mark.parametrize("command", ["ls", "explain"])
def test_without_a_daemon_they_end_with_3(command: str, directory: Path) -> None:
    """A script can tell that nobody answers."""
    shown = invoke(command, socket=directory / "s", text="1 2 3")
    assert shown.exit_code == 3
    assert "prefixcached serve" in shown.output


def test_names_cannot_write_to_the_terminal() -> None:
    """A namespace or a file's name moves no cursor and begins no line of its own."""
    hostile = "a\x1b[2J\x9b1m\u202e\nforged  line\x07"
    with DaemonProcess(*BOTH_TIERS) as process:
        with numpy_cache(process.socket) as cache:
            put(cache, FIRST, hostile)
            assert cache.flush()
        file = next(process.state_dir.rglob("*.safetensors"))
        file.with_name(f"{hostile}{file.name}").touch()
        told = [
            invoke(*arguments, socket=process.socket, text=text)
            for arguments, text in (
                (("ls",), None),
                (("explain", "--namespace", hostile, "-"), json.dumps(FIRST)),
                (("ls", "--namespace", f"{hostile}?"), None),
                (("verify",), None),
                (("clear", "--namespace", hostile), None),
            )
        ]
    assert [one.exit_code for one in told] == [0, 0, 1, 0, 0], [one.output for one in told]
    for one in told:
        assert "forged" in one.output
        lines = one.output.splitlines()
        assert all(line.isprintable() for line in lines), one.output
        assert not any(line.startswith("forged") for line in lines), one.output
