"""One rule per family of operations; importing a module registers its rules."""

from cabs.variance.operations import convolution, embedding, linear, normalization, recurrent

__all__ = ["convolution", "embedding", "linear", "normalization", "recurrent"]
