"""Data for training: batches that are copied to where they are used while earlier ones are."""

from .prefetched import prefetch

__all__ = ["prefetch"]
