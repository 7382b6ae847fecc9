"""Objects through the client and the real daemon: every dtype and shape, mlx and numpy (O1, O2)."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from prefixcached.client import Cache, Declined, Miss, ObjectHit, Stored
from prefixcached.client import trio as client_trio
from prefixcached.client.objects import NUMPY_NAMES
from prefixcached.protocol import limits, messages
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor
from tests.support.daemon_process import DaemonProcess
from tests.support.descriptors import none_leaked
from tests.support.small_daemon import BOOT, Peer, SmallDaemon
from tests.support.until import ram_tier

MLX_DTYPES = [
    mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.float16, mx.bfloat16, mx.uint32, mx.int32,
    mx.float32, mx.uint64, mx.int64, mx.complex64,
]  # fmt: skip
SHAPES = [(), (1,), (7,), (0,), (3, 0, 2), (2, 3, 5)]


@pytest.fixture(scope="module")
def daemon_process() -> Iterator[DaemonProcess]:
    """One daemon for all tests here; each uses a namespace of its own."""
    with DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "256MiB") as process:
        yield process


@pytest.fixture
def cache(daemon_process: DaemonProcess) -> Iterator[Cache]:
    """A client that raises."""
    with none_leaked(), Cache(daemon_process.socket, timeout=30, fail_open=False) as cache:
        yield cache


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """The test's own."""
    return str(request.node.name)


def bits(array: Any) -> bytes:
    """The bytes of an array of either kind."""
    if isinstance(array, mx.array):
        size = array.itemsize
        unsigned = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[size]
        return np.array(array.view(unsigned)).tobytes() if array.size else b""
    return np.ascontiguousarray(array).tobytes()


def same(left: Any, right: Any) -> bool:
    """Whether two arrays are of one kind, dtype and shape and equal in every bit."""
    return (
        type(left) is type(right)
        and left.dtype == right.dtype
        and tuple(left.shape) == tuple(right.shape)
        and bits(left) == bits(right)
    )


def put_and_take(
    cache: Cache, tensors: dict[str, Any], namespace: str, metadata: Any = None
) -> Any:
    assert cache.put_object("key", tensors, metadata, namespace=namespace)
    result = cache.take_object("key", namespace=namespace)
    assert isinstance(result, ObjectHit)
    assert list(result.tensors) == list(tensors)
    for name, array in tensors.items():
        assert same(result.tensors[name], array), name
    return result


