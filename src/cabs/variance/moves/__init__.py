"""How ownership moves through PyTorch's operations: one function a family, by the name of the operation in ATen."""

from cabs.variance.moves import contractions, elementwise, indexing, putting, reductions
from cabs.variance.moves.registry import MOVES, READS, Call, moves

__all__ = ["MOVES", "READS", "Call", "contractions", "elementwise", "indexing", "moves", "putting", "reductions"]
