"""Checkpoints, and stopping in time: what a training needs where jobs and machines fail."""

from ..memory.sliced import Sliced, whole
from .checkpoint import Checkpoints
from .random_state import random_state, set_random_state
from .reader import Saved
from .stopping import Stopping

__all__ = ["Checkpoints", "Saved", "Sliced", "Stopping", "random_state", "set_random_state",
           "whole"]
