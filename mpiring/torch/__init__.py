"""The adapter for PyTorch: a module wrapper, and the back end `mpiring` of torch.distributed."""

from typing import TYPE_CHECKING

from ..names import WeightCopies, later, publish
from . import process_group, rendezvous
from .checkpoints import Checkpoints, TrainState, load_file, random_state, set_random_state, whole
from .data_parallel import DataParallel
from .tensors import device_for
from .local import DiLoCo, LocalSGD
from .process_group import ProcessGroup
from .rendezvous import export_environment
from .sampler import DistributedSampler
from .sharded import Sharded
from .states import broadcast_optimizer_state, broadcast_parameters
from .threads import share_cores

if TYPE_CHECKING:
    from ..asynchronous.torch import AsyncDataParallel

process_group.register()
rendezvous.register()

__all__ = ["AsyncDataParallel", "Checkpoints", "DataParallel", "DiLoCo", "DistributedSampler",
           "LocalSGD", "ProcessGroup", "Sharded", "TrainState", "WeightCopies",
           "broadcast_optimizer_state", "broadcast_parameters", "device_for", "export_environment",
           "load_file", "random_state", "set_random_state", "share_cores", "whole"]

publish(__name__)
__getattr__ = later(__name__, AsyncDataParallel="mpiring.asynchronous.torch:AsyncDataParallel")
