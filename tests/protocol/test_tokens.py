"""Token ids become packed uint32, exactly or not at all (rule N5)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.protocol.errors import UnsupportedTokensError
from prefixcached.protocol.tokens import common_prefix_length, pack_tokens, token_array

IDS = st.one_of(st.integers(0, 50000), st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "range-like": lambda ids: [np.int64(i) for i in ids],
    "int64": lambda ids: np.array(ids, dtype=np.int64),
    "uint32": lambda ids: np.array(ids, dtype=np.uint32),
    "big-endian": lambda ids: np.array(ids, dtype=">u8"),
    "strided": lambda ids: np.repeat(np.array(ids, dtype=np.int64), 2)[::2],
    "bytes": lambda ids: b"".join(i.to_bytes(4, "little") for i in ids),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@given(ids=st.lists(IDS, max_size=40))
def test_every_form_gives_the_same_ids(form: Callable[[list[int]], Any], ids: list[int]) -> None:
    """N5: whatever holds the ids, they travel as 4 little-endian bytes each."""
    array = token_array(form(ids))
    assert (array.dtype.str, array.shape) == ("<u4", (len(ids),))
    assert array.tolist() == ids
    assert pack_tokens(form(ids)) == b"".join(i.to_bytes(4, "little") for i in ids)


@pytest.mark.parametrize("form", [list, tuple, lambda ids: np.array(ids, dtype=object)])
@given(
    ids=st.lists(IDS, max_size=10),
    bad=st.one_of(st.integers(max_value=-1), st.integers(min_value=2**32)),
    position=st.integers(0, 10),
)
def test_an_id_that_does_not_fit_is_never_wrapped(
    form: Callable[[list[int]], Any], ids: list[int], bad: int, position: int
) -> None:
    """N5: one id outside 0..2**32-1, wherever it stands, is refused by its own error."""
    ids.insert(position, bad)
    with pytest.raises(UnsupportedTokensError):
        token_array(form(ids))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8])
def test_an_array_with_an_id_that_does_not_fit_is_refused(dtype: type[Any]) -> None:
    """N5: the limits of the array's own dtype do not hide an id."""
    bad = np.array([5, -1], dtype=dtype) if dtype is not np.uint64 else np.array([5, 2**32], dtype)
    with pytest.raises(UnsupportedTokensError, match="4294967295"):
        token_array(bad)


@pytest.mark.parametrize(
    "tokens",
    [
        [0.5],
        [1, 2.0],
        ["1"],
        [None],
        [[1]],
        [[1], [2]],
        "abc",
        b"abc",
        np.zeros((2, 2), int),
        np.array(5),
        np.array([True, False]),
    ],
)
def test_what_is_no_token_is_a_type_error(tokens: Sequence[int]) -> None:
    """A caller's mistake is told, and is not taken for an id that cannot be stored."""
    with pytest.raises(TypeError):
        token_array(tokens)


def test_no_tokens_are_no_mistake() -> None:
    """An empty prompt is an empty array, in whatever form."""
    values: tuple[Any, ...] = ([], (), b"", np.array([]))
    for nothing in values:
        assert token_array(nothing).shape == (0,)


@given(
    prefix=st.lists(st.integers(0, 3), max_size=600),
    left=st.lists(st.integers(0, 3), max_size=5),
    right=st.lists(st.integers(0, 3), max_size=5),
)
def test_the_common_prefix_is_where_a_loop_finds_it(
    prefix: list[int], left: list[int], right: list[int]
) -> None:
    """T1: comparing blocks finds the first difference wherever it stands."""
    a, b = prefix + left, prefix + right
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix_length(token_array(a), token_array(b)) == expected
