"""Data for training: balanced batches, and batches made ready while earlier ones are used."""

from ..names import publish
from .prefetched import prefetch
from .token_batches import TokenBatches

__all__ = ["TokenBatches", "prefetch"]

publish(__name__)
