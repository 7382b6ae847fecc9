"""Which model's KV hits, with real weights on disk and a real daemon (rules N1, N2, N3).

Every case stores the KV of one loaded model and asks for it with another: the same weights by
another way hit, anything that changes what the model computes does not.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen2
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

from prefixcached.client import Cache, PromptCache, connect
from tests.client.kv.loopback import prefill
from tests.support.daemon_process import DaemonProcess

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "rope_theta": 10000.0,
}
TOKENS = [(7 * i * i + 3) % 100 for i in range(40)]

CUSTOM = """
from mlx_lm.models.qwen2 import Model as Qwen2, ModelArgs


class Model(Qwen2):
    def __call__(self, inputs, cache=None, input_embeddings=None):
        return super().__call__(inputs, cache, input_embeddings) * {factor}
"""
"""Code of a model's own folder."""


def write(folder: Path, **config: Any) -> Path:
    """Write a model; the weights are always the same."""
    folder.mkdir(parents=True)
    mx.random.seed(1)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(CONFIG))
    weights = tree_flatten(model.parameters())
    assert isinstance(weights, list)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def write_adapter(folder: Path, kind: str, scale: float = 10.0) -> Path:
    """Write an adapter that changes what is computed."""
    folder.mkdir()
    parameters = {"rank": 2, "scale": scale, "dropout": 0.0}
    config = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model = qwen2.Model(qwen2.ModelArgs.from_dict(CONFIG))
    linear_to_lora_layers(model, 1, parameters, use_dora=kind == "dora")
    mx.random.seed(2)
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    weights = {
        name: mx.random.normal(value.shape)
        for name, value in flat
        if name.rpartition(".")[2] in ("lora_a", "lora_b")
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(folder, **options)[0]


def fused(model: Any) -> Any:
    """Return the model with its adapter in its weights, as `mlx_lm.fuse` makes it."""
    layers = [(name, m.fuse()) for name, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(layers))
    return model


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[Cache]:
    with connect(daemon.socket, fail_open=False) as connected:
        yield connected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "first")


def put(cache: Cache, model: Any, **options: Any) -> None:
    shared = PromptCache(model, cache=cache, **options)
    kv = shared.fresh()
    prefill(model, kv, TOKENS)
    assert shared.store(TOKENS, kv)


def reused(cache: Cache, model: Any, **options: Any) -> int:
    return PromptCache(model, cache=cache, **options).fetch(TOKENS)[1]


