"""Every architecture of mlx-lm as a tiny random model, beside those of `tiny-models.json`.

Most modules of `mlx_lm.models` take arguments of the same few names. `SMALL` has a small value for
each name, `OWN` what one module wants otherwise. Float32, because mixtures of experts run on a CPU
in nothing else; random weights, equal in every process.
"""

import dataclasses
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from tests.support import models

SMALL: Final[dict[str, Any]] = {
    # Sizes.
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "dim_model_base"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"), 4
    ),
    **dict.fromkeys(
        ("intermediate_size", "ff_intermediate_size", "n_inner", "dense_intermediate_size"), 96
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        48,
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 500),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), 1024),
    # Attention.
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_attention_groups"), 2),
    "head_dim": 16,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 64,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "attention_window_size": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_cla": False,
    "cla_share_factor": 2,
    "use_qk_norm": True,
    "attention_bias": False,
    "dense_attention_every_n_layers": 1,
    # Positions.
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq"), 1),
    "decoder_sparse_step": 1,
    "num_dense_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "use_expert_bias": True,
    "use_mixed_mlp_moe": True,
    "is_moe_layer": [False, True] * 2,
    "mlp_only_layers": [],
    # Recurrence.
    "layer_group_size": 2,
    "group_norm_size": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "linear_allow_neg_eigval": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    **dict.fromkeys(("ssm_state_size", "state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "conv_L_cache"), 3),
    "conv_window": 2,
    "n_groups": 1,
    "time_step_rank": 4,
    "mamba_expand": 2,
    **dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8
    ),
    # The rest.
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "post_norm_eps"), 1e-5
    ),
    **dict.fromkeys(("mlp_bias", "use_bias", "conv_bias", "tie_word_embeddings"), False),
    "use_conv_bias": True,
    **dict.fromkeys(
        ("logits_scaling", "embedding_multiplier", "residual_multiplier", "output_multiplier"), 1.0
    ),
    "attention_multiplier": 0.25,
    "scale_depth": 1.0,
    "scale_emb": 1.0,
    "gegelu_limit": 20.0,
    "ffn_dim_divisor": 8,
}
"""A value for each argument that has one of these names."""

_ROPE: Final = {"rope_theta": 10000.0, "rope_type": "default"}
_ROPE_BY_TYPE: Final = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_ROPE_LLAMA4: Final = {
    **_ROPE,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 1024,
}
_BLOCKS: Final = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
]

OWN: Final[dict[str, dict[str, Any]]] = {
    "baichuan_m1": {"sliding_window_layers": [1, 3]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "gemma3": {"num_hidden_layers": 6},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "glm_moe_dsa": {"rope_parameters": _ROPE},
    "hunyuan": {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "hidden_act": "situ",
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2-vl": {
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1, 3],
    },
    "mellum": {"rope_parameters": _ROPE_BY_TYPE},
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
        }
    },
    "minimax_m3_vl": {"moe_layer_freq": [0, 1, 1, 1]},
    "ministral3": {"rope_parameters": _ROPE_LLAMA4},
    "mistral4": {
        "rope_parameters": {
            **_ROPE_LLAMA4,
            "rope_type": "yarn",
            "factor": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    },
    "muse_spark": {
        "rope_parameters": _ROPE,
        "layer_rope_theta": [10000.0, 0.0] * 2,
        "final_logit_softcapping": 30.0,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": _BLOCKS},
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": ["M", "*", "-", "M"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
        "ffn_multipliers": [1.0] * 4,
    },
    "phixtral": {"num_vocab": 500, "num_heads": 4},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16, "intermediate_size": 192},
    "spark2_5": {"rope_parameters": _ROPE_BY_TYPE},
    "step3p5": {"share_expert_dim": 48},
}
"""What a module wants beside `SMALL` or otherwise, in its own arguments or its text model's."""

LEFT_OUT: Final = {
    "bitnet": "its kernel needs Metal",
    "muse_spark": "its kernel needs Metal",
    "olmo": "importing it ends the process where ai2-olmo is not installed",
    "phi3small": "it crashes mlx on a CPU",
    "prism_hadamard_qwen35": "it loads packs of 2-bit weights only; its text model is qwen3_5's",
}
"""Architectures that cannot run everywhere, and why."""

_FOLDER: Final = Path(
    next(iter(getattr(importlib.util.find_spec("mlx_lm.models"), "submodule_search_locations", [])))
)


def names() -> tuple[str, ...]:
    """Every architecture: those of `tiny-models.json`, and each other module that has a Model.

    Read from the modules' text, since importing some of them ends the process.
    """
    modules = {
        path.stem
        for path in _FOLDER.glob("*.py")
        if re.search(r"^class Model\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    tiny = models.names()
    return tuple(sorted({*tiny, *(modules - set(map(models.module, tiny)))}))


def vocab_size(name: str) -> int:
    """Token ids in [0, vocab_size) are valid for this model."""
    return models.vocab_size(name) if name in models.names() else int(SMALL["vocab_size"])


def tokens(name: str, count: int, *, seed: int = 0) -> list[int]:
    """Valid token ids, the same for equal arguments; a longer list starts with the shorter."""
    return models.tokens_below(vocab_size(name), count, seed=seed)


def build(name: str) -> Any:
    """A float32 model with random weights, the same in every process."""
    if name in models.names():
        return models.build(name)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    wanted = {field.name for field in dataclasses.fields(module.ModelArgs)}
    small = {**SMALL, "model_type": name, **OWN.get(name, {})}
    given = {key: value for key, value in small.items() if key in wanted}
    if "text_config" in wanted:
        # Some modules take arguments of the text model's for their own.
        given["text_config"] = dict(small)
    mx.random.seed(0)
    model: Any = module.Model(module.ModelArgs.from_dict(given))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model
