"""Vectors in the memory of GPUs, with functions to copy and combine them."""

from .arrays import OPENERS, device_named, is_gpu_tensor, is_on_gpu, vector_of
from .nccl import nccl_library
from .vectors import copy_to, divide
