"""`prefixcached ls`: the prefix tree, as a tree."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from prefixcached.daemon.commands.asking import asking, unknown_namespace
from prefixcached.daemon.commands.common import (
    age_text,
    counted,
    plain,
    socket_option,
    terminal,
)
from prefixcached.daemon.sizes import bytes_text
from prefixcached.protocol import limits
from prefixcached.protocol.messages import List, Listed, ListedNamespace, Listing

if TYPE_CHECKING:
    from rich.tree import Tree

DEFAULT_LIMIT: Final = 200
"""Images shown unless asked for more: a few screens."""

HEADER: Final = "tokens A..B: positions A up to B, without B itself; from 0, as in `explain`"

MAX_NAME_CHARACTERS: Final = 60
"""Of a namespace's name in the tree: most are digests."""


@click.command(
    "ls",
    short_help="Show what is cached, as the tree of prefixes.",
    epilog="Example: prefixcached ls --namespace demo --limit 20",
)
@socket_option
@click.option("--namespace", metavar="NAME", help="Only this namespace.")
@click.option(
    "--limit",
    type=click.IntRange(1, limits.MAX_LISTED),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="Images to show, those used last first.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def list_tree(socket: Path, namespace: str | None, limit: int, *, as_json: bool) -> None:
    """Show what is cached: namespaces, and the tree of prefixes in each.

    Every line is one piece: its tokens, bytes, where it is, when it was last used, and by how many
    branches its tokens are shared.
    """
    with asking(socket) as ask:
        listing = ask(List(namespace=namespace, limit=limit))
        assert isinstance(listing, Listing)
        if namespace is not None and not listing.namespaces:
            raise unknown_namespace(ask, namespace)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(listing), indent=2))
    else:
        _print(listing)


def _print(listing: Listing) -> None:
    if not listing.namespaces:
        click.echo("nothing is cached; `prefixcached explain` says what a prompt would find")
        return
    click.echo(HEADER)
    console = terminal()
    for one in listing.namespaces:
        console.print(tree_of(one))
    if not listing.complete:
        click.echo("and more; --limit shows it, --namespace narrows it down")


def tree_of(namespace: ListedNamespace) -> "Tree":
    """Return one namespace as something that rich prints."""
    from rich.text import Text
    from rich.tree import Tree

    name = plain(namespace.namespace) or "(empty name)"
    if len(name) > MAX_NAME_CHARACTERS:
        name = f"{name[: MAX_NAME_CHARACTERS - 1]}…"
    tree = Tree(Text(f"{name}  {counted(namespace.count, 'piece')}", style="bold"))
    above: list[tuple[int, Tree]] = [(-1, tree)]
    for image in namespace.images:
        while above[-1][0] >= image.depth:
            above.pop()
        above.append((image.depth, above[-1][1].add(Text(_line(image)))))
    return tree


def _line(image: Listed) -> str:
    match image.kind:
        case "segment":
            one = image.end - image.start == 1
            what = f"{'token' if one else 'tokens'} {image.start:,}..{image.end:,}"
        case "checkpoint":
            what = f"checkpoint at {image.end:,}"
        case "object":
            what = f"object {plain(image.key)}"
    tiers = "+".join(name for name, held in (("ram", image.in_ram), ("ssd", image.on_ssd)) if held)
    parts = [what, bytes_text(image.nbytes), tiers or "leaving", _used(image)]
    if image.sharing > 1:
        parts.append(f"shared by {image.sharing}")
    if image.holders:
        parts.append(f"in use by {image.holders}")
    return "  ".join(parts)


def _used(image: Listed) -> str:
    if image.idle_seconds is None:
        return "not used since the start"
    return f"used {age_text(image.idle_seconds)} ago, {counted(image.uses, 'hit')}"
