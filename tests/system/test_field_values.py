"""FIELD 3, what users got: wrong KV, somebody else's KV, or none, and no word about why."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from prefixcached.client import Cache, PromptCache, connect
from prefixcached.client.wire import Wire
from prefixcached.protocol import messages
from prefixcached.protocol.tokens import pack_tokens
from tests.support import derived_kv, derived_numpy, models
from tests.support.daemon_process import DaemonProcess
from tests.support.until import until, wait_until_loaded
from tests.system.conftest import numpy_cache

PROMPT = derived_numpy.tokens(700, seed=21)


def put(cache: Cache, prompt: list[int], namespace: str = "n", salt: int = 0) -> None:
    """Store the KV of a prompt."""
    assert cache.put(prompt, derived_numpy.caches(prompt, salt=salt), namespace=namespace)


def reused(cache: Cache, prompt: list[int], namespace: str = "n", salt: int = 0) -> int:
    """Take; check every byte; return how many tokens hit."""
    found = cache.take(prompt, namespace=namespace)
    found.drop_claim()
    if found:
        derived_numpy.assert_derived(found.kv, prompt[: found.length], salt=salt)
    return found.length if found else 0


def test_a_lease_outlives_everything_but_its_holder(both_tiers: DaemonProcess) -> None:
    """FIELD 3: no lease expires: cleared and pushed out, what is lent stays as it was (L1, L2)."""
    with numpy_cache(both_tiers.socket) as cache:
        put(cache, PROMPT)
        wire = Wire(both_tiers.socket)
        deadline = time.monotonic() + 30
        wire.open(deadline)
        take = messages.Take("n", pack_tokens([*PROMPT, 7]))
        hit, (descriptor,) = wire.request(take, deadline)
        assert isinstance(hit, messages.Hit)
        before = os.pread(descriptor, 1 << 20, 0)
        cache.clear()
        for seed in range(5):
            put(cache, derived_numpy.tokens(700, seed=100 + seed))
        assert os.pread(descriptor, 1 << 20, 0) == before
        state = cache.stats()["ram_tier"]
        assert state["leases"] == 1
        assert state["ram_bytes_by_state"]["lingering"] > 0
        wire.close()
        until(lambda: not cache.stats()["ram_tier"]["ram_bytes_by_state"]["lingering"])
        assert cache.stats()["ram_tier"]["leases"] == 0


@pytest.fixture(scope="module")
def model_and_cache() -> Iterator[tuple[Any, Cache]]:
    """A tiny real model, and its KV stored under the salt "ours"."""
    with DaemonProcess() as daemon, connect(daemon.socket, fail_open=False) as cache:
        model = models.build("llama")
        shared = PromptCache(model, cache=cache, salt="ours")
        prompt = models.tokens("llama", 60)
        kv, _ = shared.fetch(prompt)
        mx.eval(model(mx.array(prompt)[None], cache=kv))
        assert shared.store(prompt, kv)
        yield model, cache


def test_other_weights_under_the_same_name_miss(model_and_cache: tuple[Any, Cache]) -> None:
    """FIELD 3: another model under the same name misses: its weights decide; equal ones hit."""
    _, cache = model_and_cache
    prompt = models.tokens("llama", 60)
    assert PromptCache(models.build("llama"), cache=cache, salt="ours").fetch(prompt)[1] == 59
    edited = models.build("llama")
    name, array = cast(list[tuple[str, Any]], tree_flatten(edited.parameters()))[-1]
    edited.update(tree_unflatten([(name, array + mx.array(1e-3))]))
    assert PromptCache(edited, cache=cache, salt="ours").fetch(prompt)[1] == 0


def test_another_salt_misses_and_the_same_hits(model_and_cache: tuple[Any, Cache]) -> None:
    """FIELD 3: nothing leaks into another's answer: another salt misses, the same salt hits."""
    model, cache = model_and_cache
    prompt = models.tokens("llama", 60)
    assert PromptCache(model, cache=cache, salt="theirs").fetch(prompt)[1] == 0
    assert PromptCache(model, cache=cache, salt="ours").fetch(prompt)[1] == 59


def test_one_token_decides(shared: Cache) -> None:
    """FIELD 3: tokens are compared, never only hashed: one changed bit of one token ends a hit."""
    put(shared, PROMPT)
    choose = random.Random(4)
    for position in (0, 1, 255, 256, 698, 699, *choose.sample(range(700), 20)):
        changed = [*PROMPT, 7]
        # Bit 8 and above: an 8-bit token hash would not see it.
        changed[position] ^= 1 << choose.randrange(8, 20)
        assert reused(shared, changed) == position
        assert not shared.contains(changed[:700], namespace="n")
    assert shared.contains(PROMPT, namespace="n")


def test_every_length_is_reused_whole(shared: Cache) -> None:
    """FIELD 3: reuse is exact to the token: no block is lost, also across branches (T1, T3)."""
    put(shared, PROMPT)
    branch = [*PROMPT[:333], *derived_numpy.tokens(300, seed=22)]
    put(shared, branch)
    choose = random.Random(5)
    for length in (1, 2, 255, 256, 257, 333, 334, *choose.sample(range(1, 633), 15)):
        assert reused(shared, [*PROMPT[:length], 7]) == length
        assert reused(shared, [*branch[:length], 7]) == length
        # The last token is always left to be computed.
        assert reused(shared, PROMPT[:length]) == length - 1


