"""Checkpoints and timely stops for training on jobs and machines that may fail."""

from ..names import publish
from ..sharding.sliced import Sliced, whole
from .checkpoint import Checkpoints, random_state, set_random_state
from .consolidated import load_file
from .reader import Saved
from .stopping import Stopping
from .train_state import TrainState

__all__ = ["Checkpoints", "Saved", "Sliced", "Stopping", "TrainState", "load_file",
           "random_state", "set_random_state", "whole"]

publish(__name__)
