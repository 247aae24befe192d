"""Stacks of layers: what torch itself has, and ``x-transformers`` with what its layers can be told to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo_models.case import Case, ids, of, of_installed, pictures, simple, tokens, vectors

TOKENS = 64
LAYERS = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}

# What x-transformers' layers can be told to do.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "T5 bias": {"rel_pos_bias": True},
    "dynamic bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "RMSNorm": {"use_rmsnorm": True},
    "ScaleNorm": {"use_scalenorm": True},
    "GLU": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "one key head": {"attn_one_kv_head": True},
    "key norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "memory keys": {"attn_num_mem_kv": 3},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "sparse": {"attn_sparse_topk": 3},
    "gates": {"gate_residual": True, "attn_gate_values": True},
    "sandwich": {"sandwich_norm": True},
    "post norm": {"pre_norm": False},
    "macaron": {"macaron": True},
    "shifted": {"shift_tokens": 1},
    "hyper connections": {"num_residual_streams": 2},
    "value residual": {"add_value_residual": True},
}


class Sequenced(nn.Module):
    """A recurrent layer between an embedding and a linear layer."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding, self.layer, self.last = nn.Embedding(TOKENS, 16), layer, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(self.embedding(x))
        return self.last(output[0] if isinstance(output, tuple) else output)


class Pair(nn.Module):
    """nn.Transformer from tokens to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS)
        self.inner = nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        return self.last(self.inner(self.embedding(source), self.embedding(target), tgt_mask=mask))


def recurrent(name: str, **options: Any) -> Case:
    return tokens(Sequenced(getattr(nn, name)(16, 12, batch_first=True, **options), 24 if options else 12))


def pair() -> Case:
    return simple(Pair(), source=ids, target=lambda m, length: ids(m, length + 1))


def encoder(**options: Any) -> Case:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, **options)
    return tokens(Sequenced(nn.TransformerEncoder(layer, 2), 16))


def x_transformer(kind: str, feature: str) -> Case:
    layers = of("x_transformers", kind, **LAYERS, **FEATURES[feature])
    return tokens(of("x_transformers", "TransformerWrapper", num_tokens=TOKENS, max_seq_len=32, attn_layers=layers))


def x_wrapper(name: str) -> Case:
    layers = of("x_transformers", "Encoder", **LAYERS)
    if name == "ViTransformerWrapper":
        model = of("x_transformers", name, image_size=16, patch_size=4, num_classes=5, attn_layers=layers)
        return pictures(model, "img")
    if name == "memory tokens":
        options = {"num_tokens": TOKENS, "max_seq_len": 32, "num_memory_tokens": 3, "attn_layers": layers}
        return tokens(of("x_transformers", "TransformerWrapper", **options))
    return vectors(of("x_transformers", name, dim_in=16, dim_out=6, max_seq_len=32, attn_layers=layers))


PACKAGES: dict[str, dict[str, Callable[[], Case]]] = {
    "torch": {
        "RNN": partial(recurrent, "RNN"),
        "LSTM": partial(recurrent, "LSTM"),
        "GRU": partial(recurrent, "GRU"),
        "LSTM[bidirectional]": partial(recurrent, "LSTM", bidirectional=True, num_layers=2),
        "Transformer": pair,
        "TransformerEncoder": encoder,
        "TransformerEncoder[norm first]": partial(encoder, norm_first=True),
    },
    "x_transformers": {
        **{
            f"TransformerWrapper[{kind}, {feature}]": partial(x_transformer, kind, feature)
            for feature in FEATURES
            for kind in ("Decoder", "Encoder")
        },
        **{name: partial(x_wrapper, name) for name in ("ViTransformerWrapper", "ContinuousTransformerWrapper")},
        "TransformerWrapper[memory tokens]": partial(x_wrapper, "memory tokens"),
    },
}


def builders() -> dict[str, Callable[[], Case]]:
    return of_installed(PACKAGES)
