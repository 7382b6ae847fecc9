"""`SharedPromptCache` and mlx-lm's `LRUPromptCache`: one contract, and where the stock one errs.

The tests that take ``subject`` run against both classes. Those after them are about ours alone; a
comment says what the stock class does there.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache, trim_prompt_cache

from prefixcached.client import Cache, connect
from prefixcached.client.mlx_lm import SharedPromptCache
from prefixcached.client.prompt_cache import PromptCache
from prefixcached.client.shared_prompt_cache import PAUSE_AFTER_TIMEOUT_SECONDS
from tests.client.kv.loopback import build, forward, leaves, prefill, same_bits
from tests.client.test_fingerprint import model as other_model
from tests.support import models
from tests.support.daemon_process import DaemonProcess
from tests.support.small_daemon import SmallDaemon

KEY = ("a/model", None, None)
OTHER_KEY = ("another/model", None, None)
TOKENS = models.tokens("llama", 120)

Subject: TypeAlias = Any
"""One of both; mlx-lm has no types."""

Bound = Callable[..., SharedPromptCache]


@pytest.fixture(scope="module")
def small_prompts() -> Iterator[DaemonProcess]:
    """One daemon for all tests, which takes prefixes of any length."""
    with DaemonProcess("--put-min-tokens", "1") as process:
        yield process


@pytest.fixture
def cache(small_prompts: DaemonProcess) -> Iterator[Cache]:
    with connect(small_prompts.socket) as connected:
        assert connected.clear()
        yield connected


@pytest.fixture
def bound(cache: Cache) -> Bound:
    """Makes a `SharedPromptCache` in which KEY is bound to a model, and OTHER_KEY to another."""

    def make(model: Any = None, **options: Any) -> SharedPromptCache:
        shared = SharedPromptCache()
        share = PromptCache(model or build("llama"), cache=cache, **options)
        shared.bind(KEY, share)
        shared.bind(OTHER_KEY, PromptCache(build("qwen2"), cache=cache))
        return shared

    return make


@pytest.fixture(params=["LRUPromptCache", "SharedPromptCache"])
def subject(request: pytest.FixtureRequest, bound: Bound) -> Subject:
    return LRUPromptCache(10) if request.param == "LRUPromptCache" else bound()


def computed(tokens: list[int], model: Any = None) -> list[Any]:
    """The model's caches after ``tokens``."""
    model = model or build("llama")
    kv: list[Any] = make_prompt_cache(model)
    prefill(model, kv, tokens)
    return kv


def holds(kv: list[Any] | None, of: list[Any], length: int) -> bool:
    """Whether ``kv`` is the first ``length`` tokens of ``of``, bit for bit."""
    assert kv is not None
    return all(
        ours.offset == length
        and same_bits(ours.keys[..., :length, :], theirs.keys[..., :length, :])
        and same_bits(ours.values[..., :length, :], theirs.values[..., :length, :])
        for ours, theirs in zip(kv, of, strict=True)
    )


# -- both ---------------------------------------------------------------------------------------


def test_nothing_known(subject: Subject) -> None:
    """A prompt of which nothing is known comes back whole, without caches."""
    assert subject.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
    assert (len(subject), subject.nbytes) == (0, 0)


@pytest.mark.parametrize("cache_type", ["assistant", "user", "system"])
def test_a_longer_prompt(subject: Subject, cache_type: str) -> None:
    """T1: a prompt that goes on where an entry ends gets all of it, and the rest as tokens."""
    kv = computed(TOKENS[:50])
    subject.insert_cache(KEY, TOKENS[:50], kv, cache_type=cache_type)
    found, rest = subject.fetch_nearest_cache(KEY, TOKENS)
    assert rest == TOKENS[50:]
    assert holds(found, kv, 50)


def test_a_shorter_prompt(subject: Subject) -> None:
    """T3, T5: a prompt inside an entry gets all but its last token."""
    kv = computed(TOKENS[:50])
    subject.insert_cache(KEY, TOKENS[:50], kv)
    found, rest = subject.fetch_nearest_cache(KEY, TOKENS[:30])
    assert rest == TOKENS[29:30]
    assert holds(found, kv, 29)


