"""The variants of ``vit-pytorch``, and the networks of ``monai`` and ``efficientnet_pytorch``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from zoo_models.case import Case, noise, simple

SIZE = 32
PLAIN = {"image_size": SIZE, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}
SIMPLE = PLAIN | {"dim_head": 8}
CLIP = PLAIN | {"frames": 4, "frame_patch_size": 2}
SERIES = {"seq_len": 32, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}

# module.Class: arguments
VITS: dict[str, dict[str, Any]] = {
    "vit.ViT": PLAIN,
    "simple_vit.SimpleViT": SIMPLE,
    "deepvit.DeepViT": PLAIN,
    "cait.CaiT": PLAIN | {"cls_depth": 1},
    "parallel_vit.ViT": PLAIN | {"num_parallel_branches": 2},
    "rvt.RvT": PLAIN,
    "learnable_memory_vit.ViT": PLAIN,
    "normalized_vit.nViT": SIMPLE,
    "vit_for_small_dataset.ViT": PLAIN,
    "vit_with_patch_merger.ViT": PLAIN | {"patch_merge_layer": 1, "patch_merge_num_tokens": 3},
    "vit_with_decorr.ViT": PLAIN,
    "vit_with_keel_post_ln.ViT": PLAIN,
    "vit_detpool.ViTDetPool": PLAIN,
    "vit_5.ViT": PLAIN,
    "jet_vit.JetViT": SIMPLE,
    "ats_vit.ViT": PLAIN | {"max_tokens_per_depth": (8, 6)},
    "simple_flash_attn_vit.SimpleViT": SIMPLE,
    "simple_vit_attn_residual.SimpleViTAttnResidual": SIMPLE,
    "simple_vit_orthog_residual_update.SimpleViT": SIMPLE,
    "simple_vit_with_fft.SimpleViT": SIMPLE | {"freq_patch_size": 8},
    "simple_vit_with_hyper_connections.SimpleViT": SIMPLE | {"num_residual_streams": 2},
    "simple_vit_with_qk_norm.SimpleViT": SIMPLE,
    "simple_vit_with_register_tokens.SimpleViT": SIMPLE,
    "simple_vit_with_relative_proj_pos_bias.SimpleViT": SIMPLE,
    "simple_vit_with_sparse_gating.SimpleViTWithSparseGating": SIMPLE,
    "simple_vit_with_specialized_cls.SimpleViT": SIMPLE,
    "simple_vit_with_value_residual.SimpleViT": SIMPLE,
    "attn_residual_with_dca_simple_vit.SimpleViT": SIMPLE,
    "simple_uvit.SimpleUViT": SIMPLE,
    "looped_vit.LoopedViT": {k: v for k, v in SIMPLE.items() if k != "depth"}
    | {"pre_loop_depth": 1, "post_loop_depth": 1, "num_looped_blocks": 1, "loop_depth": 2},
    "jumbo_vit.JumboViT": SIMPLE | {"num_jumbo_cls": 1, "jumbo_cls_k": 3},
    "look_vit.LookViT": {"dim": 16, "image_size": 32, "num_classes": 5, "depth": 2, "patch_size": 8, "heads": 2}
    | {"highres_patch_size": 4, "cross_attn_heads": 2, "patch_conv_kernel_size": 3},
    "efficient.ViT": {},
    "pit.PiT": {"image_size": 32, "patch_size": 8, "dim": 16, "num_classes": 5, "depth": (1, 1), "heads": 2}
    | {"mlp_dim": 24},
    "t2t.T2TViT": {"image_size": 32, "num_classes": 5, "depth": 2, "heads": 2, "mlp_dim": 24, "dim": 16},
    "cct.CCT": {"img_size": 32, "embedding_dim": 16, "n_output_channels": 8, "num_layers": 2, "num_heads": 2}
    | {"num_classes": 5, "mlp_ratio": 2.0, "positional_embedding": "learnable"},
    "cross_vit.CrossViT": {"image_size": 32, "num_classes": 5, "depth": 2, "sm_dim": 16, "lg_dim": 16}
    | {"sm_patch_size": 8, "lg_patch_size": 16, "sm_enc_depth": 1, "lg_enc_depth": 1},
    "cvt.CvT": {"num_classes": 5} | {f"s{i}_depth": 1 for i in (1, 2, 3)} | {f"s{i}_emb_dim": 16 for i in (1, 2, 3)},
    "levit.LeViT": {"image_size": 32, "num_classes": 5, "stages": 2, "dim": (16, 16), "depth": 1, "heads": (2, 2)}
    | {"mlp_mult": 2},
    "max_vit.MaxViT": {"num_classes": 5, "dim": 16, "depth": (1, 1), "window_size": 4, "dim_head": 8},
    "max_vit_with_registers.MaxViT": {"num_classes": 5, "dim": 16, "depth": (1, 1), "window_size": 4, "dim_head": 8},
    "mobile_vit.MobileViT": {"image_size": (32, 32), "dims": [16, 20, 24], "num_classes": 5}
    | {"channels": [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16], "patch_size": (1, 1)},
    "nest.NesT": {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2, "num_classes": 5}
    | {"block_repeats": (1, 1)},
    "regionvit.RegionViT": {"dim": (8, 16, 16, 16), "depth": (1, 1, 1, 1), "num_classes": 5, "window_size": 1},
    "scalable_vit.ScalableViT": {"num_classes": 5, "dim": 16, "heads": (1, 2), "depth": (1, 1), "window_size": (4, 4)}
    | {"ssa_dim_key": 8, "ssa_dim_value": 8, "reduction_factor": (2, 1), "iwsa_dim_key": 8, "iwsa_dim_value": 8},
    "twins_svt.TwinsSVT": {"num_classes": 5}
    | {f"s{i}_{k}": v for i in (1, 2, 3, 4) for k, v in (("emb_dim", 16), ("depth", 1), ("local_patch_size", 1))}
    | {f"s{i}_global_k": 1 for i in (1, 2, 3, 4)},
    "xcit.XCiT": PLAIN | {"cls_depth": 1},
    "vit_3d.ViT": CLIP | {"image_patch_size": 8},
    "vivit.ViViT": CLIP | {"image_patch_size": 8, "spatial_depth": 1, "temporal_depth": 1},
    "simple_vit_3d.SimpleViT": CLIP | {"image_patch_size": 8},
    "vit_1d.ViT": SERIES,
    "simple_vit_1d.SimpleViT": SERIES,
}

FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
MONAI: dict[str, dict[str, Any]] = {
    "UNet": FLAT | {"channels": (4, 8, 8), "strides": (2, 2), "num_res_units": 1},
    "BasicUNet": FLAT | {"features": (4, 4, 8, 8, 8, 4)},
    "AttentionUnet": FLAT | {"channels": (4, 8, 8), "strides": (2, 2)},
    "SegResNet": FLAT | {"init_filters": 8},
    "SegResNetDS": FLAT | {"init_filters": 8},
    "DenseNet": FLAT | {"init_features": 8, "growth_rate": 4, "block_config": (1, 1)},
    "ResNet": {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 4, 8, 8], "spatial_dims": 2}
    | {"n_input_channels": 1, "num_classes": 3},
    "UNETR": FLAT | {"img_size": 32, "feature_size": 4, "hidden_size": 16, "mlp_dim": 24, "num_heads": 2},
    "SwinUNETR": FLAT | {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)},
    "ViT": {"in_channels": 1, "img_size": (32, 32), "patch_size": (8, 8), "hidden_size": 16, "mlp_dim": 24}
    | {"num_layers": 2, "num_heads": 2, "classification": True, "spatial_dims": 2},
    "VNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    "DynUNet": FLAT
    | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    | {"filters": [4, 8, 8]},
    "HighResNet": FLAT,
    "AutoEncoder": FLAT | {"channels": (4, 8), "strides": (2, 2)},
    "MedNeXt": FLAT | {"init_filters": 4},
    "BasicUNetPlusPlus": FLAT | {"features": (4, 4, 8, 8, 8, 4)},
    "EfficientNetBN": {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 1, "num_classes": 3}
    | {"pretrained": False},
}


def builders() -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {}
    if find_spec("vit_pytorch") is not None:
        found |= {f"vit_pytorch/{name}": partial(vit, name) for name in VITS}
    if find_spec("monai") is not None:
        found |= {f"monai/{name}": partial(medical, name) for name in MONAI}
    if find_spec("efficientnet_pytorch") is not None:
        found["efficientnet_pytorch/EfficientNet"] = efficient
    return found


def vit(name: str) -> Case:
    stand_in_for_torchvision()
    module, _, class_name = name.partition(".")
    arguments = dict(VITS[name])
    if module == "efficient":
        encoder = importlib.import_module("vit_pytorch.vit").ViT(**PLAIN)
        arguments = {k: v for k, v in PLAIN.items() if k not in ("depth", "heads", "mlp_dim")}
        arguments["transformer"] = encoder.transformer
    if "image_patch_size" in arguments:
        del arguments["patch_size"]
    if "spatial_depth" in arguments:
        del arguments["depth"]
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), class_name)(**arguments)
    shape = {"3d": (3, 4, SIZE, SIZE), "vivit": (3, 4, SIZE, SIZE), "1d": (3, 32)}
    sizes = next((s for key, s in shape.items() if key in module), (3, SIZE, SIZE))
    first = next(name for name in model.forward.__code__.co_varnames if name != "self")
    return simple(model, **{first: lambda m, length: noise(m, *sizes)})


def stand_in_for_torchvision() -> None:
    """One of the modules that vit-pytorch imports at once wants torchvision, and none of ours is that one."""
    if find_spec("torchvision") is None:
        stand_in = ModuleType("torchvision")
        stand_in.transforms = ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
        sys.modules |= {"torchvision": stand_in, "torchvision.transforms": stand_in.transforms}


def medical(name: str) -> Case:
    model = getattr(importlib.import_module("monai.networks.nets"), name)(**MONAI[name])
    first = next(name for name in model.forward.__code__.co_varnames if name != "self")
    size = 64 if name == "SwinUNETR" else 32
    return simple(model, **{first: lambda m, length: noise(m, 1, size, size)})


def efficient() -> Case:
    from efficientnet_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-b0", num_classes=5, width_coefficient=0.25, depth_coefficient=0.3)
    model._global_params = model._global_params._replace(drop_connect_rate=0.0)
    return simple(model, inputs=lambda m, length: noise(m, 3, 32, 32))
