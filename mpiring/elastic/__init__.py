"""Training that survives the death of ranks: the others return to the last commit in memory."""

from .recovery import run
from .state import State

__all__ = ["State", "run"]