def test_a_branch(subject: Subject) -> None:
    """T5: a prompt that leaves an entry in its middle gets it up to there."""
    kv = computed(TOKENS[:50])
    subject.insert_cache(KEY, TOKENS[:50], kv)
    branch = [*TOKENS[:40], TOKENS[40] + 1, 7, 8]
    found, rest = subject.fetch_nearest_cache(KEY, branch)
    assert rest == branch[40:]
    assert holds(found, kv, 40)


def test_the_longest_of_several(subject: Subject) -> None:
    """T1: of a system prompt, a chat and an older chat, the longest prefix serves."""
    for count, kind in ((20, "system"), (35, "user"), (60, "assistant")):
        subject.insert_cache(KEY, TOKENS[:count], computed(TOKENS[:count]), cache_type=kind)
    other = [*TOKENS[:20], 5, 6, 7]
    subject.insert_cache(KEY, other, computed(other))
    assert subject.fetch_nearest_cache(KEY, TOKENS)[1] == TOKENS[60:]
    assert subject.fetch_nearest_cache(KEY, [*other, 9])[1] == [9]


def test_what_is_fetched_is_the_callers_own(subject: Subject) -> None:
    """T2: nothing that one taker does to its caches reaches another."""
    kv = computed(TOKENS[:50])
    subject.insert_cache(KEY, TOKENS[:50], copy.deepcopy(kv))
    first, rest = subject.fetch_nearest_cache(KEY, TOKENS)
    assert first is not None
    forward(build("llama"), first, rest)
    trim_prompt_cache(first, 100)
    forward(build("llama"), first, [3, 1, 4])
    again, _ = subject.fetch_nearest_cache(KEY, TOKENS)
    assert holds(again, kv, 50)


def test_models_are_apart(subject: Subject) -> None:
    """N1: what one model computed is not another's."""
    subject.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    assert subject.fetch_nearest_cache(OTHER_KEY, TOKENS) == (None, TOKENS)


def test_the_caller_keeps_its_lists(subject: Subject) -> None:
    """The token lists are the caller's to change afterwards, as mlx_lm.server does."""
    tokens = TOKENS[:50]
    subject.insert_cache(KEY, tokens, computed(tokens))
    prompt = TOKENS[:60]
    _, rest = subject.fetch_nearest_cache(KEY, prompt)
    rest.append(1)
    assert prompt == TOKENS[:60]


def test_the_figures_agree(subject: Subject) -> None:
    """`len` and `nbytes` are sums of `stats_by_type`, in mlx-lm's order; repeats add nothing."""
    for _ in range(2):
        subject.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]), cache_type="system")
    other = [9, *TOKENS[:40]]
    subject.insert_cache(KEY, other, computed(other))
    stats = subject.stats_by_type()
    assert list(stats) == ["assistant", "user", "system"]
    assert [kind["n_sequences"] for kind in stats.values()] == [1, 0, 1]
    assert len(subject) == 2
    assert subject.nbytes == sum(kind["n_bytes"] for kind in stats.values()) > 0
    assert stats["user"]["n_bytes"] == 0


def test_trimming_to_plenty(subject: Subject) -> None:
    """`trim_to` with room enough changes nothing; it takes mlx_lm.server's arguments."""
    subject.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    subject.trim_to(n_sequences=5, n_bytes=1 << 40)
    subject.trim_to(n_bytes=1 << 40)
    assert subject.fetch_nearest_cache(KEY, TOKENS)[1] == TOKENS[50:]


# -- where the stock one is wrong -----------------------------------------------------------------


def test_an_exact_hit_leaves_a_token(bound: Bound) -> None:
    """T3: the very prompt that was stored gets all but its last token."""
    # Stock: rest == [], of which no logits can be computed; its server's thread dies of it.
    shared, kv = bound(), computed(TOKENS[:50])
    shared.insert_cache(KEY, TOKENS[:50], kv)
    found, rest = shared.fetch_nearest_cache(KEY, TOKENS[:50])
    assert rest == TOKENS[49:50]
    assert holds(found, kv, 49)


def test_an_entry_of_one_token(bound: Bound) -> None:
    """T1: a prefix of one token is a prefix, for recurrent state too."""
    # Stock: not found unless its caches can be trimmed, since its search asks for an index above 0.
    model = build("qwen3_next")
    shared, tokens = bound(model), models.tokens("qwen3_next", 10)
    shared.insert_cache(KEY, tokens[:1], computed(tokens[:1], model))
    found, rest = shared.fetch_nearest_cache(KEY, tokens)
    assert found is not None
    assert rest == tokens[1:]