def test_a_damaged_file_is_a_miss(both_tiers: DaemonProcess) -> None:
    """FIELD 3: a torn file is a miss: cut short, or with one bit flipped, it is not served (D3)."""
    choose = random.Random(6)
    prompts = [derived_numpy.tokens(300, seed=200 + number) for number in range(12)]
    with numpy_cache(both_tiers.socket) as cache:
        for number, prompt in enumerate(prompts):
            put(cache, prompt, namespace=str(number))
        assert cache.flush().failed == 0
        both_tiers.terminate()
        files = sorted(both_tiers.state_dir.glob("segments.noindex/*/*.segment.safetensors"))
        assert len(files) == 12
        both_tiers.start()
        wait_until_loaded(cache)
        for number, file in enumerate(files):
            whole = file.read_bytes()
            if number % 2:
                # The data stands behind the header, and a flip in padding harms nobody.
                place = len(whole) - choose.randrange(1, 30_000)
                torn = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            else:
                torn = whole[: choose.randrange(len(whole))]
            file.write_bytes(torn)
        for number, prompt in enumerate(prompts):
            found = cache.take([*prompt, 7], namespace=str(number))
            assert not found
            assert found.reason == "restore-failed"
        assert cache.stats()["ssd_tier"]["quarantined_files"] == 12


@pytest.mark.parametrize("kinds", [derived_kv.HYBRID, derived_kv.EVERY_KIND, ("append", "window")])
def test_every_kind_of_layer_hits(both_tiers: DaemonProcess, kinds: tuple[str, ...]) -> None:
    """FIELD 3: hybrid and sliding-window models hit: exact, longer and shorter prompts, or a miss.

    `tests/client/test_all_models.py` does this with every architecture of mlx-lm.
    """
    prompt = derived_kv.tokens(300, seed=23)
    with connect(both_tiers.socket, fail_open=False) as cache:
        for length in (200, 300):
            kv = derived_kv.caches(prompt[:length], kinds)
            assert cache.put(prompt[:length], kv, namespace="n")
        for asked, snapshot in ((301, 300), (300, 200), (250, 200), (201, 200), (150, 0)):
            found = cache.take([*prompt, 7][:asked], namespace="n")
            length = found.length if found else 0
            if found:
                derived_kv.assert_derived(found.kv, prompt[:length], kinds)
            if "state" in kinds:
                assert length == snapshot, "a snapshot serves at its own position alone"
            else:
                assert snapshot <= length < asked


def test_twelve_cold_agents_compute_one_prompt_once(both_tiers: DaemonProcess) -> None:
    """FIELD 3: cold agents prefill once: twelve ask together, one computes, eleven wait (Q3)."""
    computed: list[int] = []
    failures: list[BaseException] = []
    together = threading.Barrier(12)

    def agent(number: int) -> None:
        try:
            with numpy_cache(both_tiers.socket) as cache:
                together.wait(60)
                found = cache.take([*PROMPT, 7], namespace="n", wait=60.0)
                if not found:
                    computed.append(number)
                    put(cache, PROMPT)
                else:
                    derived_numpy.assert_derived(found.kv, PROMPT[: found.length])
                    assert found.length == 700
        except BaseException as error:  # noqa: BLE001, shown below
            failures.append(error)

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(12)]
    for thread in agents:
        thread.start()
    for thread in agents:
        thread.join()
    assert not failures
    assert len(computed) == 1


def test_each_miss_has_its_reason(both_tiers: DaemonProcess, tmp_path: Path) -> None:
    """FIELD 3: a miss says why: reason and matched tokens in the result, counted in `status`."""
    with numpy_cache(both_tiers.socket) as cache:
        assert cache.take(PROMPT, namespace="n").reason == "empty"  # type: ignore[union-attr]
        put(cache, PROMPT)
        hybrid = derived_numpy.caches(PROMPT, state=True)
        assert cache.put(PROMPT, hybrid, namespace="hybrid")
        whole = derived_numpy.caches(PROMPT)
        assert cache.put(PROMPT, whole, namespace="whole", minimum_length=600)
        expected = {
            ("n", (5, *PROMPT)): ("diverged", 0),
            ("hybrid", (*PROMPT[:90], 5)): ("no-checkpoint", 90),
            ("whole", (*PROMPT[:80], 5)): ("below-minimum", 80),
            ("n", (-1, 5)): ("unsupported-tokens", 0),
        }
        for (namespace, prompt), (reason, matched) in expected.items():
            found = cache.take(list(prompt), namespace=namespace)
            assert not found
            assert (found.reason, found.matched) == (reason, matched)
        misses = cache.stats()["ram_tier"]["takes"]["misses"]
        assert misses == {"empty": 1, "diverged": 1, "no-checkpoint": 1, "below-minimum": 1}
    with connect(tmp_path / "nobody") as alone:
        assert alone.take(PROMPT, namespace="n").reason == "no-daemon"  # type: ignore[union-attr]


def test_explain_shows_where_a_prompt_leaves_what_is_held(
    both_tiers: DaemonProcess, tmp_path: Path
) -> None:
    """FIELD 3: the first differing tokens are shown: on both sides, as text with a tokenizer."""
    from tests.client.word_tokenizer import word_tokenizer

    held = [position % 900 + 20 for position in range(300)]
    with numpy_cache(both_tiers.socket) as cache:
        put(cache, held)
    word_tokenizer(1000).save_pretrained(tmp_path / "tokenizer")
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*held[:120], 999, *held[121:]]))
    done = subprocess.run(
        [
            sys.executable, "-m", "prefixcached.daemon.cli", "explain", "--socket",
            str(both_tiers.socket), "--namespace", "n", "--tokenizer",
            str(tmp_path / "tokenizer"), str(prompt),
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "999" in lines["prompt"]
    assert "140" in lines["held"]
    assert "120" in done.stdout
