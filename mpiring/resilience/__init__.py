"""Lets a job stop and go on: checkpoints, and the signals and time limits that end it."""

from .checkpoint import Checkpoints
from .random_state import random_state, set_random_state
from .reader import Saved
from .stopping import Stopping

__all__ = ["Checkpoints", "Saved", "Stopping", "random_state", "set_random_state"]
