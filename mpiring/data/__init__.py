"""Training data: batches with similar numbers of tokens, and batches loaded in the background."""

from ..names import publish
from .prefetched import prefetch
from .token_batches import TokenBatches

__all__ = ["TokenBatches", "prefetch"]

publish(__name__)
