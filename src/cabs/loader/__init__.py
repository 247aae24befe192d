"""Batches whose size may move at every step."""

from cabs.loader.adaptive import AdaptiveLoader

__all__ = ["AdaptiveLoader"]
