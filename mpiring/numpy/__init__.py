"""The adapter for NumPy and CuPy models: averaged gradients, mixed precision, checkpoints."""

from ..resilience import Checkpoints
from .data_parallel import DataParallel
from .precision import LossScaler, MasterWeights

__all__ = ["Checkpoints", "DataParallel", "LossScaler", "MasterWeights"]
