"""The paper's convolutional networks: convolutions with pooling, then fully-connected layers, ReLU throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Initial:
    """Initial weights: a normal distribution cut off at two standard deviations; biases: a constant.

    Attributes:
        conv_std: Standard deviation of convolution weights.
        conv_bias: Biases of the convolutions, one constant for each layer in turn, the last for all further ones.
        dense_std: Standard deviation of the weights of hidden fully-connected layers.
        dense_bias: Their biases.
        output_std: Standard deviation of the output layer's weights.
        output_bias: Its biases.
    """

    conv_std: float
    conv_bias: Sequence[float]
    dense_std: float
    dense_bias: float
    output_std: float
    output_bias: float


# The values of the paper's public code, for MNIST and for CIFAR-10.
MNIST_INITIAL = Initial(
    conv_std=0.01, conv_bias=(0.05,), dense_std=0.01, dense_bias=0.05, output_std=0.01, output_bias=0.05
)


def cifar_initial(last_hidden: int) -> Initial:
    """CIFAR-10's initial values, also used for SVHN and CIFAR-100; the output's deviation is 1 / its inputs."""
    return Initial(
        conv_std=0.05,
        conv_bias=(0.0, 0.1),
        dense_std=0.04,
        dense_bias=0.1,
        output_std=1 / last_hidden,
        output_bias=0.0,
    )


def pool_2() -> nn.Module:
    """Max-pooling over 2×2 windows."""
    return nn.MaxPool2d(2)


def pool_3() -> nn.Module:
    """Max-pooling over overlapping 3×3 windows with stride 2, every pixel being in some window."""
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


@dataclass(frozen=True, kw_only=True)
class ConvNet:
    """The shape of a network, which `build` makes.

    Attributes:
        input_shape: Channels, height and width of an image as the network sees it.
        filters: The number of filters of each convolution; each is followed by ReLU and a pool.
        kernel: The (odd) width of the filters; padding keeps the image's size.
        overlapping_pool: Pools of 3×3 with stride 2 instead of 2×2.
        hidden: The widths of the hidden fully-connected layers.
        classes: The number of outputs.
        initial: How weights and biases start.
    """

    input_shape: tuple[int, int, int]
    filters: tuple[int, ...]
    kernel: int = 5
    overlapping_pool: bool = True
    hidden: tuple[int, ...]
    classes: int
    initial: Initial

    def build(self, seed: int = 0) -> nn.Sequential:
        """The network with its initial weights, which depend on the seed alone."""
        layers: list[nn.Module] = []
        channels = self.input_shape[0]
        for filters in self.filters:
            layers += [nn.Conv2d(channels, filters, self.kernel, padding=self.kernel // 2), nn.ReLU()]
            layers.append(pool_3() if self.overlapping_pool else pool_2())
            channels = filters
        layers.append(nn.Flatten())
        with torch.no_grad():
            features = nn.Sequential(*layers)(torch.zeros(1, *self.input_shape)).shape[1]
        for width in self.hidden:
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        layers.append(nn.Linear(features, self.classes))
        network = nn.Sequential(*layers)
        initialise(network, self.initial, torch.Generator().manual_seed(seed))
        # Channels last: the same numbers, but CPUs pool several times faster this way and train a third faster.
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def initialise(network: nn.Sequential, initial: Initial, generator: torch.Generator) -> None:
    """Set the weights and biases of a network in place."""
    output = network[-1]
    convolutions = 0
    for layer in network:
        if isinstance(layer, nn.Conv2d):
            bias = initial.conv_bias[min(convolutions, len(initial.conv_bias) - 1)]
            _set(layer, initial.conv_std, bias, generator)
            convolutions += 1
        elif isinstance(layer, nn.Linear):
            is_output = layer is output
            std = initial.output_std if is_output else initial.dense_std
            _set(layer, std, initial.output_bias if is_output else initial.dense_bias, generator)


def _set(layer: nn.Conv2d | nn.Linear, std: float, bias: float, generator: torch.Generator) -> None:
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
