"""What determines a namespace, and what does not (rules N2 and N3)."""

import dataclasses
import functools
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import afm7, llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.tuner.utils import linear_to_lora_layers

from prefixcached.client.fingerprint import (
    _Sources,
    fingerprint,
    is_distributed,
    namespace,
    namespace_for,
)
from prefixcached.protocol.limits import MAX_NAMESPACE_BYTES
from tests.support import architectures

ARGS = llama.ModelArgs(
    model_type="llama",
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=64,
    num_attention_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=50,
)


def model(args: llama.ModelArgs = ARGS) -> Any:
    mx.random.seed(3)
    return llama.Model(args)


def edited(edit: Callable[[Any], None]) -> str:
    changed = model()
    edit(changed)
    return fingerprint(changed)


def test_same_weights_agree() -> None:
    """N2: two loads of the same weights have one fingerprint, used or not."""
    used = model()
    used(mx.array([[1, 2, 3]]))
    used.eval()
    used.freeze()
    assert fingerprint(used) == fingerprint(model())


def test_another_process_agrees() -> None:
    """N2: nothing of the process is in a fingerprint, hash seeds and addresses included."""
    code = "from tests.client.test_fingerprint import *; print(fingerprint(model()))"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert told == fingerprint(model())


def _swap_rows(m: Any) -> None:
    weight = m.layers[1].mlp.up_proj.weight
    m.layers[1].mlp.up_proj.weight = weight[mx.array([1, 0, *range(2, weight.shape[0])])]


def _swap_columns(m: Any) -> None:
    weight = m.layers[1].mlp.up_proj.weight
    m.layers[1].mlp.up_proj.weight = weight[:, mx.array([1, 0, *range(2, weight.shape[1])])]


def _one_bit(m: Any) -> None:
    words = m.model.embed_tokens.weight.view(mx.uint32)
    words[7, 3] = words[7, 3] ^ 1
    m.model.embed_tokens.weight = words.view(mx.float32)


def _norm(m: Any) -> None:
    m.model.norm.weight = m.model.norm.weight * 2


def _layers(m: Any) -> None:
    m.model.layers = m.model.layers[::-1]


def _half(m: Any) -> None:
    m.set_dtype(mx.bfloat16)


def _quantise(m: Any) -> None:
    nn.quantize(m, group_size=32, bits=4)


def _adapter(m: Any) -> None:
    m.freeze()
    linear_to_lora_layers(m, 1, {"rank": 2, "scale": 10.0, "dropout": 0.0})


@pytest.mark.parametrize(
    "edit", [_swap_rows, _swap_columns, _one_bit, _norm, _layers, _half, _quantise, _adapter]
)
def test_live_weights_count(edit: Callable[[Any], None]) -> None:
    """N3: whatever was done to the weights in memory is seen, though name and shape agree."""
    assert edited(edit) != fingerprint(model())


def test_an_adapters_scale_counts() -> None:
    """N2: two adapters with equal weights and different scales differ."""

    def scaled(m: Any) -> None:
        mx.random.seed(5)
        _adapter(m)
        m.layers[-1].self_attn.q_proj.scale = 20.0

    def unscaled(m: Any) -> None:
        mx.random.seed(5)
        _adapter(m)

    assert edited(scaled) != edited(unscaled) == edited(unscaled)


def test_every_parameter_of_an_adapter_counts() -> None:
    """N2: also those that a layer keeps in a list, as adapters of fused projections do."""
    args = afm7.ModelArgs(
        model_type="afm7", vocab_size=32, hidden_dim=16, num_layers=2, num_kv_reuse_layers=1,
        num_heads=2, num_kv_heads=1, hidden_dim_scale_factor=2.0,
    )  # fmt: skip
    adapted = afm7.Model(args)
    adapted.freeze()
    linear_to_lora_layers(adapted, 2, {"rank": 2, "scale": 20.0, "dropout": 0.0})
    found = {fingerprint(adapted)}
    trained: Any = tree_flatten(adapted.trainable_parameters())
    assert any("lora_b.2" in name for name, _ in trained)
    for name, value in trained:
        adapted.load_weights([(name, value + 1)], strict=False)
        found.add(fingerprint(adapted))
    assert len(found) == 1 + len(trained)


class Pair(NamedTuple):
    """What some models keep their arrays in."""

    array: mx.array
    number: int


