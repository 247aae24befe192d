"""The batch-size autopilot for PyTorch: couples the batch size of every step to the learning rate."""

from cabs import couplings, rules
from cabs._version import __version__
from cabs.loader import AdaptiveLoader
from cabs.probe import probe
from cabs.scheduler import CABS, BatchSizeScheduler
from cabs.variance import GradientVariance

__all__ = [
    "CABS",
    "AdaptiveLoader",
    "BatchSizeScheduler",
    "GradientVariance",
    "__version__",
    "couplings",
    "probe",
    "rules",
]
