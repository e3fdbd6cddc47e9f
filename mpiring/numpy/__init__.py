"""Joins NumPy and CuPy models: gradients that average themselves, mixed precision."""

from ..resilience import Checkpoints
from .data_parallel import DataParallel
from .precision import LossScaler, MasterWeights

__all__ = ["Checkpoints", "DataParallel", "LossScaler", "MasterWeights"]
