"""The variance of the gradients of single examples."""

from cabs.variance.engine import GradientVariance
from cabs.variance.registry import register_layer

__all__ = ["GradientVariance", "register_layer"]