def hub(folder: Path, base: Path) -> Path:
    """Return the same files as the Hugging Face hub lays them out: links to blobs."""
    blobs, snapshot = base / "blobs", base / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def test_the_same_weights_by_another_way(cache: Cache, folder: Path, tmp_path: Path) -> None:
    """N2: another path, a hub's snapshot, a lazy load and another tokenizer all hit."""
    put(cache, loaded(folder))
    copied = Path(shutil.copytree(folder, tmp_path / "another name"))
    (copied / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    snapshot = hub(folder, tmp_path / "models--some--model")
    assert (snapshot / "config.json").is_symlink()
    for model in (
        loaded(folder),
        loaded(copied),
        loaded(snapshot),
        loaded(folder, lazy=True),
        loaded(folder, model_config={"rope_theta": CONFIG["rope_theta"]}),
    ):
        assert reused(cache, model) == len(TOKENS) - 1


def _edit_weight(model: Any) -> Any:
    weight = model.layers[0].self_attn.k_proj.weight
    weight[3, 5] = weight[3, 5] + 1e-3
    return model


def _edit_and_undo(model: Any) -> Any:
    weight = model.layers[0].self_attn.k_proj.weight
    before = mx.array(weight)
    _edit_weight(model)
    model.layers[0].self_attn.k_proj.weight = before
    return model


def test_weights_edited_in_memory(cache: Cache, folder: Path) -> None:
    """N3: an edited weight is seen, though no file says so; undone, it hits again."""
    put(cache, loaded(folder))
    assert reused(cache, _edit_weight(loaded(folder))) == 0
    assert reused(cache, _edit_and_undo(loaded(folder))) == len(TOKENS) - 1


@pytest.mark.parametrize(
    "override",
    [
        {"rope_theta": 5000.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-6},
        {"rope_traditional": True},
    ],
    ids=str,
)
def test_overrides_of_the_configuration(
    cache: Cache, folder: Path, override: dict[str, Any]
) -> None:
    """N3: `model_config` overrides are seen, though weights and files agree; equal ones hit."""
    put(cache, loaded(folder, model_config=override))
    assert reused(cache, loaded(folder)) == 0
    assert reused(cache, loaded(folder, model_config=override)) == len(TOKENS) - 1


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters(cache: Cache, folder: Path, tmp_path: Path, kind: str) -> None:
    """N1: base, adapter, the adapter at another scale and the fused model share nothing."""
    first = write_adapter(tmp_path / "a", kind)
    second = write_adapter(tmp_path / "b", kind, scale=5.0)
    variants: dict[str, Callable[[], Any]] = {
        "base": lambda: loaded(folder),
        "adapter": lambda: load_adapters(loaded(folder), str(first)),
        "other scale": lambda: load_adapters(loaded(folder), str(second)),
        "fused": lambda: fused(load_adapters(loaded(folder), str(first))),
    }
    for variant in variants.values():
        assert reused(cache, variant()) == 0
        put(cache, variant())
    # Each finds its own, an adapter that was copied elsewhere too.
    for variant in variants.values():
        assert reused(cache, variant()) == len(TOKENS) - 1
    copied = shutil.copytree(first, tmp_path / "copied")
    assert reused(cache, load_adapters(loaded(folder), str(copied))) == len(TOKENS) - 1


def test_code_of_the_models_own_folder(cache: Cache, tmp_path: Path) -> None:
    """N2: equal weights and arguments with other code are another model; with equal code, not."""
    folders = []
    for number, factor in enumerate((2, 3, 2)):
        folder = write(tmp_path / str(number), model_file="code.py")
        (folder / "code.py").write_text(CUSTOM.format(factor=factor))
        folders.append(folder)
    first, other, same = (loaded(folder, trust_remote_code=True) for folder in folders)
    put(cache, first)
    assert reused(cache, other) == 0
    assert reused(cache, same) == len(TOKENS) - 1


def test_arguments_by_another_name(cache: Cache) -> None:
    """N2: arguments that a model keeps as `config` count as `model.args` do."""
    from mlx_lm.models import plamo3

    def model(theta: float) -> Any:
        mx.random.seed(4)
        return plamo3.Model(
            plamo3.ModelArgs(
                hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=2,
                num_key_value_heads=1, head_dim=16, vocab_size=100, rope_theta=theta,
            )
        )  # fmt: skip

    assert not hasattr(model(1.0), "args")
    put(cache, model(10000.0))
    assert reused(cache, model(5000.0)) == 0
    assert reused(cache, model(10000.0)) > 0


def test_formats_and_salts(cache: Cache, folder: Path) -> None:
    """N2, N4: each format of KV and each salt has its own, and finds it again."""
    model = loaded(folder)
    variants: list[dict[str, Any]] = [
        {},
        {"salt": "tenant 1"},
        {"salt": "tenant 2"},
        {"max_kv_size": 64},
        {"max_kv_size": 128},
    ]
    for options in variants:
        assert reused(cache, model, **options) == 0
        put(cache, model, **options)
    for options in variants:
        assert reused(cache, model, **options) == len(TOKENS) - 1


def test_quantised_formats(cache: Cache, tmp_path: Path) -> None:
    """N4: quantised KV is found with the same bits, group size and start, and no others."""
    mx.random.seed(1)
    # Groups of 64 need heads of 64.
    model = qwen2.Model(qwen2.ModelArgs.from_dict(CONFIG | {"hidden_size": 128}))
    stored: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 10}
    shared = PromptCache(model, cache=cache, **stored)
    kv = shared.fresh()
    prefill(model, kv, TOKENS)
    assert shared.store(TOKENS, [entry.to_quantized(group_size=32, bits=8) for entry in kv])
    assert reused(cache, model, **stored) == len(TOKENS) - 1
    others: list[dict[str, Any]] = [
        {"quantized_kv_start": 20},
        {"quantized_kv_start": 0},
        {"kv_bits": 4},
        {"kv_group_size": 64},
        {"kv_bits": None},
    ]
    for other in others:
        assert reused(cache, model, **(stored | other)) == 0
