"""Joins PyTorch: a module wrapper, and a back end of torch.distributed that importing registers."""

from . import process_group, rendezvous
from .checkpoints import Checkpoints, random_state, set_random_state
from .data_parallel import DataParallel
from .devices import device_for
from .process_group import ProcessGroup
from .rendezvous import export_environment
from .sampler import DistributedSampler
from .states import broadcast_optimizer_state, broadcast_parameters
from .threads import share_cores

process_group.register()
rendezvous.register()

__all__ = ["Checkpoints", "DataParallel", "DistributedSampler", "ProcessGroup",
           "broadcast_optimizer_state", "broadcast_parameters", "device_for", "export_environment",
           "random_state", "set_random_state", "share_cores"]
