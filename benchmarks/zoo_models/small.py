"""Small packages of models in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from zoo_models.case import Case, ids, noise, of, of_installed, pictures, simple, tokens, vectors

TOKENS = 64


def builders() -> dict[str, Callable[[], Case]]:
    return of_installed(PACKAGES)


def mamba(module: str) -> Case:
    inner = import_module(f"mambapy.{module}")
    name = {"mamba": "Mamba", "mamba2": "Mamba2"}[module]
    config = getattr(inner, f"{name}Config")(d_model=16, n_layers=2, d_state=4)
    return vectors(getattr(inner, name)(config))


def perceiver() -> Case:
    model = of(
        "perceiver_pytorch",
        "Perceiver",
        input_channels=3,
        num_freq_bands=2,
        max_freq=4.0,
        depth=2,
        num_latents=6,
        latent_dim=16,
        num_classes=5,
        latent_heads=2,
        cross_dim_head=8,
        latent_dim_head=8,
    )
    return simple(model, data=lambda m, length: noise(m, 8, 8, 3))


def perceiver_io() -> Case:
    model = of(
        "perceiver_pytorch",
        "PerceiverLM",
        num_tokens=TOKENS,
        max_seq_len=32,
        dim=16,
        depth=1,
        num_latents=5,
        latent_dim=16,
        latent_heads=2,
    )
    return tokens(model)


def language(module: str, name: str, **arguments: Any) -> Case:
    model = of(module, name, num_tokens=TOKENS, dim=16, depth=2, **arguments)
    return tokens(model, model.forward.__code__.co_varnames[1], 4)


def sequence(module: str, name: str, **arguments: Any) -> Case:
    model = of(module, name, **arguments)
    return vectors(model, model.forward.__code__.co_varnames[1])


def picture(module: str, name: str, channels: int, **arguments: Any) -> Case:
    model = of(module, name, **arguments)
    return pictures(model, model.forward.__code__.co_varnames[1], channels)


def mixer(name: str) -> Case:
    options = {"channels": 3} if name == "MLPMixer" else {"segments": 4}
    model = of("mlp_mixer_pytorch", name, image_size=16, patch_size=4, dim=16, depth=2, num_classes=5, **options)
    return pictures(Named(model))


class Named(nn.Module):
    """Gives the input of an nn.Sequential a name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def gated() -> Case:
    inner = import_module("g_mlp_pytorch.g_mlp_pytorch")
    model = inner.gMLP(num_tokens=TOKENS, dim=16, depth=2, seq_len=8, causal=True, attn_dim=8)
    return simple(model, x=lambda m, length: ids(m, 8))


Makers = dict[str, Callable[[], Case]]
PACKAGES: dict[str, Makers] = {
    "mambapy": {"Mamba": partial(mamba, "mamba")},
    "perceiver_pytorch": {"Perceiver": perceiver, "PerceiverLM": perceiver_io},
    "linear_attention_transformer": {
        "LinearAttentionTransformerLM": partial(
            language, "linear_attention_transformer", "LinearAttentionTransformerLM", heads=2, max_seq_len=32
        ),
        "LinearAttentionTransformerLM[causal]": partial(
            language,
            "linear_attention_transformer",
            "LinearAttentionTransformerLM",
            heads=2,
            max_seq_len=32,
            causal=True,
            blindspot_size=2,
        ),
    },
    "performer_pytorch": {
        "PerformerLM": partial(language, "performer_pytorch", "PerformerLM", heads=2, max_seq_len=32, dim_head=8)
    },
    "g_mlp_pytorch": {"gMLP": gated},
    "mlp_mixer_pytorch": {name: partial(mixer, name) for name in ("MLPMixer", "Permutator")},
    "nystrom_attention": {
        "Nystromformer": partial(
            sequence, "nystrom_attention", "Nystromformer", dim=16, dim_head=8, heads=2, depth=2, num_landmarks=3
        )
    },
    "conformer": {
        "Conformer": partial(
            sequence, "conformer", "Conformer", dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5
        )
    },
    "soft_moe_pytorch": {
        "SoftMoE": partial(sequence, "soft_moe_pytorch", "SoftMoE", dim=16, seq_len=8, num_experts=4),
        "DynamicSlotsSoftMoE": partial(sequence, "soft_moe_pytorch", "DynamicSlotsSoftMoE", dim=16, num_experts=4),
    },
    "mixture_of_experts": {"MoE": partial(sequence, "mixture_of_experts", "MoE", dim=16, num_experts=4, hidden_dim=16)},
    "st_moe_pytorch": {"MoE": partial(sequence, "st_moe_pytorch", "MoE", dim=16, num_experts=4, gating_top_n=2)},
    "minGRU_pytorch": {
        "minLM": partial(language, "minGRU_pytorch.minLM", "minLM"),
    },
    "axial_attention": {
        "AxialAttention": partial(picture, "axial_attention", "AxialAttention", 16, dim=16, dim_index=1, heads=2),
        "AxialImageTransformer": partial(
            picture, "axial_attention", "AxialImageTransformer", 16, dim=16, depth=2, heads=2, reversible=False
        ),
    },
    "lambda_networks": {
        "LambdaLayer": partial(picture, "lambda_networks", "LambdaLayer", 8, dim=8, dim_out=8, r=5, dim_k=4, heads=2)
    },
    "bottleneck_transformer_pytorch": {
        "BottleStack": partial(
            picture,
            "bottleneck_transformer_pytorch",
            "BottleStack",
            8,
            dim=8,
            fmap_size=16,
            dim_out=16,
            num_layers=2,
            heads=2,
            dim_head=8,
            rel_pos_emb=True,
        )
    },
    "slot_attention": {
        "SlotAttention": partial(sequence, "slot_attention", "SlotAttention", num_slots=3, dim=16, iters=2)
    },
}
