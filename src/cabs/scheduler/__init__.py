"""The loop around the rule: one record of a step; measure, smooth, rule, clip, loader."""

from cabs.scheduler.cabs import CABS
from cabs.scheduler.scheduler import BatchSizeScheduler, auto_every
from cabs.scheduler.step import Measurement, Step

__all__ = ["CABS", "BatchSizeScheduler", "Measurement", "Step", "auto_every"]
