"""Attachments through the client and the real daemon (rules A1, T5, P3)."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixcached.client import Cache, Hit, Miss
from prefixcached.client.kv import Attachment
from tests.client.kv.loopback import build, prefill
from tests.support import derived_kv, models
from tests.support.daemon_process import DaemonProcess
from tests.support.until import ram_tier, until

PROMPT = derived_kv.tokens(400, seed=5)


@pytest.fixture
def process() -> Iterator[DaemonProcess]:
    """A daemon with both tiers."""
    with DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "256MiB") as process:
        yield process


@pytest.fixture
def cache(process: DaemonProcess) -> Iterator[Cache]:
    """A client that raises."""
    with Cache(process.socket, timeout=30, fail_open=False) as cache:
        until(lambda: not ram_tier(cache)["loading"])
        yield cache


def features(seed: int) -> dict[str, Attachment]:
    """Two sets of tensors; one of them in a dtype that numpy lacks."""
    mx.random.seed(seed)
    return {
        "vision": Attachment(
            "vision-features/1",
            {"grid": mx.random.normal((2, 3, 5)).astype(mx.bfloat16), "none": mx.zeros((0, 4))},
            {"image": f"sha-{seed}", "sizes": [1, 2.5, None]},
        ),
        "adapter": Attachment("note/1", metadata=[seed]),
    }


def same(found: Any, expected: dict[str, Attachment]) -> bool:
    """Whether two sets of attachments are equal, bit for bit."""
    return found.keys() == expected.keys() and all(
        (found[name].schema, found[name].metadata) == (wanted.schema, wanted.metadata)
        and found[name].tensors.keys() == wanted.tensors.keys()
        and all(
            found[name].tensors[key].dtype == array.dtype
            and found[name].tensors[key].shape == array.shape
            and mx.array_equal(found[name].tensors[key], array).item()
            for key, array in wanted.tensors.items()
        )
        for name, wanted in expected.items()
    )


def hit(cache: Cache, tokens: list[int]) -> Hit:
    result = cache.take(tokens, namespace="n")
    assert isinstance(result, Hit)
    return result


def put(cache: Cache, tokens: list[int], attachments: dict[str, Attachment] | None = None) -> None:
    assert cache.put(tokens, derived_kv.caches(tokens), namespace="n", attachments=attachments)


def test_attachments_come_with_their_own_position(cache: Cache) -> None:
    """A1, T5: a prompt longer than theirs gets them; others get the KV and nothing else."""
    put(cache, PROMPT, features(1))
    assert same(hit(cache, [*PROMPT, 7]).attachments, features(1))
    shorter = hit(cache, PROMPT[:200])
    assert (shorter.length, shorter.attachments) == (199, None)
    branch = hit(cache, [*PROMPT[:300], 1, 2, 3])
    assert (branch.length, branch.attachments) == (300, None)
    put(cache, [*PROMPT, 7, 8])
    longer = hit(cache, [*PROMPT, 7, 8, 9])
    assert (longer.length, longer.attachments) == (402, None)
    assert same(hit(cache, [*PROMPT, 6]).attachments, features(1))


def test_the_newest_attachments_of_a_position_win(cache: Cache) -> None:
    """P3: a second put of the same tokens replaces them; one without any leaves them."""
    put(cache, PROMPT, features(1))
    put(cache, PROMPT, features(2))
    assert same(hit(cache, [*PROMPT, 7]).attachments, features(2))
    put(cache, PROMPT)
    assert same(hit(cache, [*PROMPT, 7]).attachments, features(2))


def test_attachments_are_charged_and_persisted(process: DaemonProcess, cache: Cache) -> None:
    """A1: they count in the budget, and come back from SSD after kill -9."""
    put(cache, PROMPT)
    before = ram_tier(cache)["ram_bytes"]
    put(cache, PROMPT, features(3))
    assert ram_tier(cache)["ram_bytes"] > before
    assert cache.flush(timeout=60)
    process.kill()
    process.start()
    with Cache(process.socket, timeout=30, fail_open=False) as again:
        until(lambda: not ram_tier(again)["loading"])
        result = hit(again, [*PROMPT, 7])
        assert result.tier == "ssd"
        assert same(result.attachments, features(3))


@pytest.mark.parametrize(
    ("attached", "said"),
    [
        (Attachment("s/1", {"x": mx.ones((1,) * 9)}), "9 dimensions; at most 8"),
        (Attachment("s/1", {}, "x" * (5 << 20)), "store large values as tensors"),
        (Attachment("s/1", {str(n): mx.zeros(1) for n in range(8193)}), "at most 8192"),
    ],
    ids=["dimensions", "metadata", "tensors"],
)
def test_what_no_message_carries_is_the_callers_mistake(
    cache: Cache, attached: Attachment, said: str
) -> None:
    """A1, C4: it raises and says what fits; the daemon is not asked, so nobody else is put off."""
    with pytest.raises(ValueError, match=said):
        cache.put(PROMPT, derived_kv.caches(PROMPT), namespace="n", attachments={"a": attached})
    assert cache.statistics().failures == {}
    put(cache, PROMPT)
    assert hit(cache, [*PROMPT, 7]).length == 400


def test_any_minimum_can_be_asked_for(cache: Cache) -> None:
    """T6: one beyond every prompt makes it usable by none, and breaks nothing."""
    kv = derived_kv.caches(PROMPT)
    assert cache.put(PROMPT, kv, namespace="n", minimum_length=1 << 62)
    missed = cache.take([*PROMPT, 7], namespace="n")
    assert isinstance(missed, Miss)
    assert missed.reason == "below-minimum"


def test_attachments_come_with_a_window_too(cache: Cache) -> None:
    """A1, P2: also where the rows that their position needs were stored alone before."""
    model, tokens = build("exaone4"), models.tokens("exaone4", 60)
    for length, attachments in ((60, None), (30, None), (30, features(1))):
        kv = make_prompt_cache(model)
        prefill(model, kv, tokens[:length])
        assert cache.put(tokens[:length], kv, namespace="w", attachments=attachments)
    found = cache.take([*tokens[:30], 1], namespace="w")
    assert isinstance(found, Hit)
    assert same(found.attachments, features(1))
