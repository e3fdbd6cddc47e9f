"""Joins PyTorch: a module wrapper that averages gradients."""

from .data_parallel import DataParallel
from .states import broadcast_parameters

__all__ = ["DataParallel", "broadcast_parameters"]
