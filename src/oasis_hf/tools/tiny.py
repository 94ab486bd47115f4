"""Tiny random models of every type that Transformers has, on which a cache can be tried."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
WINDOW = 16
POSITIONS = 256
SCALE = 0.2
"""Spread of the weights: attention is then neither uniform nor on one token."""

# Every name under which configs ask for a size; each config gets those that it has.
_SIZES: dict[str, Any] = {
    # Vocabulary, width and depth.
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 128),
    **dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size"), 128),
    "encoder_hash_byte_group_vocab": 128,
    **dict.fromkeys(
        (
            "hidden_size",
            "hidden_size_global",
            "n_embd",
            "d_model",
            "embed_dim",
            "emb_dim",
            "word_embed_proj_dim",
        ),
        64,
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("dff", "encoder_ffn_dim", "ffn_hidden_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), LAYERS),
    "depth": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    "hidden_size_per_layer_input": 8,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    # Attention.
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), WINDOW),
    "num_kv_shared_layers": 2,
    "rotary_dim": 8,
    "is_decoder": True,
    # Latent attention, and indexers that choose tokens.
    **dict.fromkeys(("q_lora_rank", "qk_head_dim"), 24),
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    **dict.fromkeys(("qk_rope_head_dim", "index_topk"), 8),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 2),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim", "indexer_budget"), 16),
    "indexer_kv_heads": 1,
    "indexer_compress_ratio": 4,
    # Experts.
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "zero_expert_num"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    # Recurrent layers.
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    "linear_head_dim": 16,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 32),
    "lru_width": 64,
}

_GEMMA4 = {"global_head_dim": 32}
_DOTS3 = {
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("swa_q_lora_rank", "swa_head_dim"), 24),
    **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 16),
    "swa_kv_lora_rank": 32,
}

# What some types need besides.
_EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            },
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}

# What to leave at its default, in turn, where a config refuses the whole.
_OMISSIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("layer_types",),
    ("num_kv_shared_layers",),
    ("num_key_value_heads",),
    ("head_dim",),
    ("layer_types", "head_dim"),
    ("qk_head_dim", "head_dim"),
)


def model_types() -> list[str]:
    """All types with a causal language model in the installed Transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    """Name of the causal language model of a type."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config of four small layers, among them every kind of layer that the default has.

    Args:
        model_type: one of `model_types()`.
        **changes: fields of the decoder's config.

    Raises:
        Exception: whatever the config's own checks raise last.
    """
    config = CONFIG_MAPPING[model_type]()
    wanted = getattr(getattr(transformers, class_name(model_type)), "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        config = config.get_text_config(decoder=True)
    return _shrink(config, {**_EXTRA.get(model_type, {}), **changes})


def _shrink(config: PreTrainedConfig, extra: dict[str, Any]) -> PreTrainedConfig:
    names = {field.name for field in dataclasses.fields(config)}
    sizes = {name: size for name, size in _SIZES.items() if name in names}
    if vars(config).get("sliding_window") is None:
        sizes.pop("sliding_window", None)
    if vars(config).get("kv_lora_rank"):
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
        sizes.pop("head_dim", None)
    for name in {"layer_types", "layers_block_type"} & names:
        kinds = list(dict.fromkeys(getattr(config, name) or ()))
        if kinds:
            sizes[name] = (kinds * LAYERS)[:LAYERS]
    parts = {
        name: _shrink(part, extra if name == "text_config" else {})
        for name in config.sub_configs
        if isinstance(part := getattr(config, name, None), PreTrainedConfig)
    }
    sizes |= parts
    if "text_config" not in parts:
        sizes |= extra
    error: Exception | None = None
    for omitted in _OMISSIONS:
        try:
            return type(config)(**{k: v for k, v in sizes.items() if k not in omitted})
        except Exception as refused:
            error = error or refused
    assert error is not None
    raise error


def tiny_model(config: PreTrainedConfig, name: str, attention: str, seed: int = 0) -> Any:
    """A random model in fp32, the same for any attention implementation.

    Args:
        config: as from `tiny_config`.
        name: the model class.
        attention: the attention implementation.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    # A model writes its attention implementation into its config.
    own = copy.deepcopy(config)
    model = getattr(transformers, name)._from_config(own, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, SCALE, generator=generator)
            elif not torch.isfinite(weight).all():
                weight.zero_()
    return model
