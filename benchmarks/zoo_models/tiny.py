"""Tiny configurations of the models of ``transformers``, found from the names of their fields."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 64
IMAGE, PATCH = 32, 8
MELS = 16

RULES: tuple[tuple[str, int], ...] = (
    (r"pad_token_id|blank_token_id", 0),
    (r"bos_token_id|cls_token_id|decoder_start_token_id", 1),
    (r"eos_token_id|sep_token_id", 2),
    (r"mask_token_id", 3),
    (r".*token_(id|index)", 4),
    (r"type_vocab_size|num_labels", 2),
    (r"(\w+_)?vocab_size(_\w+)?|num_tokens|n_token", VOCABULARY),
    (r"num_(key_value|kv)_heads|n_kv_heads?|(\w+_)?num_key_value_heads|num_global_key_value_heads", 2),
    (r"linear_num_key_heads|linear_num_heads", 2),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"num_mamba_heads", 8),
    (r"(\w+_)?(num_(attention_)?heads|n_heads?|attention_heads|linear_num_value_heads)", 4),
    (r"(\w+_)?head_dim|d_kv|dim_head|mamba_d_head|attention_head_dim|(\w+_)?head_size|attention_key_size", 8),
    (r"rotary_dim", 4),
    (r"(q|kv|o|attn|mlp)_lora_rank|q_rank|index_topk|index_n_heads|(\w+_)?low_rank_dim|\w+_lora_rank", 8),
    (r"(\w+_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_decoder_layers|depth)", 2),
    (r"num_encoder_layers|encoder_num_hidden_layers|decoder_num_hidden_layers|num_blocks|num_hidden_blocks", 2),
    (r"(\w+_)?(intermediate_size|ffn_dim|d_ff|mlp_dim|n_inner|ff_dim|ffn_hidden_size|inner_dim)(_\w+)?", 48),
    (r"num_local_experts|(\w+_)?num_experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|moe_top_k|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_group|num_limited_groups", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|decoder_sparse_step|encoder_sparse_step", 1),
    (r"max_window_layers", 1),
    (r"max_(\w+_)?positions?(_embeddings)?|n_positions|n_ctx|max_seq_len(gth)?|model_max_length|seq_length", 64),
    (r"(\w+_)?image_size|input_size|img_size|image_resolution", IMAGE),
    (r"(\w+_)?patch_size|(\w+_)?patch_stride", PATCH),
    (r"num_mel_bins|num_mels|n_mels|mel_bins|feature_size", MELS),
    (r"sliding_window|attention_window|local_window_size|attention_chunk_size", 4),
    (r"state_size|mamba_d_state|ssm_state_size|time_step_rank|mamba_dt_rank", 8),
    (r"chunk_size|mamba_chunk_size|(\w+_)?chunk_length|block_size", 8),
    (r"num_conv_pos_embeddings|num_frames", 4),
    (r"num_conv_pos_embedding_groups", 2),
    (r"num_queries|num_query_tokens|num_latents", 5),
    (r"num_(image_)?codebooks|num_quantizers", 3),
    (r"(\w+_)?codebook_size|num_codevectors_per_group|num_embeddings", VOCABULARY),
    (r"(\w+_)?(hidden_size|hidden_dim|embed_dim|emb_dim|d_model|n_embd|embedding_size|embedding_dim)(_\w+)?", 32),
    (r"dim|projection_dim|(\w+_)?proj(ection)?_size|(\w+_)?output_dim|lru_width|output_hidden_size", 32),
    (r"hidden_channels|(\w+_)?latents?_dim|d_latents|(\w+_)?pooler_output_size|model_dim|word_embed_proj_dim", 32),
    (r"base_channels|latent_channels|num_filters|\w*codevector_dim|stem_hidden_channels|upsample_initial_channel", 16),
)
COMPILED = tuple((re.compile(pattern), value) for pattern, value in RULES)

STAGES: dict[str, list[int]] = {
    "hidden_sizes": [8, 16, 24, 32],
    "embed_dims": [8, 16, 24, 32],
    "embed_dim": [8, 16, 32, 32],
    "num_attention_heads": [1, 2, 4, 4],
    "num_heads": [1, 2, 4, 4],
    "depths": [1, 1, 2, 1],
    "depth": [1, 1, 2, 1],
    "neck_hidden_sizes": [8, 16, 24, 32],
}

SWIN = {"depths": [1, 2], "num_heads": [2, 4], "embed_dim": 16, "patch_size": 4, "window_size": 4}
"""Four stages would leave nothing of so small an image."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "swin": SWIN,
    "swinv2": SWIN,
    "maskformer-swin": SWIN,
    "donut-swin": SWIN,
    "swin2sr": {"depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "patch_size": 1, "window_size": 4},
    "mamba2": {"num_heads": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "bit": {"num_groups": 4},
    "granite_speech5_encoder": {"context_size": 16},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
}

WANTED = {
    "pad_token_id": 0,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Fields that are set even where the default configuration leaves them open."""


def tiny(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A configuration with few and narrow layers and no dropout."""
    default = config_class()
    default.allow_global_per_layer_attribute_access = True
    fields = {f.name: f for f in dataclasses.fields(config_class) if f.init}
    values: dict[str, Any] = {}
    for name, one in fields.items():
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            values[name] = tiny(type(value))
        elif (small := shrunk(name, value, one.default is None)) is not None:
            values[name] = small
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:  # latent attention shares no heads
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    layers, few = getattr(default, "num_hidden_layers", None), values.get("num_hidden_layers")
    for name, one in fields.items():  # one entry for each layer
        value = getattr(default, name, None)
        if isinstance(value, (list, tuple)) and few and len(value) == layers and one.default is not None:
            values[name] = type(value)(value[:few])
    config = config_class(**values | OVERRIDES.get(config_class.model_type, {}))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def shrunk(name: str, value: Any, derived: bool) -> Any:
    """A small value for a field, or None where it should stay as it is."""
    if value is None or name == "pad_token_id":
        return WANTED.get(name)
    if isinstance(value, bool):
        return False if name in ("apply_spec_augment", "use_cache") and value else None
    if "drop" in name or name in ("mask_time_prob", "mask_feature_prob") or name.endswith("jitter_noise"):
        if isinstance(value, (list, tuple)):
            return type(value)(type(v)(0) for v in value)
        return type(value)(0) if isinstance(value, (int, float)) else None
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return None if derived else shrunk_list(name, value)
    if not isinstance(value, int):
        return None
    for pattern, small in COMPILED:
        if pattern.fullmatch(name):
            return min(value, small) if name.endswith(("layers", "depth")) else small
    return None


def shrunk_list(name: str, value: list[int] | tuple[int, ...]) -> Any:
    kind = type(value)
    if name in STAGES and len(value) <= 4:
        return STAGES[name][: len(value)]
    if name.endswith("image_size") or name == "input_size":
        return kind([IMAGE] * len(value))
    if name == "conv_dim":
        return kind([16] * len(value))
    if name.endswith("token_id"):
        return kind([2])
    return None