def test_the_producer_goes_on(bound: Bound) -> None:
    """T2, P1: what was stored stays, whatever its producer does with its caches."""
    # Stock: keeps the caller's list, so the entry grows and a hit hands out other tokens' KV.
    shared, kv = bound(), computed(TOKENS[:50])
    kept = copy.deepcopy(kv)
    shared.insert_cache(KEY, TOKENS[:50], kv)
    forward(build("llama"), kv, [5, 5, 5])
    found, _ = shared.fetch_nearest_cache(KEY, TOKENS)
    assert holds(found, kept, 50)


def test_more_tokens_than_kv(bound: Bound) -> None:
    """P1: tokens beyond what the caches cover are not stored; speculative decoding has such."""
    # Stock: stores the key as given, so a hit skips tokens that no cache has seen.
    shared, kv = bound(), computed(TOKENS[:50])
    shared.insert_cache(KEY, TOKENS[:52], kv)
    found, rest = shared.fetch_nearest_cache(KEY, TOKENS)
    assert rest == TOKENS[50:]
    assert holds(found, kv, 50)


def test_other_weights_under_one_name(bound: Bound) -> None:
    """N2: a key only names a model; what it shares is decided by its live weights."""
    # Stock: the name is the key, so a model that was loaded anew hits its predecessor's KV.
    bound().insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    assert bound(other_model()).fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
    assert bound().fetch_nearest_cache(KEY, TOKENS)[1] == TOKENS[50:]


def test_a_hybrid_model_at_its_boundaries(bound: Bound) -> None:
    """T5, P11: recurrent state is found at every position that was inserted, also a held one's."""
    # Stock: the same, but its exact hit cannot be answered at all: the state cannot step back.
    model = build("qwen3_next")
    tokens = models.tokens("qwen3_next", 60)
    shared = bound(model)
    for count in (20, 40):
        shared.insert_cache(KEY, tokens[:count], computed(tokens[:count], model))
    assert shared.fetch_nearest_cache(KEY, tokens)[1] == tokens[40:]
    assert shared.fetch_nearest_cache(KEY, tokens[:40])[1] == tokens[20:40]


# -- ours alone ---------------------------------------------------------------------------------


def test_nothing_shared_is_evicted(bound: Bound) -> None:
    """E2: trimming the server's own share leaves what every process uses."""
    shared = bound()
    shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    shared.trim_to(n_sequences=0, n_bytes=0)
    assert bound().fetch_nearest_cache(KEY, TOKENS)[1] == TOKENS[50:]


def test_images_are_neither_stored_nor_looked_up(bound: Bound) -> None:
    """N5: mlx_lm.server's negative ids of images are a miss, counted."""
    shared = bound()
    image = -(2**60) + 12345
    prompt = [*TOKENS[:20], image, image, *TOKENS[20:50]]
    shared.insert_cache(KEY, prompt, computed([*TOKENS[:22], *TOKENS[20:50]]))
    assert shared.fetch_nearest_cache(KEY, prompt) == (None, prompt)
    statistics = shared.statistics()
    assert statistics.declined == {"unsupported-tokens": 1}
    assert statistics.misses == {"unsupported-tokens": 1}
    assert len(shared) == 0


def test_caches_that_do_not_fit(bound: Bound, caplog: pytest.LogCaptureFixture) -> None:
    """P1: a mix-up is logged and counted, and does not end the thread that generates."""
    shared = bound()
    shared.insert_cache(KEY, TOKENS[:80], computed(TOKENS[:50]))
    assert shared.statistics().declined == {"invalid": 1}
    assert "80 tokens" in caplog.text
    shared.insert_cache(KEY, TOKENS[:50], [object()])
    assert shared.statistics().declined == {"invalid": 2}
    assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)


def test_a_key_that_nobody_bound(bound: Bound) -> None:
    """N2: without a live model there is no identity, so nothing is shared."""
    shared = bound()
    shared.unbind_all()
    shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
    assert shared.statistics().declined == {"unknown-model": 1}
    assert shared.statistics().misses == {"unknown-model": 1}


