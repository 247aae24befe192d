"""One formula per family of operations; importing a module registers its formulas."""

from cabs.variance.operations import convolution, embedding, linear, normalization, recurrent

__all__ = ["convolution", "embedding", "linear", "normalization", "recurrent"]
