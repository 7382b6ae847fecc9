"""mlx-lm's `LRUPromptCache` over the shared cache, for `mlx_lm.server` and programs like it.

`SharedPromptCache` owns which model a key names, its counters and the pause after a timeout. It is
made on any thread; everything else but its counters is for the one thread that generates, and
nothing that it does may raise there: an exception would end that thread, and with it the server.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from prefixcached.client.errors import UseAfterClose
from prefixcached.client.kv import OwnCaches
from prefixcached.client.prompt_cache import DISABLED, PromptCache
from prefixcached.client.results import Declined, Stored

PAUSE_AFTER_TIMEOUT_SECONDS: Final = 30.0
"""How long a daemon that did not answer in time is left alone. A timeout stalls every stream of the
server for seconds; the pool's own pause, 5 s at most, would let that happen again and again."""

CACHE_TYPES: Final = ("assistant", "user", "system")
"""mlx-lm's kinds of entries, in its order."""

UNKNOWN_MODEL: Final = "unknown-model"
"""Why nothing is shared for a key that no model was bound to."""

PAUSED: Final = "paused"
"""Why the daemon is not asked: it let a call time out just now."""

CLOSED: Final = "closed"
"""Why the daemon cannot be asked: somebody closed the connection's `Cache`."""

_TIMEOUT: Final = "timeout"
_INVALID: Final = "invalid"
_TOO_SHORT: Final = "too-short"
_DRAFT_DIFFERS: Final = "draft-differs"

_logger = logging.getLogger(__name__)


class SharedPromptCacheStatistics(msgspec.Struct, frozen=True):
    """What one `SharedPromptCache` did so far.

    Attributes:
        hits: Fetches that reused something.
        misses: Fetches that reused nothing, by reason.
        tokens_requested: Tokens of all prompts fetched.
        tokens_reused: Tokens of them that needed no prefill.
        stored: Inserts that are visible to every process now, or were already.
        declined: Inserts that were not stored, by reason.
    """

    hits: int
    misses: dict[str, int]
    tokens_requested: int
    tokens_reused: int
    stored: int
    declined: dict[str, int]


class Fetched(NamedTuple):
    """What the last `SharedPromptCache.fetch_nearest_cache` was asked, and how much it gave."""

    model: Hashable
    tokens: list[int]
    reused: int


class _Part(NamedTuple):
    """A model, or a draft model, and how many of mlx-lm's caches are its own."""

    shared: PromptCache
    caches: int


