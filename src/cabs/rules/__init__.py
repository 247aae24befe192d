"""Rules for the batch size: small, pure, in the paper's names. docs/rules.md has a table of all."""

from cabs.rules.adaptive import CABS, GainPerCost, InnerProductTest, NoiseScale, NormTest
from cabs.rules.amounts import examples_of
from cabs.rules.base import Estimates, Rule, noise_scale, noise_share, round_and_clip
from cabs.rules.decay import DecayToBatch
from cabs.rules.horizon import Horizon, fit
from cabs.rules.plateau import OnPlateau
from cabs.rules.schedules import Constant, Function, Geometric, Ramp, Repeat, Schedule, Sequential, Steps

__all__ = [
    "CABS",
    "Constant",
    "DecayToBatch",
    "Estimates",
    "Function",
    "GainPerCost",
    "Geometric",
    "Horizon",
    "InnerProductTest",
    "NoiseScale",
    "NormTest",
    "OnPlateau",
    "Ramp",
    "Repeat",
    "Rule",
    "Schedule",
    "Sequential",
    "Steps",
    "examples_of",
    "fit",
    "noise_scale",
    "noise_share",
    "round_and_clip",
]
