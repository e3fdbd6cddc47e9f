"""Joins PyTorch: a module wrapper that averages gradients, and what goes with it."""

from .data_parallel import DataParallel
from .sampler import DistributedSampler
from .states import broadcast_optimizer_state, broadcast_parameters
from .threads import share_cores

__all__ = ["DataParallel", "DistributedSampler", "broadcast_optimizer_state",
           "broadcast_parameters", "share_cores"]
