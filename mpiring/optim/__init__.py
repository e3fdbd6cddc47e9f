"""Optimisers of models that are trained on several ranks, as a whole or in slices."""

from .adam import Adam, AdamW
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