def test_figures_of_what_was_reused(bound: Bound) -> None:
    """C5: hits, misses and tokens are counted."""
    shared = bound()
    shared.fetch_nearest_cache(KEY, TOKENS[:1])
    shared.fetch_nearest_cache(KEY, TOKENS)
    shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    shared.fetch_nearest_cache(KEY, TOKENS)
    statistics = shared.statistics()
    assert (statistics.hits, statistics.stored) == (1, 1)
    assert (statistics.tokens_requested, statistics.tokens_reused) == (241, 50)
    assert statistics.misses == {"too-short": 1, "empty": 1}


def test_quantised_kv(bound: Bound) -> None:
    """N4: caches that mlx-lm quantised on the way are found by a server with the same flags."""
    flags: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30}
    kv = [entry.to_quantized(group_size=32, bits=8) for entry in computed(TOKENS[:50])]
    bound(**flags).insert_cache(KEY, TOKENS[:50], kv)
    found, rest = bound(**flags).fetch_nearest_cache(KEY, TOKENS)
    assert found is not None
    assert [type(entry) for entry in found] == [type(entry) for entry in kv]
    assert rest == TOKENS[50:]
    assert bound().fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
    assert bound(**flags | {"kv_bits": 4}).fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)


def test_a_draft_model_is_stored_apart(cache: Cache) -> None:
    """N2: a draft model's caches follow the model's; each is found up to where both reach."""
    model, draft = build("llama"), other_model()
    shares = PromptCache(model, cache=cache), PromptCache(draft, cache=cache)
    shared = SharedPromptCache()
    shared.bind(KEY, *shares)
    kv = [*computed(TOKENS[:50], model), *computed(TOKENS[:48], draft)]
    shared.insert_cache(KEY, TOKENS[:51], kv)
    found, rest = shared.fetch_nearest_cache(KEY, TOKENS)
    assert rest == TOKENS[48:]
    assert found is not None
    assert holds(found, kv, 48)
    # The model alone has more.
    assert shares[0].fetch(TOKENS)[1] == 50
    alone = SharedPromptCache()
    alone.bind(KEY, shares[0])
    alone.insert_cache(KEY, [9, 9, *TOKENS], computed([9, 9, *TOKENS]))
    assert shared.fetch_nearest_cache(KEY, [9, 9, *TOKENS, 1])[0] is None


def test_claims_end_with_the_caches(cache: Cache, bound: Bound) -> None:
    """Q1: who fetched through this class and computes nothing keeps nobody waiting."""
    shared, prompt = bound(), models.tokens("llama", 600)
    assert shared.fetch_nearest_cache(KEY, prompt)[0] is None
    assert cache.statistics().claims == 0


# -- trouble with the daemon ----------------------------------------------------------------------


def test_no_daemon(tmp_path: Path) -> None:
    """C4: without a daemon everything is a miss, and the caller's prompt is untouched."""
    shared = SharedPromptCache()
    shared.bind(KEY, PromptCache(build("llama"), cache=connect(tmp_path / "nobody")))
    shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
    assert shared.statistics().misses == {"no-daemon": 1}
    assert shared.statistics().declined == {"no-daemon": 1}


def test_a_cache_that_somebody_closed(daemon: DaemonProcess) -> None:
    """DESIGN 1.2: an answer goes on without it."""
    shared = SharedPromptCache()
    with connect(daemon.socket) as cache:
        shared.bind(KEY, PromptCache(build("llama"), cache=cache))
    shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
    assert shared.statistics().misses == shared.statistics().declined == {"closed": 1}


def test_back_after_the_daemon(daemon: DaemonProcess) -> None:
    """C4: a killed daemon costs misses, and a restarted one is used again."""
    clock = [0.0]
    cache = Cache(daemon.socket, timeout=10, clock=lambda: clock[0])
    shared = SharedPromptCache()
    shared.bind(KEY, PromptCache(build("llama"), cache=cache))
    shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    daemon.kill()
    assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
    daemon.start()
    clock[0] += 60
    shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
    assert shared.fetch_nearest_cache(KEY, TOKENS)[1] == TOKENS[50:]
    cache.close()


