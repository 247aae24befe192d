"""Whole-batch input operations against slow code that takes one image, and one pixel rule, at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cabs.experiments.problems import augment
from cabs.experiments.problems.augment import Scaled, Standardised


def some_images(count: int, side: int = 32, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8)


def slow_standardised(image: Tensor, brightness: float = 0.0, contrast: float = 1.0) -> Tensor:
    """The paper's pipeline on one image, step by step and in double precision."""
    pixels = image.double() + brightness
    for channel in range(len(pixels)):
        mean = pixels[channel].mean()
        pixels[channel] = (pixels[channel] - mean) * contrast + mean
    mean = pixels.mean()
    deviation = ((pixels - mean) ** 2).mean().sqrt()
    return (pixels - mean) / max(float(deviation), 1 / math.sqrt(pixels.numel()))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), side=st.integers(2, 12), channels=st.integers(1, 4), contrast=st.floats(0.2, 1.8))
def test_standardise_is_contrast_then_zero_mean_and_unit_variance(
    seed: int, side: int, channels: int, contrast: float
) -> None:
    torch.manual_seed(seed)
    images = some_images(3, side, channels)
    brightness = torch.empty(3).uniform_(-63, 63).tolist()
    fast = augment.standardise(images, torch.full((3,), contrast))
    slow = torch.stack([slow_standardised(i, b, contrast) for i, b in zip(images, brightness, strict=True)])
    assert torch.allclose(fast.double(), slow, atol=1e-4)


def test_brightness_goes_away_with_the_mean() -> None:
    image = some_images(1)[0]
    assert torch.allclose(slow_standardised(image, -63.0, 1.7), slow_standardised(image, 63.0, 1.7), atol=1e-12)


@pytest.mark.parametrize("value", [0, 128, 255])
def test_a_uniform_image_stays_finite(value: int) -> None:
    images = torch.full((2, 3, 8, 8), value, dtype=torch.uint8)
    assert torch.allclose(augment.standardise(images), torch.zeros(2, 3, 8, 8), atol=1e-3)


def test_training_inputs_equal_a_loop_over_images() -> None:
    images = some_images(40)
    inputs = Standardised(crop=24, distort=True).train(images, torch.Generator().manual_seed(3))
    draws = torch.Generator().manual_seed(3)
    top, left = (torch.randint(9, (40,), generator=draws) for _ in range(2))
    mirrored = torch.rand(40, generator=draws) < 0.5
    contrast = torch.rand(40, generator=draws) * 1.6 + 0.2
    assert mirrored.any()
    assert not mirrored.all()
    for i in range(40):
        cut = images[i, :, top[i] : top[i] + 24, left[i] : left[i] + 24]
        if mirrored[i]:
            cut = torch.stack([torch.stack([row.flip(0) for row in channel]) for channel in cut])
        expected = slow_standardised(cut, contrast=float(contrast[i]))
        assert torch.allclose(inputs[i].double(), expected, atol=1e-4)


def test_crops_reach_every_place_and_no_other() -> None:
    images = torch.arange(36, dtype=torch.uint8).reshape(1, 1, 6, 6).expand(600, -1, -1, -1)
    generator = torch.Generator().manual_seed(0)
    cut = augment.crop(images, *augment.draw_corners(images, 4, generator), 4)
    corners = {int(image[0, 0, 0]) for image in cut}
    assert corners == {row * 6 + column for row in range(3) for column in range(3)}


def test_evaluation_takes_the_centre() -> None:
    images = some_images(2)
    inputs = Standardised(crop=24, distort=True).evaluate(images)
    for image, result in zip(images, inputs, strict=True):
        assert torch.allclose(result.double(), slow_standardised(image[:, 4:28, 4:28]), atol=1e-4)


def test_the_generator_alone_decides() -> None:
    images = some_images(16)
    inputs = Standardised(crop=24, distort=True)
    generator = torch.Generator().manual_seed(1)
    first = inputs.train(images, generator)
    state = generator.get_state()
    second = inputs.train(images, generator)
    torch.rand(10)  # the global generator plays no part
    generator.set_state(state)
    assert torch.equal(inputs.train(images, generator), second)
    assert not torch.equal(first, second)


def test_whole_images_are_standardised_without_draws() -> None:
    images = some_images(4)
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    assert torch.equal(Standardised().train(images, generator), Standardised().evaluate(images))
    assert torch.equal(generator.get_state(), before)


def test_scaling() -> None:
    images = torch.tensor([[[[0, 16], [8, 4]]]], dtype=torch.uint8)
    generator = torch.Generator()
    assert Scaled(16).evaluate(images).flatten().tolist() == [0.0, 1.0, 0.5, 0.25]
    assert torch.equal(Scaled(16).train(images, generator), Scaled(16).evaluate(images))


def test_shifts_move_images_over_a_black_edge() -> None:
    images = some_images(50, side=8, channels=1)
    moved = Scaled(255, shift=1).train(images, torch.Generator().manual_seed(5))
    draws = torch.Generator().manual_seed(5)
    top, left = (torch.randint(3, (50,), generator=draws) for _ in range(2))
    for i in range(50):
        padded = torch.zeros(10, 10)
        padded[1:9, 1:9] = images[i, 0] / 255
        assert torch.allclose(moved[i, 0], padded[top[i] : top[i] + 8, left[i] : left[i] + 8])


def test_images_are_left_as_they_were() -> None:
    images = some_images(8)
    before = images.clone()
    for inputs in (Scaled(255, shift=2), Standardised(crop=24, distort=True), Standardised()):
        inputs.train(images, torch.Generator())
        inputs.evaluate(images)
    assert torch.equal(images, before)
