"""The adapter for NumPy and CuPy: averaged gradients, local training, mixed precision."""

from ..names import publish
from ..resilience import Checkpoints, TrainState
from .data_parallel import AsyncDataParallel, DataParallel
from .local import DiLoCo, LocalSGD
from .precision import LossScaler, MasterWeights

__all__ = ["AsyncDataParallel", "Checkpoints", "DataParallel", "DiLoCo", "LocalSGD", "LossScaler",
           "MasterWeights", "TrainState"]

publish(__name__)
