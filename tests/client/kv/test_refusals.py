"""What cannot be stored or restored, and how that is said (rule P1)."""

import json
import sys
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from prefixcached.client.kv import (
    IncomparableKvError,
    UnsupportedCacheError,
    UnusableImageError,
    restoration,
    snapshot,
)
from prefixcached.protocol.image import Extent, ImageKind, ImageSpec, WindowRows
from prefixcached.protocol.messages import Part
from prefixcached.protocol.schema import Schema
from tests.client.kv.loopback import Store, filled


def test_offset_far_from_the_count() -> None:
    """P1: an offset and a count more than 8 apart are a ValueError with both numbers."""
    with snapshot([filled(20)], range(12)) as taken:
        assert taken.length == 12
    with snapshot([filled(20)], range(28)) as taken:
        assert taken.length == 20
    for count in (11, 29):
        with pytest.raises(ValueError, match=rf"20 tokens and {count} tokens"):
            snapshot([filled(20)], range(count))


def test_longer_leaves_are_cut() -> None:
    """P1: KV covers what its shortest cache covers."""
    store = Store()
    assert store.put([filled(20), filled(22)], range(22)) == 20
    assert [cache.offset for cache in store.take(20)] == [20, 20]


def test_empty_caches() -> None:
    """P1: all empty is length 0; one empty among full ones is a ValueError with both numbers."""
    for empty in ([KVCache(), RotatingKVCache(8)], [ArraysCache(2)], [CacheList(KVCache())]):
        with snapshot(empty, range(20)) as taken:
            assert (taken.length, taken.checkpoint, taken.schema.tensors) == (0, None, ())
    for mixed in ([filled(20), KVCache()], [ArraysCache(2), filled(20)]):
        with pytest.raises(IncomparableKvError, match=r"0 tokens.*20"):
            snapshot(mixed, range(20))


def test_batches() -> None:
    """P1: every form of a batch is refused with the advice to extract rows."""
    two_rows = KVCache()
    two_rows.update_and_fetch(mx.ones((2, 1, 4, 2)), mx.ones((2, 1, 4, 2)))
    state = ArraysCache(1)
    state[0] = mx.ones((2, 3))
    prepared = ArraysCache(1)
    prepared[0] = mx.ones((1, 3))
    prepared.prepare(lengths=[4])
    for cache in (
        two_rows,
        BatchKVCache([0, 1]),
        BatchRotatingKVCache(8, [0, 1]),
        CacheList(KVCache(), BatchKVCache([0, 1])),
        state,
        prepared,
        ArraysCache(1, [0, 1]),
    ):
        with pytest.raises(UnsupportedCacheError, match="extract"):
            snapshot([cache], range(4))


def test_what_only_looks_like_a_cache() -> None:
    """P1: values that are neither arrays nor plain are named in the refusal."""
    cache: Any = ArraysCache(1)
    cache[0] = mx.ones((1, 3))
    cache.helper = object()
    with pytest.raises(UnsupportedCacheError, match=r"helper holds a builtins\.object"):
        snapshot([cache], range(3))


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "this.d",
        "subprocess.Popen",
        "mlx_lm.utils.load",
        "mlx_lm.models.cache.make_prompt_cache",
        "mlx_lm.models.no_such_module.Cache",
        "mlx_lm.models.cache.copy.deepcopy",
        "mlx_lm.models.olmo.Model",
        "KVCache",
    ],
)
def test_no_class_is_built_because_data_names_it(name: str) -> None:
    """P1: a description names registered classes or mlx-lm's own, or it is a miss."""
    schema = Schema(description=json.dumps([{"class": name}]).encode(), has_state=True)
    spec = ImageSpec(ImageKind.CHECKPOINT, 3, 3, metadata=b'{"states":{"0":{}}}')
    with pytest.raises(UnusableImageError):
        restoration(schema, 3, spec, [Part(spec, 3, 3)]).finish()
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "description",
    [b"", b"{}", b"[1]", b"[[]]", b'[{"caches":[{"class":5}]}]', b"[" * 100_000,
     b'[{"class":"mlx_lm.models.cache.KVCache"}]',
     b'[{"class":"mlx_lm.models.cache.RotatingKVCache"},{"class":"mlx_lm.models.cache.KVCache"}]',
     b'[{"class":"mlx_lm.models.cache.RotatingKVCache","max_size":"x","keep":0}]'],
)  # fmt: skip
def test_descriptions_that_do_not_fit(description: bytes) -> None:
    """T8: a damaged description is an error of its own kind, whatever is wrong with it."""
    store = Store()
    store.put([filled(), filled()], range(20))
    schema = msgspec.structs.replace(store.schema, description=description)
    with pytest.raises(UnusableImageError):
        restoration(schema, 20, None, store.parts(20)).finish()


