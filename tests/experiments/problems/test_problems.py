"""The declarations: networks, initial weights and data of each problem."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_folder import write_images
from torch import nn

from cabs.experiments.errors import DataError, UsageError
from cabs.experiments.problems import PROBLEMS, problem

# Counted by hand from design: convolutions, then fully-connected layers, weights and biases.
PARAMETERS = {
    "mnist": (25 * 32 + 32) + (25 * 32 * 64 + 64) + (7 * 7 * 64 * 1024 + 1024) + (1024 * 10 + 10),
    "svhn": (75 * 64 + 64) + (1600 * 64 + 64) + (2304 * 256 + 256) + (256 * 128 + 128) + (128 * 10 + 10),
    "cifar10": (75 * 64 + 64) + (1600 * 64 + 64) + (2304 * 384 + 384) + (384 * 192 + 192) + (192 * 10 + 10),
    "cifar100": (75 * 64 + 64) + 2 * (1600 * 64 + 64) + (1024 * 512 + 512) + (512 * 256 + 256) + (256 * 100 + 100),
}
IMAGES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "svhn": (3, 32, 32),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_papers_networks_have_the_papers_sizes(name: str) -> None:
    assert sum(parameter.numel() for parameter in problem(name).network().parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", IMAGES)
def test_inputs_fit_the_network(name: str) -> None:
    images = torch.randint(0, 256, (3, *IMAGES[name]), dtype=torch.uint8)
    declared = problem(name)
    network = declared.network()
    classes = 100 if name == "cifar100" else 10
    assert network(declared.inputs.train(images, torch.Generator())).shape == (3, classes)
    assert network(declared.inputs.evaluate(images)).shape == (3, classes)


def layers(name: str) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in problem(name).network() if isinstance(layer, nn.Conv2d | nn.Linear)]


INITIAL = {
    "mnist": [(0.01, 0.05)] * 4,
    "svhn": [(0.05, 0.0), (0.05, 0.1), (0.04, 0.1), (0.04, 0.1), (1 / 128, 0.0)],
    "cifar10": [(0.05, 0.0), (0.05, 0.1), (0.04, 0.1), (0.04, 0.1), (1 / 192, 0.0)],
    "cifar100": [(0.05, 0.0), (0.05, 0.1), (0.05, 0.1), (0.04, 0.1), (0.04, 0.1), (1 / 256, 0.0)],
}


@pytest.mark.parametrize("name", INITIAL)
def test_initial_weights_are_a_truncated_normal(name: str) -> None:
    for layer, (std, bias) in zip(layers(name), INITIAL[name], strict=True):
        weights = layer.weight.detach()
        assert layer.bias is not None
        assert torch.equal(layer.bias, torch.full_like(layer.bias, bias))
        assert float(weights.abs().max()) <= 2 * std
        # A normal distribution cut off at two deviations has 0.880 of the deviation.
        assert float(weights.std()) == pytest.approx(0.880 * std, rel=0.08)


def test_pools_reach_the_last_row_and_column() -> None:
    pool = next(layer for layer in problem("cifar10").network() if isinstance(layer, nn.MaxPool2d))
    image = torch.zeros(1, 1, 24, 24)
    image[..., 23, 23] = 1.0
    assert pool(image).shape == (1, 1, 12, 12)
    assert float(pool(image).sum()) == 1.0


def test_seeds_decide_the_weights() -> None:
    def weights(seed: int) -> list[float]:
        return problem("digits").network(seed)[0].weight.flatten().tolist()

    assert weights(1) == weights(1) != weights(2)
    torch.manual_seed(5)
    first = weights(1)
    torch.manual_seed(6)
    assert weights(1) == first


def test_unknown_problem_lists_the_known() -> None:
    with pytest.raises(UsageError, match="digits, mnist, svhn, cifar10, cifar100, shakespeare, imagefolder:DIRECTORY"):
        problem("imagenet")


def test_regularisation_is_where_the_paper_has_it() -> None:
    assert {name for name, declared in PROBLEMS.items() if declared.weight_decay} == {"svhn", "cifar100"}


def test_image_folder(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat"):
        write_images(tmp_path / name, 5)
    declared = problem(f"imagefolder:{tmp_path}")
    data = declared.load(None)
    assert declared.network()(declared.inputs.evaluate(data.test.images)).shape == (3, 3)
    with pytest.raises(DataError, match="no such directory"):
        problem(f"imagefolder:{tmp_path}/nowhere")
