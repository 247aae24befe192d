"""Inputs of the models of ``transformers``, by the names that these have for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo_models.case import ids, noise


def boxes(config: Any, m: int, length: int) -> Tensor:
    """Where words are on a page: left, top, right, bottom."""
    corners = torch.randint(0, 30, (m, length, 2))
    return torch.cat([corners, corners + torch.randint(1, 30, (m, length, 2))], 2)


def mask_noise(config: Any, m: int, length: int) -> Tensor:
    """What decides which patches are masked, for each example its own."""
    return noise(m, (nested(config, "image_size", default=32) // nested(config, "patch_size", default=8)) ** 2)


EXTRAS: dict[str, Callable[[Any, int, int], Tensor]] = {"bbox": boxes, "noise": mask_noise}
"""Further inputs, by name, that a model gets if it takes them."""


def nested(config: Any, *names: str, default: int) -> int:
    """The first of these fields that the configuration, or the part of it for images or sound, has."""
    parts = [config, *(getattr(config, part, None) for part in ("vision_config", "audio_config", "encoder_config"))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int):
                return value
    return default


def image(config: Any, m: int, length: int) -> Tensor:
    size = nested(config, "image_size", default=32)
    return noise(m, nested(config, "num_channels", "in_channels", "in_chans", default=3), size, size)


def large_image(config: Any, m: int, length: int) -> Tensor:
    """For networks that halve images more often than small ones can be halved."""
    return noise(m, nested(config, "num_channels", "in_channels", "in_chans", default=3), 64, 64)


def film(config: Any, m: int, length: int) -> Tensor:
    size, frames = nested(config, "image_size", "crop_size", default=32), nested(config, "num_frames", default=4)
    return noise(m, frames, nested(config, "num_channels", "in_chans", default=3), size, size)


def bands(config: Any) -> int:
    return nested(config, "num_mel_bins", "feature_size", "n_mels", "num_mels", "input_feat_per_channel", default=16)


def spectrum(config: Any, m: int, length: int) -> Tensor:
    """As Whisper has it: bands before time, and always as much time."""
    return noise(m, bands(config), 2 * nested(config, "max_source_positions", default=32))


def frames(config: Any, m: int, length: int) -> Tensor:
    return noise(m, nested(config, "max_length", default=0) or 8 * length, bands(config))


def some_frames(width: int) -> Callable[[Any, int, int], Tensor]:
    return lambda config, m, length: noise(m, 4 * length, width)


def sound(config: Any, m: int, length: int) -> Tensor:
    return noise(m, 320 * length + 80)


def long_sound(config: Any, m: int, length: int) -> Tensor:
    return noise(m, 320 * (length + 16))


def one_channel(config: Any, m: int, length: int) -> Tensor:
    return noise(m, 1, 320 * length)


def series(config: Any, m: int, length: int) -> Tensor:
    return noise(m, nested(config, "context_length", default=32), nested(config, "num_input_channels", default=1))


SOUNDS = (spectrum, frames, some_frames(160), some_frames(80), sound, one_channel)
SHAPES_OF: dict[str, tuple[Callable[[Any, int, int], Tensor], ...]] = {
    "input_ids": (lambda config, m, length: ids(m, length), lambda config, m, length: ids(m, 4 * length)),
    "pixel_values": (image, film, large_image),
    "inputs": (lambda config, m, length: ids(m, nested(config, "max_position_embeddings", default=64)), image),
    "pixel_values_videos": (film,),
    "input_features": SOUNDS,
    "input_values": (sound, long_sound, one_channel, frames, spectrum),
    "past_values": (series,),
}
