"""A put and a take without a daemon: images as byte arrays, cut and lent as a daemon may."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from prefixcached.client.kv import Attachments, Snapshot, restoration, snapshot
from prefixcached.client.kv.restoration import Restoration
from prefixcached.protocol.image import ImageKind, ImageSpec, WindowRows, layout
from prefixcached.protocol.messages import Part
from prefixcached.protocol.schema import Schema
from tests.support import models


@dataclass
class Image:
    spec: ImageSpec
    data: bytearray


@dataclass
class Store:
    """The images of one path through the tree, from its root on."""

    images: list[Image] = field(default_factory=list)
    schema: Schema = field(default_factory=Schema)
    length: int = 0
    windows: tuple[WindowRows, ...] = ()

    def put(
        self,
        caches: Sequence[Any],
        tokens: Sequence[int],
        *,
        base: int | None = None,
        cuts: Sequence[int] = (),
        attachments: Attachments | None = None,
    ) -> int:
        """Keep what lies beyond ``base``, in segments that are cut at ``cuts``."""
        base = self.length if base is None else base
        with snapshot(caches, tokens, attachments) as taken:
            bounds = [base, *(cut for cut in cuts if base < cut < taken.length), taken.length]
            pairs = [pair for pair in pairwise(bounds) if pair[0] < pair[1]]
            specs = [
                ImageSpec(
                    kind=ImageKind.SEGMENT,
                    start=start,
                    end=end,
                    windows=taken.windows if end == taken.length else (),
                )
                for start, end in pairs
            ]
            if taken.checkpoint is not None:
                specs.append(taken.checkpoint)
            for spec in specs:
                self.add(taken, spec)
            if self.schema.description:
                assert self.schema == taken.schema
            self.schema, self.length, self.windows = taken.schema, taken.length, taken.windows
        return self.length

    def add(self, taken: Snapshot, spec: ImageSpec) -> None:
        """Keep one image as the daemon granted it."""
        plan = layout(taken.schema, spec)
        data = bytearray(plan.nbytes)
        for extent in plan.extents:
            run = b"".join(taken.rows(extent))
            assert len(run) == extent.nbytes
            data[extent.offset : extent.offset + extent.nbytes] = run
        self.images.append(Image(spec, data))

    def parts(self, length: int) -> list[Part]:
        """Return what a daemon would lend for the first ``length`` tokens of this path."""
        parts = []
        for image, following in zip(self.images, [*self.images[1:], None], strict=True):
            spec = image.spec
            leave = (
                following.spec.start if following and following.spec.start > spec.start else length
            )
            end = min(length, spec.end, leave)
            parts.append(Part(spec=spec, use_start=min(spec.start, end), use_end=end))
        return parts

    def lent(self, length: int) -> list[tuple[Image, Part]]:
        pairs = zip(self.images, self.parts(length), strict=True)
        return [
            (image, part)
            for image, part in pairs
            if (part.use_start < part.use_end or part.spec.windows or part.spec.end == length)
            and (part.spec.kind is ImageKind.SEGMENT or part.spec.end == length)
        ]

    def start(self, length: int) -> tuple[Restoration, list[tuple[Image, Part]]]:
        lent = self.lent(length)
        return restoration(self.schema, length, None, [part for _, part in lent]), lent

    def take(self, length: int) -> list[Any]:
        """Return caches of the first ``length`` tokens."""
        restored, lent = self.start(length)
        for index, (image, _) in enumerate(lent):
            for offset, views in restored.targets(index):
                for view in views:
                    view[:] = image.data[offset : offset + view.nbytes]
                    offset += view.nbytes  # noqa: PLW2901, the next view lies behind this one
        return restored.finish()


@functools.cache
def build(name: str) -> Any:
    """Return a model that all tests of a process share; they only forward through it.

    "llama" is smaller here than the shared one, which takes a second for each call.
    """
    if name != "llama":
        return models.build(name)
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=128,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=models.vocab_size("llama"),
        )
    )
    mx.eval(model.parameters())
    return model


def filled(rows: int = 20) -> Any:
    """Return a KVCache of so many random rows."""
    cache = KVCache()
    cache.update_and_fetch(mx.random.normal((1, 2, rows, 8)), mx.random.normal((1, 2, rows, 8)))
    return cache


def leaves(caches: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if hasattr(cache, "caches") else [cache]
    return found


def same_bits(left: mx.array, right: mx.array) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bytes(np.array(left.view(mx.uint8))) == bytes(np.array(right.view(mx.uint8)))


def forward(model: Any, caches: list[Any], tokens: Sequence[int]) -> mx.array:
    """Return the logits of ``tokens``, one call."""
    logits: mx.array = model(mx.array(list(tokens))[None], cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def prefill(
    model: Any, caches: list[Any], tokens: Sequence[int], boundaries: Sequence[int] = ()
) -> None:
    """Forward ``tokens``, with a call boundary at each of ``boundaries``."""
    bounds = [0, *(b for b in boundaries if 0 < b < len(tokens)), len(tokens)]
    for start, end in pairwise(bounds):
        forward(model, caches, tokens[start:end])
