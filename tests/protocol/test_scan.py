"""The look at untrusted msgpack before anything is built from it: its bounds, exactly (rule C3)."""

import pytest

from prefixcached.protocol import limits
from prefixcached.protocol.scan import ScanError, scan

EMPTY = [b"\x80", b"\x90", b"\xdc\x00\x00", b"\xde\x00\x00"]
"""A map and a list of nothing, in their short and their long form."""


def test_as_many_values_as_the_limit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: the list itself counts, and the value beyond the limit is one too many."""
    monkeypatch.setattr(limits, "MAX_VALUES", 4)
    scan(b"\x93\xc0\xc0\xc0", 0, 4)
    with pytest.raises(ScanError, match="more than 4 values"):
        scan(b"\x94\xc0\xc0\xc0\xc0", 0, 5)


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_container_is_as_deep_as_another(empty: bytes) -> None:
    """C3: what is built from it nests as deep, whatever it holds."""
    outer = limits.MAX_NESTING - 1
    scan(b"\x91" * outer + empty, 0, outer + len(empty))
    with pytest.raises(ScanError, match="nested deeper"):
        scan(b"\x91" * (outer + 1) + empty, 0, outer + 1 + len(empty))
