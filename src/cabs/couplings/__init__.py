"""What a step of an optimizer does with a gradient: α and P of w ← w − α P u, from its own groups and state."""

from cabs.couplings.base import Coupling
from cabs.couplings.binding import Coupled
from cabs.couplings.kinds import SGD, Adagrad, Adam, Adamax, AssumedSGD, NAdam, RAdam, RMSprop
from cabs.couplings.registry import coupling_of, register_coupling, unwrapped

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Adamax",
    "AssumedSGD",
    "Coupled",
    "Coupling",
    "NAdam",
    "RAdam",
    "RMSprop",
    "coupling_of",
    "register_coupling",
    "unwrapped",
]
