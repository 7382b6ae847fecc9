"""Token ids as digests: which prompts share which prefix stays, the tokens do not."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.daemon.trace.prefix_digests import PrefixDigests, siphash
from prefixcached.protocol.tokens import common_prefix_length, pack_tokens, token_array

IDS = st.integers(0, (1 << 32) - 1)
PROMPTS = st.lists(st.one_of(st.integers(0, 3), IDS), max_size=40)


def digest(digests: PrefixDigests, prompt: list[int]) -> list[int]:
    return [int(word) for word in token_array(digests.of(pack_tokens(prompt)))]


@given(head=PROMPTS, one=PROMPTS, other=PROMPTS)
def test_prompts_share_as_much_as_their_digests(
    head: list[int], one: list[int], other: list[int]
) -> None:
    """Equal prefixes have equal digests, and what parted stays apart at every later position."""
    digests = PrefixDigests()
    left, right = [*head, *one], [*head, *other]
    common = common_prefix_length(token_array(left), token_array(right))
    ours, theirs = digest(digests, left), digest(digests, right)
    assert len(ours) == len(left)
    assert ours[:common] == theirs[:common]
    assert all(a != b for a, b in zip(ours[common:], theirs[common:], strict=False))


@given(prompt=st.lists(IDS, min_size=2, max_size=40))
def test_another_trace_has_other_digests(prompt: list[int]) -> None:
    """A secret is drawn for each trace: two traces cannot be joined, nor a table of them made."""
    one, other = digest(PrefixDigests(), prompt), digest(PrefixDigests(), prompt)
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_token_looks_different_everywhere() -> None:
    """One token a thousand times has a thousand digests: nothing can be counted."""
    assert len(set(digest(PrefixDigests(), [7] * 1000))) == 1000


def test_digests_of_known_tokens_tell_nothing_of_others() -> None:
    """Were they linear, equal steps of the token would be equal steps of the digest."""
    digests = PrefixDigests()
    words = [digest(digests, [11, token])[1] for token in range(500)]
    steps = {(b - a) % (1 << 32) for a, b in pairwise(words)}
    assert len(steps) == 499


@given(prefix=PROMPTS, more=PROMPTS)
def test_a_continuation_has_the_digests_of_the_whole(prefix: list[int], more: list[int]) -> None:
    """What is said of tokens behind a prompt fits the prompt's digests."""
    digests = PrefixDigests()
    whole = digests.of(pack_tokens([*prefix, *more]))
    assert (
        digests.of_continuation(pack_tokens(prefix), pack_tokens(more))
        == (whole[4 * len(prefix) :])
    )


def test_a_longer_prompt_later_keeps_earlier_digests() -> None:
    """The secret factors grow with the longest prompt and never change."""
    digests = PrefixDigests()
    short = digest(digests, list(range(10)))
    assert digest(digests, list(range(20_000)))[:10] == short


def test_siphash_is_the_published_one() -> None:
    """The vector of eight bytes in the authors' reference implementation."""
    key = bytes(range(16))
    word = np.frombuffer(bytes(range(8)), dtype="<u8").astype(np.uint64)
    assert siphash(key, word).astype("<u8").tobytes().hex() == "6224939a79f5f593"