class Holder(nn.Module):
    """A layer whose numbers lie in containers."""

    def __init__(self, held: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = held


def test_what_lies_in_containers_counts() -> None:
    """N2: arrays of MLX and of numpy in lists, tuples and dicts, at any depth, and where."""
    one, two = mx.array([1.0]), mx.array([2.0])
    held: list[object] = [
        [one], [two], (one, two), (two, one), {"a": one}, {"b": one}, {"a": [one]}, {"a": [two]},
        {"_a": two}, [one, 1], [one, 2], [np.ones(2)], [np.zeros(2)], np.ones(2), np.zeros(2),
        np.ones(2, np.float32), np.float32(1), np.float32(2), {1, 2}, {1, 3}, OrderedDict(z=one),
        OrderedDict(z=two), Pair(one, 7), Pair(two, 7),
    ]  # fmt: skip
    assert len({fingerprint(Holder(value)) for value in held}) == len(held)
    # What has no value of its own is left out, and keeps nobody from sharing.
    odd = {"a": one, object(): one, "c": np.array([object()])}
    assert fingerprint(Holder(odd)) == fingerprint(Holder({**odd, "c": np.array([object()])}))
    again = fingerprint(Holder({"b": two, "a": one}))
    assert again == fingerprint(Holder({"a": one, "b": two})), "the order of a dict says nothing"


def test_arguments_count() -> None:
    """N2: the same weights under another configuration are another model."""
    changed = model(dataclasses.replace(ARGS, rope_theta=5000.0))
    assert tree_map(lambda x: x.shape, changed.parameters()) == tree_map(
        lambda x: x.shape, model().parameters()
    )
    assert fingerprint(changed) != fingerprint(model())


def test_class_counts() -> None:
    """N2: the same weights and arguments in another class are another model."""

    class Model(llama.Model):  # type: ignore[misc]
        """Computes something else, perhaps."""

    changed = model()
    changed.__class__ = Model
    assert fingerprint(changed) != fingerprint(model())


def _rope(factor: float) -> Callable[[Any], None]:
    def replace(m: Any) -> None:
        scaling = {
            "rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 64,
        }  # fmt: skip
        for layer in m.layers:
            layer.self_attn.rope = initialize_rope(16, 10000.0, False, scaling, 4096)

    return replace


def test_derived_attributes_count() -> None:
    """N3: a layer that was replaced in memory may differ in what it derived alone."""
    assert edited(_rope(2.0)) != edited(_rope(8.0)) == edited(_rope(8.0))


def test_training_counts_where_it_computes_something_else() -> None:
    """N2: with an adapter's dropout the KV of a model in training is another."""

    def adapted(*, trains: bool, dropout: float) -> Callable[[Any], None]:
        def adapt(m: Any) -> None:
            mx.random.seed(5)
            linear_to_lora_layers(m, 2, {"rank": 2, "scale": 10.0, "dropout": dropout})
            m.train(trains)

        return adapt

    assert edited(adapted(trains=True, dropout=0.5)) != edited(adapted(trains=False, dropout=0.5))
    assert edited(adapted(trains=True, dropout=0.0)) == edited(adapted(trains=False, dropout=0.0))


def _scaled(factor: float) -> Any:
    """A way to call attention, as somebody would replace it."""
    original = llama.Attention.__call__

    def scaled(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        return original(self, x * factor, mask, cache)

    return scaled


def test_a_method_that_was_replaced_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """N2: from whatever file, and with what it closes over."""
    found = {fingerprint(model())}
    for factor in (0.5, 2.0):
        original, scaled = llama.Attention.__call__, _scaled(factor)
        for replacement in (scaled, functools.wraps(original)(_scaled(factor + 1))):
            monkeypatch.setattr(llama.Attention, "__call__", replacement)
            found.add(fingerprint(model()))
            monkeypatch.undo()
    monkeypatch.setattr(nn.RMSNorm, "__call__", lambda self, x: x)
    found.add(fingerprint(model()))
    assert len(found) == 6


@pytest.mark.parametrize("base", ["llama.Model", "nn.Module"])
def test_a_class_without_a_file_counts_by_its_code(base: str) -> None:
    """N2: as notebooks and `python -c` define them; the same code is the same model anywhere."""

    def defined(factor: float) -> str:
        names: dict[str, Any] = {"llama": llama, "nn": nn}
        exec(f"class Model({base}):\n def f(self, x): return x * {factor} in {{1, 2, 3}}", names)
        changed = model()
        changed.__class__ = names["Model"]
        return fingerprint(changed)

    assert defined(1.0) != defined(2.0) == defined(2.0)


def test_the_source_of_mlx_lm_counts(tmp_path: Path) -> None:
    """N2: a model file that somebody edited in place is another model."""

    def of(text: str) -> str:
        file = tmp_path / "model.py"
        file.write_text(text)
        names: dict[str, Any] = {"__name__": "model"}
        exec(compile(text, str(file), "exec"), names)
        changed = model()
        changed.__class__ = type("Model", (llama.Model,), {"f": names["f"]})
        return fingerprint(changed)

    assert of("def f(self): return 1") != of("def f(self): return 2")
    ours = "".join(_Sources([llama.Model]))
    assert Path(str(llama.__file__)).read_text() in ours


@pytest.mark.parametrize("name", ["plamo3", "kimi_k3", "gpt_oss", "qwen3_next"])
def test_use_changes_nothing(name: str) -> None:
    """N2: what layers compute at their first use is no part of it, nor is that they were used."""
    used = architectures.build(name)
    used.eval()
    before = fingerprint(used)
    mx.eval(used(mx.array([[1, 2, 3]]), cache=make_prompt_cache(used)))
    assert fingerprint(used) == before


def test_namespaces() -> None:
    """N1: format and salt keep KV apart, and a namespace always fits."""
    names = {
        namespace_for(model(), "plain"),
        namespace_for(model(), "plain", "a"),
        namespace_for(model(), "plain", "b" * 1000),
        namespace_for(model(), "plain", "b" * 999 + "c"),
        namespace_for(model(), "quantised", "ä\n/"),
        namespace("x", "plain", ""),
        namespace("", "xplain", ""),
    }
    assert len(names) == 7
    assert all(len(name.encode()) <= MAX_NAMESPACE_BYTES and name.isprintable() for name in names)


def test_one_rank_of_several() -> None:
    """N3: a model that holds one rank's share is known as such."""
    assert not is_distributed(model())
    pipelined = model()
    pipelined.model.pipeline_size = 2
    assert is_distributed(pipelined)
