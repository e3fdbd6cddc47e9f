"""Keeps training right where machines fail: checkpoints, stopping in time, equal replicas."""

from .checkpoint import Checkpoints
from .random_state import random_state, set_random_state
from .reader import Saved
from .stopping import Stopping

__all__ = ["Checkpoints", "Saved", "Stopping", "random_state", "set_random_state"]
