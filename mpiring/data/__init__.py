"""Data for training: batches that are made ready while earlier ones are used."""

from .prefetched import prefetch

__all__ = ["prefetch"]
