"""The loop around the rule: one record of a step; measure, smooth, rule, clip, loader."""

from cabs.scheduler.cabs import CABS
from cabs.scheduler.scheduler import AUTO_EVERY, BatchSizeScheduler
from cabs.scheduler.step import Measurement, Step

__all__ = ["AUTO_EVERY", "CABS", "BatchSizeScheduler", "Measurement", "Step"]