class SharedPromptCache:
    """A drop-in for mlx-lm's `LRUPromptCache`, shared by all processes of the user.

    What differs: a key must be bound to a model first (`bind`), since its name does not tell its
    weights; a prefix of any length is found, inside longer entries too; a hit leaves at least the
    last token to be computed; and nothing is ever evicted from here.

    ``len``, `nbytes` and `stats_by_type` tell what this process added to the shared cache. They ask
    nobody.

    Args:
        max_size: As mlx-lm's, without effect: the daemon's caps hold.
        max_bytes: Likewise.
        clock: Seconds that never go back; measures the pause only.
    """

    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int = 1 << 63,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.latest: Fetched | None = None
        self._clock = clock
        self._paused_until = -math.inf
        self._parts: dict[Hashable, list[_Part]] = {}
        self._sequences: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()

    # -- which models -----------------------------------------------------------------------------

    def bind(self, model: Hashable, shared: PromptCache, draft: PromptCache | None = None) -> None:
        """Say which loaded model the key ``model`` names.

        Args:
            model: The key that fetches and inserts will name.
            shared: The model's share of the cache.
            draft: That of its draft model. Its caches follow the model's in every list, and are
                stored apart from them (rule N2).
        """
        owners = [shared] if draft is None else [shared, draft]
        self._parts[model] = [_Part(owner, len(owner.fresh())) for owner in owners]

    def unbind_all(self) -> None:
        """Forget all models, so that their memory can be freed."""
        self._parts.clear()

    # -- what LRUPromptCache has ------------------------------------------------------------------

    def fetch_nearest_cache(
        self, model: Hashable, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """Return caches of the longest known prefix of ``tokens``, and the tokens after it.

        Returns:
            Caches that are the caller's own, and at least one token; (None, ``tokens``) where
            nothing is known.
        """
        start = time.perf_counter()
        kv, reused, misses = self._fetch(model, tokens)
        self._note(misses)
        self._counts["requested"] += len(tokens)
        self._counts["reused"] += reused
        # A copy: mlx_lm.server goes on appending to its list.
        self.latest = Fetched(model, list(tokens), reused)
        seconds = time.perf_counter() - start
        if not reused:
            reason = misses[-1] if misses else DISABLED
            self._misses[reason] += 1
            _logger.info(
                "nothing of %d tokens is shared (%s, %.3f s)", len(tokens), reason, seconds
            )
            return None, tokens
        self._counts["hits"] += 1
        _logger.info("%d of %d tokens are shared (%.3f s)", reused, len(tokens), seconds)
        return kv, tokens[reused:]

    def insert_cache(
        self,
        model: Hashable,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Share ``prompt_cache``, the caches after forwarding ``tokens``, with every process.

        The caches stay the caller's: they are read now, and not kept.
        """
        start = time.perf_counter()
        results = self._store(model, tokens, prompt_cache)
        declined = [result.reason for result in results if isinstance(result, Declined)]
        self._note(declined)
        self._declined.update(declined)
        self._counts["stored"] += not declined
        new_bytes = sum(result.new_bytes for result in results if isinstance(result, Stored))
        _logger.info(
            "%d tokens stored as %s: %s (%.3f s)",
            len(tokens),
            cache_type,
            f"no, {declined[0]}" if declined else f"yes, {new_bytes} new bytes",
            time.perf_counter() - start,
        )
        if new_bytes:
            self._sequences[cache_type] += 1
            self._bytes[cache_type] += new_bytes

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Do nothing: what other processes share is not this one's to evict."""

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return the sequences and bytes that this process added, by mlx-lm's kinds."""
        return {
            kind: {"n_sequences": self._sequences[kind], "n_bytes": self._bytes[kind]}
            for kind in dict.fromkeys((*CACHE_TYPES, *self._sequences))
        }

    @property
    def nbytes(self) -> int:
        """Bytes that this process added to the shared cache."""
        return self._bytes.total()

    def __len__(self) -> int:
        return self._sequences.total()

    # -- its own ----------------------------------------------------------------------------------

    def statistics(self) -> SharedPromptCacheStatistics:
        """Return what was fetched and stored so far."""
        return SharedPromptCacheStatistics(
            hits=self._counts["hits"],
            misses=dict(self._misses),
            tokens_requested=self._counts["requested"],
            tokens_reused=self._counts["reused"],
            stored=self._counts["stored"],
            declined=dict(self._declined),
        )

    def _fetch(
        self, model: Hashable, tokens: list[int]
    ) -> tuple[list[Any] | None, int, tuple[str, ...]]:
        """Return caches, how many tokens they cover, and why there are no more."""
        obstacle = self._obstacle(model)
        if obstacle is not None:
            return None, 0, (obstacle,)
        if len(tokens) < 2:
            return None, 0, (_TOO_SHORT,)
        try:
            return self._fetch_parts(model, tokens)
        except UseAfterClose:
            return None, 0, (CLOSED,)

    def _fetch_parts(
        self, model: Hashable, tokens: list[int]
    ) -> tuple[list[Any] | None, int, tuple[str, ...]]:
        first, *rest = (part.shared for part in self._parts[model])
        kv, reused = first.fetch(tokens)
        misses = kv.misses
        if not rest or not reused:
            return kv, reused, misses
        (draft,) = rest
        draft_kv, draft_reused = draft.fetch(tokens[: reused + 1])
        if draft_reused and draft_reused < reused:
            kv, reused = first.fetch(tokens[: draft_reused + 1])
        if draft_reused != reused:
            return None, 0, draft_kv.misses or (_DRAFT_DIFFERS,)
        return OwnCaches([*kv, *draft_kv]), reused, misses

    def _store(
        self, model: Hashable, tokens: Sequence[int], prompt_cache: list[Any]
    ) -> list[Stored | Declined]:
        obstacle = self._obstacle(model)
        if obstacle is not None:
            return [Declined(reason=obstacle)]
        results: list[Stored | Declined] = []
        start = 0
        for shared, count in self._parts[model]:
            part = prompt_cache[start : start + count]
            if isinstance(prompt_cache, OwnCaches):
                part = OwnCaches(part)
            try:
                results.append(shared.store(tokens, part))
            except ValueError as error:
                _logger.warning("the KV of %d tokens is not shared: %s", len(tokens), error)
                results.append(Declined(reason=_INVALID))
            except UseAfterClose:
                results.append(Declined(reason=CLOSED))
            start += count
        return results

    def _obstacle(self, model: Hashable) -> str | None:
        """Return why the daemon must not be asked, if there is a reason."""
        if model not in self._parts:
            return UNKNOWN_MODEL
        return PAUSED if self._clock() < self._paused_until else None

    def _note(self, reasons: Sequence[str]) -> None:
        """Begin a pause if a call timed out."""
        if _TIMEOUT in reasons:
            self._paused_until = self._clock() + PAUSE_AFTER_TIMEOUT_SECONDS
            _logger.warning(
                "the daemon did not answer in time and is left alone for %.0f s; "
                "`prefixcached doctor` says how it is",
                PAUSE_AFTER_TIMEOUT_SECONDS,
            )