def random_mlx(dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """Any bits at all, but for truth values; of NaN too."""
    if dtype == mx.bool_:
        return mx.random.bernoulli(0.5, shape)
    width = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[dtype.size]
    drawn = mx.random.randint(0, 2**31 - 1, (*shape, dtype.size)).astype(mx.uint8)
    return drawn.view(width).reshape(shape).view(dtype) if drawn.size else mx.zeros(shape, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_of_mlx_come_back_bit_for_bit(
    cache: Cache, namespace: str, shape: tuple[int, ...]
) -> None:
    """O1: every dtype, bfloat16 among them, in every shape, empty and scalar ones too."""
    mx.random.seed(3)
    put_and_take(cache, {str(dtype): random_mlx(dtype, shape) for dtype in MLX_DTYPES}, namespace)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_of_numpy_come_back_bit_for_bit(
    cache: Cache, namespace: str, shape: tuple[int, ...]
) -> None:
    """O1: numpy's arrays stay numpy's."""
    random = np.random.default_rng(4)
    tensors = {}
    for code in NUMPY_NAMES:
        size = int(np.prod(shape)) * np.dtype(code).itemsize
        raw = random.integers(0, 2 if code == "|b1" else 256, size, dtype=np.uint8)
        tensors[code] = raw.view(code).reshape(shape)
    put_and_take(cache, tensors, namespace)


def test_both_kinds_mix_in_any_order(cache: Cache, namespace: str) -> None:
    """O1: names keep their order and each array its kind."""
    tensors = {"z": np.arange(5), "a": mx.arange(7), "m": np.ones((2, 2), np.float32)}
    put_and_take(cache, tensors, namespace)


def test_views_are_stored_as_what_they_show(cache: Cache, namespace: str) -> None:
    """O1: strides, transposes and byte orders are the caller's own affair."""
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    lazy = mx.arange(24).reshape(4, 6)
    assert cache.put_object(
        "key",
        {"n": base.T[::2], "m": lazy.T[::2] + 1, "big": base.astype(">i4")},
        namespace=namespace,
    )
    result = cache.take_object("key", namespace=namespace)
    assert isinstance(result, ObjectHit)
    assert np.array_equal(result.tensors["n"], base.T[::2])
    assert result.tensors["m"].tolist() == (base.T[::2] + 1).tolist()
    assert np.array_equal(result.tensors["big"], base)


def test_metadata_is_json(cache: Cache, namespace: str) -> None:
    """O1: what json writes and reads comes back with the arrays; an object may be nothing else."""
    metadata = {"model": "vision", "grid": [1, 2.5, None, True], "text": "ümlaut"}
    assert put_and_take(cache, {}, namespace, metadata).metadata == metadata
    assert put_and_take(cache, {"a": np.ones(3)}, namespace).metadata is None


def test_what_is_taken_is_ones_own(cache: Cache, namespace: str) -> None:
    """T2: changing a copy changes nobody else's, and appending to it copies nothing hidden."""
    result = put_and_take(cache, {"m": mx.arange(6), "n": np.arange(6)}, namespace)
    result.tensors["m"][0] = 77
    result.tensors["n"][0] = 77
    again = cache.take_object("key", namespace=namespace)
    assert isinstance(again, ObjectHit)
    assert again.tensors["m"].tolist() == again.tensors["n"].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_newest_object_of_a_key_wins(cache: Cache, namespace: str) -> None:
    """P3: a second put replaces the first, for everybody."""
    put_and_take(cache, {"a": np.arange(4)}, namespace, 1)
    assert put_and_take(cache, {"b": np.arange(9.0)}, namespace, 2).metadata == 2


def test_unknown_keys_and_other_namespaces_miss(cache: Cache, namespace: str) -> None:
    """O1, N1: the key is exact and its namespace is its own."""
    put_and_take(cache, {"a": np.arange(4)}, namespace)
    assert cache.take_object("ke", namespace=namespace) == Miss(reason="empty")
    assert cache.take_object("key", namespace="another") == Miss(reason="empty")
    cache.clear(namespace)
    assert cache.take_object("key", namespace=namespace) == Miss(reason="empty")


def test_objects_are_counted_apart(cache: Cache, namespace: str) -> None:
    """O2: hits and misses of objects are no hits and misses of prompts."""
    before = ram_tier(cache)
    put_and_take(cache, {"a": np.arange(4)}, namespace)
    cache.take_object("nothing", namespace=namespace)
    after = ram_tier(cache)
    for counter, growth in (("object_hits", 1), ("object_misses", 1), ("object_restores", 0)):
        assert after["objects"][counter] == before["objects"][counter] + growth
    assert after["takes"] == before["takes"]


def test_an_object_survives_a_restart(namespace: str) -> None:
    """O1, D1: after kill -9 it is read from its file, bit for bit."""
    tensors = {"m": random_mlx(mx.bfloat16, (30, 1000)), "n": np.arange(3), "0": np.empty((0, 2))}
    with DaemonProcess("--ram-bytes", "64MiB", "--ssd-bytes", "256MiB") as process:
        with Cache(process.socket, timeout=30, fail_open=False) as cache:
            assert cache.put_object("key", tensors, {"a": 1}, namespace=namespace)
            assert cache.put_object("empty", {}, namespace=namespace)
            assert cache.flush(timeout=60)
            process.kill()
            process.start()
        with Cache(process.socket, timeout=30, fail_open=False) as cache:
            while not (result := cache.take_object("key", namespace=namespace)):
                assert isinstance(result, Miss)
                assert result.reason == "loading"
            assert isinstance(result, ObjectHit)
            assert (result.tier, result.metadata) == ("ssd", {"a": 1})
            assert all(same(result.tensors[name], array) for name, array in tensors.items())
            assert cache.take_object("empty", namespace=namespace)
            assert ram_tier(cache)["objects"]["object_restores"] >= 1


async def test_the_trio_client_has_objects_too(
    daemon_process: DaemonProcess, namespace: str
) -> None:
    """DESIGN 6: the same calls, to be awaited; 4 MiB are copied in a thread."""
    tensors = {"m": random_mlx(mx.bfloat16, (2, 1 << 20)), "n": np.arange(5)}
    async with client_trio.Cache(daemon_process.socket, timeout=30, fail_open=False) as cache:
        assert await cache.put_object("key", tensors, [1], namespace=namespace)
        result = await cache.take_object("key", namespace=namespace)
        assert isinstance(result, ObjectHit)
        assert all(same(result.tensors[name], array) for name, array in tensors.items())
        assert result.metadata == [1]
        assert await cache.take_object("other", namespace=namespace) == Miss(reason="empty")


def test_too_large_an_object_is_declined(cache: Cache, namespace: str) -> None:
    """P7: more than the RAM cap is refused, and nothing is left of it."""
    large = np.zeros(80 << 20, np.uint8)
    result = cache.put_object("key", {"a": large}, namespace=namespace)
    assert result == Declined(reason="too-large")
    assert ram_tier(cache)["puts_in_flight"] == 0


BAD_OBJECTS: dict[str, Callable[[Cache], object]] = {
    "no array": lambda c: c.put_object("k", {"a": [1, 2]}, namespace="n"),
    "a name of bytes": lambda c: c.put_object("k", {b"a": np.ones(1)}, namespace="n"),  # type: ignore[dict-item]
    "an empty name": lambda c: c.put_object("k", {"": np.ones(1)}, namespace="n"),
    "a long name": lambda c: c.put_object("k", {"x" * 257: np.ones(1)}, namespace="n"),
    "texts": lambda c: c.put_object("k", {"a": np.array(["x"])}, namespace="n"),
    "objects": lambda c: c.put_object("k", {"a": np.array([None])}, namespace="n"),
    "nine dimensions": lambda c: c.put_object("k", {"a": np.ones((1,) * 9)}, namespace="n"),
    "a name that is no UTF-8": lambda c: c.put_object("k", {"\ud800": np.ones(1)}, namespace="n"),
    "metadata no JSON": lambda c: c.put_object("k", {}, {1, 2}, namespace="n"),
    "too much metadata": lambda c: c.put_object(
        "k", {}, "x" * limits.MAX_METADATA_BYTES, namespace="n"
    ),
    "too many tensors": lambda c: c.put_object(
        "k", dict.fromkeys(map(str, range(limits.MAX_TENSORS + 1)), np.ones(1)), namespace="n"
    ),
    "a key of bytes": lambda c: c.take_object(b"k", namespace="n"),  # type: ignore[arg-type]
    "a long key": lambda c: c.take_object("x" * 513, namespace="n"),
    "a long session": lambda c: c.close_session("x" * 513),
    "prefill of text": lambda c: c.note_prefill("1", 1.0, namespace="n"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", BAD_OBJECTS.values(), ids=BAD_OBJECTS.keys())
def test_what_cannot_be_stored_is_told_at_once(
    tmp_path: Any, call: Callable[[Cache], object]
) -> None:
    """DESIGN 1.2: a caller's mistake raises, also with `fail_open` and without a daemon."""
    with Cache(tmp_path / "socket") as cache:
        with pytest.raises((TypeError, ValueError)):
            call(cache)
        assert cache.statistics().refusals == {}


def object_hit(spec: ImageSpec, count: int = 1) -> messages.Hit:
    parts = (messages.Part(spec, 0, 0),) * count
    return messages.Hit(lease=1, length=0, tier="ram", parts=parts, boot=BOOT)


@pytest.mark.parametrize(
    ("spec", "count", "reason"),
    [
        (ImageSpec(ImageKind.OBJECT, metadata=b"no json"), 1, "restore-failed"),
        (ImageSpec(ImageKind.OBJECT, metadata=b'{"value": "{", "mlx": []}'), 1, "restore-failed"),
        (
            ImageSpec(
                ImageKind.OBJECT,
                tensors=(StateTensor("a", "BF16", (2,)),),
                metadata=b'{"value": "1", "mlx": []}',
            ),
            1,
            "restore-failed",
        ),
        (
            ImageSpec(
                ImageKind.OBJECT,
                tensors=(StateTensor("a", "U8", (1 << 30,)),),
                metadata=b'{"value": "1", "mlx": ["a"]}',
            ),
            1,
            "restore-failed",
        ),
        (ImageSpec(ImageKind.OBJECT, metadata=b'{"value": "1", "mlx": []}'), 2, "protocol"),
    ],
)
def test_an_object_that_contradicts_itself_is_a_miss(
    tmp_path: Any, spec: ImageSpec, count: int, reason: str
) -> None:
    """DESIGN 1.1: what cannot be what was put is never handed out."""
    with none_leaked(), SmallDaemon(tmp_path / "socket") as daemon, open(__file__, "rb") as lent:

        def lie(peer: Peer, request: Any) -> bool:
            if isinstance(request, messages.TakeObject):
                peer.send(object_hit(spec, count), [lent.fileno()] * count)
                return True
            return False

        daemon.on_request = lie
        with Cache(daemon.path) as cache:
            assert cache.take_object("key", namespace="n") == Miss(reason=reason)
        assert daemon.wait_until(lambda: daemon.connections == 0)


def test_a_grant_of_another_object_is_refused(tmp_path: Any) -> None:
    """DESIGN 1.1: a client fills what it offered and nothing else."""
    with SmallDaemon(tmp_path / "socket") as daemon, open(__file__, "rb") as lent:

        def lie(peer: Peer, request: Any) -> bool:
            if isinstance(request, messages.OfferObject):
                spec = ImageSpec(ImageKind.OBJECT, metadata=b"other")
                peer.send(messages.Grant(put=1, base=0, images=(spec,)), [lent.fileno()])
                return True
            return False

        daemon.on_request = lie
        with Cache(daemon.path) as cache:
            result = cache.put_object("key", {"a": np.ones(3)}, namespace="n")
            assert result == Declined(reason="protocol")
        assert not isinstance(result, Stored)
