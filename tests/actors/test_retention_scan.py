"""A batch sweep through a cache that holds live conversations (rule E9)."""

from collections.abc import Iterator

import pytest

from prefixcached.actors.retention_policy import DEFAULT_POLICY
from tests.support.agent_traces import HollowCore, Score, Traffic, Turn, replay
from tests.support.core import small_config

PROMPTS = 500
CONVERSATIONS = 10
TURNS_BEFORE = 12

UNBOUNDED = 1 << 40


class Scene:
    """Ten conversations of twelve turns each, and a sweep that is about to come."""

    def __init__(self, policy: str, ram_bytes: int) -> None:
        self.traffic = Traffic(7)
        system = self.traffic.tokens(2000, 3000)
        self.live = [self.traffic.conversation("live", system, 40) for _ in range(CONVERSATIONS)]
        self.core = HollowCore(
            small_config(
                ram_bytes=ram_bytes, max_images=1 << 20, segment_min_tokens=256, retention=policy
            )
        )  # fmt: skip
        replay(self.core, self._speak(TURNS_BEFORE * CONVERSATIONS), Score())

    def _speak(self, turns: int) -> Iterator[Turn]:
        for number in range(turns):
            yield next(self.live[number % CONVERSATIONS])

    def sweep(self, every: int) -> Score:
        """Sweep while one conversation speaks after each ``every`` prompts, and each at the end."""
        score = Score()

        def turns() -> Iterator[Turn]:
            speaking = self._speak(PROMPTS // every)
            for number, prompt in enumerate(self.traffic.sweep(PROMPTS), 1):
                yield prompt
                if number % every == 0:
                    yield next(speaking)
            yield from self._speak(CONVERSATIONS)

        replay(self.core, turns(), score)
        return score


@pytest.fixture(scope="module")
def live_bytes() -> int:
    """What the ten conversations hold before the sweep."""
    return Scene("lru", UNBOUNDED).core.index.ram.bytes


@pytest.mark.parametrize("every", [25, 100, PROMPTS])
def test_a_sweep_does_not_evict_the_live_conversations(live_bytes: int, every: int) -> None:
    """E9: 500 prompts never read again leave ten live conversations a hit ratio over 90 %."""
    scene = Scene(DEFAULT_POLICY, live_bytes * 3 // 2)
    score = scene.sweep(every)
    assert score.requested["sweep"] * 1024 > 3 * live_bytes, "the sweep is larger than the cache"
    assert score.ratio("live") > 0.9


def test_what_the_default_is_measured_against(live_bytes: int) -> None:
    """E3, E9: the same sweep flushes a plain LRU, which is why it is not the default."""
    assert Scene("lru", live_bytes * 3 // 2).sweep(25).ratio("live") < 0.5
