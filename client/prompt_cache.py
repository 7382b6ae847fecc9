"""A loaded model's share of the cache: binds namespaces to the model and its KV format.

A `PromptCache` owns nothing that changes: its namespaces are computed once, when it is made.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from prefixcached.client.cache import Cache
from prefixcached.client.fingerprint import fingerprint, is_distributed, namespace
from prefixcached.client.kv import Attachments, OwnCaches, description
from prefixcached.client.results import Declined, Hit, Miss, Stored

DISABLED: Final = "disabled"
"""Why nothing is stored for a model whose KV cannot be shared."""

_logger = logging.getLogger(__name__)


class FetchedKv(OwnCaches):
    """The caches of a `PromptCache.fetch`: a list like mlx-lm's own.

    While it lives, other processes may wait for what its owner is computing (rule Q1). That ends
    when a store covers the prompt, with `drop_claim`, or with the list. Copies are plain lists.
    """

    def __init__(self, caches: Iterable[Any], taken: Sequence[Hit | Miss]) -> None:
        super().__init__(caches)
        # Not the results: a hit holds its caches, which mlx-lm replaces here when it quantises.
        self._claims = [result.claim for result in taken if result.claim is not None]
        self._misses = tuple(result.reason for result in taken if isinstance(result, Miss))

    @property
    def misses(self) -> tuple[str, ...]:
        """Why there is nothing, for each namespace that was asked and had nothing (rule T9)."""
        return self._misses

    def drop_claim(self) -> None:
        """Say that the rest of the prompt will not be computed here after all."""
        for claim in self._claims:
            claim.end()


class PromptCache:
    """Fetch and store the KV of one loaded model.

    Making one reads all weights once (`fingerprint`); who edits weights or loads another adapter
    afterwards makes a new one.

    Attributes:
        model: The model.
        max_kv_size: As mlx-lm's: the size of rotating caches, for models that leave it open.
        kv_bits: As mlx-lm's: bits of quantised KV, None for plain KV.
        kv_group_size: As mlx-lm's.
        quantized_kv_start: As mlx-lm's: KV is plain until this many tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        cache: Cache,
        salt: str = "",
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
    ) -> None:
        self.model = model
        self.max_kv_size = max_kv_size
        self.kv_bits = kv_bits
        self.kv_group_size = kv_group_size
        self.quantized_kv_start = quantized_kv_start
        self._cache = cache
        self._salt = salt
        self._fingerprint = ""
        self._namespaces: tuple[str, ...] = ()
        if is_distributed(model):
            _logger.info("the model is one rank of several: its KV is not shared")
            return
        try:
            fresh = self.fresh()
            self._fingerprint = fingerprint(model)
            plain, quantised = self._namespace_of(fresh), self._namespace_of(self._quantised(fresh))
        except Exception as error:  # noqa: BLE001, an odd model costs sharing, never the answer
            _logger.warning("KV of this model is not shared: %s", error)
            return
        self._namespaces = (plain,) if kv_bits is None else (quantised, plain)

    @property
    def cache(self) -> Cache:
        """The cache that it was made with."""
        return self._cache

    def fresh(self) -> list[Any]:
        """Return empty caches for this model."""
        return OwnCaches(make_prompt_cache(self.model, self.max_kv_size))

    def fetch(
        self, tokens: Sequence[int], wait: float = 0.0, session: str | None = None
    ) -> tuple[FetchedKv, int]:
        """Return caches that cover the first tokens of a prompt, and how many.

        Quantised KV is looked for first, and only where mlx-lm would have quantised it (rule N4).

        Args:
            tokens: The whole prompt.
            wait: Seconds to wait for a process that is computing this prompt right now.
            session: A name for the conversation.

        Returns:
            The caches and the number of tokens that need no prefill, at most ``len(tokens) - 1``;
            fresh caches and 0 where nothing is known. Forward ``tokens[reused:]``.
        """
        taken: list[Hit | Miss] = []
        for name in self._namespaces:
            is_quantised = name != self._namespaces[-1]
            if is_quantised and len(tokens) <= self.quantized_kv_start:
                continue
            result = self._cache.take(tokens, namespace=name, session=session, wait=wait)
            if taken:
                # Whoever computes this prompt stores it in the namespace that was asked first.
                result.drop_claim()
            taken.append(result)
            if isinstance(result, Hit):
                return FetchedKv(result.kv, taken), result.length
            wait = 0.0
        return FetchedKv(self.fresh(), taken), 0

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long computing ``tokens`` took (`Cache.note_prefill`)."""
        for name in self._namespaces:
            self._cache.note_prefill(tokens, seconds, namespace=name)

    def store(
        self,
        tokens: Sequence[int],
        kv: list[Any],
        *,
        session: str | None = None,
        attachments: Attachments | None = None,
    ) -> Stored | Declined:
        """Share ``kv``, the caches after forwarding ``tokens``, with every process.

        Raises:
            ValueError: ``kv`` and ``tokens`` do not belong together (rule P1), or the caches cannot
                be stored (`UnsupportedCacheError`).
        """
        if not self._namespaces:
            return Declined(reason=DISABLED)
        is_quantised = any(isinstance(cache, QuantizedKVCache) for cache in kv)
        return self._cache.put(
            tokens,
            kv,
            namespace=self._namespace_of(kv),
            session=session,
            attachments=attachments,
            minimum_length=self.quantized_kv_start if is_quantised else 0,
        )

    def _namespace_of(self, kv: Sequence[Any]) -> str:
        """Return the namespace for the classes that are really there (rule N4)."""
        classes, _ = description.read(kv)
        kv_format = classes.decode()
        if any(isinstance(cache, QuantizedKVCache) for cache in kv):
            kv_format += f"/quantised from {self.quantized_kv_start}"
        return namespace(self._fingerprint, kv_format, self._salt)

    def _quantised(self, fresh: Sequence[Any]) -> list[Any]:
        """Return what mlx-lm turns ``fresh`` into once ``quantized_kv_start`` is reached."""
        if self.kv_bits is None:
            return list(fresh)
        return [
            cache.to_quantized(group_size=self.kv_group_size, bits=self.kv_bits)
            if hasattr(cache, "to_quantized")
            else cache
            for cache in fresh
        ]
