"""One rule per family of operations; importing a module registers its rules."""

from cabs.variance.operations import convolution, elementwise, embedding, linear, normalization, recurrent

__all__ = ["convolution", "elementwise", "embedding", "linear", "normalization", "recurrent"]
