"""One rule per family of operations; importing a module registers its rules."""

from cabs.variance.operations import convolution, elementwise, linear

__all__ = ["convolution", "elementwise", "linear"]
