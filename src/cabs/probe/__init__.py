"""What batch size is useful, found out before training."""

from cabs.probe.intervals import Interval
from cabs.probe.probing import probe
from cabs.probe.recommending import Recommendation
from cabs.probe.report import Report

__all__ = ["Interval", "Recommendation", "Report", "probe"]
