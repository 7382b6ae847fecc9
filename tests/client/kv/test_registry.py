"""Other engines' classes of cache: registered with one call, or stored as they are (issue 5)."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from prefixcached.client import PromptCache, connect
from prefixcached.client.kv import (
    AppendAdapter,
    UncuttableKvError,
    UnsupportedCacheError,
    register,
    snapshot,
)
from prefixcached.protocol.paths import SOCKET_VARIABLE
from prefixcached.protocol.schema import Kind
from tests.client.kv.loopback import Store, prefill, same_bits
from tests.client.test_fingerprint import model as small_model
from tests.support.daemon_process import DaemonProcess

README = Path(__file__).parents[3] / "README.md"


class PagedKV:
    """An engine's own: rows in two lists of arrays, a constructor's argument, and a helper."""

    step = 32

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.blocks: Any = None
        self.offset = 0
        self.helper = object()

    @property
    def state(self) -> Any:
        return self.blocks

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.blocks is not None:
            pairs = zip(self.blocks, (keys, values), strict=True)
            keys, values = (
                mx.concatenate([old[..., : self.offset, :], new], axis=-2) for old, new in pairs
            )
        self.blocks = (keys, values)
        self.offset = keys.shape[-2]
        return keys, values


class Summary:
    """A model's own: no interface at all, some arrays and plain values."""

    def __init__(self) -> None:
        self.means: dict[str, mx.array] = {}
        self.offset = 0
        self.settings = {"decay": 0.5, "layers": (1, 2)}

    def update(self, rows: mx.array) -> None:
        self.means = {"mean": rows.mean(axis=0), "last": rows[-1]}
        self.offset += rows.shape[0]


class Slotted:
    """Not all of it is in its `__dict__`."""

    __slots__ = ("keys",)


class SlottedKV(KVCache):  # type: ignore[misc]
    __slots__ = ("extra",)


class Listed(list[Any]):
    """Its items are not in its `__dict__`."""


def test_a_registered_class_is_cut_anywhere() -> None:
    """T5: one call to register gives a foreign class rows, resumable at every position."""
    register(PagedKV, AppendAdapter(parameters=("page_size",), fields=("blocks",)))
    cache = PagedKV(16)
    rows = mx.random.normal((2, 1, 3, 40, 8))
    cache.update_and_fetch(rows[0], rows[1])
    store = Store()
    store.put([cache], range(40), cuts=(7, 20))
    assert {tensor.kind for tensor in store.schema.tensors} == {Kind.APPEND}
    for position in (1, 7, 19, 39, 40):
        restored: Any = store.take(position)[0]
        assert (type(restored), restored.page_size, restored.offset) == (PagedKV, 16, position)
        assert restored.blocks[0].shape[-2] == (position // 32 + 1) * 32
        for block, row in zip(restored.blocks, rows, strict=True):
            assert same_bits(block[..., :position, :], row[..., :position, :])


def test_an_unknown_class_is_state() -> None:
    """T5: arrays and plain values of any class are restored, at the position of the put only."""
    cache = Summary()
    cache.update(mx.random.normal((20, 4)))
    store = Store()
    assert store.put([cache], range(20)) == 20
    assert store.schema.has_state
    restored = store.take(20)[0]
    assert type(restored) is Summary
    assert restored.settings == cache.settings
    assert all(same_bits(restored.means[name], cache.means[name]) for name in cache.means)
    with pytest.raises(UncuttableKvError, match="cannot be cut"):
        snapshot([cache], range(19))


@pytest.mark.parametrize(
    ("cache", "what"),
    [
        (Slotted(), "Slotted holds keys"),
        (SlottedKV(), "SlottedKV holds extra"),
        (Listed(), "Listed holds what its built-in base holds"),
        (PagedKV, "type"),
    ],
)
def test_what_is_not_all_attributes(cache: Any, what: str) -> None:
    """P1: a class of which a part would be lost is refused with the advice to register it."""
    with pytest.raises(UnsupportedCacheError, match=what) as told:
        snapshot([cache], range(4))
    assert "prefixcached.client.kv.register" in str(told.value)


def test_another_process_registers_too(daemon: DaemonProcess) -> None:
    """T8: a process that does not know the class has a miss; once it registers, a hit."""
    code = (
        "import sys\n"
        "from prefixcached.client import connect\n"
        "if {known}:\n"
        "    from tests.client.kv.test_registry import *\n"
        "    register(PagedKV, AppendAdapter(parameters=('page_size',), fields=('blocks',)))\n"
        "with connect(sys.argv[1], timeout=60) as cache:\n"
        "    told = cache.take(list(range(30)), namespace='demo')\n"
        "    print(told.length if told else told.reason)\n"
    )
    register(PagedKV, AppendAdapter(parameters=("page_size",), fields=("blocks",)))
    kv = PagedKV(16)
    kv.update_and_fetch(mx.ones((1, 1, 20, 4)), mx.ones((1, 1, 20, 4)))
    with connect(daemon.socket, timeout=60, fail_open=False) as cache:
        assert cache.put(list(range(20)), [kv], namespace="demo")
        for known, expected in ((False, "restore-failed"), (True, "20")):
            run = subprocess.run(
                [sys.executable, "-c", code.format(known=known), str(daemon.socket)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert run.stdout.strip() == expected


def test_a_model_with_its_own_class(daemon: DaemonProcess) -> None:
    """T12: a `PromptCache` knows its model's classes, though nobody registered them."""

    class OwnKV(KVCache):  # type: ignore[misc]
        """From the model's own folder."""

    def own_model() -> Any:
        model = small_model()
        model.make_cache = lambda: [OwnKV(), OwnKV()]
        return model

    tokens = list(range(30))
    with connect(daemon.socket, timeout=60, fail_open=False) as cache:
        shared = PromptCache(own_model(), cache=cache)
        kv = shared.fresh()
        prefill(shared.model, kv, tokens[:20])
        assert shared.store(tokens[:20], kv)
        restored, reused = PromptCache(own_model(), cache=cache).fetch(tokens)
    assert (type(restored[0]), reused) == (OwnKV, 20)
    rest = mx.array(tokens[20:])[None]
    assert same_bits(shared.model(rest, cache=list(restored)), shared.model(rest, cache=list(kv)))


def test_the_readmes_example(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN 6: what the README says about other engines' classes works as it stands."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (example,) = (block for block in blocks if "AppendAdapter" in block)
    monkeypatch.setenv(SOCKET_VARIABLE, str(daemon.socket))
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(example, "README.md", "exec"), names)
    names["cache"].close()
    assert capsys.readouterr().out == "11\n"
