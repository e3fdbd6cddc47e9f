"""Ranges of tensors on ranks: held, gathered, saved, loaded, moved to other buckets."""

from .sliced import slices_of
from .state import SliceState, ranges_in
