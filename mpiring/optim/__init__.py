"""Optimisers of models that are trained on several ranks, as a whole or in slices."""

from ..names import publish
from .adam import Adam, AdamW
from .lamb import LAMB
from .lars import LARS
from .sgd import SGD

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW"]

publish(__name__)
