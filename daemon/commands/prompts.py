"""Reading prompts that people give to `explain`, and showing tokens to them."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import click

from prefixcached.protocol import limits
from prefixcached.protocol.errors import UnsupportedTokensError
from prefixcached.protocol.tokens import TokenArray, token_array

_SEPARATORS: Final = re.compile(r"[\s,]+")


class Tokenizer(Protocol):
    """What is used of a tokenizer of `transformers`."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a model's folder or hub name.

    Raises:
        click.ClickException: transformers is missing, or knows no such tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise click.ClickException(
            "--tokenizer needs transformers; install it with `pip install transformers`, "
            "or give token ids"
        ) from error
    try:
        factory: Any = AutoTokenizer
        tokenizer: Any = factory.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise click.ClickException(f"no tokenizer at {name}: {error}") from error
    return cast("Tokenizer", tokenizer)


def read_prompt(file: str, tokenizer: Tokenizer | None, *, is_text: bool) -> TokenArray:
    """Return the tokens in ``file``, "-" for standard input.

    Raises:
        click.UsageError: It cannot be read, or is no list of token ids.
    """
    if file == "-" and sys.stdin.isatty():
        click.echo("reading the prompt from standard input; Ctrl-D ends it", err=True)
    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"cannot read {file}: {error}") from error
    if is_text:
        assert tokenizer is not None, "the command requires it"
        ids: Any = tokenizer.encode(content)
    else:
        ids = parse_ids(content, file)
    try:
        tokens = token_array(ids)
    except UnsupportedTokensError as error:
        raise click.UsageError(
            f"{file}: {error}; prompts with others are neither stored nor found"
        ) from error
    if not tokens.size:
        where = "standard input" if file == "-" else file
        raise click.UsageError(f"{where} has no tokens; give a file of token ids, or pipe them in")
    if tokens.size > limits.MAX_TOKENS:
        raise click.UsageError(f"{file} has {tokens.size} tokens, at most {limits.MAX_TOKENS} fit")
    return tokens


def parse_ids(content: str, source: str) -> list[int]:
    """Return token ids written as a JSON array, or separated by blanks or commas.

    Raises:
        click.UsageError: Something in it is no integer; it is named.
    """
    content = content.strip()
    if content.startswith("["):
        try:
            values: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"{source} is no JSON array of token ids: {error}") from error
    else:
        values = [_number(word, source) for word in _SEPARATORS.split(content) if word]
    for value in values:
        if isinstance(value, list | dict):  # which may be as deep as can be read, and no deeper
            raise click.UsageError(f"{source}: a list of token ids has no other in it")
        if not isinstance(value, int) or isinstance(value, bool):
            raise click.UsageError(f"{source}: {value!r} is no token id")
    return list(values)


def _number(word: str, source: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise click.UsageError(
            f"{source}: {word[:40]!r} is no token id; for text use --text --tokenizer MODEL"
        ) from error


def shown(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Token ids for people, as text too where there is a tokenizer."""
    numbers = " ".join(map(str, tokens)) or "(end)"
    if tokenizer is None or not len(tokens):
        return numbers
    return f"{numbers}  {tokenizer.decode(list(tokens))!r}"
