"""Optimizers of distributed models, complete on each rank or sharded over ranks."""

from ..names import publish
from .adam import Adam, AdamW
from .lamb import LAMB
from .lars import LARS
from .method import Method, checked
from .optimizer import Optimizer
from .parts import parts_of
from .sgd import SGD
from .slices import BareTensors, gathered
from .update import Update

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW"]

publish(__name__)
