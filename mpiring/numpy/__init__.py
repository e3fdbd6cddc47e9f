"""The adapter for NumPy and CuPy: averaged gradients, local training, mixed precision."""

from typing import TYPE_CHECKING

from ..names import later, publish
from ..resilience import Checkpoints, TrainState
from .data_parallel import DataParallel
from .local import DiLoCo, LocalSGD
from .precision import LossScaler, MasterWeights

if TYPE_CHECKING:
    from ..asynchronous.numpy import AsyncDataParallel

__all__ = ["AsyncDataParallel", "Checkpoints", "DataParallel", "DiLoCo", "LocalSGD", "LossScaler",
           "MasterWeights", "TrainState"]

publish(__name__)
__getattr__ = later(__name__, AsyncDataParallel="mpiring.asynchronous.numpy:AsyncDataParallel")
