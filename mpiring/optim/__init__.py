"""Optimizers of distributed models, complete on each rank or sharded over ranks."""

from ..names import publish
from .adam import Adam, AdamW
from .lamb import LAMB
from .lars import LARS
from .sgd import SGD

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW"]

publish(__name__)
