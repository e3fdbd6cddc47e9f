"""Trains on when ranks die: those that are left begin again at the last commit in memory."""

from .recovery import run
from .state import State

__all__ = ["State", "run"]
