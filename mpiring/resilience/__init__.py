"""Checkpoints, and stopping in time: what a training needs where jobs and machines fail."""

from ..sharding.sliced import Sliced, whole
from .checkpoint import Checkpoints
from .consolidated import load_file
from .random_state import random_state, set_random_state
from .reader import Saved
from .stopping import Stopping

__all__ = ["Checkpoints", "Saved", "Sliced", "Stopping", "load_file", "random_state",
           "set_random_state", "whole"]
