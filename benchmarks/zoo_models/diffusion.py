"""Networks of ``diffusers``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from zoo_models.case import Case, noise, simple

Makers = dict[str, Callable[[int, int], Any]]


def images(channels: int = 4, size: int = 8) -> Callable[[int, int], Any]:
    return lambda m, length: noise(m, channels, size, size)


def words(width: int) -> Callable[[int, int], Any]:
    return lambda m, length: noise(m, length, width)


def times(m: int, length: int) -> Any:
    return torch.linspace(1, 900, m).long()


STAGES = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
DOWN = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
CODED = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
UNET: Makers = {"sample": images(), "timestep": times}

MODELS: dict[str, tuple[dict[str, Any], Makers]] = {
    "UNet2DModel": (STAGES | DOWN | {"in_channels": 4, "out_channels": 4, "attention_head_dim": 4}, UNET),
    "UNet2DConditionModel": (
        STAGES | CROSS | {"cross_attention_dim": 12, "attention_head_dim": 2},
        UNET | {"encoder_hidden_states": words(12)},
    ),
    "ControlNetModel": (
        STAGES
        | {"down_block_types": CROSS["down_block_types"], "cross_attention_dim": 12, "attention_head_dim": 2}
        | {"conditioning_embedding_out_channels": (4, 8)},
        UNET | {"encoder_hidden_states": words(12), "controlnet_cond": images(3, 16)},
    ),
    "UNet1DModel": (
        {"block_out_channels": (32, 64), "in_channels": 4, "out_channels": 4, "layers_per_block": 1}
        | {"down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"), "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip")}
        | {"extra_in_channels": 64},
        {"sample": lambda m, length: noise(m, 4, 32), "timestep": times},
    ),
    "AutoencoderKL": (STAGES | CODED | {"latent_channels": 4}, {"sample": images(3, 16)}),
    "VQModel": (STAGES | CODED | {"latent_channels": 3, "num_vq_embeddings": 16}, {"sample": images(3, 16)}),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
        | {"num_embeds_ada_norm": 20},
        {
            "hidden_states": images(),
            "timestep": lambda m, length: torch.arange(1, m + 1),
            "class_labels": lambda m, length: torch.arange(m),
        },
    ),
    "PixArtTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
        | {"cross_attention_dim": 16, "caption_channels": 12, "use_additional_conditions": False},
        {"hidden_states": images(), "timestep": times, "encoder_hidden_states": words(12)},
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
        | {"num_attention_heads": 2, "joint_attention_dim": 12, "caption_projection_dim": 16, "out_channels": 4}
        | {"pooled_projection_dim": 10},
        {
            "hidden_states": images(),
            "encoder_hidden_states": words(12),
            "pooled_projections": lambda m, length: noise(m, 10),
            "timestep": times,
        },
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1}
        | {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12, "out_channels": 4}
        | {"caption_projection_dim": 16, "pos_embed_max_size": 64},
        {"hidden_states": images(), "encoder_hidden_states": words(12), "timestep": times},
    ),
    "SanaTransformer2DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
        | {"caption_channels": 12, "sample_size": 8},
        {"hidden_states": images(), "encoder_hidden_states": words(12), "timestep": times},
    ),
    "CogView3PlusTransformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "out_channels": 4}
        | {"text_embed_dim": 12, "time_embed_dim": 8, "condition_dim": 2, "sample_size": 8, "pos_embed_max_size": 8},
        {
            "hidden_states": images(),
            "encoder_hidden_states": words(12),
            "timestep": times,
            "original_size": lambda m, length: torch.full((m, 2), 8),
            "target_size": lambda m, length: torch.full((m, 2), 8),
            "crop_coords": lambda m, length: torch.zeros((m, 2)),
        },
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 12}
        | {"freq_dim": 16, "ffn_dim": 24, "num_layers": 2, "cross_attn_norm": True},
        {
            "hidden_states": lambda m, length: noise(m, 4, 2, 8, 8),
            "encoder_hidden_states": words(12),
            "timestep": times,
        },
    ),
    "PriorTransformer": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 12, "num_embeddings": 6}
        | {"additional_embeddings": 4},
        {
            "hidden_states": lambda m, length: noise(m, 12),
            "timestep": times,
            "proj_embedding": lambda m, length: noise(m, 12),
            "encoder_hidden_states": lambda m, length: noise(m, 6, 12),
        },
    ),
    "UNet3DConditionModel": (
        STAGES
        | {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D")}
        | {"up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 12, "attention_head_dim": 4},
        {
            "sample": lambda m, length: noise(m, 4, 3, 8, 8),
            "timestep": times,
            "encoder_hidden_states": words(12),
        },
    ),
}


def builders() -> dict[str, Callable[[], Case]]:
    if find_spec("diffusers") is None:
        return {}
    return {f"diffusers/{name}": partial(build, name) for name in MODELS}


def build(name: str) -> Case:
    import diffusers

    arguments, makers = MODELS[name]
    model = getattr(diffusers, name)(**arguments).double()
    case = simple(model, **makers)
    with torch.no_grad():
        model(**case.batch(2, 8).whole)
    return case
