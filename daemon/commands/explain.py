"""`prefixcached explain`: what a prompt would find, where it diverges, and why."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec

from prefixcached.daemon.commands.asking import Ask, asking
from prefixcached.daemon.commands.common import counted, say, see, socket_option
from prefixcached.daemon.commands.prompts import Tokenizer, load_tokenizer, read_prompt, shown
from prefixcached.protocol.messages import Explain, Explanation, List, Listing
from prefixcached.protocol.tokens import TokenArray, common_prefix_length, token_array

SHOWN_TOKENS: Final = 12
"""Tokens shown on each side of a divergence: a line of text."""

MAX_NAMESPACES: Final = 64
"""Namespaces that are asked when none is named."""

REASONS: Final = {
    "empty": "nothing is cached in this namespace: another model, adapter, salt or KV format?",
    "diverged": "the prompt goes on with other tokens than anything that was stored",
    "below-minimum": "a longer match is required by the `minimum_length` of the stored prompt",
    "no-checkpoint": "this model resumes at snapshots only, and none lies further along",
    "window-gap": "the sliding window's rows are not held for a position further along",
    "evicted": "what followed was evicted to hold the caps",
    "pressure": "what followed was given up while memory was short",
    "loading": "the daemon is still reading its files; ask again",
}
"""What each miss reason of rule T9 means that a look-up can give."""


class Found(NamedTuple):
    """What one namespace says to one prompt."""

    namespace: str
    explanation: Explanation


@click.command(
    short_help="Say what a prompt would find in the cache, and why.",
    epilog="""\b
Examples: prefixcached explain --namespace demo prompt.json
          echo "[1, 2, 3]" | prefixcached explain
          prefixcached explain --text --tokenizer ./model a.txt b.txt""",
)
@socket_option
@click.option(
    "--namespace", metavar="NAME", help="Ask only this one; by default whichever holds most of it."
)
@click.option("--text", "is_text", is_flag=True, help="The files hold text; needs --tokenizer.")
@click.option("--tokenizer", metavar="MODEL", help="Folder or hub name; shows tokens as text too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.argument("prompt", default="-")
@click.argument("other", required=False)
def explain(
    socket: Path,
    namespace: str | None,
    tokenizer: str | None,
    prompt: str,
    other: str | None,
    *,
    is_text: bool,
    as_json: bool,
) -> None:
    """Say what a PROMPT would find in the cache, where it leaves it, and why.

    PROMPT is a file of token ids, a JSON array or numbers with blanks between; without it, or with
    "-", standard input is read. With a second file, OTHER, it first compares the two.
    """
    if is_text and tokenizer is None:
        raise click.UsageError("--text needs --tokenizer MODEL")
    words = load_tokenizer(tokenizer) if tokenizer is not None else None
    prompts = [read_prompt(prompt, words, is_text=is_text)]
    if other is not None:
        prompts.append(read_prompt(other, words, is_text=is_text))
    names = [prompt, other or ""]
    if other is not None and not as_json:
        _print_comparison(names, prompts, words)
    with asking(socket) as ask:
        found = [_find(ask, tokens, namespace) for tokens in prompts]
    if as_json:
        click.echo(json.dumps(_report(names, prompts, found), indent=2))
        return
    for name, tokens, answers in zip(names, prompts, found, strict=False):
        _print(name, tokens, answers, words)
        if is_text and not any(one.explanation.matched for one in answers):
            say("  the text was encoded as it stands: a chat's prompt begins with a template; see")
            say(
                "  `Nothing is ever reused` in the manual for how to get the ids that are asked for"
            )


def _find(ask: Ask, tokens: TokenArray, namespace: str | None) -> list[Found]:
    """Return the answers, the most useful namespace first."""
    names = [namespace] if namespace is not None else _namespaces(ask)
    found: list[Found] = []
    for name in names:
        reply = ask(Explain(name, tokens.tobytes()))
        assert isinstance(reply, Explanation)
        found.append(Found(name, reply))
    found.sort(key=lambda one: (one.explanation.length, one.explanation.matched), reverse=True)
    return found


def _namespaces(ask: Ask) -> list[str]:
    listing = ask(List(limit=1))
    assert isinstance(listing, Listing)
    return [one.namespace for one in listing.namespaces[:MAX_NAMESPACES]]


def _tier(explanation: Explanation) -> str | None:
    if not explanation.length:
        return None
    return "ram" if explanation.ram_length >= explanation.length else "ssd"


def _print(name: str, tokens: TokenArray, found: list[Found], tokenizer: Tokenizer | None) -> None:
    say(f"{name}: {counted(tokens.size, 'token')}")
    if not found:
        say("  would miss: nothing is cached at all")
        return
    best = found[0]
    said = best.explanation
    say(f"  namespace {best.namespace}")
    if said.length:
        say(
            f"  would hit: {counted(said.length, 'token')} from {_tier(said)}, "
            f"{tokens.size - said.length:,} to compute"
        )
        if 0 < said.ram_length < said.length:
            say(f"  RAM alone holds {said.ram_length:,} of them")
    else:
        say("  would miss")
    if said.reason:
        say(f"  why not more: {said.reason}: {REASONS.get(said.reason, see('Misses'))}")
    if said.matched == tokens.size and said.length == tokens.size - 1:
        say("  all of it is held; the last token is computed, since the next one comes from it")
    elif said.matched > said.length:
        held = counted(said.matched, "token")
        say(f"  {held} of it held, resumable at {said.length:,} at most")
    if said.matched < tokens.size and said.continuations:
        _print_divergence(tokens, said, tokenizer)
    for other in found[1:]:
        if other.explanation.matched:
            say(f"  also {counted(other.explanation.matched, 'token')} in {other.namespace}")


def _print_divergence(tokens: TokenArray, said: Explanation, tokenizer: Tokenizer | None) -> None:
    say(f"  it leaves what is held at position {said.matched:,}")
    before = tokens[max(0, said.matched - SHOWN_TOKENS) : said.matched]
    after = tokens[said.matched : said.matched + SHOWN_TOKENS]
    say(f"    before  {shown(before.tolist(), tokenizer) if before.size else '(start)'}")
    say(f"    prompt  {shown(after.tolist(), tokenizer)}")
    for packed in said.continuations:
        held = token_array(packed)[:SHOWN_TOKENS]
        say(f"    held    {shown(held.tolist(), tokenizer)}")


def _print_comparison(
    names: list[str], prompts: list[TokenArray], tokenizer: Tokenizer | None
) -> None:
    first, second = prompts
    common = common_prefix_length(first, second)
    say(f"{names[0]} and {names[1]} share their first {counted(common, 'token')}")
    if common < max(first.size, second.size):
        for name, tokens in zip(names, prompts, strict=True):
            say(f"  {name}: {shown(tokens[common : common + SHOWN_TOKENS].tolist(), tokenizer)}")


def _report(
    names: list[str], prompts: list[TokenArray], found: list[list[Found]]
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "prompts": [
            {
                "file": name,
                "tokens": int(tokens.size),
                "namespaces": [
                    {
                        "namespace": one.namespace,
                        "tier": _tier(one.explanation),
                        **_plain(one.explanation),
                    }
                    for one in answers
                ],
            }
            for name, tokens, answers in zip(names, prompts, found, strict=False)
        ]
    }
    if len(prompts) > 1:
        report["common"] = common_prefix_length(*prompts)
    return report


def _plain(explanation: Explanation) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(explanation, builtin_types=(bytes,))
    plain["continuations"] = [token_array(one).tolist() for one in explanation.continuations]
    return plain