@pytest.mark.parametrize("metadata", [b"", b"[]", b"\xff", b'{"states":{"0":{"cache":{"x":1}}}}'])
def test_checkpoints_that_do_not_fit(metadata: bytes) -> None:
    """T8: a damaged checkpoint is an error of its own kind."""
    cache = ArraysCache(1)
    cache[0] = mx.ones((1, 3))
    store = Store()
    store.put([cache], range(4))
    spec = msgspec.structs.replace(store.images[-1].spec, metadata=metadata)
    with pytest.raises(UnusableImageError):
        restoration(store.schema, 4, spec, [Part(spec, 4, 4)]).finish()


def test_gaps_between_parts() -> None:
    """T1: rows that no part has are an error, never zeros."""
    store = Store()
    store.put([filled()], range(20), cuts=(5, 11))
    parts = store.parts(20)
    with pytest.raises(UnusableImageError, match="20 tokens"):
        restoration(store.schema, 20, None, [parts[0], parts[2]])
    ring = RotatingKVCache(max_size=8)
    ring.update_and_fetch(mx.ones((1, 1, 30, 2)), mx.ones((1, 1, 30, 2)))
    store = Store()
    store.put([ring], range(30))
    spec = msgspec.structs.replace(store.images[0].spec, windows=(WindowRows(((24, 30),)),))
    with pytest.raises(UnusableImageError, match="needed"):
        restoration(store.schema, 30, None, [Part(spec, 0, 30)])


def test_rows_beyond_the_fork_are_not_used() -> None:
    """T1: window rows of a part that lie behind the point where it is left belong to others."""
    ring = RotatingKVCache(max_size=8)
    ring.update_and_fetch(mx.ones((1, 1, 30, 2)), mx.ones((1, 1, 30, 2)))
    store = Store()
    store.put([ring], range(30))
    spec = store.images[0].spec
    with pytest.raises(UnusableImageError, match="needed"):
        restoration(store.schema, 30, None, [Part(spec, 0, 28)])


def test_rows_that_are_not_there() -> None:
    """P2: a grant for rows that were never offered is an error."""
    with snapshot([filled(20)], range(20)) as taken:
        spec = taken.schema.tensors[0]
        extent = Extent(spec.name, spec.dtype, spec.full_shape(5), 0, 5 * 64, spec, ((18, 23),))
        with pytest.raises(UnusableImageError, match="token 20"):
            taken.rows(extent)


def test_model_without_a_cache_of_its_own() -> None:
    """T12: `make_prompt_cache` and a restored list agree in classes, whatever the model."""
    model: Any = type("Model", (), {"layers": [None, None]})()
    caches = make_prompt_cache(model, max_kv_size=16)
    for cache in caches:
        cache.update_and_fetch(mx.ones((1, 1, 30, 2)), mx.ones((1, 1, 30, 2)))
    store = Store()
    store.put(caches, range(30))
    restored = store.take(30)
    assert [(type(c), c.max_size, c.keep) for c in restored] == [(RotatingKVCache, 16, 4)] * 2
