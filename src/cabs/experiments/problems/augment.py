"""From examples to network inputs: scaling, cropping, mirroring and colour distortion of whole batches.

Nothing here loops over images. The random draws come from a generator of their own, so that a run's augmentation
can be saved, resumed and repeated. Processes that share a batch draw for the whole of it and take what belongs to their
examples: each example gets what it would get in one process, and the generators stay in step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

CONTRAST = (0.2, 1.8)


@dataclass(frozen=True)
class Share:
    """Which examples of a batch the images at hand are.

    Attributes:
        examples: How many examples the batch has.
        rows: Which of them are here.
    """

    examples: int
    rows: slice

    @classmethod
    def of_rank(cls, rank: int, world_size: int, first: int, examples: int) -> Self:
        """What the loader hands out to one of several processes: every so many examples, counted over all batches.

        A process that gets none is given one that does not count, to keep in step; which draws that one takes does not
        matter.

        Args:
            rank: Its number.
            world_size: How many there are.
            first: How many examples came before the batch.
            examples: How many examples the batch has.
        """
        start = (rank - first) % world_size
        return cls(examples, slice(start, None, world_size) if start < examples else slice(0, 1))

    @classmethod
    def whole(cls, images: Tensor) -> Self:
        """All of them."""
        return cls(len(images), slice(None))


class Inputs(Protocol):
    """How the examples of a data set become inputs of a network."""

    def train(self, images: Tensor, generator: torch.Generator, share: Share | None = None) -> Tensor:
        """Inputs for training, randomly distorted where the problem asks for it.

        Args:
            images: The examples as they are stored.
            generator: Where the random numbers come from.
            share: Which of their batch these are; None if they are the whole of it.
        """

    def evaluate(self, images: Tensor) -> Tensor:
        """Inputs for evaluation, a fixed function of the images."""


@dataclass(frozen=True)
class Tokens:
    """Characters by their numbers, as they are."""

    def train(self, images: Tensor, generator: torch.Generator, share: Share | None = None) -> Tensor:
        return self.evaluate(images)

    def evaluate(self, images: Tensor) -> Tensor:
        return images.long()


@dataclass(frozen=True)
class Scaled:
    """Pixels divided by their largest possible value.

    Attributes:
        largest: That value.
        shift: In training, images are moved by up to this many pixels in each direction, at random.
    """

    largest: int = 255
    shift: int = 0

    def train(self, images: Tensor, generator: torch.Generator, share: Share | None = None) -> Tensor:
        if self.shift:
            size = images.shape[-1]
            images = F.pad(images, [self.shift] * 4)
            images = crop(images, *draw_corners(images, size, generator, share), size)
        return self.evaluate(images)

    def evaluate(self, images: Tensor) -> Tensor:
        return images.float().div_(self.largest)


@dataclass(frozen=True)
class Standardised:
    """Each image to zero mean and unit variance, after a crop and, in training, after random distortions.

    Attributes:
        crop: Side of the square that is cut out: anywhere in training, from the centre in evaluation. None for
            the whole image.
        distort: Whether training images are mirrored and change their contrast at random.
    """

    crop: int | None = None
    distort: bool = False

    def train(self, images: Tensor, generator: torch.Generator, share: Share | None = None) -> Tensor:
        share = share or Share.whole(images)
        if self.crop is not None:
            images = crop(images, *draw_corners(images, self.crop, generator, share), self.crop)
        if not self.distort:
            return standardise(images)
        mirrored = torch.rand(share.examples, generator=generator)[share.rows] < 0.5
        low, high = CONTRAST
        contrast = torch.rand(share.examples, generator=generator)[share.rows] * (high - low) + low
        images = mirror(images, mirrored.to(images.device))
        return standardise(images, contrast.to(images.device))

    def evaluate(self, images: Tensor) -> Tensor:
        return standardise(images if self.crop is None else centre_crop(images, self.crop))


def draw_corners(
    images: Tensor, size: int, generator: torch.Generator, share: Share | None = None
) -> tuple[Tensor, Tensor]:
    """For each image the top left corner of a random square within it: rows and columns."""
    share = share or Share.whole(images)
    height, width = images.shape[2:]
    top = torch.randint(height - size + 1, (share.examples,), generator=generator)[share.rows]
    left = torch.randint(width - size + 1, (share.examples,), generator=generator)[share.rows]
    return top.to(images.device), left.to(images.device)


def crop(images: Tensor, top: Tensor, left: Tensor, size: int) -> Tensor:
    """Cut a square out of each image, at a place of its own."""
    windows = images.unfold(2, size, 1).unfold(3, size, 1)  # a view: example, channel, top, left, row, column
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def centre_crop(images: Tensor, size: int) -> Tensor:
    """The square in the middle of each image."""
    top, left = (images.shape[2] - size) // 2, (images.shape[3] - size) // 2
    return images[:, :, top : top + size, left : left + size]


def mirror(images: Tensor, mirrored: Tensor) -> Tensor:
    """Swap left and right in the images that are marked."""
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def standardise(images: Tensor, contrast: Tensor | None = None) -> Tensor:
    """Change the contrast of each image, then bring it to zero mean and unit variance.

    Contrast f moves the pixels of a channel away from the channel's mean μ_c: x becomes f (x − μ_c) + μ_c, whose
    mean over the image is that of the μ_c and whose variance is f² · mean_c(σ_c²) + var_c(μ_c). So both steps are
    one linear map per channel. The paper's random *brightness*, one number added to all pixels of an image, goes
    away with the mean and need not be drawn.

    Args:
        images: Images of any dtype, shape (examples, channels, height, width).
        contrast: A factor for each image; None leaves the contrast as it is.

    Returns:
        A float tensor of the same shape. As in the paper's code the deviation is taken to be at least
        1 / √(values in an image), so that a uniform image stays finite.
    """
    pixels = images.float()
    values = pixels[0].numel()
    variances, means = torch.var_mean(pixels, dim=(2, 3), correction=0, keepdim=True)
    spread = means.var(dim=1, correction=0, keepdim=True)
    centre = means.mean(dim=1, keepdim=True)
    factor = torch.ones_like(centre) if contrast is None else contrast[:, None, None, None]
    variance = factor.square() * variances.mean(dim=1, keepdim=True) + spread
    scale = variance.sqrt().clamp_(min=values**-0.5).reciprocal_()
    return torch.addcmul((means - centre - factor * means) * scale, pixels, factor * scale)