def test_a_daemon_that_hangs_is_left_alone(tmp_path: Path) -> None:
    """C4: after one call that timed out none is made for a while: it would stall every stream."""
    clock = [0.0]
    with SmallDaemon(tmp_path / "s") as daemon, connect(tmp_path / "s", timeout=0.2) as cache:
        shared = SharedPromptCache(clock=lambda: clock[0])
        shared.bind(KEY, PromptCache(build("llama"), cache=cache))
        daemon.on_request = lambda _, request: type(request).__name__ == "Take"
        assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
        asked = len(daemon.requests)
        clock[0] = PAUSE_AFTER_TIMEOUT_SECONDS - 1
        assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
        shared.insert_cache(KEY, TOKENS[:50], computed(TOKENS[:50]))
        assert len(daemon.requests) == asked
        assert shared.statistics().misses == {"timeout": 1, "paused": 1}
        assert shared.statistics().declined == {"paused": 1}
        daemon.on_request = None
        clock[0] = PAUSE_AFTER_TIMEOUT_SECONDS
        assert shared.fetch_nearest_cache(KEY, TOKENS) == (None, TOKENS)
        assert shared.statistics().misses["paused"] == 1


# -- the batched path of mlx_lm.server ------------------------------------------------------------

QUICK = ("llama", "gemma3_text", "qwen3_next", "deepseek_v32")
"""One for each kind of caches; the others take minutes together."""

ALL = (pytest.mark.exhaustive, pytest.mark.timeout(600))

NOT_BATCHABLE = ("llama4",)
"""Their chunked caches cannot be merged: mlx_lm.server serves them alone."""

BATCHED = [
    pytest.param(name, marks=() if name in QUICK else ALL)
    for name in models.names()
    if name not in NOT_BATCHABLE
]


@pytest.mark.parametrize("name", BATCHED)
def test_what_a_batch_extracts(cache: Cache, name: str) -> None:
    """T12: caches extracted from a batch are stored, and continue as the batch's own do."""
    model = build(name)
    shared = SharedPromptCache()
    shared.bind(KEY, PromptCache(model, cache=cache))
    tokens = models.tokens(name, 50)
    system, prompts = tokens[:20], [tokens[:40], [*tokens[:20], 3, 5, *tokens[20:25]]]
    generator = BatchGenerator(model, max_tokens=3)
    generator.insert_segments([[system, prompts[0][20:]], [prompts[1]]])
    extracted = []
    finished = 0
    while finished < 2:
        progress, generated = generator.next()
        ended = [r.uid for r in progress if r.end_of_segment and not r.end_of_prompt]
        extracted += [(k[:], kv) for kv, k in generator.extract_cache(ended).values()]
        for response in generated:
            if response.finish_reason is not None:
                assert response.all_tokens is not None
                extracted.append((response.all_tokens[:], response.prompt_cache))
                finished += 1
    generator.close()
    assert len(extracted) == 5
    for key, kv in extracted:
        shared.insert_cache(KEY, key, kv)
    assert shared.statistics().declined == {}
    for key, kv in extracted:
        suffix = [7, 8]
        found, rest = shared.fetch_nearest_cache(KEY, [*key, *suffix])
        assert rest == suffix
        assert found is not None
        assert [type(c) for c in leaves(found)] == [type(c) for c in leaves(kv)]
        continued = forward(model, copy.deepcopy(kv), suffix)
        assert same_bits(forward(model, found, suffix), continued)
    # And what was restored is merged into the next batch.
    found, rest = shared.fetch_nearest_cache(KEY, tokens)
    assert found is not None
    again = BatchGenerator(model, max_tokens=2)
    again.insert_segments([[rest]], caches=[found], all_tokens=[tokens[: len(tokens) - len(rest)]])
    produced = [r.token for _ in range(2) for r in again.next_generated()]
    again.close()
    assert len(produced) == 2


def test_rows_before_the_window_are_shared_where_they_are_its_own(bound: Bound) -> None:
    """T13: caches that were fetched and grew were never in a batch: all their rows are believed."""
    model, tokens = build("exaone4"), models.tokens("exaone4", 60)
    shared = bound(model)
    shared.insert_cache(KEY, tokens[:40], computed(tokens[:40], model))
    kv, rest = shared.fetch_nearest_cache(KEY, tokens[:41])
    assert kv is not None
    assert len(rest) == 1
    prefill(model, kv, tokens[40:60])
    shared.insert_cache(KEY, tokens, kv)
    branch = [*tokens[:50], (tokens[50] + 1) % 100, 3]
    _, rest = shared.fetch_nearest_cache(KEY, branch)
    assert len(rest) == 2
    assert shared.fetch_nearest_cache(KEY, [*tokens[:30], 1, 1])[0] is None
